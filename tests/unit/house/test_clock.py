"""The clock of compilations: sections exclude the sections inside them, and cost nothing without a clock."""

from __future__ import annotations

import time

import pytest

from polydyn.clock import REST, measuring, section, timed, unit_compiled, unit_lines


def test_sections_add_up_and_exclude_inner_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: 2.0 * next(ticks))
    monkeypatch.setattr(time, "process_time", lambda: 0.0)

    @timed("inner")
    def inner(n: int) -> int:
        return n + 1

    with measuring() as clock:  # 0
        with section("outer"), measuring() as same:  # 2 to 16
            assert same is clock
            assert inner(1) == 2 and inner(n=2) == 3  # 4 to 6, 8 to 10
            with pytest.raises(KeyError), section("failing"):  # 12 to 14
                raise KeyError
        unit_compiled("a.c", 1.5)
        unit_compiled("a.c", 0.5)
        unit_lines("a.c", {"f": 10})
    timing = clock.timing()  # 18
    assert {s.name: (s.seconds, s.count) for s in timing.sections} == {
        REST: (4.0, 1), "outer": (8.0, 1), "inner": (4.0, 2), "failing": (2.0, 1),
    }  # fmt: skip
    assert timing.seconds == 18.0 and timing.processor == 2.0
    assert [(u.name, u.processor, dict(u.lines)) for u in timing.units] == [("a.c", 2.0, {"f": 10})]
    assert [line.split()[0] for line in str(timing).splitlines() if line][1] == "outer"


def test_without_a_clock_nothing_is_recorded() -> None:
    with section("lost"):
        unit_compiled("a.c", 1.0)
        unit_lines("a.c", {})
    with measuring() as clock:
        pass
    assert [s.name for s in clock.timing().sections] == [REST] and not clock.timing().units
