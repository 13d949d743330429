"""Fuse only if off-chip traffic does not rise: each rule with a case that fuses and one that does not."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.fusion.facts import facts_of
from polydyn.fusion.pipeline import fusion_plan
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.traffic import may_rise, size_of
from polydyn.graph.ir import Guard
from polydyn.schedules.expr import cast, const, op
from polydyn.schedules.index import Index
from polydyn.testing.plans import bytes_at
from tests.support.graphs import Sheet, matmul, wrong


def outputs(plan: FusionPlan) -> list[tuple[str, ...]]:
    return [g.outputs for g in plan.groups]


def turned_sums(s: Sheet, name: str, source: str) -> None:
    """Add a reader that no map can join: it runs over the rows in another order."""
    m, n, k = s.tensors[source].shape
    s.let(name, (n, m), s.at(source, "d1", "d0", "r0"), (k,), "sum")


# -- producers that could be computed again --------------------------------------------------------------------------


def sums_of_a_sum(readers: int) -> Sheet:
    s = Sheet(a=("M", "N", "K"), b=("M", "N", "K"))
    s.let("p", ("M", "N", "K"), op("add", s.at("a", "d0", "d1", "d2"), s.at("b", "d0", "d1", "d2")))
    for k in range(readers):
        turned_sums(s, f"t{k}", "p")
        s.let(f"y{k}", ("N", "M"), op("mul", s.at(f"t{k}", "d0", "d1"), const(k + 1, "float32")))
    return s


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_a_sum_read_by_few_is_computed_again(readers: int) -> None:
    """p moves 2 + 1 + readers tensors as a kernel, otherwise 2 * readers."""
    s = sums_of_a_sum(readers)
    names = [f"y{k}" for k in range(readers)]
    plan = fusion_plan(s.graph(*names))
    assert outputs(plan) == [(n,) for n in names]
    assert "computed again here (input-inline)" in "\n".join(plan.groups[0].reasons)


def test_a_sum_read_by_many_is_not() -> None:
    s = sums_of_a_sum(4)
    plan = fusion_plan(s.graph(*(f"y{k}" for k in range(4))))
    assert ("p",) in outputs(plan) and len(plan.groups) == 5
    why = next(r for g in plan.groups for r in plan.why_apart(g))
    assert "not computed again: off-chip traffic may rise" in why and "more bytes (a, b)" in why


@pytest.mark.compiler
def test_what_is_computed_again_is_right() -> None:
    sizes = ({"M": 5, "N": 33, "K": 7}, {"M": 1, "N": 1, "K": 1}, {"M": 0, "N": 3, "K": 2})
    assert not wrong(sums_of_a_sum(2).graph("y0", "y1"), *sizes)


def test_a_broadcast_is_not_computed_again_for_every_place_that_reads_it() -> None:
    s = Sheet(a=("N",), b=("M", "N"))
    s.let("p", ("N",), op("add", s.at("a", "d0"), const(1, "float32")))
    s.let("y", ("M", "N"), op("mul", s.at("b", "d0", "d1"), s.at("p", "d1")))
    plan = fusion_plan(s.graph("y"))
    assert outputs(plan) == [("p",), ("y",)]
    assert "it would be computed M*N times for N elements" in plan.why_apart(plan.groups[1])[0]


def test_dear_operations_are_not_computed_again() -> None:
    s = Sheet(a=("M", "N", "K"))
    s.let("p", ("M", "N", "K"), op("exp", s.at("a", "d0", "d1", "d2")))
    turned_sums(s, "y", "p")
    plan = fusion_plan(s.graph("y"))
    assert outputs(plan) == [("p",), ("y",)]
    assert "costs more than a few simple operations" in plan.why_apart(plan.groups[1])[0]


# -- epilogues -------------------------------------------------------------------------------------------------------


def product_and_square(*more: str) -> FusionPlan:
    """Build x = a @ b, q = x * x, t = row sums of q."""
    s = Sheet(a=("M", "K"), b=("K", "N"))
    matmul(s, "x", "a", "b")
    s.let("q", ("M", "N"), op("mul", s.at("x", "d0", "d1"), s.at("x", "d0", "d1")))
    s.let("t", ("M", 1), s.at("q", "d0", "r0"), ("N",), "sum")
    assert not wrong(s.graph("t", *more), {"M": 5, "N": 33, "K": 3})
    return fusion_plan(s.graph("t", *more))


@pytest.mark.compiler
def test_an_epilogue_that_replaces_what_is_written_stays() -> None:
    assert outputs(product_and_square()) == [("q",), ("t",)]


@pytest.mark.compiler
def test_an_epilogue_beside_what_is_written_goes_to_its_reader() -> None:
    plan = product_and_square("x")
    assert outputs(plan) == [("x",), ("t",)]
    assert plan.groups[1].reasons[0].startswith("q: ") and "no epilogue of x" in plan.groups[1].reasons[0]
    assert "off-chip traffic would rise" in plan.why_apart(plan.groups[1])[0]


# -- casts -----------------------------------------------------------------------------------------------------------


def test_a_cast_to_halves_stays_with_what_makes_the_operand() -> None:
    """norm -> float16 -> product: inside the product the cast would make the GEMM read float32."""
    s = Sheet(x=("M", "K"), w=("K", "N"))
    s.let("m", ("M", 1), s.at("x", "d0", "r0"), ("K",), "max")
    s.let("n", ("M", "K"), op("sub", s.at("x", "d0", "d1"), s.at("m", "d0", 0)))
    s.let("h", ("M", "K"), cast(s.at("n", "d0", "d1"), "float16"))
    s.let("v", ("K", "N"), cast(s.at("w", "d0", "d1"), "float16"))
    wide = [cast(s.at("h", "d0", "r0"), "float32"), cast(s.at("v", "r0", "d1"), "float32")]
    s.let("y", ("M", "N"), op("mul", *wide), ("K",), "sum")
    plan = fusion_plan(s.graph("y"))
    product = next(g for g in plan.groups if g.kind == "contract")
    assert set(plan.inputs["y"]) == {"h", "v"} and ("h",) in outputs(plan)
    assert next(g for g in plan.groups if g.outputs == ("h",)).nodes[0].output == "m", "the cast joined the norm"
    assert all("a cast stays with what makes the operand" in line for line in plan.why_apart(product))
    sizes = {"M": 64, "K": 32, "N": 16}
    assert bytes_at(plan, product, sizes) == 2 * (64 * 32 + 32 * 16) + 4 * 64 * 16


def test_a_cast_from_halves_that_a_product_needs_is_no_kernel() -> None:
    """The widening is a part of the product's body: it reads the halves."""
    s = Sheet("float16", x=("M", "K"), w=("K", "N"))
    wide = [cast(s.at("x", "d0", "r0"), "float32"), cast(s.at("w", "r0", "d1"), "float32")]
    s.let("y", ("M", "N"), op("mul", *wide), ("K",), "sum")
    s.let("z", ("M", "N"), cast(s.at("y", "d0", "d1"), "float16"))
    (group,) = fusion_plan(s.graph("z")).groups
    assert group.kind == "contract" and group.outputs == ("z",)


