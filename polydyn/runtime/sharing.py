"""Check which arrays of a call share memory. Standard library and numpy only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


def surely_apart(arrays: Iterable[Array], addresses: Iterable[int]) -> bool:
    """Return True if the arrays are dense and their address ranges disjoint; False means unknown."""
    spans = []
    for a, low in zip(arrays, addresses, strict=True):
        if not a.flags.c_contiguous:
            return False
        spans.append((low, low + a.nbytes))
    spans.sort()
    return all(a[1] <= b[0] for a, b in pairwise(spans))


def reject_folded(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    """Raise InputError if two elements of an output may have the same address (kernels are proven for distinct ones).

    ``strides`` and ``itemsize`` are in bytes.
    """
    span = itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < span and 0 not in shape:
            raise InputError(
                f"elements of out['{name}'] share memory: strides {strides} in bytes for shape {shape}",
                tensor=name,
                remedy="pass an array, or a slice of one",
            )
        span += (n - 1) * stride


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
    equal = all(n == 1 or s == t for n, s, t in zip(a.shape, a.strides, b.strides, strict=True))
    return equal and a.__array_interface__["data"][0] == b.__array_interface__["data"][0]


def _refuse(first: str, name: str, pair: bool) -> None:
    raise InputError(
        f"out['{name}'] may share memory with '{first}'" + (", but has another layout" if pair else ""),
        tensor=name,
        remedy=f"let both be views of one array, cut along the axis that grows: '{first}' = cache[:, :, :P], "
        f"'{name}' = cache[:, :, :P + L]"
        if pair
        else "pass a copy",
    )
