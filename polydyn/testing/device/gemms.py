"""Inputs, launch shapes and expected results for the two hand-written GEMMs (``gemm_mma.cu``, ``gemm_wgmma.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydyn.runtime.cuda.tensormap import TensorMap
from polydyn.testing.device.cases import HERE, Array, Mapped

MMA_SOURCE = (HERE / "gemm_mma.cu").read_text()
WGMMA_SOURCE = (HERE / "gemm_wgmma.cu").read_text()
SHAPES = ((1, 1, 1), (131, 77, 50), (7, 129, 33), (64, 200, 16), (257, 130, 297), (128, 128, 0))
"""(M, N, K): ones, primes, tile + 1, and K longer than a ring of 4 stages."""


def pitched(values: Array, multiple: int) -> Array:
    """Return a view of ``values`` in a buffer whose row pitch is a multiple; the padding is NaN."""
    rows, cols = values.shape
    base = np.full((rows, -(-max(cols, 1) // multiple) * multiple), np.nan, values.dtype)
    view = base[:, :cols]
    view[...] = values
    return view


class Problem:
    """One GEMM: operands, expected result (float64), and launch arguments for either kernel."""

    def __init__(self, m: int, n: int, k: int, vector: int = 8, seed: int = 0) -> None:
        r = np.random.default_rng(seed)
        self.m, self.n, self.k = m, n, k
        half = [r.standard_normal(s).astype(np.float16) for s in ((m, k), (k, n), (1, n))]
        self.a, self.b, self.bias = pitched(half[0], vector), pitched(half[1], vector), half[2]
        self.c = pitched(np.full((m, n), np.nan, np.float16), vector)
        wide = [h.astype(np.float64) for h in half]
        self.want = np.maximum(wide[0] @ wide[1] + wide[2], 0)

    def mma(self, bm: int = 128, bn: int = 128, stages: int = 4) -> tuple[int, int, list[Any]]:
        """Return (blocks, bytes of shared memory, arguments)."""
        pitches = [np.int32(x.strides[0] // 2) for x in (self.a, self.b, self.c)]
        args = [self.a.base, self.b.base, self.bias, self.c.base, *map(np.int32, (self.m, self.n, self.k)), *pitches]
        return self._blocks(bm, bn), max(stages * (bm + bn) * 64, bm * (bn + 8) * 2), args

    def wgmma(self, bn: int = 128, stages: int = 4) -> tuple[int, int, list[Any]]:
        """Return the arguments like ``mma``; the first two are tensor maps (K = 0 has none: use the other kernel)."""
        maps = [
            Mapped(TensorMap("float16", x.shape[::-1], x.strides[:1], (64, rows)), x)
            for x, rows in ((self.a, 128), (self.b, 64))
        ]
        args = [*maps, self.bias, self.c.base, *map(np.int32, (self.m, self.n, self.k, self.c.strides[0] // 2))]
        return self._blocks(128, bn), stages * (128 + bn) * 128 + stages * 16, args

    def _blocks(self, bm: int, bn: int) -> int:
        return -(-self.m // bm) * -(-self.n // bn)

    def error(self) -> float:
        """Return the relative error of the norm; inf if the padding was touched."""
        base = self.c.base
        if base is not None and not np.isnan(base[:, self.n :]).all():
            return float("inf")
        return float(np.linalg.norm(self.c - self.want) / max(float(np.linalg.norm(self.want)), 1e-30))
