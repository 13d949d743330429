"""Equal nodes are computed once, operations without effect are removed, and nothing else happens."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from polydyn.backends import Options, target_of
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Graph
from polydyn.graph.passes.tidy import tidy
from polydyn.graph.reference import evaluate
from tests.support.tiny import model, node

RNG = np.random.default_rng(3)
W = RNG.standard_normal((7, 5)).astype(np.float32)


def graph(*nodes: onnx.NodeProto, dtype: str = "float32", **constants: np.ndarray) -> Graph:
    """Build a model of ``x [B, 7]`` with all unread tensors as outputs."""
    read = {i for n in nodes for i in n.input}
    outputs = [o for n in nodes for o in n.output if o not in read]
    return import_model(model(nodes, {"x": (dtype, ["B", 7])}, outputs, constants))


def same(g: Graph, dtype: str = "float32") -> Graph:
    """Return the tidy graph, after a comparison of its outputs bit by bit, at special values too."""
    made = tidy(g)
    for b in (0, 1, 3):
        x = RNG.integers(-5, 5, (b, 7)).astype(dtype)
        if dtype.startswith("float") and b:
            x[0, :5] = -0.0, 0.0, np.nan, np.inf, -np.inf
        with np.errstate(all="ignore"):
            before, after = evaluate(g, {"x": x}), evaluate(made, {"x": x})
        for o in g.outputs:
            assert before[o].tobytes() == after[o].tobytes(), o
    return made


def groups(g: Graph) -> int:
    target = target_of("cpu:avx2", Options())
    return len(target.fuse(target.rewrite(g)).groups)


def test_equal_products_are_one_kernel() -> None:
    g = graph(
        node("MatMul", "x w", "a"),
        node("MatMul", "x v", "b"),
        node("Relu", "a", "y"),
        node("Neg", "b", "z"),
        w=W,
        v=W.copy(),
    )
    made = same(g)
    assert len(made.nodes) == 3 and "b is a, computed once" in made.notes and set(made.constants) == {"w"}
    outputs = graph(node("MatMul", "x w", "a"), node("MatMul", "x w", "b"), w=W)
    made = same(outputs)
    assert [n.reduce for n in made.nodes if n.output in ("a", "b")] == ["sum", None], "the second is a copy"
    behind = graph(
        node("Transpose", "x", "s", perm=[1, 0]), node("Transpose", "x", "t", perm=[1, 0]),
        node("Softmax", "s", "p", axis=0), node("Softmax", "t", "q", axis=0), node("Sub", "p q", "y"),
    )  # fmt: skip
    assert len(same(behind).nodes) < len(behind.nodes) / 2 + 2
    different = graph(node("MatMul", "x w", "a"), node("MatMul", "x v", "b"), w=W, v=W + 1)
    assert tidy(different) is different


@pytest.mark.parametrize(
    ("op", "number", "dtype", "goes"),
    [
        ("Mul", 1.0, "float32", True), ("Mul", 2.0, "float32", False), ("Div", 1.0, "float32", True),
        ("Sub", 0.0, "float32", True), ("Sub", -0.0, "float32", False), ("Add", -0.0, "float32", True),
        ("Add", 0.0, "float32", False), ("Add", 0, "int64", True), ("Mul", 1, "int32", True), ("Div", 1, "int64", True),
    ],
)  # fmt: skip
def test_operations_that_change_nothing(op: str, number: float, dtype: str, goes: bool) -> None:
    for shape in ((), (1,), (1, 1)):
        c = np.full(shape, number, dtype)
        made = same(graph(node(op, "x c", "a"), node("Neg", "a", "y"), dtype=dtype, c=c), dtype)
        assert (len(made.nodes) == 1) is goes, shape


def test_an_operand_that_makes_the_result_larger_stays() -> None:
    made = same(graph(node("Mul", "x c", "a"), node("Neg", "a", "y"), c=np.ones((1, 1, 1), np.float32)))
    assert len(made.tensors["y"].shape) == 3
    weights = same(graph(node("Mul", "x c", "a"), node("Neg", "a", "y"), c=np.ones(7, np.float32)))
    assert len(weights.nodes) == 2, "weights that are all 1 are weights"


@pytest.mark.parametrize(
    ("dtype", "through", "to", "casts"),
    [
        ("float32", "DOUBLE", "FLOAT", 0), ("int32", "INT64", "FLOAT", 1), ("float32", "FLOAT16", "FLOAT", 2),
        ("int32", "FLOAT", "INT32", 2), ("int32", "DOUBLE", "INT32", 0), ("int64", "INT32", "INT64", 2),
    ],
)  # fmt: skip
def test_casts_of_casts(dtype: str, through: str, to: str, casts: int) -> None:
    types = {n: getattr(onnx.TensorProto, n) for n in (through, to)}
    nodes = [node("Cast", "x", "a", to=types[through]), node("Cast", "a", "b", to=types[to]), node("Neg", "b", "y")]
    made = same(graph(*nodes, dtype=dtype), dtype)
    assert len(made.nodes) == 1 + casts


def test_views_that_cancel_leave_no_kernel() -> None:
    there, back = node("Transpose", "p", "s", perm=[1, 0]), node("Transpose", "s", "t", perm=[1, 0])
    g = graph(node("MatMul", "x w", "p"), there, back, node("Identity", "t", "u"), node("Relu", "u", "y"), w=W)
    assert groups(g) == 1
    assert same(g).outputs == ("y",)
