"""``docs/operators.md`` names every operator that is built, and how it is built."""

from __future__ import annotations

from benchmarks.operators import PLACE, kinds


def test_the_table_is_complete() -> None:
    cells = [line.split("|") for line in PLACE.read_text().splitlines() if "|" in line]
    rows = {c[1].strip(): c[2].strip() for c in cells}
    stale = {op: how for op, how in kinds().items() if rows.get(op) != how}
    assert not stale, "python -m benchmarks.operators RESULTS.json writes the table again"
