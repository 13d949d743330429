"""The parts of the benchmark of tuned models that need no measurement."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tuned import chosen_rows, least_processor_ms, medians
from polydyn.schedules.decision import Leaf
from polydyn.search.backbone import Tile
from polydyn.search.hardware import cpu
from polydyn.search.outcomes import Search, search_record
from polydyn.search.records import Records
from polydyn.search.tasks.cpu import DEFAULT
from tests.program.test_searched_rows import SPLIT, computed, constant_rows, task_of


def test_rows_of_searches_are_counted_by_group(tmp_path: Path) -> None:
    split = [Tile.of_row(SPLIT, (), (("slices", n),)) for n in (2, 4)]
    with Records.open(tmp_path / "r.db") as records:
        for model, tiles in ((computed(), (DEFAULT, *split)), (constant_rows(), (DEFAULT,))):
            search = Search("polydyn", tiles, 9, cpu(1, lanes=8), Leaf(0))
            records.put([search_record(search, task_of(model))])
    assert chosen_rows(tmp_path / "r.db") == {SPLIT: 1}


def test_runs_alternate_and_the_least_time_counts() -> None:
    called: list[str] = []
    runs = {n: lambda n=n: called.append(n) for n in "ab"}  # type: ignore[misc]
    times = least_processor_ms(runs, 3)
    assert "".join(called) == "ab" * 4 and all(0 <= x < 1e3 for x in times.values())
    assert medians(runs, 1).keys() == {"a", "b"}
