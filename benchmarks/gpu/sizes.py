"""Layer sizes of papers and common models; standard library and numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TRANSFORMER = ((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096))
"""(N, K) of the dense layers of BERT base and large."""
ROWS = (1, 4, 8, 16, 77, 128, 384, 512, 1024, 2048, 4096)
LARGE_PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 14336))
"""(M, N, K)."""
LENGTHS = tuple(sorted({1, *range(8, 512, 8)}))[:62]
"""62 lengths in 1..512, as many as in TSCompiler: (32 L, 1024) x (1024, 3072) and (32 L, 4096) x (4096, 1024)."""
DIETCODE = tuple(16 * t for t in (1, 2, 5, 13, 24, 43, 62, 81, 96, 100, 113, 119, 127, 128))
"""Rows of [16 T, 768] x [2304, 768] for T in 1..128 (DietCode)."""
FTUNER = (5, 24, 43, 62, 81, 100, 119, 128)
"""Lengths (FTuner)."""
VORTEX = {
    "DeepBench": ((35, 8448), (1, 6000), (128, 500000)), "Transformer": ((1, 476), (768, 4096), (768, 4096)),
    "CNN": ((1, 128), (80, 25088), (10, 4096)), "GNN": ((2708, 1888584), (2, 121), (8, 3703)),
}  # fmt: skip
"""Ranges of M, N, K (Vortex, Table 3)."""
VORTEX_CONVOLUTIONS = {
    "DeepBench": ((1, 16), (7, 700), (1, 20), (1, 2048), (16, 2048)),
    "CNN": ((1, 64), (4, 768), (1, 11), (3, 832), (16, 512)),
}
"""Ranges of images, side, window, channels, filters (Vortex, Table 4)."""
FLOPS, NUMBERS = 2e12, 2e8
"""Limits of a sample: above these, time or memory exceed its value."""


def vortex(count: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield ``count`` (range, M, N, K) of each of Vortex's ranges, log-uniform, none above FLOPS and NUMBERS."""
    rng = np.random.default_rng(0)
    for name, ranges in VORTEX.items():
        found = 0
        while found < count:
            m, n, k = (round(np.exp(rng.uniform(np.log(a), np.log(b)))) for a, b in ranges)
            if 2.0 * m * n * k <= FLOPS and m * k + k * n + m * n <= NUMBERS:
                found += 1
                yield name, m, n, k


def vortex_convolutions(count: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield ``count`` (images, side, window, channels, filters) of each of Vortex's ranges, drawn like ``vortex``.

    Windows are odd and no larger than the image, so that a padding of half a window keeps its size.
    """
    rng = np.random.default_rng(0)
    for ranges in VORTEX_CONVOLUTIONS.values():
        found = 0
        while found < count:
            images, side, window, channels, filters = (round(np.exp(rng.uniform(*np.log(r)))) for r in ranges)
            pixels, steps = images * side**2, channels * window**2
            small = 2.0 * pixels * steps * filters <= FLOPS / 4 and pixels * (channels + filters) <= NUMBERS
            if window % 2 and window <= side and small:
                found += 1
                yield images, side, window, channels, filters


def batches(count: int) -> list[tuple[int, int]]:
    """Return ``count`` random (batch, length), batch 1 to 16, length 1 to 512."""
    rng = np.random.default_rng(25)
    return [(int(2 ** rng.integers(0, 5)), int(rng.integers(1, 513))) for _ in range(count)]
