"""Epilogues read other tensors along vectors of columns; reads that need gathers stay in a separate kernel."""

from __future__ import annotations

import numpy as np
import pytest

import polydyn
from tests.support.tiny import model, node

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("head", "kernels"), [(24, 2), (32, 1)])
def test_a_residual_by_heads(head: int, kernels: int) -> None:
    """Heads of whole vectors are affine in their lanes, heads of one and a half are not."""
    w = RNG.standard_normal((32, 2 * head)).astype(np.float32)
    program = polydyn.compile(
        model(
            [
                node("MatMul", "x w", "m"), node("Transpose", "r", "t", perm=[0, 2, 1, 3]),
                node("Reshape", "t s", "rr"), node("Add", "m rr", "y"),
            ],
            {"x": ("float32", ["B", "L", 32]), "r": ("float32", ["B", 2, "L", head])}, ["y"],
            {"w": w, "s": np.array([0, -1, 2 * head])},
        ),
        threads=1,
    )  # fmt: skip
    text = program.explain(B=2, L=5)
    assert len(text.launches) == kernels, text
    if kernels == 2:
        assert "it reads r at addresses that are not affine along a vector of columns" in text.details()
    for b, n in ((2, 5), (1, 1), (3, 17), (0, 4)):
        x, r = (RNG.standard_normal(s).astype(np.float32) for s in ((b, n, 32), (b, 2, n, head)))
        want = x @ w + r.transpose(0, 2, 1, 3).reshape(b, n, 2 * head)
        np.testing.assert_allclose(program.run({"x": x, "r": r})["y"], want, 1e-5, 1e-5)
