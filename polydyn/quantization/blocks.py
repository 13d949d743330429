"""Round weights to 4 or 8 bits in blocks, each with a scale and perhaps a zero point, at the least squared error.

A block is ``block`` consecutive weights of one column of a product, along the sum. With a search, several clippings of
each block are tried; every one gets the scale of least squares for its integers, and the best one stays. The error may
be weighed by the mean squares of the inputs that meet the weights, so that it is the error of the product's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from polydyn.build.features import available_cores
from polydyn.schedules.expr import Array

CHUNK = 1 << 18
"""Weights that a thread rounds at once. Its temporary arrays take about ten times as many bytes as floats of these."""
CLIPPINGS = {4: (0.85, 0.92, 0.97, 1.0, 1.03, 1.08, 1.14, 1.22, 1.32), 8: (1.0, 1.02)}
"""Tried step counts of the largest weight of a block, relative to the greatest integer: more than 1 clips it."""
MIN_ASYMMETRIC = 0.95
"""Clippings below this are tried for symmetric blocks only: with a zero point both ends are used already."""
TINY = 1e-30
"""Below this, a scale is 1 and the block 0."""


@dataclass(frozen=True)
class Rounded:
    """Integers ``q`` uint8 [columns, blocks, block], ``scales`` float [columns, blocks], ``zeros`` uint8 of that shape.

    A weight is ``(q - zero) * scale``; ``zeros`` None means half of the range. ``error``: the sum of squared
    differences, ``energy``: the sum of squares, both weighed.
    """

    q: Array
    scales: Array
    zeros: Array | None
    error: float
    energy: float

    @property
    def relative_error(self) -> float:
        """The norm of the differences over the norm of the weights; 0 if all weights are 0."""
        return float(np.sqrt(self.error / self.energy)) if self.energy else 0.0


def round_blocks(
    weights: Array, bits: int, block: int, *, symmetric: bool = True, search: bool = True,
    importance: Array | None = None, scale_dtype: str = "float32",
) -> Rounded:  # fmt: skip
    """Round ``weights`` [columns, steps]; the last block is filled up with zeros.

    ``importance``: [steps], the weight of each step's squared error. ``scale_dtype``: scales are rounded to it before
    the integers are chosen.
    """
    columns, steps = weights.shape
    blocks = -(-steps // block)
    padding = ((0, 0), (0, blocks * block - steps))
    factor: Array = np.ones(steps) if importance is None else importance / max(float(importance.mean()), TINY)
    factor = np.pad(factor.astype(np.float32), padding[1]).reshape(blocks, block)
    rows = max(1, CHUNK // max(1, blocks * block))

    def chunk(first: int) -> tuple[Array, Array, Array | None, float, float]:
        part = np.pad(weights[first : first + rows].astype(np.float32), padding).reshape(-1, blocks, block)
        scales, zeros = (_symmetric if symmetric else _asymmetric)(part, factor, bits, search, scale_dtype)
        q = _integers(part, scales, zeros, bits)
        centre = np.float32(2 ** (bits - 1)) if zeros is None else zeros[..., None]
        wrong = (q - centre) * scales[..., None] - part
        error = float(np.einsum("nbk,nbk,bk->", wrong, wrong, factor, dtype=np.float64))
        energy = float(np.einsum("nbk,nbk,bk->", part, part, factor, dtype=np.float64))
        return q.astype(np.uint8), scales, zeros, error, energy

    with ThreadPoolExecutor(available_cores()) as threads:
        parts = list(threads.map(chunk, range(0, columns, rows)))
    q, scales = (np.concatenate([p[k] for p in parts]) for k in (0, 1))
    zeros = None if symmetric else np.concatenate([p[2] for p in parts]).astype(np.uint8)
    return Rounded(q, scales.astype(scale_dtype), zeros, sum(p[3] for p in parts), sum(p[4] for p in parts))


def pack_bits(q: Array, bits: int) -> Array:
    """Pack numbers of 4 bits in bytes along the last axis, the first in the low bits; an odd last one gets a zero."""
    if bits == 8:
        return q
    if q.shape[-1] % 2:
        q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, 1)])
    packed: Array = q[..., ::2] | q[..., 1::2] << np.uint8(4)
    return packed


def _integers(w: Array, scales: Array, zeros: Array | None, bits: int) -> Array:
    """Return the nearest integers, 0 to ``2**bits - 1``, as floats."""
    centre = np.float32(2 ** (bits - 1)) if zeros is None else zeros[..., None]
    q = w / scales[..., None]
    np.rint(q, out=q)
    q += centre
    return np.clip(q, 0, 2**bits - 1, out=q)


def _stored(scales: Array, dtype: str) -> Array:
    """Return scales as they are stored, none of them 0."""
    scales = scales.astype(dtype).astype(np.float32)
    return np.where(np.abs(scales) < TINY, np.float32(1), scales)


def _symmetric(w: Array, factor: Array, bits: int, search: bool, dtype: str) -> tuple[Array, None]:
    """Choose scales for integers around half of the range. They may be negative: there is one negative integer more."""
    at = np.abs(w).argmax(-1)[..., None]
    largest = np.take_along_axis(w, at, -1)[..., 0]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if not search:
        return _stored(largest / low, dtype), None
    tried = [largest / np.float32(end * f) for f in CLIPPINGS[bits] for end in (low, high)]
    return _best(w, factor, bits, ((t, None) for t in tried), dtype)[0], None


def _asymmetric(w: Array, factor: Array, bits: int, search: bool, dtype: str) -> tuple[Array, Array]:
    """Choose scales and zero points, so that 0 is represented exactly."""
    low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
    top = np.float32(2**bits - 1)

    def candidate(f: float, g: float) -> tuple[Array, Array]:
        scale = _stored((high / np.float32(g) - low / np.float32(f)) / top, dtype)
        return scale, np.clip(np.rint(-low / np.float32(f) / scale), 0, top)

    if not search:
        return candidate(1.0, 1.0)
    ends = [f for f in CLIPPINGS[bits] if f > MIN_ASYMMETRIC]
    pairs = [(f, g) for f in ends for g in ends if abs(f - g) < 0.15]
    scales, zeros = _best(w, factor, bits, (candidate(f, g) for f, g in pairs), dtype)
    assert zeros is not None
    return scales, zeros


def _best(
    w: Array, factor: Array, bits: int, tried: Iterator[tuple[Array, Array | None]], dtype: str
) -> tuple[Array, Array | None]:  # fmt: skip
    """Return scales and zero points of the least error per block, with the scale of least squares for each."""
    best: tuple[Array, Array | None] | None = None
    least: Array = np.empty(0)
    for first, zeros in tried:
        centre = np.float32(2 ** (bits - 1)) if zeros is None else zeros[..., None]
        q = _integers(w, _stored(first, dtype), zeros, bits) - centre
        weighed = q * factor
        squares = np.einsum("nbk,nbk->nb", weighed, q)
        scales = _stored(np.einsum("nbk,nbk->nb", weighed, w) / np.maximum(squares, TINY), dtype)
        q *= scales[..., None]
        q -= w
        error = np.einsum("nbk,nbk,bk->nb", q, q, factor)
        if best is None:
            best, least = (scales, zeros), error
            continue
        better = error < least
        least = np.where(better, error, least)
        zero = None if zeros is None or best[1] is None else np.where(better, zeros, best[1])
        best = np.where(better, scales, best[0]), zero
    assert best is not None
    return best
