"""Types of at most 8 bits that numpy lacks: casts, QuantizeLinear, DequantizeLinear; integers that wrap."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import polydyn
from polydyn.errors import InputError, UnsupportedError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.schedules.expr import SMALL
from tests.support.one_node import check, model_of
from tests.support.tiny import model, node

SATURATING = {"float8_e4m3fn": 448, "float8_e4m3fnuz": 240, "float8_e5m2": 57344, "float8_e5m2fnuz": 57344}
X = np.array([0, -0.0, 1, 0.3, 447, 449, 500, -1e9, 1e-5, 3e-8, np.inf, -np.inf, np.nan], np.float32)


def cast_model(to: str, **attributes: int) -> onnx.ModelProto:
    code = helper.np_dtype_to_tensor_dtype(numpy_dtype(to))
    return model([node("Cast", "x", "y", to=code, **attributes)], {"x": ("float32", ["N"])}, ["y"], opset=23)


@pytest.mark.parametrize("dtype", SATURATING)
@pytest.mark.parametrize("saturate", [0, 1])
def test_what_is_beyond_the_largest_number(dtype: str, saturate: int) -> None:
    got = polydyn.compile(cast_model(dtype, saturate=saturate)).run({"x": X})["y"].view(numpy_dtype(dtype))
    most = SATURATING[dtype]
    with np.errstate(all="ignore"):
        inside = np.where(np.isnan(X), X, np.clip(X, -most, most)) if saturate else X
        expected = inside.astype(numpy_dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(got.astype(np.float32), expected)


@pytest.mark.parametrize("dtype", [t for t in SMALL if t != "float8_e8m0fnu"])
def test_there_and_back_at_every_number(dtype: str) -> None:
    bits = 4 if "4_" in dtype or dtype.endswith("4") else 2 if dtype.endswith("int2") else 8
    every = np.arange(2**bits, dtype=np.uint8).view(numpy_dtype(dtype))
    there = helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))
    nodes = [node("Cast", "x", "f", to=TensorProto.FLOAT), node("Cast", "f", "y", to=there, saturate=0)]
    program = polydyn.compile(model(nodes, {"x": (dtype, ["N"])}, ["f", "y"], opset=25))
    got = program.run({"x": every})
    np.testing.assert_array_equal(got["f"], every.astype(np.float32))
    numbers = ~np.isnan(every.astype(np.float32))
    np.testing.assert_array_equal(got["y"][numbers], every.view(np.uint8)[numbers])
    assert not program.run({"x": every[:0]})["y"].size


@pytest.mark.parametrize("dtype", [t for t in SATURATING if t.endswith("fnuz")])
def test_the_only_nan_of_a_type_widens_to_a_positive_one(dtype: str) -> None:
    widening = model([node("Cast", "x", "y", to=TensorProto.FLOAT)], {"x": (dtype, ["N"])}, ["y"], opset=23)
    x = np.array([0x80, 0x81], np.uint8).view(numpy_dtype(dtype))
    for y in (polydyn.compile(widening).run({"x": x})["y"], evaluate(import_model(widening), {"x": x})["y"]):
        assert np.isnan(y[0]) and np.signbit(y).tolist() == [False, True]


def test_the_sum_of_one_product_begins_at_0() -> None:
    product = model([node("MatMul", "a b", "y")], {"a": ("float32", [2, 1]), "b": ("float32", [1, 2])}, ["y"])
    feeds = {"a": np.full((2, 1), -0.0, np.float32), "b": np.ones((1, 2), np.float32)}
    for y in (polydyn.compile(product).run(feeds)["y"], evaluate(import_model(product), feeds)["y"]):
        assert not np.signbit(y).any()


def test_an_input_of_a_small_type_is_checked() -> None:
    widening = node("Cast", "x", "y", to=TensorProto.FLOAT)
    program = polydyn.compile(model([widening], {"x": ("int4", ["N"])}, ["y"], opset=23))
    x = np.array([-8, 7, -1], ml_dtypes.int4)
    assert program.run({"x": x})["y"].tolist() == [-8, 7, -1]
    with pytest.raises(InputError, match="input 'x' is uint4, the program takes int4"):
        program.run({"x": np.array([1], ml_dtypes.uint4)})


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e4m3fn"])
def test_weights_of_a_small_type_are_dequantized(dtype: str) -> None:
    r = np.random.default_rng(3)
    q = r.integers(0, 8, (6, 5)).astype(np.float32).astype(numpy_dtype(dtype))
    scale = np.float32(0.5)
    nodes = [node("DequantizeLinear", "q s", "w"), node("MatMul", "x w", "y")]
    program = polydyn.compile(model(nodes, {"x": ("float32", ["N", 6])}, ["y"], {"q": q, "s": scale}, opset=21))
    for n in (0, 1, 7):
        x = r.standard_normal((n, 6), np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], x @ (q.astype(np.float32) * scale), 1e-5, 1e-5)


def test_a_type_that_is_not_built_is_refused_by_name() -> None:
    m = model_of("Identity", {"x": ("float32", (3,))})
    m.graph.input[0].type.tensor_type.elem_type = TensorProto.COMPLEX64
    with pytest.raises(UnsupportedError, match="element type COMPLEX64"):
        polydyn.compile(m)


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int8", "int16"])
@pytest.mark.parametrize("op", ["Add", "Mul", "Sub"])
def test_integers_wrap(op: str, dtype: str) -> None:
    ends = np.iinfo(dtype)
    x, y = (np.array(v, dtype) for v in ([ends.max, ends.min, 1, 77], [ends.max, 1, ends.max, 200 % ends.max]))
    m = model_of(op, {"a": (dtype, ("N",)), "b": (dtype, ("N",))})
    with np.errstate(over="ignore"):
        check(m, {"a": x, "b": y})
        expected = {"Add": x + y, "Mul": x * y, "Sub": x - y}[op]
    np.testing.assert_array_equal(polydyn.compile(m).run({"a": x, "b": y})["y"], expected)


def test_float64_keeps_its_precision() -> None:
    nodes = [node("MatMul", "x y", "p"), node("Softmax", "p", "s", axis=-1), node("Gelu", "s", "o")]
    inputs = {"x": ("float64", ["M", "K"]), "y": ("float64", ["K", "N"])}
    program = polydyn.compile(model(nodes, inputs, ["o"], opset=20))
    r = np.random.default_rng(1)
    for m, k, n in ((1, 1, 1), (7, 33, 5), (2, 0, 3)):
        x, y = r.standard_normal((m, k)), r.standard_normal((k, n))
        e = np.exp(x @ y - (x @ y).max(-1, keepdims=True))
        s = e / e.sum(-1, keepdims=True)
        expected = 0.5 * s * (1 + np.vectorize(math.erf)(s / np.sqrt(2)))
        np.testing.assert_allclose(program.run({"x": x, "y": y})["o"], expected, 1e-12, 1e-13)
