"""A small CUDA program for tests, on the CPU libcuda."""

from __future__ import annotations

import numpy as np
from tiny import model, node

import polydyn
from polydyn.program.cuda_program import CudaProgram

EYE = np.eye(8, dtype=np.float32)


def relu(target: str = "cuda:emulated") -> CudaProgram:
    """``y = relu(x) @ w`` with w the identity, for x of [N, 8]."""
    nodes = [node("Relu", "x", "t"), node("MatMul", "t w", "y")]
    program = polydyn.compile(model(nodes, {"x": ("float32", ["N", 8])}, ["y"], {"w": EYE}), target=target)
    assert isinstance(program, CudaProgram)
    return program


def check(program: CudaProgram, n: int) -> None:
    """Runs it on n rows."""
    x = np.arange(8.0 * n, dtype=np.float32).reshape(n, 8) - 5
    np.testing.assert_allclose(program.run({"x": x})["y"], np.maximum(x, 0))
