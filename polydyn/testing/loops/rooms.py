"""Memory of a kernel in execution: one room for each buffer. Elements that nobody has written are poison."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import WIDENED, Array

INTEGER_POISON = 0x5A
"""Every byte of an integer that was not written. Floats are NaN."""


class Broken(Exception):
    """A kernel does what no kernel may do: it accesses memory out of bounds, or waits for what never comes."""


class Unbound(Broken):
    """A name has no value: a pass has opened it, and a later one binds it."""


def value_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy dtype that values of a dtype are computed in."""
    return numpy_dtype(WIDENED.get(dtype, dtype))


def poisoned(shape: Any, dtype: str) -> Array:
    """Return an array of elements that were not written."""
    kind = numpy_dtype(dtype)
    if kind == np.bool_:
        return np.zeros(shape, kind)
    if kind.kind in "iu":
        return np.full(shape, np.full(kind.itemsize, INTEGER_POISON, np.uint8).view(kind)[0])
    return np.full(shape, np.nan).astype(kind) if "e8m0" not in dtype else np.ones(shape).astype(kind)


class Room:
    """The elements of a buffer. ``data``: one-dimensional, or (threads, elements) for registers of threads."""

    def __init__(self, name: str, dtype: str, data: Array) -> None:
        self.name, self.dtype, self.data = name, dtype, data

    @property
    def size(self) -> int:
        """The number of elements, of a thread for registers."""
        return int(self.data.shape[-1])

    def view(self, dtype: str) -> Array:
        """Return the same bytes as elements of another dtype."""
        kind = numpy_dtype(dtype)
        if kind == self.data.dtype:
            return self.data
        if kind.itemsize == self.data.dtype.itemsize:
            return self.data.view(kind)
        whole = self.size * self.data.dtype.itemsize // kind.itemsize * kind.itemsize // self.data.dtype.itemsize
        return self.data[..., :whole].view(kind)

    def check(self, low: Any, high: Any) -> None:
        """Raise Broken unless the elements from ``low`` to ``high``, both included, exist."""
        if low < 0 or high >= self.size:
            raise Broken(f"{self.name}[{low}..{high}] of {self.size} elements")
