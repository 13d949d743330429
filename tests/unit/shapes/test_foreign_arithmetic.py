"""Decisions about sizes and order, taken again by sympy and networkx: every check finds what is planted for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import onnx
import pytest
from onnx import TensorProto, helper

from polydyn.backends import target_of
from polydyn.backends.launches import host_plan
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.schedules import index, ranges
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.shapes.context import ShapeContext
from polydyn.testing.foreign.arithmetic import check, checked, solutions
from polydyn.testing.foreign.claims import Claim, Claims, Context, recording
from polydyn.testing.foreign.expressions import ForeignError, to_sympy, value
from polydyn.testing.foreign.order import check_groups, check_waves
from polydyn.testing.random_onnx import random_case

L, B, d0 = map(Index.of, ("L", "B", "d0"))


def found(text: str, *claims: Claim) -> None:
    with pytest.raises(ForeignError, match=text):
        check(Claims(arithmetic=dict.fromkeys(claims)))


def test_arithmetic_as_it_is() -> None:
    with checked() as claims:
        assert (8 * L + 3) // 4 == 2 * L
        assert str(minimum(L, L + 1)) == "L"
        assert ranges.simplify((4 * d0 + 3) // 4, {"d0": L}) == d0
        assert ranges.is_nonnegative(L - 1 - d0, {"d0": L})
    assert len(claims.arithmetic) > 4


def test_claims_that_do_not_hold() -> None:
    half = index.Atom("floordiv", (L, Index.of(2)))
    found("floordiv decided", Claim("floordiv", Index({(half,): 2}), "==", L))
    found("min decided", Claim("min", L, "==", Index({(index.Atom("min", (L, B)),): 1})))
    found("is_nonnegative decided", Claim("is_nonnegative", index.ZERO, "<=", L - d0 - 2, (("d0", L),)))
    found("upper_bound decided", Claim("upper_bound", d0 * 2, "<=", 2 * L - 3, (("d0", L),)))
    found("simplify decided", Claim("simplify", d0, "==", d0 + 1, (("d0", L),)))
    found("divide decided", Claim("divide", B, "==", B + d0 // 7, (("d0", Index.of(9)),)))


def test_expressions_are_read_anew() -> None:
    e = maximum(L // 3 * B, 7) - 2 * (B % 5)
    for env in ({"L": 10, "B": 4}, {"L": 0, "B": 9}, {"L": 31, "B": 13}):
        numbers = {to_sympy(Index.of(n)): v for n, v in env.items()}
        assert value(e, env) == e.evaluate(env) == int(to_sympy(e).subs(numbers))


def test_a_wrong_division_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = index.floordiv
    monkeypatch.setattr(index, "floordiv", lambda x, n: right(x + 1, n))
    with pytest.raises(ForeignError, match="floordiv decided"), checked():
        assert L // 4 is not None


def test_nothing_is_left_behind() -> None:
    before = index.floordiv, ShapeContext.canonical, ranges.divide
    with recording():
        assert index.floordiv is not before[0]
        assert ranges.floordiv is index.floordiv  # type: ignore[attr-defined]
    assert (index.floordiv, ShapeContext.canonical, ranges.divide) == before


# -- facts and guards --------------------------------------------------------------------------------------------------


def learned(facts: ShapeContext) -> None:
    """H is a multiple of 4, twice a quotient of it is W, and W is at least 2."""
    h, w = facts.declare("H"), facts.declare("W")
    facts.assume_multiple(h, 4, "a pyramid")
    facts.unify(h // 4 * 2, w, "a sum")
    facts.at_most(2, w, "a window")
    assert facts.equal(h // 2, w)
    assert facts.is_multiple(w, 2)
    assert facts.nonnegative(h // 2 - 2)


def test_facts_hold_wherever_guards_hold() -> None:
    facts = ShapeContext()
    with checked() as claims:
        learned(facts)
    assert sum(len(c.claims) for c in claims.contexts.values()) > 8
    sizes = solutions(Context(facts), random.Random(0))
    assert len({e["H"] for e in sizes}) > 3
    assert all(e["H"] % 4 == 0 and e["W"] == e["H"] // 2 for e in sizes)


@pytest.mark.parametrize("relation", ["%==", "==", "<="])
def test_a_fact_without_its_guard_is_found(relation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = ShapeContext.guards
    monkeypatch.setattr(ShapeContext, "guards", lambda f: tuple(g for g in guards(f) if g.relation != relation))
    with pytest.raises(ForeignError, match="decided"), checked():
        learned(ShapeContext())


def test_a_wrong_answer_of_facts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShapeContext, "_nonnegative", lambda *_: True)
    with pytest.raises(ForeignError, match="nonnegative decided"), checked():
        facts = ShapeContext()
        facts.nonnegative(facts.declare("H") - 1)


# -- order -------------------------------------------------------------------------------------------------------------


def model() -> onnx.ModelProto:
    """Two reductions, a concatenation of what is made of both, and a product of it."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Softmax", ["x"], ["a"], axis=-1),
        helper.make_node("MatMul", ["a", "x"], ["b"]),
        helper.make_node("Softmax", ["b"], ["c"], axis=0),
        helper.make_node("Concat", ["b", "c"], ["y"], axis=1),
        helper.make_node("MatMul", ["x", "y"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, ["N", "N"])],
                              [info("z", TensorProto.FLOAT, [None, None])])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture(scope="module")