# -- counting --------------------------------------------------------------------------------------------------------


def test_comparisons_use_the_ranges_that_the_program_guards() -> None:
    guards = (Guard(Index.of(8), "<=", Index.of("N"), ""), Guard(Index.of("N"), "<=", Index.of(16), ""))
    n, m = Index.of("N"), Index.of("M")
    assert facts_of(guards).nonnegative(2 * n * m - 16 * m) and not facts_of(()).nonnegative(2 * n * m - 16 * m)
    assert facts_of(guards).nonnegative(16 * m - n * m) and not facts_of(guards).nonnegative(17 - 2 * n)


def test_undecided_traffic_keeps_groups_apart() -> None:
    """Reading K*N*J and more instead of M*N*J: the cheaper one depends on the call, so nothing is recomputed."""
    s = Sheet(a=("M", "N", "J"), big=("K", "N", "J"))
    s.let("p", ("M", "N", "J"), op("add", s.at("a", "d0", "d1", "d2"), s.at("big", 0, "d1", "d2")))
    for k in range(3):
        turned_sums(s, f"t{k}", "p")
    plan = fusion_plan(s.graph("t0", "t1", "t2"), without=("siblings",))
    alone = fusion_plan(s.graph("t0", "t1", "t2"), without=("siblings", "recompute"))
    p = next(g for g in alone.groups if g.outputs == ("p",))
    more = "(4*J*K*N + 8*J*M*N) more bytes (a, big, p)"
    assert may_rise(alone, (p,), (p, p)) == f"off-chip traffic may rise: {more}, 0 fewer"
    assert ("p",) in outputs(plan) and len(plan.groups) == 4


def test_bytes_are_those_that_loads_can_touch() -> None:
    s = Sheet(x=("M", "N"))
    s.let("y", ("M", 4), op("exp", s.at("x", "d0", Index.of("d1") + 1)))
    plan = fusion_plan(s.graph("y"))
    (g,) = plan.groups
    assert bytes_at(plan, g, {"M": 3, "N": 100}) == 4 * (3 * 4 + 3 * 4)
    assert size_of(plan.graph, "x").evaluate({"M": 3, "N": 100}) == np.zeros((3, 100), np.float32).nbytes
