"""Operators on shapes, views and gathers against the ONNX reference, at ugly sizes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from polydyn.errors import ModelError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute
from tests.support.tiny import model, node, run

F, I64 = "float32", "int64"
BIG = 2**63 - 1


def i64(*xs: int) -> np.ndarray:
    return np.array(xs, np.int64)


CASES = {
    "reshape heads": ([node("Reshape", "x s", "y")], (F, ["B", "L", 12]), {"s": i64(0, 0, 3, 4)}),
    "reshape merge": ([node("Reshape", "x s", "y")], (F, ["B", "L", 6]), {"s": i64(-1, 6)}),
    "reshape rest": ([node("Reshape", "x s", "y")], (F, ["B", "L", 6]), {"s": i64(0, -1)}),
    "reshape mixed": ([node("Reshape", "x s", "y")], (F, ["B", 4, 6]), {"s": i64(0, 3, -1, 1)}),
    "flatten": ([node("Flatten", "x", "y", axis=2)], (F, ["B", 3, "L", 2]), {}),
    "squeeze": ([node("Squeeze", "x a", "y")], (F, ["B", 1, "L"]), {"a": i64(1)}),
    "unsqueeze": ([node("Unsqueeze", "x a", "y")], (F, ["B", "L"]), {"a": i64(0, -1)}),
    "transpose": ([node("Transpose", "x", "y", perm=[2, 0, 1])], (F, ["B", "L", 3]), {}),
    "slice": (
        [node("Slice", "x s e a k", "y")],
        (F, ["B", "L"]), {"s": i64(1, -3), "e": i64(-1, BIG), "a": i64(0, 1), "k": i64(2, 1)},
    ),
    "slice back": (
        [node("Slice", "x s e a k", "y")],
        (F, ["B", "L"]), {"s": i64(-1), "e": i64(-BIG), "a": i64(1), "k": i64(-2)},
    ),
    "slice symbolic": (
        [node("Shape", "x", "n", start=1), node("Div", "n two", "h"), node("Slice", "x h n one", "y")],
        (F, ["B", "L"]), {"two": i64(2), "one": i64(1)},
    ),
    "split": ([node("Split", "x", "y y2 y3", axis=1, num_outputs=3)], (F, ["B", "L"]), {}),
    "split sizes": ([node("Split", "x s", "y y2", axis=-1)], (F, ["B", 7]), {"s": i64(3, 4)}),
    "concat": ([node("Concat", "x x x", "y", axis=1)], (F, ["B", "L"]), {}),
    "expand": ([node("Expand", "x s", "y")], (F, ["B", 1, "L"]), {"s": i64(2, 1, 3, 1)}),
    "tile": ([node("Tile", "x r", "y")], (F, ["B", "L"]), {"r": i64(2, 3)}),
    "gather": ([node("Gather", "x i", "y", axis=1)], (F, ["B", 5]), {"i": np.array([[0, -1], [4, -5]])}),
    "gather one": ([node("Gather", "x i", "y", axis=1)], (F, ["B", 5]), {"i": np.array(-2)}),
    "gather nd": ([node("GatherND", "x i", "y")], (F, [4, 5, "B"]), {"i": np.array([[0, -1], [3, 2]])}),
    "one hot": (
        [node("Cast", "x k", "i", to=7), node("OneHot", "i d v", "y", axis=1)],
        (F, ["B", "L"]), {"d": np.array(3), "v": np.array([1.0, 2.0], np.float32)},
    ),
    "trilu": ([node("Trilu", "x k", "y", upper=0)], (F, ["B", "L"]), {"k": np.array(1)}),
    "trilu up": ([node("Trilu", "x", "y")], (F, [2, "B", "L"]), {}),
    "cumsum": ([node("CumSum", "x a", "y")], (F, ["B", "L"]), {"a": np.array(1)}),
    "cumsum back": ([node("CumSum", "x a", "y", exclusive=1, reverse=1)], (F, ["B", "L"]), {"a": np.array(-1)}),
    "pad": ([node("Pad", "x p v", "y")], (F, ["B", "L"]), {"p": i64(1, 0, 0, 2), "v": np.float32(7)}),
    "pad edge": ([node("Pad", "x p", "y", mode="edge")], (F, [3, "B", 2]), {"p": i64(1, 0, 2, 2, 0, 0)}),
    "pad reflect": ([node("Pad", "x p", "y", mode="reflect")], (F, ["B", 4]), {"p": i64(0, 3, 0, 2)}),
    "shape as data": ([node("Shape", "x", "y"), node("Size", "x", "y2")], (F, ["B", 3, "L"]), {}),
    "range": (
        [node("Size", "x", "n"), node("Range", "o n t", "y")],
        (F, ["B", "L"]), {"o": np.array(1), "t": np.array(3)},
    ),
    "constant of shape": (
        [node("Shape", "x", "s"), node("ConstantOfShape", "s", "y", value=onnx.numpy_helper.from_array(i64(5)))],
        (F, ["B", "L"]), {},
    ),
    "dropout": ([node("Dropout", "x", "y y2")], (F, ["B", "L"]), {}),
    "identity of constant": ([node("Identity", "x", "y"), node("Identity", "c", "y2")], (F, ["B"]), {"c": i64(3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operator_like_the_onnx_reference(name: str) -> None:
    nodes, (dtype, dims), constants = CASES[name]
    nodes = [helper_without_dash(n) for n in nodes]
    outputs = [o for n in nodes for o in n.output if o.startswith("y")]
    m = model(nodes, {"x": (dtype, dims)}, outputs, constants)
    graph = import_model(m)
    for b, n in [(0, 3), (1, 1), (2, 5), (3, 0), (5, 4), (4, 6)]:
        shape = [{"B": b, "L": n}.get(d, d) for d in dims]
        x = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
        try:
            expected = ReferenceEvaluator(m).run(None, {"x": x})
        except ValueError:
            assert 0 in shape  # numpy does not reshape empty arrays to (0, -1), and does not mirror them
            continue
        got = run(graph, {"x": x})
        for o, e in zip(outputs, expected, strict=True):
            e = np.asarray(e)
            assert got[o].shape == e.shape and (got[o] == e).all(), (name, b, n, o)


def helper_without_dash(n: onnx.NodeProto) -> onnx.NodeProto:
    if n.op_type == "Cast":
        del n.input[1:]
    return n


def test_gathers_with_run_time_indices_wrap_negative_ones() -> None:
    nodes = [node("Gather", "x i", "y", axis=1), node("GatherElements", "x j", "z", axis=1)]
    m = model(nodes, {"x": (F, ["B", "L"]), "i": (I64, ["K"]), "j": (I64, ["B", "M"])}, ["y", "z"])
    graph = import_model(m)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    got = run(graph, {"x": x, "i": i64(-1, 0, -4), "j": np.array([[0, -1], [1, 2], [-4, 3]])})
    assert (got["y"] == x[:, [-1, 0, -4]]).all()
    assert (got["z"] == np.take_along_axis(x, np.array([[0, 3], [1, 2], [0, 3]]), 1)).all()


def test_concat_unifies_the_other_axes() -> None:
    m = model([node("Concat", "x w", "y", axis=1)], {"x": (F, ["B", "L"]), "w": (F, ["C", 2])}, ["y"])
    graph = import_model(m)
    assert str(graph.tensors["y"].shape) == "(B, (2 + L))" or str(graph.tensors["y"].shape) == "(B, (L + 2))"
    assert [(str(g.left), g.relation, str(g.right)) for g in graph.guards] == [("C", "==", "B")]


def attention_views() -> onnx.ModelProto:
    """Build x [B, L, 64] -> heads [B, 4, L, 16] -> back, as exporters write it: sizes through Shape, Gather, Concat."""
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "b"), node("Gather", "s one", "l"),
        node("Unsqueeze", "b at0", "b1"), node("Unsqueeze", "l at0", "l1"),
        node("Concat", "b1 l1 heads size", "s4", axis=0), node("Reshape", "x s4", "h"),
        node("Transpose", "h", "t", perm=[0, 2, 1, 3]), node("Transpose", "t", "u", perm=[0, 2, 1, 3]),
        node("Concat", "b1 l1 all", "s3", axis=0), node("Reshape", "u s3", "y"),
    ]  # fmt: skip
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "at0": i64(0),
        "heads": i64(4),
        "size": i64(16),
        "all": i64(-1),
    }
    return model(nodes, {"x": (F, ["B", "L", 64])}, ["y", "t"], constants)


def test_attention_reshapes_keep_symbols_and_need_no_division() -> None:
    graph = import_model(attention_views())
    assert str(graph.tensors["t"].shape) == "(B, 4, L, 16)"
    assert str(graph.tensors["y"].shape) == "(B, L, 64)"
    assert not graph.guards and not graph.notes
    for name in ("h", "t", "u"):
        n = graph.producer()[name]
        assert isinstance(n, Compute) and n.is_view and "//" not in str(n.body), n.body
    assert "//" in str(graph.producer()["y"].body)  # merging 4 and 16 into 64 must divide by 16, and only by 16
    assert set(re.findall(r"// (\w+)", str(graph.producer()["y"].body))) == {"16"}
    assert all(n.is_view for n in graph.nodes if isinstance(n, Compute)), "no shape arithmetic is left"


def test_reshape_that_may_not_divide_is_guarded() -> None:
    graph = import_model(model([node("Reshape", "x s", "y")], {"x": (F, ["N"])}, ["y"], {"s": i64(-1, 4)}))
    (g,) = graph.guards
    assert (str(g.left), g.relation, str(g.right)) == ("N", "%==", "4") and "Reshape_y" in g.message
    assert run(graph, {"x": np.arange(8, dtype=np.float32)})["y"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_gathers_at_formulas_of_the_position_are_views() -> None:
    nodes = [
        node("Slice", "ids s n one", "p"), node("Gather", "w p", "y"), node("Gather", "w r", "z"),
        node("Shape", "x", "n", start=0, end=1), node("Squeeze", "n", "m"), node("Range", "o m t", "r"),
    ]  # fmt: skip
    nodes = [nodes[3], nodes[4], nodes[5], *nodes[:3]]
    table = np.arange(18, dtype=np.float32).reshape(9, 2)
    constants = {"ids": np.arange(9)[None], "w": table, "s": i64(0), "one": i64(1)}
    m = model(nodes, {"x": (F, ["L"])}, ["y", "z"], constants | {"o": np.array(0), "t": np.array(1)})
    graph = import_model(m)
    assert [(str(g.left), g.relation, str(g.right)) for g in graph.guards] == [("L", "<=", "9")], "the table has 9 rows"
    bodies = {n.output: str(n.body) for n in graph.nodes if isinstance(n, Compute)}
    assert bodies.keys() == {"y", "z"} and "(d1, d2)" in bodies["y"] and "(d0, d1)" in bodies["z"], bodies
    assert run(graph, {"x": np.zeros(3, np.float32)})["y"].tolist() == [[[0, 1], [2, 3], [4, 5]]]


def refused(m: onnx.ModelProto) -> str:
    with pytest.raises((ShapeError, UnsupportedError)) as e:
        import_model(m)
    return str(e.value)


def test_refusals_name_node_and_reason() -> None:
    x = {"x": (F, ["B", 6])}
    assert "Reshape_y" in refused(model([node("Reshape", "x s", "y")], x, ["y"], {"s": i64(-1, -1)}))
    seven = model([node("Reshape", "x s", "y")], {"x": (F, [7])}, ["y"], {"s": i64(2, 3)})
    assert "can never be equal" in refused(seven)
    data = {"x": (F, ["B", 6]), "s": (I64, [2])}
    assert "step of the host (reshape)" in refused(model([node("Reshape", "x s", "y")], data, ["y"]))
    assert "step of the host (non_zero)" in refused(model([node("NonZero", "x", "y")], x, ["y"]))
    assert "y has rank" in refused(model([node("Squeeze", "x", "y")], x, ["y"]))
    assert "StringSplit (node StringSplit_y)" in refused(model([node("StringSplit", "x", "y")], x, ["y"]))


@pytest.mark.parametrize("op", ["Gather", "Split", "Concat", "Unsqueeze", "CumSum"])
def test_an_axis_that_does_not_exist_is_refused_with_its_node(op: str) -> None:
    inputs = {"Gather": "x i", "Concat": "x x", "Unsqueeze": "x five", "CumSum": "x five"}.get(op, "x")
    attributes = {"axis": 5} if "five" not in inputs else {}
    made = model([node(op, inputs, "y", **attributes)], {"x": (F, ["B", 6])}, ["y"], {"i": i64(0), "five": i64(5)})
    with pytest.raises(ModelError, match=r"(?s)axis 5 of a tensor with . axes.*" + f"node: {op}_y"):
        import_model(made)


@pytest.mark.parametrize("end", [2**31 - 1, BIG, -BIG])
def test_an_end_that_means_all_is_the_first_element_for_negative_steps(end: int) -> None:
    """ONNX Runtime does the same; ONNX's reference clamps it to the last element, which leaves nothing."""
    made = model([node("Slice", "x s e a k", "y")], {"x": (F, ["B"])}, ["y"],
                 {"s": i64(3), "e": i64(end), "a": i64(0), "k": i64(-2)})  # fmt: skip
    assert run(import_model(made), {"x": np.arange(7, dtype=np.float32)})["y"].tolist() == [3, 1]


