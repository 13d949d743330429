"""Pack constants into panels (``Pack``), in numpy, at compile time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.reference import evaluate_index
from polydyn.lowering.group import Pack
from polydyn.schedules.expr import NIBBLES, Array
from polydyn.schedules.index import Index


def pack(p: Pack, constants: Mapping[str, Array]) -> Array:
    """Return the array of panels in the shape of ``p``, zero past the last column."""
    panels = _words(_panels(p, constants[p.source]), p.steps)
    if p.scales:
        lines = _panels(p.scales, constants[p.scales.source]).view(panels.dtype)
        panels = np.concatenate([panels, lines[..., None, None, :]], axis=-3)
    return panels.reshape(p.shape).astype(p.dtype or panels.dtype, copy=False)


def _panels(p: Pack, source: Array) -> Array:
    """Return the panels of unpacked steps: shape (batch.., panels, reduction.., columns of a panel)."""
    names = [*(n for n, _ in p.batch), p.col[0], *(n for n, _ in p.reduction)]
    sizes = [*(e for _, e in p.batch), p.col[1], *(e for _, e in p.reduction)]
    grids = {
        n: np.arange(e, dtype=np.int64).reshape([-1 if k == a else 1 for k in range(len(names))])
        for a, (n, e) in enumerate(zip(names, sizes, strict=True))
    }
    dense = _strided(p.address, names, sizes, source)
    if dense is None:
        dense = source.reshape(-1)[np.broadcast_to(evaluate_index(p.address, grids, {}), sizes)]
    nb = len(p.batch)
    panels = -(-p.col[1] // p.columns)
    if p.col[1] % p.columns:
        padded = np.zeros([*sizes[:nb], panels * p.columns, *sizes[nb + 1 :]], source.dtype)
        padded[(slice(None),) * nb + (slice(0, p.col[1]),)] = dense
        dense = padded
    split = dense.reshape([*sizes[:nb], panels, p.columns, *sizes[nb + 1 :]])
    return np.ascontiguousarray(np.moveaxis(split, nb + 1, -1))


def _words(panels: Array, steps: int) -> Array:
    """Pack ``steps`` steps along the second-last axis into each word, padded with zeros. Floats are rounded to
    bfloat16.
    """
    if steps == 1:
        return panels
    if panels.dtype.kind != "i":
        panels = panels.astype(numpy_dtype("bfloat16")).view(np.int16)
    bits, count = 32 // steps, panels.shape[-2]
    if steps == NIBBLES:  # -8 to 7 as 0 to 15; the even parts of a word are the first four steps
        order = [k // 2 + NIBBLES // 2 * (k % 2) for k in range(NIBBLES)]
        panels = panels.reshape(*panels.shape[:-2], -1, NIBBLES, panels.shape[-1])[..., order, :]
        panels = panels.reshape(*panels.shape[:-3], count, panels.shape[-1]) + np.int8(8)
    words = np.zeros((*panels.shape[:-2], -(-count // steps), panels.shape[-1]), np.uint32)
    for k in range(min(steps, count)):
        part = panels[..., k::steps, :].astype(np.uint32) & np.uint32(2**bits - 1)
        words[..., : part.shape[-2], :] |= part << np.uint32(bits * k)
    return words.view(np.int32)


def _strided(address: Index, names: list[str], sizes: list[int], source: Array) -> Array | None:
    """Return the elements as a view of the source if their address is affine with nonnegative strides, else None."""
    strides, rest = [], address
    for n in names:
        stride, rest = rest.split(n)
        if stride.constant is None or stride.constant < 0:
            return None
        strides.append(stride.constant)
    start = rest.constant
    last = None if start is None else start + sum(s * (e - 1) for s, e in zip(strides, sizes, strict=True))
    if start is None or last is None or start < 0 or last >= source.size or 0 in sizes:
        return None
    flat = np.ascontiguousarray(source).reshape(-1)[start:]
    return np.lib.stride_tricks.as_strided(flat, sizes, [s * flat.itemsize for s in strides], writeable=False)
