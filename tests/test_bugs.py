"""Every bug once found, as the smallest program that showed it."""

from __future__ import annotations

from graphs import Sheet, wrong

from polydyn.schedules.expr import FromIndex, op
from polydyn.schedules.index import Index


def test_one_group_reduces_rows_of_different_lengths() -> None:
    """Iterators of one name had one extent in a nest: the row of 9 was summed to 8, like its slice."""
    s = Sheet(x=("A", 9))
    s.let("t", ("A", 9), op("exp", s.at("x", "d0", "d1")))
    s.let("total", ("A",), s.at("t", "d0", "r0"), (9,), "sum")
    s.let("part", ("A",), s.at("t", "d0", Index.of("r0") + 1), (8,), "sum")
    s.let("y", ("A",), op("add", s.at("part", "d0"), op("mul", s.at("total", "d0"), FromIndex("float32", Index.of(9)))))
    assert not wrong(s.graph("y", "total"), {"A": 5})
