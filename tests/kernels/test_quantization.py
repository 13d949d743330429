"""Quantized operators: ONNX's own cases, ugly numbers, every kind of zero point, and the resulting kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydyn.checked import CheckedProgram
from polydyn.compiler import Options, plan_program
from polydyn.errors import ModelError, ShapeError, UnsupportedError
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute
from polydyn.program.assemble import build_program
from polydyn.schedules.expr import Array, Load, Op, loads
from polydyn.testing.conformance import cases_of, run_case, run_model, with_symbols
from tests.support.marks import slow
from tests.support.one_node import check, check_case, check_with_onnxruntime, model_of
from tests.support.quantized import quantized_model, random_bytes, same_as_reference, targets
from tests.support.tiny import node

OPERATORS = {
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "ConvInteger",
    "QLinearConv",
}  # fmt: skip
CASES = {c.name: c for c in cases_of(OPERATORS)}
RNG = np.random.default_rng(11)
SIZES = (0, 1, 2, 7, 33)


def one(x: float) -> Array:
    return np.array(x, np.float32)


def byte(dtype: str, *shape: int) -> Array:
    return random_bytes(RNG, dtype, *shape)


def floats(*shape: int) -> Array:
    return np.asarray(RNG.standard_normal(shape), np.float32)


# -- ONNX's own cases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CASES))
def test_onnx_cases(name: str) -> None:
    case = CASES[name]
    assert run_case(case) == "passed"
    check_case(case)


def test_every_operator_has_a_case_that_passes() -> None:
    assert {n.op_type for c in CASES.values() for n in c.model.graph.node} >= OPERATORS


# -- QuantizeLinear, DequantizeLinear ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16"])
def test_halves_go_to_the_even_number_and_ends_hold(dtype: str, target: str) -> None:
    ends = np.iinfo(dtype)
    halves = np.arange(-300, 300) / 2
    x = np.concatenate([halves, [1e9, -1e9, np.inf, -np.inf, -0.0, 3e38], halves + ends.max, halves + ends.min])
    zero = np.array(3, dtype)
    want = np.clip(np.rint(x) + 3, ends.min, ends.max).astype(dtype)
    m = quantized_model(
        [node("QuantizeLinear", "x s z", "y")], {"x": ("float32", ["N"])}, ["y"], s=np.float32(1), z=zero
    )
    plan = same_as_reference(m, {"x": x.astype(np.float32)}, {"x": x[:5].astype(np.float32)}, target=target)
    (got,) = reference.evaluate(import_model(m), {"x": x.astype(np.float32)}).values()
    np.testing.assert_array_equal(got, want)
    assert not [n for k in plan.kernels for n in k.notes if "scalar" in n]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_scale_for_each_step_along_an_axis(axis: int, dtype: str) -> None:
    count = (4, 3, 5)[axis]
    parameters = {"s": RNG.random(count).astype(np.float32) + 0.1, "z": byte(dtype, count)}
    there = model_of("QuantizeLinear", {"x": ("float32", ("A", "B", "C")), **parameters}, {"axis": axis}, 13)
    back = model_of("DequantizeLinear", {"x": (dtype, ("A", "B", "C")), **parameters}, {"axis": axis}, 19)
    for n in SIZES:
        shape = [n, n, n]
        shape[axis] = count
        x, q = floats(*shape) * 50, byte(dtype, *shape)
        check(there, {"x": x})
        check(back, {"x": q})
        same_as_reference(there, {"x": x})
        same_as_reference(back, {"x": q})


def test_forms_of_several_opsets() -> None:
    x = floats(3, 4) * 9
    plain = model_of("QuantizeLinear", {"x": ("float32", ("N", 4)), "s": one(0.1)}, {}, 10)
    check(plain, {"x": x})  # no zero point: uint8
    named = model_of("QuantizeLinear", {"x": ("float32", ("N", 4)), "s": one(0.1)}, {"output_dtype": 3}, 21)
    check(named, {"x": x})
    single = {"s": np.array([0.1], np.float32), "z": np.array([7], np.int8)}
    check_with_onnxruntime(model_of("QuantizeLinear", {"x": ("float32", ("N", 4)), **single}, {}, 13), {"x": x})
    whole = model_of("QuantizeLinear", {"x": ("int32", ("N",)), "s": one(3)}, {}, 13)
    same_as_reference(whole, {"x": np.arange(-9, 900, dtype=np.int32)})
    sums = model_of("DequantizeLinear", {"x": ("int32", ("N",)), "s": one(0.5)}, {}, 19)
    check(sums, {"x": np.array([-(2**31), 2**31 - 1, 0, 5], np.int32)})
    half = model_of("DequantizeLinear", {"x": ("int8", ("N",)), "s": np.array(0.5, np.float16)}, {}, 19)
    (y,) = reference.evaluate(import_model(half), {"x": byte("int8", 9)}).values()
    assert y.dtype == np.float16


@pytest.mark.parametrize(
    ("op", "attributes", "scale", "message"),
    [
        ("QuantizeLinear", {"precision": 10}, one(1), "precision=10"),
        ("QuantizeLinear", {}, np.array(1.0), "a scale of float64"),
        ("DequantizeLinear", {"output_dtype": 1}, np.array(1.0), "a scale of float64"),
    ],
)  # fmt: skip
def test_precisions_are_refused(op: str, attributes: Any, scale: Any, message: str) -> None:
    x = "float32" if op == "QuantizeLinear" else "int8"
    with pytest.raises(UnsupportedError, match=message):
        import_model(model_of(op, {"x": (x, (4, 4)), "s": scale}, attributes, 23))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scale_for_each_block(axis: int) -> None:
    blocks = (4, 3) if axis == 0 else (7, 2)
    scale, zero = np.abs(floats(*blocks)) + 0.1, byte("uint8", *blocks)
    shape = (7, 3)
    attributes = {"block_size": 2, "axis": axis}
    model = model_of("QuantizeLinear", {"x": ("float32", shape), "s": scale, "z": zero}, attributes, 21)
    check(model, {"x": floats(*shape) * 20}, 0)
    model = model_of("DequantizeLinear", {"x": ("uint8", shape), "s": scale, "z": zero}, attributes, 21)
    check(model, {"x": byte("uint8", *shape)})
    with pytest.raises(ShapeError, match="axis 0 of s has a number for each block"):
        given = {"x": ("float32", (4, 4)), "s": np.ones((2, 4), np.float32)}
        import_model(model_of("QuantizeLinear", given, {"block_size": 2}, 21))


def test_a_named_dtype_is_that_of_the_zero_point() -> None:
    inputs = {"x": ("float32", ("N",)), "s": one(1), "z": np.uint8(3)}
    with pytest.raises(ModelError, match="output_dtype is int8 and z is uint8"):
        import_model(model_of("QuantizeLinear", inputs, {"output_dtype": 3}, 21))


# -- DynamicQuantizeLinear ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", targets())
def test_dynamic_scales_include_zero(target: str) -> None:
    m = model_of("DynamicQuantizeLinear", {"x": ("float32", ("B", "L", 5))}, {}, 13, ("y", "s", "z"))
    feeds = [{"x": floats(b, n, 5) * 3 + shift} for b, n in ((1, 1), (2, 7), (3, 33)) for shift in (0, 9, -9)]
    for f in feeds:
        check_with_onnxruntime(m, f)
    empty = [{"x": floats(0, 3, 5)}, {"x": floats(2, 0, 5)}, {"x": np.zeros((2, 3, 5), np.float32)}]
    same_as_reference(m, *feeds, *empty, target=target)
    for f in empty:
        y, scale, zero = reference.evaluate(import_model(m), f).values()
        assert (scale, zero) == (1, 0) and not y.any()
    for rank in (0, 1, 4):
        shape = (2, 3, 4, 5)[:rank]
        ranked = model_of("DynamicQuantizeLinear", {"x": ("float32", shape)}, {}, 13, ("y", "s", "z"))
        same_as_reference(ranked, {"x": floats(*shape)}, target=target)


# -- MatMulInteger, QLinearMatMul --------------------------------------------------------------------------------------


def exact_product(a: Array, b: Array, zero_a: Any, zero_b: Any) -> Array:
    """Return the exact sum of products. A vector of zero points is per row of ``a``, per column of ``b``."""
    rows = np.asarray(zero_a, np.int64)
    x = a.astype(np.int64) - (rows[:, None] if rows.ndim == 1 and rows.size > 1 else rows)
    return (x @ (b.astype(np.int64) - np.asarray(zero_b, np.int64))).astype(np.int32)


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize(("ta", "tb"), [("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")])
def test_integer_products_of_a_constant(ta: str, tb: str, target: str) -> None:
    """Columns that fill no vector, several blocks of the reduction, extreme numbers; one kernel of register tiles."""
    for k, n, columns in ((7, 5, False), (1100, 50, True)):
        b = byte(tb, k, n)
        zero_b = byte(tb, n) if columns else byte(tb)
        constants = {"b": b, "zb": zero_b, "za": byte(ta)}
        m = quantized_model([node("MatMulInteger", "a b za zb", "y")], {"a": (ta, ["M", k])}, ["y"], **constants)
        feeds = [{"a": byte(ta, rows, k)} for rows in SIZES]
        feeds.append({"a": np.full((3, k), np.iinfo(ta).max, ta)})
        plan = same_as_reference(m, *feeds, target=target)
        for f in feeds:
            (got,) = reference.evaluate(import_model(m), f).values()
            np.testing.assert_array_equal(got, exact_product(f["a"], b, constants["za"], zero_b))
        assert [launch.kind for launch in plan.launches] == ["contract"]
        assert "register tile" in "\n".join(note for kernel in plan.kernels for note in kernel.notes)
        assert "pd_dot2_add" in plan.kernels[0].text, "two steps at a time"
        assert {b.dtype for b in plan.buffers.values() if b.role == "constant"} <= {"int32", ta}


def test_integer_products_of_two_inputs() -> None:
    """Unknown sizes, zero points for each row and each column, passed at run time, of every allowed form."""
    inputs = {"a": ("uint8", ["M", "K"]), "b": ("int8", ["K", "N"]), "za": ("uint8", ["M"]), "zb": ("int8", ["N"])}
    rows = quantized_model([node("MatMulInteger", "a b za zb", "y")], inputs, ["y"])
    sizes = ((1, 1, 1), (5, 0, 3), (0, 4, 2), (3, 5, 0), (2, 33, 17), (13, 70, 40))
    feeds = [
        {"a": byte("uint8", m, k), "b": byte("int8", k, n), "za": byte("uint8", m), "zb": byte("int8", n)}
        for m, k, n in sizes
    ]
    same_as_reference(rows, *feeds, target=targets()[0])
    f = feeds[-1]
    (got,) = reference.evaluate(import_model(rows), f).values()
    np.testing.assert_array_equal(got, exact_product(f["a"], f["b"], f["za"], f["zb"]))
    stacked = {"a": ("int8", ["B", "M", "K"]), "b": ("uint8", ["B", "K", 20]), "za": ("int8", ["B", "M", 1]),
               "zb": ("uint8", ["B", 1, 20])}  # fmt: skip
    batch = quantized_model([node("MatMulInteger", "a b za zb", "y")], stacked, ["y"])
    f = {"a": byte("int8", 2, 3, 9), "b": byte("uint8", 2, 9, 20), "za": byte("int8", 2, 3, 1),
         "zb": byte("uint8", 2, 1, 20)}  # fmt: skip
    same_as_reference(batch, f, target=targets()[-1])
    (got,) = reference.evaluate(import_model(batch), f).values()
    np.testing.assert_array_equal(got, exact_product(f["a"], f["b"], f["za"], f["zb"]))


def test_the_checked_build_finds_nothing() -> None:
    constants = {"b": byte("uint8", 70, 21), "za": byte("uint8"), "zb": byte("uint8", 21)}
    m = quantized_model([node("MatMulInteger", "a b za zb", "y")], {"a": ("uint8", ["M", 70])}, ["y"], **constants)
    f = {"a": byte("uint8", 5, 70)}
    np.testing.assert_array_equal(
        CheckedProgram(plan_program(m)).run(f)["y"], reference.evaluate(import_model(m), f)["y"]
    )


def test_zero_points_along_the_reduction_are_refused() -> None:
    inputs = {"a": ("uint8", [2, 3]), "b": ("uint8", [3, 4]), "za": ("uint8", [2, 3])}
    with pytest.raises(UnsupportedError, match=r"za of shape \['2', '3'\]"):
        import_model(quantized_model([node("MatMulInteger", "a b za", "y")], inputs, ["y"]))


@pytest.mark.parametrize("taps", [3, 5])
def test_convolutions_of_bytes_copy_their_footprint_without_dot_products_of_bytes(taps: int) -> None:
    """A copy of rows, tap by tap, takes longer than the products: 2.9 ms instead of 0.5 for 8 channels of 64x64."""
    conv, image = node("ConvInteger", "a w za", "y", pads=[taps // 2] * 4), ("uint8", ["N", 8, "H", "W"])
    constants = {"w": byte("int8", 8, 8, taps, taps), "za": byte("uint8")}
    m = quantized_model([conv], {"a": image}, ["y"], **constants)
    feeds = [{"a": byte("uint8", n, 8, h, w)} for n, h, w in ((1, 9, 7), (2, 1, 17), (0, 5, 5), (1, 6, 1))]
    plan = same_as_reference(m, *feeds, target="cpu:avx2")
    assert any("footprint copied" in note for kernel in plan.kernels for note in kernel.notes)


LINEAR = "a sa za b sb zb sy zy"


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("columns", [1, 37])
def test_linear_products(dtype: str, columns: int, target: str) -> None:
    """The integers equal the reference evaluator's, and ONNX Runtime's except for its own rounding of halves.

    Weights have 7 bits: without VNNI, ONNX Runtime adds pairs of products in 16 bits, which saturate.
    """
    k, n = 70, 37
    constants = {
        "b": byte("int8", k, n) // 2, "sa": np.float32(0.02), "sb": RNG.random(columns).astype(np.float32) / 50 + 0.01,
        "zb": np.zeros(columns, np.int8), "sy": np.float32(0.4), "za": byte(dtype), "zy": byte(dtype),
    }  # fmt: skip
    m = quantized_model([node("QLinearMatMul", LINEAR, "y")], {"a": (dtype, ["B", "M", k])}, ["y"], **constants)
    feeds = [{"a": byte(dtype, b, rows, k)} for b, rows in ((1, 1), (2, 7), (0, 3), (3, 0), (1, 33))]
    plan = same_as_reference(m, *feeds, target=target)
    assert [launch.kind for launch in plan.launches] == ["contract"], "the sums are never in memory"
    for f in feeds[:2]:
        check_with_onnxruntime(m, f, 0)


# -- ConvInteger, QLinearConv ------------------------------------------------------------------------------------------

CONVOLUTIONS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((6, 4, 1, 1), {}), ((20, 5, 3, 3), {"pads": [1, 1, 1, 1]}), ((6, 2, 3, 3), {"group": 2, "strides": [2, 2]}),
    ((8, 1, 3, 3), {"group": 8, "pads": [1, 0, 2, 1]}), ((5, 3, 3), {"pads": [2, 2], "dilations": [2]}),
    ((1, 1, 1, 1), {}), ((17, 3, 5, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 1]}),
]  # fmt: skip


@pytest.mark.parametrize(("weight", "attributes"), [*CONVOLUTIONS[:4], *(slow(*x) for x in CONVOLUTIONS[4:])])
def test_convolutions(weight: tuple[int, ...], attributes: dict[str, Any]) -> None:
    """A scale and zero point for each output channel, a bias, a zero point that pads; several sizes of the image."""
    o, c, *kernel = weight
    channels = c * attributes.get("group", 1)
    dims = ["N", channels, *"HW"[: len(kernel)]]
    constants = {
        "w": byte("int8", *weight) // 2, "sx": np.float32(0.03), "zx": byte("uint8"), "zw": np.zeros(o, np.int8),
        "sw": RNG.random(o).astype(np.float32) / 50 + 0.01, "sy": np.float32(0.3), "zy": byte("uint8"),
        "bias": RNG.integers(-2000, 2000, o).astype(np.int32),
    }  # fmt: skip
    linear = node("QLinearConv", "x sx zx w sw zw sy zy bias", "y", **attributes)
    integer = node("ConvInteger", "x w zx", "y", **attributes)
    feeds = [
        {"x": byte("uint8", n, channels, *sizes[: len(kernel)])}
        for n, *sizes in ((1, 9, 7), (2, 5, 20), (0, 6, 6), (1, 33, 17))
    ]
    first, *_, last = (*targets(), *targets())
    own = quantized_model([linear], {"x": ("uint8", dims)}, ["y"], 18, **constants)
    same_as_reference(own, *feeds, target=last)
    used = {x: constants[x] for x in ("w", "zx")}
    sums = quantized_model([integer], {"x": ("uint8", dims)}, ["y"], 18, **used)
    same_as_reference(sums, *feeds, target=first)
    for f in feeds[:2]:
        check_with_onnxruntime(sums, f, 0)
        check_with_onnxruntime(own, f, 0)


@pytest.mark.parametrize("kernel", [(3,), (3, 3)])
@pytest.mark.parametrize(("group", "channels"), [(8, 8), (4, 8), (8, 16)])
def test_groups_of_few_channels_with_constant_zero_points(group: int, channels: int, kernel: tuple[int, ...]) -> None:
    """A quantizer of CNNs writes them as a ConvInteger whose sums are scaled: MobileNet, SegFormer."""
    constants = {
        "w": byte("int8", channels, 8 // group, *kernel), "zx": np.uint8(9), "zw": np.int8(3), "s": np.float32(0.25),
        "b": RNG.integers(-50, 50, (1, channels, *(1 for _ in kernel))).astype(np.float32),
    }  # fmt: skip
    nodes = [
        node("ConvInteger", "x w zx zw", "i", group=group, pads=[1, 1] * len(kernel)), node("Cast", "i", "f", to=1),
        node("Mul", "f s", "g"), node("Add", "g b", "h"), node("Relu", "h", "r"),
        node("Transpose", "r", "y", perm=[0, *range(2, 2 + len(kernel)), 1]),
    ]  # fmt: skip
    m = quantized_model(nodes, {"x": ("uint8", ["N", 8, *"HW"[: len(kernel)]])}, ["y"], 18, **constants)
    feeds = [{"x": byte("uint8", n, 8, *sizes[: len(kernel)])} for n, *sizes in ((1, 8, 8), (2, 5, 19), (0, 4, 4))]
    same_as_reference(m, *feeds)
    check_with_onnxruntime(m, feeds[1])


def test_a_chain_of_convolutions_stays_in_bytes_and_channels_last() -> None:
    """The padding's zero point is unknown at compile time in the second one, and a map of bytes is between them."""
    constants = {
        "w": byte("int8", 8, 3, 3, 3), "v": byte("int8", 5, 8, 3, 3), "s": np.float32(0.05), "z": np.uint8(7),
        "zw": np.int8(0), "sy": np.float32(9),
    }  # fmt: skip
    nodes = [
        node("QLinearConv", "x s z w s zw sy z", "c", pads=[1, 1, 1, 1]),
        node("MaxPool", "c", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("ConvInteger", "p v zp", "y", pads=[1, 1, 1, 1]),
    ]  # fmt: skip
    inputs = {"x": ("uint8", ["N", 3, "H", "W"]), "zp": ("uint8", [])}
    m = quantized_model(nodes, inputs, ["y"], 18, **constants)
    sizes = ((1, 8, 8), (2, 5, 19), (0, 4, 4))
    feeds = [{"x": byte("uint8", n, 3, h, w), "zp": byte("uint8")} for n, h, w in sizes]
    plan = same_as_reference(m, *feeds)
    assert plan.buffers["c@last"].dtype == "uint8" and plan.buffers["p@last"].dtype == "uint8"
    assert [launch.kind for launch in plan.launches] == ["contract", "nest", "contract"]
    got = CheckedProgram(plan).run(feeds[1])
    np.testing.assert_array_equal(got["y"], reference.evaluate(import_model(m), feeds[1])["y"])


# -- fusion
# --------------------------------------------------------------------------------------------------------------


def dynamic_linear(k: int = 64, n: int = 48) -> Any:
    """Build a linear layer as dynamic quantization exports it."""
    nodes = [
        node("DynamicQuantizeLinear", "x", "q s z"), node("MatMulInteger", "q w z zw", "i"),
        node("Cast", "i", "f", to=1),
        node("Mul", "s sw", "m"), node("Mul", "f m", "g"), node("Add", "g b", "y"),
    ]  # fmt: skip
    constants = {"w": byte("int8", k, n), "zw": np.int8(0), "sw": np.float32(0.01), "b": floats(n)}
    return quantized_model(nodes, {"x": ("float32", ["B", "L", k])}, ["y"], 18, **constants)


def test_a_dynamically_quantized_layer_is_three_kernels() -> None:
    """Extremes of rows; scale and zero point; the product, which quantizes its rows and scales its sums."""
    m = dynamic_linear()
    feeds = [{"x": floats(b, n, 64)} for b, n in ((1, 1), (2, 7), (3, 31), (0, 4), (4, 0))]
    plan, graph = plan_program(m), import_model(m)
    assert [launch.kind for launch in plan.launches] == ["nest", "nest", "contract"]
    assert not any("scalar" in note for k in plan.kernels for note in k.notes), "both extremes in one loop over rows"
    program = build_program(plan, threads=2)
    for f in feeds:
        np.testing.assert_allclose(program.run(f)["y"], reference.evaluate(graph, f)["y"], 1e-5, 1e-5)
    checked = CheckedProgram(plan)
    np.testing.assert_allclose(checked.run(feeds[2])["y"], program.run(feeds[2])["y"], 1e-6, 1e-6)


def test_a_quantized_weight_is_a_weight() -> None:
    """A constant that is dequantized is folded: MatMul and Conv read floats."""
    constants = {"w": byte("int8", 40, 24), "s": RNG.random(24).astype(np.float32), "z": byte("int8", 24)}
    nodes = [node("DequantizeLinear", "w s z", "f", axis=1), node("MatMul", "x f", "y")]
    m = quantized_model(nodes, {"x": ("float32", ["M", 40])}, ["y"], **constants)
    graph = rewrite_graph(import_model(m))
    assert [n.output for n in graph.nodes] == ["y"] and graph.constants["f"].dtype == np.float32


def test_integer_products_read_wide_constants_on_the_cpu_only() -> None:
    constants = {"b": byte("int8", 8, 5), "za": np.uint8(3), "zb": byte("int8", 5)}
    m = quantized_model([node("MatMulInteger", "a b za zb", "y")], {"a": ("uint8", ["M", 8])}, ["y"], **constants)
    graph = rewrite_graph(import_model(m))
    (product,) = fusion_plan(graph).graph.nodes
    assert isinstance(product, Compute) and isinstance(product.body, Op) and isinstance(product.body.args[1], Load)
    assert {x.dtype for x in loads(product.body)} == {"uint8", "int32"}
    (product,) = fusion_plan(graph, {"widen"}).graph.nodes
    assert {x.dtype for x in loads(product.body)} == {"uint8", "int8"}  # type: ignore[union-attr]
    f = {"a": byte("uint8", 3, 8)}
    program = build_program(plan_program(m, options=Options(without={"widen"})), threads=1)
    np.testing.assert_array_equal(program.run(f)["y"], exact_product(f["a"], constants["b"], 3, constants["zb"]))


def test_a_zero_point_of_unknown_size_is_one_number_where_there_is_no_axis() -> None:
    """A scalar scale and a zero point of one element, whose size is unknown in the model; the default axis is 1."""
    case = CASES["test_quantizelinear_e4m3fn"]
    assert run_model(case, with_symbols(case.model)) == "passed"
