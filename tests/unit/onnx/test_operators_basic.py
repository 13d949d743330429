"""Element-wise operators, reductions and sums of products, with symbolic dims at ugly sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from polydyn.errors import ModelError, UnsupportedError
from polydyn.graph import reference
from polydyn.graph.ir import Compute
from polydyn.schedules.expr import walk
from tests.support.one_node import check, import_model, model_of

SIZES = (0, 1, 2, 7, 33)
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


UNARY: list[tuple[str, dict[str, Any], int]] = [
    ("Neg", {}, 18), ("Abs", {}, 18), ("Sign", {}, 18), ("Exp", {}, 18), ("Log", {}, 18), ("Sqrt", {}, 18),
    ("Reciprocal", {}, 18), ("Tanh", {}, 18), ("Erf", {}, 18), ("Sin", {}, 18), ("Cos", {}, 18), ("Tan", {}, 18),
    ("Sigmoid", {}, 18), ("Relu", {}, 18), ("LeakyRelu", {"alpha": 0.2}, 18), ("Elu", {"alpha": 0.7}, 18),
    ("Selu", {}, 18), ("Gelu", {}, 20), ("Gelu", {"approximate": "tanh"}, 20), ("HardSigmoid", {"alpha": 0.3}, 18),
    ("HardSwish", {}, 18), ("Softplus", {}, 18), ("Softsign", {}, 18), ("Floor", {}, 18), ("Ceil", {}, 18),
    ("Round", {}, 18), ("ThresholdedRelu", {"alpha": 0.4}, 18), ("Celu", {"alpha": 2.0}, 18), ("Mish", {}, 18),
    ("IsNaN", {}, 18), ("IsInf", {"detect_negative": 0}, 18), ("IsInf", {"detect_positive": 0}, 20),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes", "opset"), UNARY, ids=lambda x: str(x) if isinstance(x, str) else "")
def test_unary(op: str, attributes: dict[str, Any], opset: int) -> None:
    model = model_of(op, {"x": ("float32", ("B", 3))}, attributes, opset)
    graph = import_model(model)
    for n in SIZES:
        check(model, {"x": floats(n, 3) * 3}, graph=graph)
    if op not in ("Mish", "Softsign", "HardSwish", "Sign"):  # onnx's own gives NaN or an error for some
        check(model, {"x": np.array([[np.nan, 0.0, -0.0], [5e-5, 2.5, -3.5]], np.float32)}, graph=graph)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Less", "GreaterOrEqual"])
def test_broadcasting_of_a_symbol_a_constant_one_and_a_missing_axis(op: str) -> None:
    model = model_of(op, {"a": ("float32", ("B", 1, "L")), "b": ("float32", (5, "L"))})
    graph = import_model(model)
    for b in SIZES:
        check(model, {"a": floats(b, 1, 7), "b": floats(5, 7)}, graph=graph)
        check(model, {"a": floats(2, 1, b), "b": floats(5, b)}, graph=graph)


def test_mean_of_several() -> None:
    model = model_of("Mean", {"a": ("float32", ("B", 3)), "b": ("float32", (1,)), "c": ("float32", ("B", 3))})
    check(model, {"a": floats(2, 3), "b": floats(1), "c": floats(2, 3)})


def test_size_one_of_a_symbol_is_not_broadcast() -> None:
    graph = import_model(model_of("Add", {"a": ("float32", ("L",)), "b": ("float32", ("L",))}))
    (node,) = graph.nodes
    assert isinstance(node, Compute)
    assert [str(i) for x in walk(node.body) for i in getattr(x, "index", ())] == ["d0", "d0"]


@pytest.mark.parametrize("op", ["And", "Or", "Xor", "Equal"])
def test_logic(op: str) -> None:
    model = model_of(op, {"a": ("bool", ("B", 3)), "b": ("bool", ("B", 1))})
    check(model, {"a": RNG.random((7, 3)) > 0.5, "b": RNG.random((7, 1)) > 0.5})


def test_integer_division_truncates_and_mod_follows_the_divisor() -> None:
    a, b = np.array([-7, 7, -7, 7]), np.array([2, 2, -2, -2])
    for op, attributes, want in (
        ("Div", {}, [-3, 3, 3, -3]),
        ("Mod", {}, [1, 1, -1, -1]),
        ("Mod", {"fmod": 1}, [-1, 1, -1, 1]),
    ):
        graph = import_model(model_of(op, {"a": ("int64", ("N",)), "b": ("int64", ("N",))}, attributes))
        assert reference.evaluate(graph, {"a": a, "b": b})["y"].tolist() == want


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0, 3.0, 1.7])
def test_power_of_a_constant(exponent: float) -> None:
    model = model_of("Pow", {"x": ("float32", ("N",)), "e": np.array(exponent, np.float32)})
    graph = import_model(model)
    check(model, {"x": np.abs(floats(33))}, graph=graph)
    (node,) = graph.nodes
    assert isinstance(node, Compute)
    assert ("pow" in {getattr(x, "name", "") for x in walk(node.body)}) == (exponent == 1.7)


def test_a_whole_power_of_constants_is_shape_arithmetic() -> None:
    nodes = [
        helper.make_node("Pow", ["n", "half"], ["side"]),
        helper.make_node("Cast", ["side"], ["size"], to=onnx.TensorProto.INT64),
        helper.make_node("Unsqueeze", ["size", "axes"], ["sizes"]),
        helper.make_node("Expand", ["x", "sizes"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    arrays = {"n": np.array(49, np.float32), "half": np.array(0.5, np.float32), "axes": np.array([0])}
    constants = [onnx.numpy_helper.from_array(a, n) for n, a in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x], [helper.make_empty_tensor_value_info("y")], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    assert [int(d) for d in import_model(model).tensors["y"].shape] == [7]


def test_clip_with_either_bound_missing() -> None:
    low = np.array(-0.5, np.float32)
    model = model_of("Clip", {"x": ("float32", ("N",)), "low": low})
    check(model, {"x": floats(33)})
    model = model_of("Clip", {"x": ("float32", ("N",)), "high": low}, names=("x", "", "high"))
    check(model, {"x": floats(33)})


def test_where_and_prelu_broadcast() -> None:
    model = model_of("Where", {"c": ("bool", ("B", 1)), "x": ("float32", ("L",)), "z": ("float32", ("B", "L"))})
    check(model, {"c": np.array([[True], [False]]), "x": floats(3), "z": floats(2, 3)})
    model = model_of("PRelu", {"x": ("float32", ("B", 3, "L")), "s": floats(3, 1)})
    check(model, {"x": floats(2, 3, 7)})


def test_half_precision_computes_in_float32_and_rounds_once() -> None:
    model = model_of("Softplus", {"x": ("float16", ("N",))})
    x = floats(33).astype(np.float16)
    got = reference.evaluate(import_model(model), {"x": x})["y"]
    assert got.dtype == np.float16
    wide = x.astype(np.float32)
    assert np.array_equal(got, (np.maximum(wide, 0) + np.log(1 + np.exp(-np.abs(wide)))).astype(np.float16))


REDUCTIONS = [
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
    "ReduceLogSum", "ReduceLogSumExp",
]  # fmt: skip


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions(op: str, keepdims: int) -> None:
    for axes in ([1], [0, -1], []):
        inputs: dict[str, Any] = {"x": ("float32", ("B", 3, "L")), "axes": np.array(axes, np.int64)}
        model = model_of(op, inputs, {"keepdims": keepdims})
        graph = import_model(model)
        for n in (1, 2, 7, 33):
            check(model, {"x": np.abs(floats(n, 3, 2)) + 0.1}, graph=graph)
            check(model, {"x": np.abs(floats(2, 3, n))}, graph=graph)
    model = model_of(op, {"x": ("float32", ("B", "L"))}, {"keepdims": keepdims, "axes": [-1]}, 11)
    check(model, {"x": np.abs(floats(2, 7))})


def test_empty_reductions_give_the_neutral_element() -> None:
    for op, want in (("ReduceSum", 0.0), ("ReduceProd", 1.0), ("ReduceMax", -np.inf), ("ReduceMin", np.inf)):
        graph = import_model(model_of(op, {"x": ("float32", ("B", "L"))}, {"axes": [1], "keepdims": 0}, 12))
        assert reference.evaluate(graph, {"x": floats(2, 0)})["y"].tolist() == [want, want]


def test_reduction_without_axes_may_do_nothing() -> None:
    model = model_of("ReduceSum", {"x": ("float32", ("B", "L"))}, {"noop_with_empty_axes": 1})
    check(model, {"x": floats(2, 7)})


def test_axes_that_are_not_constant_are_refused_by_name() -> None:
    model = model_of("ReduceSum", {"x": ("float32", ("B", "L")), "axes": ("int64", (1,))})
    with pytest.raises(UnsupportedError, match=r"axes axes that are not constant(.|\n)*the_ReduceSum"):
        import_model(model)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_positions_of_extremes(op: str, last: int) -> None:
    for axis, keepdims in ((0, 1), (-1, 0)):
        attributes = {"axis": axis, "keepdims": keepdims, "select_last_index": last}
        model = model_of(op, {"x": ("float32", ("B", "L"))}, attributes)
        graph = import_model(model)
        for n in (1, 2, 7, 33):
            check(model, {"x": RNG.integers(0, 3, (n, 5)).astype(np.float32)}, graph=graph)


def test_position_of_the_first_nan() -> None:
    model = model_of("ArgMax", {"x": ("float32", ("N",))}, {"axis": 0})
    check(model, {"x": np.array([1, np.nan, 3, np.nan], np.float32)})


@pytest.mark.parametrize(
    ("a", "b", "sizes"),
    [
        (("M", "K"), ("K", "N"), "MKN"),
        (("B", 1, "M", "K"), (3, "K", "N"), "BMKN"),
        (("K",), ("B", "K", "N"), "BKN"),
        (("B", "M", "K"), ("K",), "BMK"),
        (("K",), ("K",), "K"),
    ],
)
def test_matmul(a: tuple[Any, ...], b: tuple[Any, ...], sizes: str) -> None:
    model = model_of("MatMul", {"a": ("float32", a), "b": ("float32", b)})
    graph = import_model(model)
    for symbol in sizes:
        for n in SIZES:
            env = {s: n if s == symbol else 4 for s in sizes}
            feeds = {"a": floats(*(env.get(d, d) for d in a)), "b": floats(*(env.get(d, d) for d in b))}
            check(model, feeds, 1e-4, graph)


def test_matmul_learns_the_inner_dim() -> None:
    graph = import_model(model_of("MatMul", {"a": ("float32", ("M", "K")), "b": np.ones((5, 2), np.float32)}))
    (node,) = graph.nodes
    assert isinstance(node, Compute) and [int(e) for e in node.reduction] == [5]


@pytest.mark.parametrize("transpose", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm(transpose: tuple[int, int]) -> None:
    ta, tb = transpose
    for c, scale in ((("N",), 1.0), (("M", 1), 0.5), (None, 2.0)):
        inputs: dict[str, Any] = {
            "a": ("float32", ("K", "M") if ta else ("M", "K")),
            "b": ("float32", ("N", "K") if tb else ("K", "N")),
        }
        feeds = {"a": floats(*((3, 7) if ta else (7, 3))), "b": floats(*((2, 3) if tb else (3, 2)))}
        if c is not None:
            inputs["c"] = ("float32", c)
            feeds["c"] = floats(*({"N": 2, "M": 7, 1: 1}[d] for d in c))
        model = model_of("Gemm", inputs, {"transA": ta, "transB": tb, "alpha": scale, "beta": scale})
        check(model, feeds)


EQUATIONS = ["bij,bjk->bik", "ij,kj->ik", "ij->ji", "ij->i", "i,j->ij", "ab,bc,cd->ad", "ij,jk"]


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation: str) -> None:
    terms = equation.split("->")[0].split(",")
    inputs = {f"x{i}": ("float32", tuple(c.upper() for c in t)) for i, t in enumerate(terms)}
    sizes = {"a": 2, "b": 3, "c": 7, "d": 1, "i": 2, "j": 5, "k": 3}
    model = model_of("Einsum", inputs, {"equation": equation})
    check(model, {f"x{i}": floats(*(sizes[c] for c in t)) for i, t in enumerate(terms)})


@pytest.mark.parametrize(("equation", "shapes"), [
    ("...ij->...ji", [(2, 7, 3, 5)]), ("ii->i", [(7, 7)]), ("...ii->...i", [(2, 3, 3)]), ("ii", [(5, 5)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 5), (7, 5, 2)]), ("i...,i...", [(3, 2), (3, 2)]), ("b...->b...", [(31,)]),
])  # fmt: skip
def test_einsum_with_an_ellipsis_or_a_diagonal(equation: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = {f"x{i}": ("float32", s) for i, s in enumerate(shapes)}
    check(model_of("Einsum", inputs, {"equation": equation}), {f"x{i}": floats(*s) for i, s in enumerate(shapes)})


def test_einsum_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="labels ij for the 3 axes of x"):
        import_model(model_of("Einsum", {"x": ("float32", ("I", "J", "K"))}, {"equation": "ij->i"}))
