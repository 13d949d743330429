"""The numpy reference: evaluate a lowered group statement by statement, in its original order."""

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
"""Maximum instances of a statement; all of them are in memory at once."""


def reference(group: Group, sizes: Mapping[str, int], inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Return the outputs of a group as flat arrays in memory order; elements that no statement writes are 0.

    ``sizes``: the group's parameters; ``inputs``: flat arrays. UnsupportedError: a statement has too many instances.
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
    """Return the number of elements of an array that a group may access in memory."""
    a, last = group.arrays[array], -1
    for s in group.statements:
        read = [x.index for x in loads(s.value) if x.buffer == array]
        extents = [e.evaluate(sizes) for _, e in s.iters]
        if all(extents):
            env = _iterators(s, extents) | dict(sizes)
            offsets = (evaluate_index(a.address(i), env, {}) for i in (*read, *[s.index] * (s.array == array)))
            last = max([last, *(int(np.max(x)) for x in offsets)])
    return last + 1


def _iterators(s: Statement, extents: Sequence[int]) -> dict[str, Any]:
    """Return the values of a statement's iterators, each along its own axis."""
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
    offset = evaluate_index(group.arrays[s.array].address(s.index), env, memory)
    if s.reduce is None:
        memory[s.array][np.broadcast_to(offset, extents)] = values
        return
    written = {x for i in s.index for x in i.symbols()}
    over = tuple(k for k, x in enumerate(s.iterators) if x not in written)
    combine: Any = OPS[REDUCTIONS[s.reduce]].numpy
    wide = np.float64 if s.value.dtype in FLOATS else values.dtype
    total = combine.reduce(values, axis=over, dtype=wide, keepdims=True) if over else values
    target = np.broadcast_to(offset, total.shape)
    memory[s.array][target] = combine(memory[s.array][target], total).astype(memory[s.array].dtype)
