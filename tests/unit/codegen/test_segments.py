"""Index-set splitting: what segments compute, by the interpreter of the loop IR, and what is not split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polydyn.codegen.ir import Body, Def, FlatLoad, For, Let, Reg, Set, Store, walk
from polydyn.codegen.passes.segments import MOST_SEGMENTS, vectorise, vectorise_segments
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import FromIndex, const, op
from polydyn.schedules.index import ZERO, Index, fetch, floordiv, maximum, minimum
from polydyn.testing.loops.cpu import CpuRun

V = Index.of
X = V("i") + V("o")
"""The place of an element of a tile that begins at ``o``."""
LENGTH = 40
SUBSCRIPTS = {
    "reflect": minimum(2 * V("m") - maximum(3 - X, X - 3) - 2, maximum(3 - X, X - 3)),
    "edge": minimum(maximum(X - 3, 0), V("m") - 1),
    "three sides": minimum(X, V("m") - 1, 2 * V("m") - X),
    "repeat": X - V("m") * floordiv(X, V("m")),
    "repeat from within": (X + 2) - V("m") * floordiv(X + 2, V("m")),
    "rows of 9": floordiv(X, V(9)),
    "runs of 3": floordiv(X + 1, V(3)),
    "runs with ends": minimum(maximum(floordiv(X + 1, V(2)) - 1, 0), V("m") - 1),
    "runs above": maximum(V("m") - floordiv(X, V(2)), 2) + floordiv(X, V(2)),
    "slope": maximum(3 * V("i") - 7, 2),
    "back": maximum(V("m") - 2 * V("i"), 1),
}


def loop(subscript: Index) -> For:
    return For("i", ZERO, V("n"), (Store("y", V("i"), FlatLoad("float32", "x", subscript)),))


def result(body: Body, n: int, m: int, o: int) -> list[float]:
    x, y = np.arange(LENGTH, dtype=np.float32), np.full(LENGTH, -1, np.float32)
    CpuRun({"x": ("float32", x), "y": ("float32", y)}, 4).run(body, {"n": n, "m": m, "o": o})
    return list(y.tolist())


@given(st.sampled_from(sorted(SUBSCRIPTS)), st.integers(0, 11), st.integers(1, 9), st.integers(0, 8))
def test_segments_read_what_the_loop_reads(name: str, n: int, m: int, o: int) -> None:
    whole = loop(SUBSCRIPTS[name])
    i, env = np.arange(n), {"m": m, "o": o}
    places = [SUBSCRIPTS[name].evaluate(env | {"i": int(k)}) for k in i]
    if any(not 0 <= p < LENGTH for p in places):
        return
    made = vectorise(whole, 4)
    assert not isinstance(made, Declined), made
    assert result(made, n, m, o) == result((whole,), n, m, o) == [*map(float, places), *[-1.0] * (LENGTH - n)]


@given(st.integers(0, 11), st.integers(2, 4), st.integers(0, 8), st.integers(-9, 9))
def test_remainders_are_small_numbers_in_lanes(n: int, m: int, o: int, c: int) -> None:
    """The weights of a linear resize, for example."""
    index = 3 * (X - m * floordiv(X, V(m))) + c
    body = For("i", ZERO, V("n"), (Store("y", V("i"), FromIndex("float32", index)),))
    made = vectorise(body, 4)
    assert not isinstance(made, Declined)
    assert result(made, n, 1, o) == [*(float(3 * ((i + o) % m) + c) for i in range(n)), *[-1.0] * (LENGTH - n)]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 4]), *[st.integers(0, 19)] * 3)
@example(4, 4, 16, 3, 5)  # a group ends and one begins inside the guard
@example(2, 4, 3, 0, 3)  # the last group is not whole
def test_lanes_under_a_guard_read_the_sources_of_these_lanes(m: int, apart: int, n: int, low: int, high: int) -> None:
    """Elements outside of the guard's sources do not exist here, and groups begin before the guard or end behind it."""
    apart = min(apart, m)
    i = FromIndex("int64", V("i"))
    guard = op("and", op("ge", i, FromIndex("int64", V("p"))), op("lt", i, FromIndex("int64", V("q"))))
    read = FlatLoad("float32", "x", floordiv(V("i"), V(m)) * apart - V("f"))
    first = low // m * apart
    body = For("i", ZERO, V("n"), (Store("y", V("i"), op("where", guard, read, const(0, "float32"))),))
    made = vectorise(body, 8)
    assert not isinstance(made, Declined)
    last = (high - 1) // m * apart if low < high else first - 1
    x, y = np.arange(1, last - first + 2, dtype=np.float32), np.full(LENGTH, -1, np.float32)
    CpuRun({"x": ("float32", x), "y": ("float32", y)}, 8).run(made, {"n": n, "p": low, "q": high, "f": first})
    expected = [float(k // m * apart - first + 1) if low <= k < high else 0.0 for k in range(n)]
    assert y.tolist() == [*expected, *[-1.0] * (LENGTH - n)]


def test_a_size_of_zero_has_no_runs_of_a_symbol() -> None:
    made = vectorise_segments(loop(SUBSCRIPTS["repeat"]), 4)
    assert not isinstance(made, Declined)
    assert result(made, 0, 0, 3) == [-1.0] * LENGTH


def test_a_wrong_place_of_a_change_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polydyn.codegen.passes.segments.maximum", lambda *a: maximum(*a) + (len(a) == 2))
    made = vectorise_segments(loop(SUBSCRIPTS["edge"]), 4)
    assert not isinstance(made, Declined)
    assert result(made, 11, 6, 0) != result((loop(SUBSCRIPTS["edge"]),), 11, 6, 0)


@pytest.mark.parametrize(
    ("subscript", "reason"),
    [
        (X, "one segment"),
        (V("i") * V("i"), "one segment"),
        (minimum(fetch("t", (X,)), 3), "depends on data"),
        (minimum(V("i") * V("o"), 7), "not affine in i"),
        (floordiv(X * 3, V("m")), "does not move by one"),
        (floordiv(X, V(3)), "one segment"),
        (minimum(floordiv(X, V(2)) + floordiv(X, V(3)), 4), "not affine in i"),
        (floordiv(V("m"), V("i") + 1), "divides by i"),
        (sum((maximum(X, k) for k in range(1, 9)), ZERO), f"more than {MOST_SEGMENTS}"),
    ],
)
def test_what_is_not_split(subscript: Index, reason: str) -> None:
    refused = vectorise_segments(loop(subscript), 4)
    assert isinstance(refused, Declined) and reason in str(refused)


def test_a_sum_over_the_loop_is_not_split() -> None:
    carried = For("i", ZERO, V("n"), (Set("s", FlatLoad("float32", "x", SUBSCRIPTS["edge"]), reduce="sum"),))
    assert isinstance(vectorise_segments(carried, 4), Declined)
    local = For("i", ZERO, V("n"), (Def("s", FlatLoad("float32", "x", SUBSCRIPTS["edge"])),
                                    Store("y", V("i"), Reg("float32", "s"))))  # fmt: skip
    made = vectorise_segments(local, 4)
    assert not isinstance(made, Declined)
    assert result(made, 11, 6, 0) == result((local,), 11, 6, 0)


def test_affine_loops_stay_one_loop() -> None:
    assert isinstance(vectorise_loop(loop(SUBSCRIPTS["edge"]), 4), Declined)
    made = vectorise_segments(loop(SUBSCRIPTS["edge"]), 4)
    assert not isinstance(made, Declined)
    assert sum(isinstance(n, For) for n in walk(made)) == 3 and sum(isinstance(n, Let) for n in walk(made)) == 2
