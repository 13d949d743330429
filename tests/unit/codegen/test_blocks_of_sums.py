"""Sums in blocks: they equal the sums in one chain, are nearer to float64, and no chain is longer than a block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.codegen.ir import Body, Call, Compare, Def, FlatLoad, For, If, Let, Pointer, Reg, Set, Store, walk
from polydyn.codegen.passes.blocks_of_sums import IN_MEMORY, STEPS, sum_in_blocks
from polydyn.schedules.expr import const
from polydyn.schedules.index import ZERO, Index
from polydyn.testing.loops.cpu import CpuRun

V = Index.of
LANES = 4


def tile(body: Body, start: float = 0.0) -> Body:
    """Return a tile of two sums, a vector and a narrow one, around a loop."""
    return (
        Let("place", V("o") + 1, (
            Def("s", const(start, "float32"), LANES),
            Def("t", const(start, "float32"), LANES // 2),
            *body,
            Store("y", V("place") - 1, Reg("float32", "s", LANES), lanes=LANES),
            Store("y", V("place") + LANES - 1, Reg("float32", "t", LANES // 2), lanes=LANES // 2),
        )),
    )  # fmt: skip


def added(at: Index) -> Body:
    """Return the additions of one step: the vector and half a vector of row ``at``."""
    return (
        Set("s", FlatLoad("float32", "x", at * LANES, LANES), LANES, "sum"),
        Set("t", FlatLoad("float32", "x", at * LANES, LANES // 2), LANES // 2, "sum"),
    )


def result(body: Body, x: np.ndarray, n: int, m: int = 1, o: int = 0) -> np.ndarray:
    y = np.full(LANES * 3, -1, np.float32)
    CpuRun({"x": ("float32", x.ravel().copy()), "y": ("float32", y)}, LANES).run(body, {"n": n, "m": m, "o": o})
    return y


def chains(body: Body) -> list[For]:
    return [n for n in walk(body) if isinstance(n, For) and any(isinstance(x, Set) for x in n.body)]


@settings(max_examples=25)
@given(st.integers(0, 11), st.integers(1, 3), st.integers(1, 5), st.integers(0, 2), st.booleans(), st.integers(0, 2))
def test_blocks_add_what_the_loop_adds(n: int, m: int, steps: int, o: int, began: bool, form: int) -> None:
    nested = For("k", ZERO, V("n"), (For("j", ZERO, V("m"), added(V("k") * V("m") + V("j"))),))
    guarded = If((Compare(">", V("n"), V(2)),), (nested,), (For("k", ZERO, V("n") * V("m"), added(V("k"))),))
    x = np.arange(n * m * LANES, dtype=np.float32).reshape(n * m, LANES)
    whole = tile(((nested, guarded, For("k", ZERO, V(n * m), added(V("k"))))[form],), 3.0)
    made = sum_in_blocks(whole, "total", m, began, steps)
    assert result(made, x, n, m, o).tolist() == result(whole, x, n, m, o).tolist()


@given(st.integers(0, 9))
def test_a_block_is_never_longer(n: int) -> None:
    made = sum_in_blocks(tile((For("k", ZERO, V("n"), added(V("k"))),)), "total", steps=4)
    (steps,) = (x for x in chains(made) if x.var == "k")
    for block in range(n // 4 + 1):
        env = {"n": n, "k_block": block}
        assert steps.hi.evaluate(env) - steps.lo.evaluate(env) <= 4


def test_short_sums_stay_as_they_are() -> None:
    short = tile((For("k", ZERO, V(STEPS), added(V("k"))),))
    assert sum_in_blocks(short, "total") == short
    other = tile((For("k", ZERO, V("n"), (Set("w", FlatLoad("int32", "x", V("k")), 1, "sum"),)),))
    assert sum_in_blocks(other, "total") == other, "sums of integers are exact"


def test_long_inner_loops_are_blocks_themselves() -> None:
    loop = For("k", ZERO, V(3), (For("j", ZERO, V(2 * STEPS), added(V("k") * 2 * STEPS + V("j"))),))
    made = sum_in_blocks(tile((loop,)), "total")
    assert [n.var for n in walk(made) if isinstance(n, For)] == ["k", "j_block", "j"]
    x = np.ones((6 * STEPS, LANES), np.float32)
    assert result(made, x, 0)[:LANES].tolist() == [6.0 * STEPS] * LANES


def test_totals_wait_in_memory() -> None:
    made = sum_in_blocks(tile((For("k", ZERO, V("n"), added(V("k"))),)), "total")
    assert IN_MEMORY in str(made)


def test_blocks_are_nearer_to_the_sum() -> None:
    n = 8 * STEPS
    x = np.random.default_rng(0).standard_normal((n, LANES)).astype(np.float32)
    exact = x.astype(np.float64).sum(0)
    whole = tile((For("k", ZERO, V("n"), added(V("k"))),))
    one, many = (abs(result(b, x, n)[:LANES] - exact).mean() for b in (whole, sum_in_blocks(whole, "total")))
    assert many < one / 2


def test_loops_that_only_prefetch_are_no_steps() -> None:
    """Products whose panels come from memory had sums without blocks: the number of prefetched lines is no number."""
    prefetch = For("line", ZERO, V("lines"), (Call("pd_prefetch_f32", (Pointer("float32", "x", V("line")),)),))
    loop = For("k", ZERO, V(40), (prefetch, For("j", ZERO, V(4), added(V("k") * 4 + V("j")))))
    made = sum_in_blocks(tile((loop,)), "total", steps=16)
    blocks = [n for n in walk(made) if isinstance(n, For) and n.var == "k_block"]
    assert [int(n.hi) for n in blocks] == [10], "four trips of four steps"
