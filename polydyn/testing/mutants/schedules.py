"""Mutants of schedules: tile maps, buffers and bounds, which the proof or the interpreter of schedules kills.

The kernels of ``kernel_graphs`` on a CPU have the schedules. A mutant that the proof accepts is executed
by ``schedules/interpret.py`` at ragged sizes, with random tile sizes, and compared with the statements of its group,
which the interpreter of plans runs without a schedule. One that also computes the group is another legal schedule. It
counts as not killed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np

from polydyn.errors import PolydynError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.interpret import Memory, interpret
from polydyn.schedules.model import Group
from polydyn.schedules.proof import proven
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.tilemap import When
from polydyn.testing.kernel_graphs import graph
from polydyn.testing.loops.check import work_of
from polydyn.testing.loops.statements import Flat, arrays_of, expected
from polydyn.testing.mutants.score import Score
from polydyn.testing.mutants.tilemaps import mutants
from polydyn.testing.plan.planned import plans_of
from polydyn.testing.plan.tensors import difference

TARGET, GRAPHS = "cpu:avx2", ("products", "windows", "rows", "attention")
"""The target, and the graphs whose kernels have the schedules. One call of a device kernel would need minutes."""
EXTENTS, TILES = (1, 2, 3, 5, 7, 11, 17), (1, 2, 3)
MAX_WORK = 700
"""Maximum number of instances of a statement."""
ELEMENTS, POISON = 1 << 16, 77
"""Elements of an input, and the integers that a local array has before it is written."""
TRIES, CALLS = 60, 2
"""Number of draws of sizes, and of them the ones at which a schedule is executed."""


def schedules_of(target: str, graphs: Iterable[str]) -> list[Scheduled]:
    """Return the schedules that are proven while graphs are compiled for a target, one of each group and structure."""
    found: dict[str, Scheduled] = {}
    with _recorded(found):
        for name in graphs:
            plans_of(graph(name), target=target)
    return list(found.values())


@contextmanager
def _recorded(found: dict[str, Scheduled]) -> Iterator[None]:
    def noted(t: Scheduled) -> None:
        prove(t)
        found.setdefault(repr((t.group, sorted(t.map.views), t.map.axes)), t)

    with patch.object(proven, "prove", noted):
        yield


class Calls:
    """Sizes at which a schedule computes its group, and the results that are expected there."""

    def __init__(self, t: Scheduled, seed: int) -> None:
        numbers, self.at = random.Random(seed), list[tuple[Mapping[str, int], Flat, dict[str, np.ndarray]]]()
        for k in range(TRIES):
            sizes = {n: numbers.choice(EXTENTS) for n in t.group.params}
            if work_of(t.group, sizes) > MAX_WORK:
                continue
            tiles = {n: numbers.choice(TILES) for n, (when, _) in t.map.sizes().items() if when is not When.COUNT}
            call = _call(t.group, sizes, k)
            if call is not None and right(t, sizes | tiles, *call):
                self.at.append((sizes | tiles, *call))
            if len(self.at) == CALLS:
                return

    def right(self, t: Scheduled) -> bool:
        """Return whether another schedule computes the group at all sizes."""
        return all(right(t, *call) for call in self.at)


def _call(group: Group, sizes: Mapping[str, int], seed: int) -> tuple[Flat, dict[str, np.ndarray]] | None:
    """Return the results of a group and its inputs, or None if random integers are subscripts out of range."""
    elements = {}
    for n, a in group.arrays.items():
        ends = (max(0, e.evaluate(sizes) - 1) * s.evaluate(sizes) for e, s in zip(a.shape, a.strides, strict=True))
        elements[n] = a.offset.evaluate(sizes) + sum(ends) + 1 if a.role == "output" else ELEMENTS
    arrays = arrays_of(group, elements, np.random.default_rng(seed), 2)
    try:
        return expected(group, None, arrays, sizes), arrays
    except (IndexError, KeyError):
        return None


def right(t: Scheduled, sizes: Mapping[str, int], results: Flat, arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether a schedule computes the expected results of its group."""
    memory, where = Memory(), dict[str, np.ndarray]()
    for n, x in t.group.arrays.items():
        shape = tuple(e.evaluate(sizes) for e in x.shape)
        kind = numpy_dtype(x.dtype)
        if n not in arrays:
            memory[n] = np.full(shape, POISON if kind.kind in "iub" else np.nan)
            continue
        where[n], a = _addresses(t.group, n, sizes, len(arrays[n])), arrays[n]
        given = a[where[n] % len(a)].astype(kind if kind.kind in "iub" else np.float32)
        memory[n] = given if len(shape) == 1 else given.reshape(shape)
    try:
        with np.errstate(all="ignore"):
            interpret(t, sizes, memory)
    except (PolydynError, KeyError, IndexError, ValueError):
        return False
    outputs = [n for n in arrays if t.group.arrays[n].role == "output"]
    return not any(difference(memory[n].reshape(-1), results.arrays[n][where[n]]) for n in outputs)


def _addresses(group: Group, name: str, sizes: Mapping[str, int], count: int) -> np.ndarray:
    """Return the address of each element of an array. The subscripts of an input with one axis are addresses."""
    a = group.arrays[name]
    if len(a.shape) == 1 and a.role != "output":
        return np.arange(count)
    grid = np.indices([e.evaluate(sizes) for e in a.shape]).reshape(len(a.shape), -1)
    strides = np.array([s.evaluate(sizes) for s in a.strides], np.int64)
    return a.offset.evaluate(sizes) + strides @ grid


def accepted(t: Scheduled) -> bool:
    """Return whether the proof accepts a schedule."""
    try:
        prove(t)
    except (PolydynError, KeyError):
        return False
    return True


def score(each: int, seed: int, graphs: Iterable[str] = GRAPHS) -> Score:
    """Return the score of at most ``each`` mutants of every schedule."""
    total = Score("tile map")
    for t in schedules_of(TARGET, graphs):
        calls = Calls(t, seed)
        if not calls.at:
            total.notes["a schedule that the interpreter of schedules does not execute at small sizes"] += 1
            continue
        every = list(mutants(t))
        for what, mutant in random.Random(seed).sample(every, min(each, len(every))):
            text = f"{[s.name for s in t.group.statements]}: {what}"
            total.add(text, lambda m=mutant, c=calls: not (accepted(m) and c.right(m)))  # type: ignore[misc]
    return total
