"""Maps that read others twice: an inlined value would double with each of them."""

from __future__ import annotations

import pytest

from polydyn.fusion.pipeline import fusion_plan
from polydyn.graph.ir import Compute
from polydyn.graph.rewriting import compose, composed_size
from polydyn.schedules.expr import op, walk
from tests.support.graphs import Sheet, matmul

DEPTH = 46


def doubled(s: Sheet, name: str, count: int, shape: tuple[str, str]) -> str:
    """Let ``count`` maps add their predecessor to itself, and return the last one."""
    for k in range(count):
        s.let(f"{name}{k}", shape, op("add", *[s.at(f"{name}{k - 1}" if k else name, "d0", "d1")] * 2))
    return f"{name}{count - 1}"


def test_the_size_of_an_inlined_value_is_computed_without_building_it() -> None:
    s = Sheet(x=("M", "N"))
    last = doubled(s, "x", 10, ("M", "N"))
    *maps, n = [n for n in s.graph(last).nodes if isinstance(n, Compute)]
    assert composed_size(n, maps) == len(list(walk(compose(n, maps).body))) == 2**11 - 1


@pytest.mark.parametrize("before", [0, DEPTH])
@pytest.mark.parametrize("after", [0, DEPTH])
def test_sums_of_a_tensor_with_itself_around_a_product_are_fused_in_time(before: int, after: int) -> None:
    s = Sheet(x=("M", "K"), w=("K", "N"))
    left = doubled(s, "x", before, ("M", "K")) if before else "x"
    matmul(s, "p", left, "w")
    out = doubled(s, "p", after, ("M", "N")) if after else "p"
    plan = fusion_plan(s.graph(out))
    (group,) = (g for g in plan.groups if g.kind == "contract")
    assert len(group.nodes) < 16
    assert not after or any("more than 1024 values" in r for r in plan.refused.values())


def test_scores_that_are_added_to_themselves_before_a_softmax_are_fused_in_time() -> None:
    s = Sheet(q=("M", "K"), k=("K", "N"), v=("N", "K"))
    matmul(s, "s", "q", "k")
    scores = doubled(s, "s", 40, ("M", "N"))
    s.let("m", ("M", 1), s.at(scores, "d0", "r0"), ("N",), "max")
    s.let("e", ("M", "N"), op("exp", op("sub", s.at(scores, "d0", "d1"), s.at("m", "d0", 0))))
    s.let("t", ("M", 1), s.at("e", "d0", "r0"), ("N",), "sum")
    s.let("p", ("M", "N"), op("div", s.at("e", "d0", "d1"), s.at("t", "d0", 0)))
    matmul(s, "y", "p", "v")
    assert fusion_plan(s.graph("y")).groups
