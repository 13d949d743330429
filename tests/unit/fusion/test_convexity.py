"""Groups are convex for any graph: random DAGs through every pass, and the cases that fool simpler checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.errors import PolydynError
from polydyn.fusion.partition import Join, Partition, join_groups
from polydyn.fusion.pipeline import NAMES, fusion_plan
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.separate import separate
from polydyn.fusion.verify import verify_plan
from polydyn.schedules.expr import const, op
from tests.support.graphs import Sheet, matmul


def path_between(plan: FusionPlan) -> str | None:
    """Return a path that leaves a group and returns to it, searched node by node without the code under test."""
    home = {n.output: k for k, g in enumerate(plan.groups) for n in g.nodes}
    parts: dict[str, list[str]] = {}
    for t, w in plan.windows.items():
        parts.setdefault(w.target, []).append(t)
    reads = {
        n.output: [p for t in n.inputs for p in parts.get(t, [t]) if p in home] for g in plan.groups for n in g.nodes
    }
    for k, g in enumerate(plan.groups):
        todo = [(r, f"{n.output} <- {r}") for n in g.nodes for r in reads[n.output] if home[r] != k]
        seen = set()
        while todo:
            t, path = todo.pop()
            for r in reads[t]:
                if home[r] == k:
                    return f"{path} <- {r}"
                if r not in seen:
                    seen.add(r)
                    todo.append((r, f"{path} <- {r}"))
    return None


@st.composite
def sheets(draw: st.DrawFn) -> tuple[Sheet, tuple[str, ...]]:
    """Draw maps, row sums, products and concatenations over a few shapes, each reading any fitting tensors."""
    s = Sheet(x=("M", "N"), z=("M", "N"), w=("N", "N"))
    square, column = ["x", "z"], []
    for k in range(draw(st.integers(2, 12))):
        name, a, b = f"t{k}", draw(st.sampled_from(square)), draw(st.sampled_from(square))
        kind = draw(st.sampled_from(["map", "map", "sum", "spread", "product", "transposed", "concat"]))
        if kind == "map":
            s.let(name, ("M", "N"), op("add", s.at(a, "d0", "d1"), s.at(b, "d0", "d1")))
        elif kind == "sum":
            s.let(name, ("M", 1), s.at(a, "d0", "r0"), ("N",), "sum")
            column.append(name)
            continue
        elif kind == "spread" and column:
            c = draw(st.sampled_from(column))
            s.let(name, ("M", "N"), op("mul", s.at(a, "d0", "d1"), s.at(c, "d0", 0)))
        elif kind == "product":
            matmul(s, name, a, "w")
        elif kind == "concat":
            s.concat(f"{name}c", [a, b], 0)
            s.let(name, ("M", "N"), op("exp", s.at(f"{name}c", "d0", "d1")))
        else:
            s.let(f"{name}s", ("N",), s.at(a, "r0", "d0"), ("M",), "sum")
            s.let(name, ("M", "N"), op("sub", s.at(b, "d0", "d1"), s.at(f"{name}s", "d1")))
        square.append(name)
    made = [n.output for n in s.nodes]
    return s, (*draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True)), made[-1])


@settings(max_examples=60)
@given(sheets(), st.sets(st.sampled_from(NAMES), max_size=3))
def test_groups_are_convex_whatever_passes_run(drawn: tuple[Sheet, tuple[str, ...]], off: set[str]) -> None:
    s, outputs = drawn
    plan = fusion_plan(s.graph(*dict.fromkeys(outputs)), off)  # verifies order and outputs too
    assert path_between(plan) is None


def everything(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join:
    """A rule without conditions: only convexity limits it."""
    return Join({}, "because", "any")


@settings(max_examples=60)
@given(sheets())
def test_joining_whatever_stays_convex_does_so_and_no_more(drawn: tuple[Sheet, tuple[str, ...]]) -> None:
    s, outputs = drawn
    plan = join_groups(separate(s.graph(*dict.fromkeys(outputs))), everything)
    verify_plan(plan)
    assert path_between(plan) is None
    home = {n.output: k for k, g in enumerate(plan.groups) for n in g.nodes}
    for g in plan.groups:  # separate groups have the reason
        for n in g.nodes:
            apart = [t for t in n.inputs if t in home and home[t] != home[n.output]]
            assert all("convexity" in plan.refused[t, n.output] for t in apart)


def test_a_long_way_round_is_seen() -> None:
    """x -> a -> b -> c -> y, and x -> y: y may join x only together with all between."""
    s = Sheet(x0=("M", "N"))
    s.let("x", ("M", "N"), op("exp", s.at("x0", "d0", "d1")))
    for name, before in (("a", "x"), ("b", "a"), ("c", "b")):
        s.let(name, ("M", "N"), op("tanh", s.at(before, "d0", "d1")))
    s.let("y", ("M", "N"), op("add", s.at("x", "d0", "d1"), s.at("c", "d0", "d1")))
    p = Partition(separate(s.graph("y")))
    x, a, b, c, y = (p.home[t] for t in "xabcy")
    assert p.cycle(x, y) == "a cycle: c must run between the two (convexity)"
    p.join(x, a, Join({}, ""))
    assert p.cycle(x, y) and p.cycle(x, c) and p.cycle(x, b) is None
    p.join(b, c, Join({}, ""))
    assert p.cycle(x, y), "the path now is x -> {b, c} -> y"
    p.join(x, b, Join({}, ""))
    assert p.cycle(x, y) is None


def test_groups_side_by_side_may_join_unless_a_third_lies_between() -> None:
    """Neither reads the other: x and y are free, x and z are not (a transposed sum of x is between)."""
    s = Sheet(i=("M", "N"))
    s.let("x", ("M", "N"), op("exp", s.at("i", "d0", "d1")))
    s.let("y", ("M", "N"), op("tanh", s.at("i", "d0", "d1")))
    s.let("t", ("N",), s.at("x", "r0", "d0"), ("M",), "sum")
    s.let("z", ("M", "N"), op("sub", s.at("i", "d0", "d1"), s.at("t", "d1")))
    p = Partition(separate(s.graph("x", "y", "z")))
    assert p.cycle(p.home["x"], p.home["y"]) is None
    assert "t must run between" in (p.cycle(p.home["x"], p.home["z"]) or "")
    assert "t must run between" in (p.cycle(p.home["z"], p.home["x"]) or ""), "the order of asking does not matter"


def test_a_reader_of_a_concatenation_does_not_join_a_part() -> None:
    s = Sheet(x=("M", "N"), z=("M", "N"))
    s.let("a", ("M", "N"), op("exp", s.at("x", "d0", "d1")))
    s.let("b", ("M", "N"), op("tanh", s.at("z", "d0", "d1")))
    s.concat("c", ["a", "b"], 1)
    two_n = s.tensors["c"].shape[1]
    s.let("y", ("M", two_n), op("neg", s.at("c", "d0", "d1")))
    plan = fusion_plan(s.graph("y"))
    assert [g.outputs for g in plan.groups] == [("a",), ("b",), ("y",)]
    assert plan.why_apart(plan.groups[2]) == ("y: apart from c: it is a concatenation that several kernels write",)
    p = Partition(plan)
    assert "a concatenation must run between" in (p.cycle(p.home["a"], p.home["y"]) or "")


def test_an_epilogue_with_several_results_writes_them_all() -> None:
    s = Sheet(a=("M", "K"), b=("K", "N"))
    matmul(s, "x", "a", "b")
    s.let("y", ("M", "N"), op("max", s.at("x", "d0", "d1"), const(0, "float32")))
    s.let("t", ("N",), s.at("y", "r0", "d0"), ("M",), "sum")
    plan = fusion_plan(s.graph("x", "t"))
    assert [g.outputs for g in plan.groups] == [("x", "y"), ("t",)]


def test_a_wrong_plan_is_refused() -> None:
    s = Sheet(x=("M", "N"))
    s.let("a", ("M", "N"), op("exp", s.at("x", "d0", "d1")))
    s.let("t", ("N",), s.at("a", "r0", "d0"), ("M",), "sum")
    s.let("y", ("M", "N"), op("sub", s.at("a", "d0", "d1"), s.at("t", "d1")))
    plan = fusion_plan(s.graph("y"), without=("stitch", "columns"))
    first, second, third = plan.groups
    wrong = {
        "before it is whole": (second, first, third),
        "a node in two groups": (first, first, second, third),
        "no group makes it": (first, third),
        "with the outputs": (FusedGroup("nest", first.nodes, (), first.rows, ()), second, third),
        "a reduction that is not a row": (first, replace(second, rows={"t": ()}), third),
    }
    for message, groups in wrong.items():
        with pytest.raises(PolydynError, match=message):
            verify_plan(FusionPlan(plan.graph, groups))
    both = FusedGroup("nest", (*first.nodes, *third.nodes), ("a", "y"), {**first.rows, **third.rows}, ())
    with pytest.raises(PolydynError, match="before it is whole"):
        verify_plan(FusionPlan(plan.graph, (both, second)))
