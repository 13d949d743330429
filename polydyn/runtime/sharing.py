"""Check which arrays of a call share memory. Standard library and numpy only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import InputError

Array = npt.NDArray[Any]

MAX_OVERLAP_CHECKS = 10_000
"""Maximum number of candidate solutions numpy tries for a pair of interleaved arrays; if there are more, they count as
sharing memory."""


def reject_sharing(
    inputs: Mapping[str, Array], out: Mapping[str, Array], appendable: Collection[tuple[str, str]]
) -> None:
    """Raise InputError if an array in ``out`` shares memory with an input, another output or itself.

    The exception: for (input, output) in ``appendable`` the output may begin where the input begins, if both have the
    same strides. Only arrays with overlapping address ranges are examined.
    """
    for name, a in out.items():
        reject_folded(name, a.shape, a.strides, a.itemsize)
    arrays = [(name, a, False) for name, a in inputs.items()] + [(name, a, True) for name, a in out.items()]
    spans = sorted((*_span(a), k) for k, (_, a, _) in enumerate(arrays) if a.size)
    live: list[tuple[int, int]] = []
    for low, high, k in spans:
        live = [x for x in live if x[0] > low]
        for _, other in live:
            (p, a, p_out), (q, b, q_out) = (arrays[j] for j in sorted((k, other)))
            if (p_out or q_out) and _shares(a, b) and not ((p, q) in appendable and not p_out and _begins(a, b)):
                _refuse(p, q, (p, q) in appendable and not p_out)
        live.append((high, k))


Declared = Sequence[Mapping[str, Any]]
"""Inputs or outputs as a manifest describes them."""


def described_caches(inputs: Declared, outputs: Declared, appendable: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what ``Program.caches`` does. ``appendable``: output -> the input that it begins with."""
    by_name = {i["name"]: i for i in inputs}
    grown = [(o, by_name[appendable[o["name"]]]) for o in outputs if o["name"] in appendable]
    return [
        {"output": o["name"], "input": i["name"], "dtype": i["dtype"], "shape": list(i["shape"]), "axis": o["strided"]}
        for o, i in grown
    ]


def positions_of(
    pairs: Iterable[tuple[str, str]], inputs: Declared, outputs: Declared
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """Return appendable pairs as positions of the input and of the output."""
    first, second = ({a["name"]: k for k, a in enumerate(x)} for x in (inputs, outputs))
    return tuple((first[i], second[o]) for i, o in pairs if i in first and o in second)


def surely_apart(
    inputs: Sequence[Array], addresses: Sequence[int], outputs: Sequence[Array], targets: Sequence[int],
    pairs: Iterable[tuple[int, int]],
) -> bool:  # fmt: skip
    """Return True if the address ranges of all arrays are disjoint and no output folds onto itself; False means
    unknown.

    ``addresses``, ``targets``: those of the first elements. ``pairs``: positions of an input and an output; the output
    may begin with the input, in the same strides.
    """
    beginnings = {
        i for i, o in pairs
        if addresses[i] == targets[o] and same_strides(inputs[i].shape, inputs[i].strides, outputs[o].strides)
    }  # fmt: skip
    spans = []
    for k, (a, low) in enumerate(zip(inputs, addresses, strict=True)):
        if k not in beginnings and (size := extent(a.shape, a.strides, a.itemsize)):
            spans.append((low, low + size))
            if size < 0:
                return False
    for a, low in zip(outputs, targets, strict=True):
        if size := extent(a.shape, a.strides, a.itemsize):
            if size < 0 or is_folded(a.shape, a.strides, a.itemsize):
                return False
            spans.append((low, low + size))
    spans.sort()
    return all(a[1] <= b[0] for a, b in pairwise(spans))


@lru_cache(256)
def extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes from the first element to the end of the last; 0 for an empty array, -1 for negative strides.

    Caches of all layers have equal shapes, so that a decoding step computes it few times.
    """
    if 0 in shape:
        return 0
    if any(s < 0 for s, n in zip(strides, shape, strict=True) if n > 1):
        return -1
    return itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 1)


@lru_cache(256)
def same_strides(shape: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return whether two layouts place the elements of a shape equally."""
    return all(n == 1 or s == t for n, s, t in zip(shape, first, second, strict=True))


@lru_cache(256)
def is_folded(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements may have the same address."""
    span = itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span and 0 not in shape:
            return True
        span += (n - 1) * stride
    return False


def reject_folded(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    """Raise InputError if two elements of an output may have the same address (kernels are proven for distinct ones).

    ``strides`` and ``itemsize`` are in bytes.
    """
    if is_folded(shape, strides, itemsize):
        raise InputError(
            f"elements of out['{name}'] share memory: strides {strides} in bytes for shape {shape}",
            tensor=name,
            remedy="pass an array, or a slice of one",
        )


def _span(a: Array) -> tuple[int, int]:
    """Return the first address of a non-empty array, and the address after its last byte."""
    low = high = a.__array_interface__["data"][0]
    for n, stride in zip(a.shape, a.strides, strict=True):
        if stride < 0:
            low += (n - 1) * stride
        else:
            high += (n - 1) * stride
    return low, high + a.itemsize


def _shares(a: Array, b: Array) -> bool:
    try:
        limit: Any = MAX_OVERLAP_CHECKS  # some stubs allow 0 and -1 only
        return bool(np.shares_memory(a, b, max_work=limit))
    except np.exceptions.TooHardError:
        return True


def _begins(a: Array, b: Array) -> bool:
    """Return whether ``b`` has the first address and the strides of ``a``."""
    first, second = (x.__array_interface__["data"][0] for x in (a, b))
    return bool(first == second) and same_strides(a.shape, a.strides, b.strides)


def _refuse(first: str, name: str, pair: bool) -> None:
    raise InputError(
        f"out['{name}'] may share memory with '{first}'" + (", but has another layout" if pair else ""),
        tensor=name,
        remedy=f"let both be views of one array, cut along the axis that grows: '{first}' = cache[:, :, :P], "
        f"'{name}' = cache[:, :, :P + L]"
        if pair
        else "pass a copy",
    )
