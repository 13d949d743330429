"""Decisions about sizes and order, recomputed by sympy and networkx: every check finds its planted faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.backends import target_of
from polydyn.backends.launches import host_plan
from polydyn.fusion.plan import FusionPlan, Window
from polydyn.graph.expand import import_model
from polydyn.program.memory import Slot
from polydyn.schedules import index, ranges
from polydyn.schedules.expr import Load
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.shapes.context import ShapeContext
from polydyn.testing import model_check
from polydyn.testing.foreign.aliasing import check_copies, check_slots, check_windows
from polydyn.testing.foreign.arithmetic import check, checked, solutions
from polydyn.testing.foreign.claims import Claim, Claims, Context, recording
from polydyn.testing.foreign.expressions import ForeignError, to_sympy, value
from polydyn.testing.foreign.order import check_groups, check_waves
from polydyn.testing.foreign.plans import check_planned_again
from polydyn.testing.model_check import Check, Depth
from polydyn.testing.plan import framed
from polydyn.testing.plan.framed import programs_of
from polydyn.testing.plan.planned import Planned
from polydyn.testing.random_onnx import random_case

L, B, d0 = map(Index.of, ("L", "B", "d0"))


def check_claims(text: str, *claims: Claim) -> None:
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
    check_claims("floordiv decided", Claim("floordiv", Index({(half,): 2}), "==", L))
    check_claims("min decided", Claim("min", L, "==", Index({(index.Atom("min", (L, B)),): 1})))
    check_claims("is_nonnegative decided", Claim("is_nonnegative", index.ZERO, "<=", L - d0 - 2, (("d0", L),)))
    check_claims("upper_bound decided", Claim("upper_bound", d0 * 2, "<=", 2 * L - 3, (("d0", L),)))
    check_claims("simplify decided", Claim("simplify", d0, "==", d0 + 1, (("d0", L),)))
    check_claims("divide decided", Claim("divide", B, "==", B + d0 // 7, (("d0", Index.of(9)),)))


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
    """Assert that H is a multiple of 4, twice a quotient of it is W, and W is at least 2."""
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
    """Build two reductions, a concatenation of results of both, and a product of it."""
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


# -- shared memory -----------------------------------------------------------------------------------------------------


def reshaped() -> onnx.ModelProto:
    """Build a concatenation of two parts, and a product under another shape, which share memory."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["b"]),
        helper.make_node("Concat", ["a", "b"], ["y"], axis=0),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Reshape", ["m", "s"], ["z"]),
    ]
    constants = [numpy_helper.from_array(np.ones((3, 4), np.float32), "w"),
                 numpy_helper.from_array(np.array([2, -1]), "s")]  # fmt: skip
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.FLOAT, ["N", 3])],
                              [info(n, TensorProto.FLOAT, [None, None]) for n in "yz"], constants)  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture(scope="module")
def planned() -> Planned:
    (made,) = programs_of(import_model(reshaped()), target_of("cpu:avx2", None)).plans
    return made


def windows_at(p: FusionPlan, where: Callable[[Window], Window]) -> FusionPlan:
    return replace(p, windows={t: where(w) for t, w in p.windows.items()})


@pytest.mark.parametrize(
    "where",
    [
        lambda w: replace(w, offset=Index.of(0)),
        lambda w: replace(w, offset=Index.of("x0") - w.offset),
        lambda w: replace(w, axis=1),
    ],
)
def test_parts_of_a_concatenation_elsewhere_are_found(planned: Planned, where: Callable[[Window], Window]) -> None:
    check_planned_again(planned)
    assert len(planned.kernels.plan.windows) == 2
    with pytest.raises(ForeignError, match="does not lie at"):
        check_windows(planned.later[1], windows_at(planned.kernels.plan, where))


def test_a_copy_that_is_left_out_has_the_same_addresses(planned: Planned) -> None:
    plan, placed = planned.kernels.plan, planned.kernels.placed
    (left_out,) = (g for g in plan.groups if g.outputs[0] not in {p.fused.outputs[0] for p in placed})
    (node,) = left_out.nodes
    assert isinstance(node.body, Load)
    other = replace(node, body=replace(node.body, index=node.body.index[::-1]))
    groups = tuple(replace(g, nodes=(other,)) if g is left_out else g for g in plan.groups)
    with pytest.raises(ForeignError, match="is not at the same place"):
        check_copies(replace(plan, groups=groups), placed, planned.plan)
    with pytest.raises(ForeignError, match="no launch writes it"):
        check_copies(plan, placed[1:], planned.plan)


def test_tenants_of_a_slot_that_live_together_are_found(groups: FusionPlan) -> None:
    cpu = target_of("cpu:avx2", None)
    kernels = cpu.place(cpu.builder(groups))
    host = host_plan(groups.graph, kernels, cpu)
    written = [p.fused.outputs[0] for p in kernels.placed]
    check_slots(host, kernels.placed, [Slot((t,), (L,)) for t in written])
    with pytest.raises(ForeignError, match="is still used in wave"):
        check_slots(host, kernels.placed, [Slot(tuple(written), (L,) * len(written))])


def test_the_fuzzer_names_what_is_decided_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    right = index.floordiv
    monkeypatch.setattr(index, "floordiv", lambda x, n: right(x, n) + (n == 4))
    calls = [({"N": 2}, {"x": np.ones((2, 3), np.float32)})]
    monkeypatch.setattr(model_check, "stages", lambda *_: ())
    monkeypatch.setattr(framed, "programs_of", lambda g, t: [L // 4] and programs_of(g, t))
    check_claims = Check(reshaped(), calls, Depth.PLAN).run().finding
    assert check_claims is not None and (check_claims.kind, check_claims.stage) == ("wrong", "decided again")