def groups() -> FusionPlan:
    cpu = target_of("cpu:avx2", None)
    return cpu.fuse(cpu.rewrite(import_model(model())))


Change = Callable[[FusionPlan], FusionPlan]


def lost_output(p: FusionPlan) -> FusionPlan:
    k = next(k for k, g in enumerate(p.groups) if g.outputs and k + 1 < len(p.groups))
    return replace(p, groups=(*p.groups[:k], replace(p.groups[k], outputs=()), *p.groups[k + 1 :]))


def first_and_last(p: FusionPlan) -> FusionPlan:
    first, last = p.groups[0], p.groups[-1]
    joined = replace(first, nodes=(*first.nodes, *last.nodes), outputs=(*first.outputs, *last.outputs))
    return replace(p, groups=(joined, *p.groups[1:-1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, groups=p.groups[::-1]), "comes later"),
        (lambda p: replace(p, groups=p.groups[1:]), "no group computes it"),
        (lambda p: replace(p, groups=(*p.groups, p.groups[0])), "two groups compute it"),
        (lost_output, "does not leave it in memory"),
        (first_and_last, "not convex"),
    ],
)
def test_groups_in_a_wrong_order_are_found(groups: FusionPlan, change: Change, message: str) -> None:
    check_groups(groups)
    with pytest.raises(ForeignError, match=message):
        check_groups(change(groups))


def test_waves_that_need_each_other_are_found(groups: FusionPlan) -> None:
    cpu = target_of("cpu:avx2", None)
    kernels = cpu.place(cpu.builder(groups))
    plan = host_plan(groups.graph, kernels, cpu)
    check_waves(plan, kernels.placed)
    assert len(plan.launches) > 2
    with pytest.raises(ForeignError, match=r"wave 0 reads what wave 0 writes"):
        check_waves(replace(plan, waves=(len(plan.launches),)), kernels.placed)
    with pytest.raises(ForeignError, match=r"wave \d reads what wave \d writes"):
        check_waves(replace(plan, launches=plan.launches[::-1], waves=()), kernels.placed)


@pytest.mark.parametrize("theme", ["views", "sizes", "vision", "windows"])
def test_random_models_are_decided_alike(theme: str) -> None:
    cpu = target_of("cpu:avx2", None)
    with checked():
        check_groups(cpu.fuse(cpu.rewrite(import_model(random_case(50, theme).model))))
