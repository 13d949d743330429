"""Contractions with few columns run vectors along the reduction, at every size."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.compiler import compile
from tests.tiny import model, node

R = np.random.default_rng(2)


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 10])
@pytest.mark.parametrize("steps", [32, 45, 64, 1500])
def test_few_columns(columns: int, steps: int) -> None:
    w = R.standard_normal((steps, columns)).astype(np.float32)
    b = R.standard_normal(columns).astype(np.float32)
    nodes = [node("MatMul", "x w", "m"), node("Add", "m b", "a"), node("Relu", "a", "y")]
    program = compile(model(nodes, {"x": ("float32", ["M", steps])}, ["y"], {"w": w, "b": b}), threads=2)
    for rows in (0, 1, 2, 7, 33, 130):
        x = R.standard_normal((rows, steps)).astype(np.float32)
        expected = np.maximum(x.astype(np.float64) @ w + b, 0)
        np.testing.assert_allclose(program.run({"x": x})["y"], expected, rtol=0, atol=1e-6 * steps)


def test_dynamic_columns_of_unit_stride() -> None:
    """Both operands computed: queries against a few keys, the keys read in place."""
    nodes = [node("Transpose", "k", "t", perm=[0, 2, 1]), node("MatMul", "q t", "y")]
    m = model(nodes, {"q": ("float32", ["B", "Q", 48]), "k": ("float32", ["B", 5, 48])}, ["y"])
    program = compile(m, threads=1)
    for b, n in ((1, 1), (3, 7), (2, 64)):
        q, k = (R.standard_normal(s).astype(np.float32) for s in ((b, n, 48), (b, 5, 48)))
        np.testing.assert_allclose(program.run({"q": q, "k": k})["y"], q @ k.transpose(0, 2, 1), rtol=0, atol=1e-4)
