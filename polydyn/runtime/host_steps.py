"""What Python does between the parts of a program: sizes that data decide, and what has no schedule tree.

Other steps run in C (``sequence.KINDS``). A step is a function of a ``Call``; it gives arrays and sizes (one that only
answers how many gives no arrays). Order is ascending and ties go to the lower place, so results do not depend on threads.
Standard library and numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError
from polydyn.runtime.program import Program

Array = npt.NDArray[Any]


class Call(NamedTuple):
    """What a step is given: arrays, aligned to their elements, None for an absent one; sizes, settings, the models that
    it may run.

    ``kept``: for what the step needs again in the next call; no two calls have it at the same time. Arrays are those of
    this call: a result may not be one of them, nor a view.
    """

    arrays: Sequence[Any]
    dims: Sequence[int]
    settings: Mapping[str, Any]
    bodies: Mapping[str, Program]
    kept: dict[str, Any]


Result = tuple[Sequence[Array], Sequence[int]]
Step = Callable[[Call], Result]

STEPS: dict[str, Step] = {}
"""Kind -> its function."""


def step(kind: str) -> Callable[[Step], Step]:
    """Registers the function of a kind of step."""

    def register(f: Step) -> Step:
        STEPS[kind] = f
        return f

    return register


def _refuse(message: str, rule: str) -> InputError:
    return InputError(message, rule=rule, remedy="pass data that give such sizes")


@step("reshape")
def reshape(call: Call) -> Result:
    """The sizes that a shape with 0 (copies a size) and -1 (takes what is left) stands for."""
    wanted = [int(x) for x in call.arrays[0].reshape(-1)]
    copies = 0 if call.settings["allowzero"] else len(call.dims)
    out = [call.dims[k] if d == 0 and k < copies else d for k, d in enumerate(wanted)]
    place = f"a tensor of shape {list(call.dims)} cannot be reshaped to {wanted}"
    free = [k for k, d in enumerate(out) if d == -1]
    if len(free) > 1 or any(d < -1 for d in out):
        raise _refuse(place, "at most one size is -1")
    if free:
        rest = prod(d for d in out if d != -1)
        out[free[0]] = prod(call.dims) // rest if rest else 0
    if prod(out) != prod(call.dims):
        raise _refuse(place, "as many elements before as after")
    return (), out


@step("broadcast")
def broadcast(call: Call) -> Result:
    """The common sizes of a shape that is data and of one that is not."""
    wanted = [int(x) for x in call.arrays[0].reshape(-1)]
    rank = max(len(wanted), len(call.dims))
    a, b = [1] * (rank - len(call.dims)) + list(call.dims), [1] * (rank - len(wanted)) + wanted
    if any(p != q and 1 not in (p, q) for p, q in zip(a, b, strict=True)) or min(b, default=0) < 0:
        raise _refuse(f"a tensor of shape {list(call.dims)} cannot be expanded to {wanted}", "sizes are equal or 1")
    return (), [q if p == 1 else p for p, q in zip(a, b, strict=True)]


@step("count")
def count(call: Call) -> Result:
    """How many numbers lie between a start and a limit, by a step."""
    arrays = map(_floats, call.arrays) if call.settings["dtype"] == "bfloat16" else call.arrays
    start, limit, delta = (a.reshape(-1)[0] for a in arrays)
    if delta == 0:
        raise _refuse("a range by steps of 0", "the step of a range is not 0")
    if start.dtype.kind == "f":
        steps = float(limit - start) / float(delta)
        if steps != steps or steps == float("inf"):
            raise _refuse(f"a range from {start} to {limit} by {delta}", "a range ends")
        return (), [max(0, ceil(max(steps, 0.0)))]
    return (), [max(0, -((int(start) - int(limit)) // int(delta)))]


def _floats(bits: Array) -> Array:
    """bfloat16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@step("slice")
def slices(call: Call) -> Result:
    """For every axis where a slice begins, how many elements it has, its step forwards and its step backwards."""
    starts, ends = ([int(x) for x in a.reshape(-1)] for a in call.arrays[:2])
    given = [None if a is None else [int(x) for x in a.reshape(-1)] for a in call.arrays[2:]]
    axes, steps = given[0] or list(range(len(starts))), given[1] or [1] * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise _refuse(f"a slice from {starts} to {ends} along {axes} by {steps}", "as many of each, no step of 0")
    found = [(0, n, 1) for n in call.dims]
    for s, e, a, k in zip(starts, ends, _axes(axes, len(call.dims)), steps, strict=True):
        n = call.dims[a]
        low, high = (0, n) if k > 0 else (0, n - 1)
        first = min(max(s + n if s < 0 else s, low), high)
        last = min(max(e + n if e < 0 else e, 0 if k > 0 else -1), high)
        found[a] = max(first, 0), max(0, -((first - last) // k)), k
    return (), [x for first, size, k in found for x in (first, size, max(k, 0), max(-k, 0))]


def _axes(axes: Sequence[int], rank: int) -> list[int]:
    """Axes counted from the front, each once."""
    out = [a + rank if a < 0 else a for a in axes]
    if len(set(out)) != len(out) or not all(0 <= a < rank for a in out):
        raise _refuse(f"the axes {list(axes)} of a tensor with {rank} axes", "each is an axis, and only once")
    return out


@step("unsqueeze")
def unsqueeze(call: Call) -> Result:
    """The sizes with a 1 at every axis that is named."""
    axes = [int(x) for x in call.arrays[0].reshape(-1)]
    rank = len(call.dims) + len(axes)
    new, rest = set(_axes(axes, rank)), iter(call.dims)
    return (), [1 if a in new else next(rest) for a in range(rank)]


@step("squeeze")
def squeeze(call: Call) -> Result:
    """The sizes without those axes, which are 1."""
    axes = _axes([int(x) for x in call.arrays[0].reshape(-1)], len(call.dims))
    if any(call.dims[a] != 1 for a in axes):
        raise _refuse(f"a tensor of shape {list(call.dims)} is squeezed along {axes}", "such an axis has size 1")
    return (), [n for a, n in enumerate(call.dims) if a not in axes]


@step("pads")
def pads(call: Call) -> Result:
    """For every axis how many elements come before it and after it."""
    values, axes = ([int(x) for x in a.reshape(-1)] for a in call.arrays)
    if len(values) != 2 * len(axes) or min(values, default=0) < 0:
        raise _refuse(f"pads {values} along {axes}", "two for each axis, not negative")
    out = [0] * (2 * len(call.dims))
    for k, a in enumerate(_axes(axes, len(call.dims))):
        out[2 * a], out[2 * a + 1] = values[k], values[k + len(axes)]
    return (), out


@step("unique")
def unique(call: Call) -> Result:
    """Different elements, or slices along an axis: they, the first place of each, the number of each element, counts.

    Sorted, or in the order of their first places. NaNs count as equal.
    """
    x, axis = call.arrays[0], call.settings["axis"]
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not call.settings["sorted"]:
        order = np.argsort(first, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        values = np.take(values, order, axis=0 if axis is None else axis)
        first, inverse, counts = first[order], place[inverse], counts[order]
    found = (values, *(a.astype(np.int64, copy=False) for a in (first, inverse, counts)))
    return found, [len(first)]
