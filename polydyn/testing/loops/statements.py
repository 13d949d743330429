"""Compute the results of a group from its statements, without schedule and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import Array
from polydyn.schedules.model import Group
from polydyn.testing.loops.rooms import poisoned
from polydyn.testing.plan.bodies import Body
from polydyn.testing.plan.faults import Faults

Floats = Callable[[int, np.random.Generator], Array]
"""Function that draws random floats: (number, generator) -> float64 elements."""


def small(count: int, numbers: np.random.Generator) -> Array:
    """Return integers from -32 to 32, times 1/32: most sums are exact in any order."""
    return np.asarray(numbers.integers(-32, 33, count) / 32)


def large(count: int, numbers: np.random.Generator) -> Array:
    """Return larger elements: ``exp`` overflows unless its argument is the distance from the largest element."""
    return np.asarray(numbers.integers(-32, 33, count) * 4.0)


def all_magnitudes(count: int, numbers: np.random.Generator) -> Array:
    """Return elements of all magnitudes: hardly two are equal, so leaving out the largest one is seen.

    All are positive, or negative, or neither.
    """
    sign = numbers.choice((-1, 1), count) if numbers.random() < 0.4 else numbers.choice((-1, 1))
    return np.asarray(np.round(2 ** numbers.uniform(0, 14, count)) * sign / 32)


FLOATS_OF_SEED = (small, large)


class Flat:
    """The arrays of a group, as ``bodies.Body`` reads and writes memory.

    ``written``: elements that are results. ``ends``: array -> the end of the elements that statements read.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.arrays, self.faults = dict(arrays), Faults()
        self.written = {n: np.zeros(a.shape, bool) for n, a in arrays.items()}
        self.ends = dict.fromkeys(arrays, 0)

    def read(self, name: str, at: Any, dtype: str, mask: Any = None) -> Array:
        """Return elements; those that ``mask`` leaves out are arbitrary."""
        array, at = self.arrays[name], np.asarray(at)
        if at.size and mask is None and at.min() < 0:
            raise IndexError(f"{name}[{at.min()}]")
        if mask is not None:
            at = np.where(np.broadcast_to(mask, np.broadcast_shapes(np.shape(mask), at.shape)), at, 0)
            if not len(array):
                return np.zeros(at.shape, array.dtype)
        self.ends[name] = max(self.ends[name], int(at.max(initial=-1)) + 1)
        return np.asarray(array[at])

    def write(self, name: str, at: Any, value: Array, dtype: str, rewrites: bool = False) -> None:
        """Write elements; of those that are written twice the last one stays."""
        self.arrays[name][at] = value
        self.written[name][at] = True


def random_array(count: int, dtype: str, numbers: np.random.Generator, below: int, floats: Floats) -> Array:
    """Return random elements. ``below``: end of integers. ``floats`` draws elements of a float type."""
    kind = numpy_dtype(dtype)
    if kind == np.bool_:
        return numbers.random(count) < 0.5
    if kind.kind in "iu":
        narrow = kind.itemsize == 1  # no subscripts
        return numbers.integers(-9 if narrow and kind.kind == "i" else 0, 10 if narrow else below, count).astype(kind)
    return (floats if kind.itemsize >= 4 or floats is all_magnitudes else small)(count, numbers).astype(kind)


def arrays_of(
    group: Group, elements: Mapping[str, int], numbers: np.random.Generator, below: int, floats: Floats = small
) -> dict[str, Array]:
    """Return random inputs and poisoned outputs for all arrays of a group that are in memory.

    ``elements``: array -> number of elements in memory. ``below``: end of random integers.
    """
    made = {}
    for n, a in group.arrays.items():
        if a.role in ("input", "constant"):
            made[n] = random_array(elements[n], a.dtype, numbers, below, floats)
        elif a.role == "output":
            made[n] = poisoned(elements[n], a.dtype)
    return made


def expected(group: Group, form: object, arrays: Mapping[str, Array], sizes: Mapping[str, int]) -> Flat:
    """Return the memory after all statements."""
    memory = Flat({n: a.copy() for n, a in arrays.items()})
    body = Body(memory, group, form, {n: n for n in arrays}, sizes)  # type: ignore[arg-type]
    with np.errstate(all="ignore"):
        body.run()
    return memory
