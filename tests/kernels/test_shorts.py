"""Integers of 16 bits on the CPU, in vectors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.graph.dtypes import numpy_dtype
from tests.support.marks import slow
from tests.support.tiny import model, node

CODES = {"uint16": 4, "int16": 5}
SIZES = ((1, 1), (0, 3), (5, 7), (9, 64), (33, 130))
PARTS: dict[str, list[Any]] = {
    "sums": [node("Add", "x y", "a"), node("Mul", "a x", "b"), node("Sub", "b y", "o")],
    "quotients": [node("Div", "x y", "d"), node("Mod", "x y", "m"), node("Add", "d m", "o")],
    "bits": [node("BitwiseAnd", "x y", "a"), node("BitwiseXor", "a x", "b"), node("BitwiseNot", "b", "o")],
    "choices": [node("Less", "x y", "l"), node("Where", "l y x", "m"), node("Abs", "m", "a"), node("Sign", "a", "s"),
                node("Max", "s m", "o")],
    "transposition": [node("Transpose", "x", "t", perm=[1, 0]), node("Transpose", "y", "u", perm=[1, 0]),
                      node("Min", "t u", "o")],
}  # fmt: skip


def inputs_of(dtype: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return x of all values and y without zeros."""
    random, ends = np.random.default_rng(len(dtype)), np.iinfo(dtype)
    x, y = (random.integers(ends.min, ends.max + 1, shape).astype(dtype) for _ in range(2))
    return {"x": x, "y": np.where(y == 0, 7, y).astype(dtype)}


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("name", PARTS)
def test_arithmetic_wraps_as_numpy_s(name: str, dtype: str) -> None:
    made = model(PARTS[name], {n: (dtype, ["M", "N"]) for n in "xy"}, ["o"])
    plan = plan_program(made)
    kind = "u16" if dtype == "uint16" else "i16"
    assert any(re.search(rf"v(load|store)s?_{kind}\(", k.text) for k in plan.kernels)
    checked, program, reference = CheckedProgram(plan), polydyn.compile(made, threads=1), ReferenceEvaluator(made)
    for shape in SIZES:
        inputs = inputs_of(dtype, shape)
        with np.errstate(all="ignore"):
            expected = reference.run(None, inputs)[0]
        np.testing.assert_array_equal(program.run(inputs)["o"], expected, str(shape))
        np.testing.assert_array_equal(checked.run(inputs)["o"], expected, str(shape))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(
    "other", ["float32", "uint8", "float64", slow("int32"), slow("int64"), slow("bool"), slow("float16")]
)
def test_conversions(dtype: str, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "2")
    codes = {"float32": 1, "int32": 6, "int64": 7, "uint8": 2, "bool": 9, "float16": 10, "float64": 11}
    there = model([node("Cast", "x", "o", to=codes[other])], {"x": (dtype, ["M", "N"])}, ["o"])
    back = model([node("Cast", "x", "o", to=CODES[dtype])], {"x": (other, ["M", "N"])}, ["o"])
    programs = [polydyn.compile(m, threads=1) for m in (there, back)]
    for shape in SIZES:
        x = inputs_of(dtype, shape)["x"] % 2048  # exact in 16 bits of floating point
        wide = x.astype(numpy_dtype(other))
        np.testing.assert_array_equal(programs[0].run({"x": x})["o"], wide)
        np.testing.assert_array_equal(programs[1].run({"x": wide})["o"], wide.astype(dtype))


@pytest.mark.parametrize("dtype", CODES)
def test_quantized_tensors_of_16_bits(dtype: str) -> None:
    scale, zero = np.array(0.01, np.float32), np.array(3, dtype)
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "o")]
    made = model(nodes, {"x": ("float32", ["M", "N"])}, ["o", "q"], {"s": scale, "z": zero}, opset=21)
    program, reference = polydyn.compile(made, threads=1), ReferenceEvaluator(made)
    for shape in SIZES:
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32) * 300
        results = program.run({"x": x})
        for got, expected in zip((results["o"], results["q"]), reference.run(None, {"x": x}), strict=True):
            np.testing.assert_array_equal(got, expected)
