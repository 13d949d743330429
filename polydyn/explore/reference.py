"""A lowered group evaluated statement by statement with numpy, in its original order: what every schedule computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import UnsupportedError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.reference import evaluate_index, evaluate_value
from polydyn.schedules.expr import FLOATS, OPS, REDUCTIONS, Load, Value, loads, transform
from polydyn.schedules.model import Group, Statement

Arrays = dict[str, npt.NDArray[Any]]
MOST_POINTS = 1 << 26
"""Instances of a statement; all of them are in memory at once."""


def reference(group: Group, sizes: Mapping[str, int], inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The outputs of a group, flat as they lie in memory; elements that no statement writes are 0.

    ``sizes``: the group's parameters; ``inputs``: flat arrays. UnsupportedError: too many instances for this way.
    """
    memory: Arrays = dict(inputs)
    for n, a in group.arrays.items():
        if a.role in ("local", "output"):
            memory[n] = np.zeros(elements(group, n, sizes), numpy_dtype(a.dtype))
    with np.errstate(all="ignore"):
        for s in group.statements:
            _execute(group, s, sizes, memory)
    return {n: memory[n] for n, a in group.arrays.items() if a.role == "output"}


def elements(group: Group, array: str, sizes: Mapping[str, int]) -> int:
    """How many elements of memory a group reaches of an array."""
    a, most = group.arrays[array], -1
    for s in group.statements:
        met = [x.index for x in loads(s.value) if x.buffer == array]
        extents = [e.evaluate(sizes) for _, e in s.iters]
        if all(extents):
            env = _iterators(s, extents) | dict(sizes)
            places = (evaluate_index(a.address(i), env, {}) for i in (*met, *[s.index] * (s.array == array)))
            most = max([most, *(int(np.max(at)) for at in places)])
    return most + 1


def _iterators(s: Statement, extents: Sequence[int]) -> dict[str, Any]:
    """The values of a statement's iterators, each along an axis of its own."""
    rank = len(extents)
    return {x: np.arange(n).reshape([-1 if k == axis else 1 for k in range(rank)])
            for axis, (x, n) in enumerate(zip(s.iterators, extents, strict=True))}  # fmt: skip


def _execute(group: Group, s: Statement, sizes: Mapping[str, int], memory: Arrays) -> None:
    extents = [e.evaluate(sizes) for _, e in s.iters]
    if prod(extents) > MOST_POINTS:
        raise UnsupportedError(
            f"{s.name} has {prod(extents)} instances, more than {MOST_POINTS}",
            node=s.name, rule="the reference holds all instances", remedy="take smaller sizes",
        )  # fmt: skip
    if not all(extents):
        return
    env = _iterators(s, extents) | dict(sizes)

    def flat(v: Value) -> Value:
        if not isinstance(v, Load):
            return v
        return Load(v.dtype, v.buffer, (group.arrays[v.buffer].address(v.index),))

    values = np.broadcast_to(evaluate_value(transform(s.value, flat), env, memory), extents)
    at = evaluate_index(group.arrays[s.array].address(s.index), env, memory)
    if s.reduce is None:
        memory[s.array][np.broadcast_to(at, extents)] = values
        return
    written = {x for i in s.index for x in i.symbols()}
    over = tuple(k for k, x in enumerate(s.iterators) if x not in written)
    combine: Any = OPS[REDUCTIONS[s.reduce]].numpy
    wide = np.float64 if s.value.dtype in FLOATS else values.dtype
    total = combine.reduce(values, axis=over, dtype=wide, keepdims=True) if over else values
    place = np.broadcast_to(at, total.shape)
    memory[s.array][place] = combine(memory[s.array][place], total).astype(memory[s.array].dtype)
