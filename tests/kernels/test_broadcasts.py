"""Implicit broadcasts (BladeDISC 3.2): removed if the shapes are proven equal, right at run time otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from polydyn.compiler import compile
from polydyn.errors import InputError
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.runtime.opening import load
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
TILE_TO_SHAPE = [node("Shape", "b", "s"), node("Tile", "a s", "e"), node("Exp", "e", "y")]


@pytest.mark.parametrize(
    ("nodes", "inputs", "dims"),
    [
        (OWN_SHAPE, {"a": ["A", "N"]}, None),
        (EQUAL_BY_A_FACT, {"a": ["A", "N"], "b": ["B", "N"]}, None),
        ([node("Tile", "a ones", "e"), node("Exp", "e", "y")], {"a": ["A", "N"]}, None),
        (TILE_TO_SHAPE, {"a": ["A"], "b": ["B"]}, {"B": (1, 1)}),
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
    plan = plan_of(TILE_TO_SHAPE, {"a": ["A"], "b": ["B"]}, {"B": (1, 1)})
    assert "e is a: the shapes are proven equal, nothing is broadcast" in plan.graph.notes


def test_what_is_not_decided_stays_and_is_right_for_1_and_for_n() -> None:
    (group,) = plan_of(TILE_TO_SHAPE, {"a": ["A"], "b": ["B"]}).groups
    assert "A*(d0 // A)" in str(loads(group.nodes[0].body)[0].index[0]), "the remainder by A, whatever A is"
    nodes = [*TILE_TO_SHAPE[:2], node("Add", "e one", "y")]
    m = model(nodes, {"a": (F, ["A"]), "b": (F, ["B"])}, ["y"], {"one": np.float32(1)})
    program = compile(m, threads=1)
    for a, b in ((1, 1), (1, 7), (7, 1), (5, 3), (0, 4), (4, 0), (33, 2)):
        x = np.arange(a, dtype=np.float32)
        got = program.run({"a": x, "b": np.zeros(b, np.float32)})["y"]
        np.testing.assert_array_equal(got, np.tile(x, b) + 1)


def test_two_unknown_sizes_are_equal_or_one_of_them_is_1() -> None:
    """The version for equal sizes is noted; another version handles calls in which one of them is 1."""
    nodes = [node("Add", "a b", "c"), node("Mul", "c d", "y"), node("ReduceSum", "y", "s", keepdims=0)]
    m = model(nodes, {"a": (F, ["A", 3]), "b": (F, ["B", 3]), "d": (F, ["D", "E"])}, ["y", "s"])
    program = compile(m, threads=1)
    assert "taken to be equal" in "\n".join(program.manifest["notes"])
    sizes = [(5, 5, 5, 3), (1, 5, 5, 3), (5, 1, 5, 1), (1, 1, 7, 1), (1, 1, 1, 1), (4, 4, 1, 1), (0, 1, 0, 3)]
    for a, b, d, e in [*sizes, (1, 0, 1, 1)]:
        x, z, w = (np.random.default_rng(a + b).random(s, np.float32) for s in ((a, 3), (b, 3), (d, e)))
        got = program.run({"a": x, "b": z, "d": w})
        np.testing.assert_allclose(got["y"], (x + z) * w, 1e-6)
        np.testing.assert_allclose(got["s"], ((x + z) * w).sum(), 1e-4)
        out = np.empty_like(got["y"])
        assert program.bind({"a": x, "b": z, "d": w})()["y"].shape == got["y"].shape
        assert program.run({"a": x, "b": z, "d": w}, {"y": out})["y"] is out
    for a, b, d in ((4, 5, 5), (1, 5, 4), (2, 1, 3)):
        with pytest.raises(InputError, match=r"Add_c|Mul_y"):
            shapes = {"a": (a, 3), "b": (b, 3), "d": (d, 1)}
            program.run({n: np.ones(shape, np.float32) for n, shape in shapes.items()})


def test_both_versions_are_saved(tmp_path: Path) -> None:
    m = model([node("Add", "a b", "y")], {"a": (F, ["A"]), "b": (F, ["B"])}, ["y"])
    program = compile(m, threads=1)
    program.save(tmp_path / "two.polydyn")
    loaded = load(tmp_path / "two.polydyn")
    assert loaded.run({"a": np.ones(1, np.float32), "b": np.ones(4, np.float32)})["y"].tolist() == [2] * 4
    assert loaded.run({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})["y"].tolist() == [2] * 4
    again = compile(m, threads=1)
    again.save(tmp_path / "again.polydyn")
    assert (tmp_path / "two.polydyn").read_bytes() == (tmp_path / "again.polydyn").read_bytes()


def test_a_pair_that_something_else_makes_equal_has_one_version() -> None:
    m = model([node("Add", "a b", "c"), node("Concat", "a b", "d", axis=1), node("MatMul", "c d", "y")],
              {"a": (F, ["A", "A"]), "b": (F, ["B", "B"])}, ["y"])  # fmt: skip
    assert "general" not in compile(m, threads=1).manifest


def test_a_size_stated_to_be_1_broadcasts_without_a_guard_on_equality() -> None:
    plan = plan_of([node("Add", "a b", "y")], {"a": ["A"], "b": ["B"]}, {"A": (1, 1)})
    (n,) = plan.groups[0].nodes
    assert {str(x.index[0]) for x in loads(n.body)} == {"0", "d0"}
    assert not any(g.relation == "==" and {"A", "B"} <= (g.left - g.right).symbols() for g in plan.graph.guards)


BODIES = {
    "loop": """turns = Squeeze (n, zero)
        y = Loop <body = body (int64 i, bool c) => (bool c2, float[K] r) {
            c2 = Identity (c)
            e = Gather (x, i)
            r = Add (e, w)
        }> (turns, go)""",
    "branch": """m = ReduceSum <keepdims = 0> (x)
        p = Greater (m, none)
        y = If <then_branch = yes () => (float[A, B] a) { a = Add (x, w) },
                else_branch = no () => (float[C, D] b) { b = Mul (w, x) }> (p)""",
}


@pytest.mark.parametrize("body", BODIES)
def test_sizes_inside_a_body_are_1_or_equal(body: str) -> None:
    """The model itself never adds x and w, so that only its body guesses that their sizes are equal."""
    m = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : 18]>
    g (float[T, N] x, float[M] w) => (float[P, Q] y) {{
        n = Shape <start = 0, end = 1> (x)
        zero = Constant <value_ints = [0]> ()
        none = Constant <value_float = 0.0> ()
        go = Constant <value = bool {{1}}> ()
        {BODIES[body]}
    }}""")
    program = compile(m, threads=1)
    for n, k in ((4, 4), (4, 1), (1, 3), (1, 1)):
        for sign in (1, -1):
            x, w = np.full((3, n), sign, np.float32), np.arange(k, dtype=np.float32)
            want = x * w if sign < 0 and body == "branch" else x + w
            np.testing.assert_array_equal(program.run({"x": x, "w": w})["y"], want)
    with pytest.raises(InputError):
        program.run({"x": np.ones((3, 2), np.float32), "w": np.ones(3, np.float32)})


def counted_next_to(*between: onnx.NodeProto) -> onnx.ModelProto:
    """Build ``nonzero(x) + w``, whose rows the data decide, with nodes from w to v."""
    nodes = [node("NonZero", "x", "z"), node("Transpose", "z", "t", perm=[1, 0]), *between, node("Add", "t v", "y")]
    return model(nodes, {"x": ("float32", ["N"]), "w": ("int64", ["M", 1])}, ["y"], {"one": np.array([1, 1])})


def test_a_refused_guess_of_a_broadcast_names_the_remedy_and_it_works() -> None:
    feeds = {"x": np.ones(3, np.float32), "w": np.ones((1, 1), np.int64)}
    proto = counted_next_to(node("Identity", "w", "v"))
    message = r"taken to be equal; if one of them is always 1, compile with dims={'M': \(1, 1\)}, or make it"
    with pytest.raises(InputError, match=message):
        compile(proto, threads=1).run(feeds)
    fixed = counted_next_to(node("Reshape", "w one", "v"))
    for program in (compile(proto, threads=1, dims={"M": (1, 1)}), compile(fixed, threads=1)):
        assert program.run(feeds)["y"].tolist() == [[1], [2], [3]]
