"""Implicit broadcasts (BladeDISC 3.2): gone where the shapes are proven equal, right at run time where they are not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from polydyn.compiler import compile
from polydyn.errors import InputError
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.schedules.expr import loads
from polydyn.schedules.index import Index
from tests.support.tiny import model, node

F = "float32"
Nodes = list[onnx.NodeProto]
Shapes = Mapping[str, list[str]]
Dims = Mapping[str, tuple[int, int]]


def plan_of(nodes: Nodes, inputs: Shapes, dims: Dims | None = None) -> FusionPlan:
    constants = {"ones": np.array([1, 1])} if any("ones" in n.input for n in nodes) else {}
    m = model(nodes, {k: (F, v) for k, v in inputs.items()}, ["y"], constants)
    return fusion_plan(rewrite_graph(import_model(m, dims)))


OWN_SHAPE = [node("Shape", "a", "s"), node("Expand", "a s", "e"), node("Exp", "e", "y")]
EQUAL_BY_A_FACT = [
    node("Add", "a b", "c"), node("Shape", "b", "s"), node("Expand", "a s", "e"), node("Mul", "e c", "y"),
]  # fmt: skip
TILED = [node("Shape", "b", "s"), node("Tile", "a s", "e"), node("Exp", "e", "y")]


@pytest.mark.parametrize(
    ("nodes", "inputs", "dims"),
    [
        (OWN_SHAPE, {"a": ["A", "N"]}, None),
        (EQUAL_BY_A_FACT, {"a": ["A", "N"], "b": ["B", "N"]}, None),
        ([node("Tile", "a ones", "e"), node("Exp", "e", "y")], {"a": ["A", "N"]}, None),
        (TILED, {"a": ["A"], "b": ["B"]}, {"B": (1, 1)}),
    ],
    ids=["its own shape", "equal by another fact", "once", "a size that is 1"],
)
def test_a_broadcast_that_is_proven_unnecessary_is_gone(nodes: Nodes, inputs: Shapes, dims: Dims | None) -> None:
    plan = plan_of(nodes, inputs, dims)
    (group,) = plan.groups
    for n in group.nodes:
        here = tuple(Index.of(f"d{a}") for a in range(len(plan.graph.tensors[n.output].shape)))
        assert all(x.index == here for x in loads(n.body))


def test_the_reason_is_noted() -> None:
    plan = plan_of(TILED, {"a": ["A"], "b": ["B"]}, {"B": (1, 1)})
    assert "e is a: the shapes are proven equal, nothing is broadcast" in plan.graph.notes


def test_what_is_not_decided_stays_and_is_right_for_1_and_for_n() -> None:
    (group,) = plan_of(TILED, {"a": ["A"], "b": ["B"]}).groups
    assert "A*(d0 // A)" in str(loads(group.nodes[0].body)[0].index[0]), "the remainder by A, whatever A is"
    nodes = [*TILED[:2], node("Add", "e one", "y")]
    m = model(nodes, {"a": (F, ["A"]), "b": (F, ["B"])}, ["y"], {"one": np.float32(1)})
    program = compile(m, threads=1)
    for a, b in ((1, 1), (1, 7), (7, 1), (5, 3), (0, 4), (4, 0), (33, 2)):
        x = np.arange(a, dtype=np.float32)
        got = program.run({"a": x, "b": np.zeros(b, np.float32)})["y"]
        np.testing.assert_array_equal(got, np.tile(x, b) + 1)


def test_two_unknown_sizes_are_equal_under_a_guard_or_refused_by_name() -> None:
    """Whether A and B are equal or one of them is 1 cannot be known: equality is checked on every call and noted."""
    m = model([node("Add", "a b", "y")], {"a": (F, ["A"]), "b": (F, ["B"])}, ["y"])
    program = compile(m, threads=1)
    assert any("taken to be equal" in n for n in program.manifest["notes"])
    for n in (1, 5):
        x = np.ones(n, np.float32)
        np.testing.assert_array_equal(program.run({"a": x, "b": x})["y"], x + x)
    with pytest.raises(InputError, match=r"axis 0 is 5, but A .* is 1 in this call"):
        program.run({"a": np.ones(1, np.float32), "b": np.ones(5, np.float32)})


def test_a_size_stated_to_be_1_broadcasts_without_a_guard_on_equality() -> None:
    plan = plan_of([node("Add", "a b", "y")], {"a": ["A"], "b": ["B"]}, {"A": (1, 1)})
    (n,) = plan.groups[0].nodes
    assert {str(x.index[0]) for x in loads(n.body)} == {"0", "d0"}
    assert not any(g.relation == "==" and {"A", "B"} <= (g.left - g.right).symbols() for g in plan.graph.guards)
