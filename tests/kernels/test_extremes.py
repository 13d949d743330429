"""Minima and maxima of bytes along rows and columns, in vectors."""

from __future__ import annotations

import numpy as np
import pytest

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from tests.support.tiny import model, node


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
def test_extremes_of_bytes(op: str, dtype: str, axis: int) -> None:
    made = model([node(op, "x", "o", axes=[axis], keepdims=0)], {"x": (dtype, ["M", "N"])}, ["o"], opset=13)
    plan = plan_program(made, target="cpu:avx2")
    assert all("vload_" in k.text for k in plan.kernels)
    checked, program = CheckedProgram(plan_program(made)), polydyn.compile(made, threads=1)
    ends = np.iinfo(dtype)
    for rows, columns in ((1, 1), (7, 8), (9, 31), (5, 64), (40, 203)):
        x = np.random.default_rng(rows).integers(ends.min, ends.max + 1, (rows, columns)).astype(dtype)
        expected = (np.max if op == "ReduceMax" else np.min)(x, axis)
        np.testing.assert_array_equal(program.run({"x": x})["o"], expected)
        np.testing.assert_array_equal(checked.run({"x": x})["o"], expected)
