"""Products with a constant operand at every kind of column tail, on both x86 instruction sets, right and in bounds."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.checked import CheckedProgram
from polydyn.compiler import compile, plan_program
from tests.support.marks import slow
from tests.support.tiny import model, node

RNG = np.random.default_rng(4)
ROWS = (0, 1, 2, 9, 33)


def product(columns: int, steps: int) -> tuple[object, np.ndarray, np.ndarray]:
    """Build tanh(x w + b): the epilogue has vector functions, and the bias is read by column."""
    w = (RNG.standard_normal((steps, columns)) / steps**0.5).astype(np.float32)
    b = RNG.standard_normal(columns).astype(np.float32)
    nodes = [node("MatMul", "x w", "m"), node("Add", "m b", "a"), node("Tanh", "a", "y")]
    return model(nodes, {"x": ("float32", ["M", steps])}, ["y"], {"w": w, "b": b}), w, b


def expected(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.tanh(x.astype(np.float64) @ w + b)


@pytest.mark.parametrize("target", ["cpu", slow("cpu:avx2")])
@pytest.mark.parametrize("size", [(5, 7), (8, 25), (24, 40), (35, 70), (40, 1), (52, 40), (98, 33), (49, 1100)])
def test_column_tails(size: tuple[int, int], target: str) -> None:
    m, w, b = product(*size)
    program = compile(m, threads=2, target=target)
    for rows in ROWS:
        x = RNG.standard_normal((rows, size[1])).astype(np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], expected(x, w, b), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("columns", "steps"), [(8, 40), (52, 40), (70, 1600), (2, 300)])
def test_column_tails_touch_nothing_else(columns: int, steps: int) -> None:
    """Narrow vectors, blocks of rows, several reduction blocks, prefetches beyond the last tile."""
    m, w, b = product(columns, steps)
    program = CheckedProgram(plan_program(m))
    for rows in (1, 19):
        x = RNG.standard_normal((rows, steps)).astype(np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], expected(x, w, b), rtol=0, atol=1e-5)


def test_rows_in_blocks() -> None:
    """Columns stay in the cache, so rows run in blocks for any number of threads."""
    m, w, b = product(64, 48)
    for threads in (1, 2, 3):
        program = compile(m, threads=threads)
        for rows in (7, 1500, 3001):
            x = RNG.standard_normal((rows, 48)).astype(np.float32)
            np.testing.assert_allclose(program.run({"x": x})["y"], expected(x, w, b), rtol=0, atol=1e-5)


def test_few_steps_of_many_columns_go_column_by_column() -> None:
    """Columns beyond the cache, of 64 steps or fewer: tasks are row tiles, in runs that share some columns."""
    m, w, b = product(3001, 61)
    (kernel,) = plan_program(m, target="cpu:avx512").kernels
    values = [kernel.values({"n0": rows}, workers=2) for rows in (9, 100)]
    assert [(x["B_i"], x["B_j"]) for x in values] == [(2, 5), (13, 2)], "8 rows, half of a cache, 16 tasks"
    order = [kernel.text.index(f"for (i64 {x} =") for x in ("b_j", "b_i", "c_j", "c_i")]
    assert order == sorted(order)
    for threads in (1, 2, 3):
        program = compile(m, threads=threads)
        for rows in (1, 9, 100):
            x = RNG.standard_normal((rows, 61)).astype(np.float32)
            np.testing.assert_allclose(program.run({"x": x})["y"], expected(x, w, b), rtol=0, atol=1e-5)
