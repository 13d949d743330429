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
MOST_POINTS = 1 << 24
"""Maximum instances of a statement that are in memory at once."""


def reference(group: Group, sizes: Mapping[str, int], inputs: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """Return the outputs of a group as flat arrays in memory order; elements that no statement writes are 0.

    ``sizes``: the group's parameters; ``inputs``: flat arrays. UnsupportedError: a statement has too many instances for
    one value of its first iterator.
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


def _iterators(s: Statement, extents: Sequence[int], rows: range | None = None) -> dict[str, Any]:
    """Return the values of a statement's iterators, each along its own axis. ``rows``: those of the first one."""
    rank = len(extents)
    values = {x: np.arange(n).reshape([-1 if k == axis else 1 for k in range(rank)])
              for axis, (x, n) in enumerate(zip(s.iterators, extents, strict=True))}  # fmt: skip
    if rows is not None:
        values[s.iterators[0]] = np.arange(rows.start, rows.stop).reshape([-1] + [1] * (rank - 1))
    return values


def _execute(group: Group, s: Statement, sizes: Mapping[str, int], memory: Arrays) -> None:
    """Execute a statement, in parts of its first iterator if it has many instances."""
    extents = [e.evaluate(sizes) for _, e in s.iters]
    if not all(extents):
        return
    row = prod(extents[1:])
    if not extents or prod(extents) <= MOST_POINTS:
        _execute_part(group, s, sizes, memory, extents, None)
        return
    if row > MOST_POINTS or all(s.iterators[0] not in i.symbols() for i in s.index):
        raise UnsupportedError(
            f"{s.name} has {prod(extents)} instances, {row} for each {s.iterators[0]}; at most {MOST_POINTS} fit",
            node=s.name, rule="the reference holds the instances of a row", remedy="take smaller sizes",
        )  # fmt: skip
    step = MOST_POINTS // row
    for first in range(0, extents[0], step):
        rows = range(first, min(extents[0], first + step))
        _execute_part(group, s, sizes, memory, [len(rows), *extents[1:]], rows)


def _execute_part(
    group: Group, s: Statement, sizes: Mapping[str, int], memory: Arrays, extents: Sequence[int], rows: range | None
) -> None:
    env = _iterators(s, extents, rows) | dict(sizes)

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
