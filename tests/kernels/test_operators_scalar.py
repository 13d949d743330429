"""Trigonometric and hyperbolic functions, bits and shifts: interpreted and compiled, at ugly sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.errors import ModelError, UnsupportedError
from tests.support.one_node import check, expected, import_model, model_of

SIZES = (0, 1, 2, 7, 31, 33)
RNG = np.random.default_rng(0)
CIRCULAR = ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")


def compiled_agrees(model: onnx.ModelProto, *calls: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Check that the compiled model equals onnx's reference evaluator, for every call."""
    program = polydyn.compile(model, threads=1)
    for feeds in calls:
        for got, want in zip(program.run(feeds).values(), expected(model, feeds), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), tolerance, tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", CIRCULAR)
def test_circular_functions(op: str, dtype: str) -> None:
    model = model_of(op, {"x": (dtype, ("B", 3))})
    graph = import_model(model)
    calls = [{"x": RNG.uniform(-0.99, 0.99, (n, 3)).astype(dtype) + (op == "Acosh") * 2} for n in SIZES]
    for feeds in calls:
        check(model, feeds, graph=graph)
    if dtype == "float64" or op in ("Tan", "Acosh"):
        compiled_agrees(model, *[{k: v.astype(dtype) for k, v in c.items()} for c in calls])


@pytest.mark.parametrize("op", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint64"])
def test_bitwise(op: str, dtype: str) -> None:
    model = model_of(op, {"a": (dtype, ("B", 3)), "b": (dtype, (3,))})
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    calls = [{"a": RNG.integers(low, high, (n, 3), dtype), "b": RNG.integers(low, high, 3, dtype)} for n in SIZES]
    compiled_agrees(model, *calls, tolerance=0)
    negated = model_of("BitwiseNot", {"a": (dtype, ("B", 3))})
    compiled_agrees(negated, *({"a": c["a"]} for c in calls), tolerance=0)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint64"])
def test_shifts_by_too_much_and_by_less_than_nothing(direction: str, dtype: str) -> None:
    model = model_of("BitShift", {"a": (dtype, ("B",)), "b": (dtype, ("B",))}, {"direction": direction}, opset=28)
    low, high, bits = np.iinfo(dtype).min, np.iinfo(dtype).max, 8 * np.dtype(dtype).itemsize
    calls = [
        {"a": RNG.integers(low, high, n, dtype), "b": RNG.integers(0 if low == 0 else -3, bits + 3, n).astype(dtype)}
        for n in (*SIZES, 200)
    ]
    compiled_agrees(model, *calls, tolerance=0)


def test_bits_as_another_dtype() -> None:
    model = model_of("BitCast", {"x": ("float32", ("B",))}, {"to": onnx.TensorProto.INT32}, opset=26)
    compiled_agrees(model, *({"x": RNG.standard_normal(n).astype(np.float32)} for n in SIZES), tolerance=0)
    with pytest.raises((ModelError, UnsupportedError, polydyn.PolydynError), match="bits"):
        import_model(model_of("BitCast", {"x": ("float32", ("B",))}, {"to": onnx.TensorProto.INT64}, opset=26))
