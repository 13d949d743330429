"""Bytes of device memory that the 32 threads of a warp access at once, and the layouts of tensor-core operands."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import Array
from polydyn.testing.loops.rooms import Broken

WARP = 32
LANES = np.arange(WARP)


class Bytes:
    """A range of bytes that threads access by address. ``name``: for messages."""

    def __init__(self, name: str, data: Array) -> None:
        self.name, self.data = name, data

    def places(self, at: Any, count: int, mask: Array, align: int = 0) -> Array:
        """Return the positions of ``count`` bytes from ``at`` on, for each thread of the mask: (threads, count)."""
        start = np.broadcast_to(np.asarray(at, np.int64), (WARP,))[mask]
        if start.size and (start.min() < 0 or start.max() + count > len(self.data)):
            raise Broken(f"{self.name}: bytes {start.min()}..{start.max() + count - 1} of {len(self.data)}")
        if (start % (align or count)).any():
            raise Broken(f"{self.name}: {count} bytes at an address that is no multiple of {align or count}")
        return np.asarray(start[:, None] + np.arange(count))

    def read(self, at: Any, dtype: str, mask: Array, count: int = 1, align: int = 0) -> Array:
        """Return ``count`` elements of each thread, (WARP, count); those of threads outside of the mask are 0."""
        kind = numpy_dtype(dtype)
        out = np.zeros((WARP, count), kind)
        places = self.places(at, count * kind.itemsize, mask, align)
        out[mask] = np.ascontiguousarray(self.data[places]).view(kind)
        return out

    def write(self, at: Any, values: Array, mask: Array, align: int = 0) -> None:
        """Write the elements of each thread of the mask, (WARP, count)."""
        data = np.ascontiguousarray(values).view(np.uint8).reshape(WARP, -1)[mask]
        self.data[self.places(at, data.shape[1], mask, align)] = data


def swizzled(row: Any, column: Any, pitch: int, chunk: int, size: int) -> Any:
    """Return the element of a tile in shared memory at (row, column): chunks of a row are permuted by XOR with the row,
    so that a column of chunks occupies different banks (128 bytes).
    """
    chunks, banks = pitch // chunk, 128 // (chunk * size)
    fold, mask = (1, banks - 1) if chunks >= banks else (banks // chunks, chunks - 1)
    row, column = np.asarray(row), np.asarray(column)
    return row * pitch + ((column // chunk) ^ (row // fold & mask)) * chunk + column % chunk


def ldmatrix(rows: Array, transposed: bool) -> Array:
    """Return the registers (WARP, 4) that four 8 x 8 matrices of 16 bits become. ``rows``: (WARP, 8) of uint16, lane
    8m + r has row r of matrix m.
    """
    out = np.zeros((WARP, 4), np.uint32)
    for m in range(4):
        matrix = rows[8 * m : 8 * m + 8]
        matrix = matrix.T if transposed else matrix
        pair = matrix[LANES[:, None] // 4, LANES[:, None] % 4 * 2 + np.arange(2)]
        out[:, m] = np.ascontiguousarray(pair).view(np.uint32)[:, 0]
    return out


def elements(registers: Array, dtype: str) -> Array:
    """Return the elements of registers of 32 bits, (WARP, registers, elements of one), as float64 or int64."""
    data = np.ascontiguousarray(registers.astype(np.uint32))
    if dtype == "tf32":
        return np.asarray((data & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)[..., None])
    kind = numpy_dtype(dtype)
    parts = data.view(kind).reshape(*registers.shape, 4 // kind.itemsize)
    return np.asarray(parts.astype(np.int64 if kind.kind in "iu" else np.float64))


def mma(d: Array, a: Array, b: Array, types: tuple[str, str]) -> Array:
    """Return d + a b of an m16n8 instruction. ``d``: (WARP, 4) sums, ``a``: (WARP, 4), ``b``: (WARP, 2) registers.

    With g = lane // 4 and t = lane % 4 (PTX ISA, "Matrix Fragments for mma"), a register of E elements has: A rows g,
    g + 8, g, g + 8 from step tE on, the last two 4E steps later; B column g from step tE on, the second 4E steps later;
    D rows g, g, g + 8, g + 8 and columns 2t, 2t + 1.
    """
    left, right = elements(a, types[0]), elements(b, types[1])
    e = left.shape[-1]
    g, t = LANES // 4, LANES % 4
    rows, columns = np.zeros((16, 8 * e), left.dtype), np.zeros((8 * e, 8), left.dtype)
    for k in range(e):
        for i in range(4):
            rows[g + i % 2 * 8, i // 2 * 4 * e + t * e + k] = left[:, i, k]
        for i in range(2):
            columns[i * 4 * e + t * e + k, g] = right[:, i, k]
    total = rows @ columns
    more = np.stack([total[g + i // 2 * 8, t * 2 + i % 2] for i in range(4)], 1)
    return np.asarray((d + more).astype(d.dtype))
