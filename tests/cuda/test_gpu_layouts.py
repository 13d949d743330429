"""Layouts of lanes: our formulas against the layouts that CuTe publishes, which run on GPUs every day.

A layout maps (lane, value) to an offset in a matrix stored column by column; lanes and values are split into digits,
least significant first, each with a stride (``cute/atom/mma_traits_sm80.hpp``, ``mma_traits_sm90_gmma.hpp``).
"""

from __future__ import annotations

from itertools import product

import pytest

from polydyn.codegen.cuda.instructions import COLUMN, ROW
from polydyn.testing.device.cases import _fragment_a, _fragment_b, _fragment_c

Digits = tuple[tuple[int, ...], tuple[int, ...]]
LANES, FOUR = (4, 8), (2, 2)
PUBLISHED_A: dict[int, tuple[Digits, Digits]] = {
    8: ((LANES, (16, 1)), (FOUR, (8, 64))),
    16: ((LANES, (32, 1)), ((2, 2, 2), (16, 8, 128))),
    32: ((LANES, (64, 1)), ((4, 2, 2), (16, 8, 256))),
}
"""Maps steps of m16n8 to the row operand, 16 x steps."""
PUBLISHED_B: dict[int, tuple[Digits, Digits]] = {
    8: ((LANES, (8, 1)), ((2,), (32,))),
    16: ((LANES, (16, 1)), (FOUR, (8, 64))),
    32: ((LANES, (32, 1)), ((4, 2), (8, 128))),
}
"""The column operand, 8 x steps."""
SUMS: tuple[Digits, Digits] = ((LANES, (32, 1)), (FOUR, (16, 8)))


def places(layout: tuple[Digits, Digits], rows: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Map (lane, value) to (row, column)."""
    offsets = []
    for shape, stride in layout:
        digits = product(*(range(n) for n in reversed(shape)))
        offsets.append([sum(d * s for d, s in zip(reversed(at), stride, strict=True)) for at in digits])
    lanes, values = offsets
    return {(t, v): ((a + b) % rows, (a + b) // rows) for t, a in enumerate(lanes) for v, b in enumerate(values)}


@pytest.mark.parametrize("steps", [8, 16, 32])
def test_operands_of_mma(steps: int) -> None:
    assert {(t, i): (r, k) for t, i, r, k in _fragment_a(steps)} == places(PUBLISHED_A[steps], 16)
    assert {(t, i): (c, k) for t, i, k, c in _fragment_b(steps)} == places(PUBLISHED_B[steps], 8)


def test_sums_of_mma() -> None:
    assert {(t, i): (r, c) for t, i, r, c in _fragment_c()} == places(SUMS, 16)


@pytest.mark.parametrize("columns", [32, 256])
def test_sums_of_wgmma_are_those_of_mma_side_by_side(columns: int) -> None:
    """Generated kernels map the registers of a thread in this way, in a product of 64 rows by a warpgroup."""
    published: tuple[Digits, Digits] = (((4, 8, 4), (128, 1, 16)), ((2, 2, columns // 8), (64, 8, 512)))
    for (t, i), (row, column) in places(published, 64).items():
        env = {"lane": t % 32, "row_half": i // 2 % 2, "column_of_pair": i % 2}
        assert (t // 32 * 16 + ROW.evaluate(env), i // 4 * 8 + COLUMN.evaluate(env)) == (row, column)
