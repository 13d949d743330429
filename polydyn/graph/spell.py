"""Shape arithmetic as data: build the body of a Compute that writes sizes."""

from __future__ import annotations

from itertools import pairwise

from polydyn.graph.ir import dim_name
from polydyn.schedules.expr import INTEGERS, Array, FromIndex, Value, const, op
from polydyn.schedules.index import Index


def spell(value: Array, dtype: str) -> Value:
    """Return the body of a Compute that writes shape arithmetic: one Dim, a progression, or a choice by position."""
    if value.ndim == 0:
        return _scalar(value.item(), dtype)
    position: Index = Index.of(0)
    for axis, size in enumerate(value.shape):
        position = position * size + dim_name(axis)
    dims = list(value.flat)
    if len(dims) > MAX_SELECTED and dtype in INTEGERS:
        step = dims[1] - dims[0]
        if all(b - a == step for a, b in pairwise(dims)):
            return FromIndex(dtype, dims[0] + position * step)
    return _choice([_scalar(x, dtype) for x in dims] or [const(0, dtype)], 0, FromIndex("int64", position))


MAX_SELECTED = 8
"""Maximum elements that are selected one by one. More are selected by bisection, which bounds the nesting depth."""


def _choice(flat: list[Value], first: int, position: Value) -> Value:
    """Return the element at a position. ``flat`` holds the elements from ``first`` on."""
    if len(flat) > MAX_SELECTED and any(x != flat[0] for x in flat):
        half = len(flat) // 2
        low, high = _choice(flat[:half], first, position), _choice(flat[half:], first + half, position)
        return low if low == high else op("where", op("lt", position, const(first + half, "int64")), low, high)
    body = flat[-1]
    for i in range(len(flat) - 2, -1, -1):
        if flat[i] != body:
            body = op("where", op("eq", position, const(first + i, "int64")), flat[i], body)
    return body


def _scalar(x: Index, dtype: str) -> Value:
    c = x.constant
    if c is not None:
        return const(c, dtype)
    if dtype == "bool":
        return op("ne", FromIndex("int64", x), const(0, "int64"))
    return FromIndex(dtype, x)