def test_sizes_that_no_call_can_have_are_refused() -> None:
    """A slice backwards that is always empty broadcasts only with size 1."""
    made = model([node("Slice", "x one e zero back", "t"), node("Slice", "x two e zero one", "u"),
                  node("Add", "t u", "y")],
                 {"x": (F, ["B", 3])}, ["y"],
                 {"one": i64(1), "two": i64(2), "e": i64(1000), "zero": i64(0), "back": i64(-2)})  # fmt: skip
    with pytest.raises(ShapeError, match=r"no size of B meets what the model needs: .*broadcasts axis 0"):
        import_model(made)


@pytest.mark.parametrize(("start", "end"), [(1, BIG), (1, -1), (2, 10**9)])
def test_sizes_of_slices_of_slices_grow_linearly(start: int, end: int) -> None:
    """The size of each had the size before twice: twelve took all memory."""
    count = 30
    nodes = [node("Slice", f"{'x' if k == 0 else f'y{k - 1}'} s e a", f"y{k}") for k in range(count)]
    m = model(nodes, {"x": (F, ["B", "L"])}, [f"y{count - 1}"], {"s": i64(start), "e": i64(end), "a": i64(1)})
    graph = import_model(m)
    assert len(str(graph.tensors[f"y{count - 1}"].shape[1])) < 60 * count
    for length in (0, 1, 40, 61, 90):
        x = np.arange(2 * length, dtype=np.float32).reshape(2, length)
        expected = x
        for _ in range(count):
            expected = expected[:, start:end]
        np.testing.assert_array_equal(run(graph, {"x": x})[f"y{count - 1}"], expected)
