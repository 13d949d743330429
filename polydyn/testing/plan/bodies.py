"""Run the statements of a kernel's group on the simulated memory, element by element.

The strides and offsets of the group's arrays give the address of each element, at the sizes that the candidate passes.
All instances of a statement run at once, and statements run one after another. The schedule and the fusion plan are
not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.lowering.argsort import ArgSortGroup
from polydyn.lowering.serial import SerialGroup
from polydyn.schedules.expr import Array as Numbers
from polydyn.schedules.expr import Load, Value, loads
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, Group, Statement
from polydyn.testing.plan.arithmetic import RELATIONS, size_of, value_of
from polydyn.testing.plan.memory import Memory
from polydyn.testing.plan.tensors import difference
from polydyn.testing.plan.values import Evaluator, factors_of, sum_of_products, symbols_in

MAX_INSTANCES = 1 << 22
"""Maximum number of elements of an iteration space that are evaluated at once."""
COMBINE: Mapping[str, np.ufunc] = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
Ranges = tuple[tuple[str, int, int], ...]
"""(iterator, first value, end) of each iterator; the end is exclusive."""
INITIAL_INTEGER = 77
"""Initial value of integers in local arrays of a kernel. Floats are NaN initially."""


class Body:
    """One run of a group. ``buffers``: array -> buffer of the plan. ``sizes``: values of the group's parameters.

    ``serial``: the group reads its own results, as running sums and updates do.
    """

    def __init__(
        self, memory: Memory, group: Group, form: object, buffers: Mapping[str, str], sizes: Mapping[str, int]
    ) -> None:
        self.memory, self.group, self.form = memory, group, form
        self.buffers, self.sizes, self.serial = buffers, sizes, False
        self.evaluator = Evaluator(self._load)
        self.locals: dict[str, Numbers] = {}
        self.made: dict[str, list[tuple[Numbers, Numbers]]] = {}
        held = [s for s in group.statements if group.arrays[s.array].role == "rows"]  # of one row, for every batch
        self.batch = [x for x, _ in held[0].iters if all(x not in i.symbols() for i in held[0].index)] if held else []

    def run(self) -> None:
        """Run all statements in order."""
        if isinstance(self.form, ArgSortGroup):
            self._order(self.form)
            return
        for s in self.group.statements:
            self._statement(s)

    def compare(self, outputs: Sequence[str], expected: Callable[[str], Numbers], least: float) -> None:
        """Compare the results of the group with the expected tensors, in the order of its output arrays.

        ``least`` is the minimum tolerance, see ``difference``.
        """
        arrays = [n for n, a in self.group.arrays.items() if a.role == "output"]
        for name, tensor in zip(arrays, outputs, strict=True):
            want = expected(tensor).reshape(-1)
            at, values = self._last_values(name, want.dtype)
            if at.size != want.size:
                self.memory.faults.add("incomplete", tensor, f"{at.size} of {want.size} elements are written")
                continue
            error = difference(values, want, least)
            if error and difference(np.sort(values), np.sort(want), least):  # memory may hold axes in another order
                self.memory.faults.add("value", tensor, error)

    def _last_values(self, name: str, kind: np.dtype[Any]) -> tuple[Numbers, Numbers]:
        """Return the addresses that an array was written at, sorted, and the last value of each."""
        pieces = self.made.get(name, [])
        if not pieces:
            return np.zeros(0, np.int64), np.zeros(0, kind)
        at = np.concatenate([a for a, _ in pieces])[::-1]
        values = np.concatenate([v for _, v in pieces])[::-1]
        once, first = np.unique(at, return_index=True)
        return once, values[first]

    # -- statements --------------------------------------------------------------------------------------------------

    def _statement(self, s: Statement) -> None:
        """Run all instances. A statement that reads its own previous result runs step by step."""
        extents = [(x, size_of(e, self.sizes)) for x, e in s.iters]
        if any(n <= 0 for _, n in extents):
            return
        itself = s.reduce is None and any(x.buffer == s.array for x in loads(s.value))
        if not (itself and self.group.arrays[s.array].role == "output"):
            self._block(s, tuple((x, 0, n) for x, n in extents))
            return
        self.serial = True
        last, steps = extents[-1]
        for k in range(steps):
            self._block(s, (*((x, 0, n) for x, n in extents[:-1]), (last, k, k + 1)))

    def _block(self, s: Statement, ranges: Ranges) -> None:
        """Run the instances of a box. A large box is split in halves."""
        factors = self._factors(s)
        used = [symbols_in(f) for f in factors] if len(factors) > 1 else [{x for x, _, _ in ranges}]
        if max(math.prod(b - a for x, a, b in ranges if x in u) for u in used) > MAX_INSTANCES:
            k = max(range(len(ranges)), key=lambda k: ranges[k][2] - ranges[k][1])
            x, a, b = ranges[k]
            if b - a > 1:
                for half in ((x, a, (a + b) // 2), (x, (a + b) // 2, b)):
                    self._block(s, (*ranges[:k], half, *ranges[k + 1 :]))
                return
        env: dict[str, Any] = dict(self.sizes)
        for k, (x, a, b) in enumerate(ranges):
            env[x] = np.arange(a, b).reshape([-1 if j == k else 1 for j in range(len(ranges))])
        self._instances(s, env, ranges, factors)

    def _instances(self, s: Statement, env: dict[str, Any], ranges: Ranges, factors: Sequence[Value]) -> None:
        full = tuple(b - a for _, a, b in ranges)
        mask = self._mask(s, env, full)
        at = [self.evaluator.index(i, env, mask) for i in s.index]
        free = tuple(k for k, (x, _, _) in enumerate(ranges) if all(x not in i.symbols() for i in s.index))
        reduced = s.reduce is not None and mask is None and not any(i.fetches() for i in s.index)
        kept = tuple(1 if reduced and k in free else n for k, n in enumerate(full))
        if reduced and len(factors) > 1:
            value = sum_of_products([self.evaluator.value(f, env, None) for f in factors], full, free)
        else:
            value = np.broadcast_to(self.evaluator.value(s.value, env, mask), full)
            if reduced:
                wide = value.astype(np.float64) if value.dtype == np.float32 else value
                value = COMBINE[s.reduce or ""].reduce(wide, axis=free, keepdims=True).astype(value.dtype)
        at = [np.broadcast_to(i, kept) for i in at]
        value = np.broadcast_to(value, kept)
        if mask is not None:
            at, value = [i[mask] for i in at], value[mask]
        array = self.group.arrays[s.array]
        if array.role == "output":
            self._write(array, self._address(array, at), value, s.reduce)
            return
        rows = [np.broadcast_to(env[x], kept) for x in self.batch if array.role == "rows"]
        self._keep(array, (*rows, *at), value, s.reduce)

    def _mask(self, s: Statement, env: Mapping[str, Any], full: tuple[int, ...]) -> Numbers | None:
        """Return a mask of the instances that run, or None if all run."""
        mask: Numbers | None = None
        if isinstance(self.form, SerialGroup) and s.role != "init":
            for c in self.form.conditions:
                left, right = (self.evaluator.index(i, env, mask) for i in (c.left, c.right))
                here = np.broadcast_to(RELATIONS[c.relation](left, right), full)
                mask = here if mask is None else mask & here
        return mask

    def _factors(self, s: Statement) -> list[Value]:
        """Return the factors of a sum of products if every iterator occurs in a factor, else the whole value."""
        if s.reduce != "sum" or isinstance(self.form, SerialGroup):
            return [s.value]
        found = factors_of(s.value)
        whole = {x for f in found for x in symbols_in(f)} >= {x for x, _ in s.iters}
        return found if whole else [s.value]

    # -- arrays ------------------------------------------------------------------------------------------------------

    def _address(self, a: Array, at: Sequence[Any]) -> Numbers:
        strides = [size_of(t, self.sizes) for t in a.strides]
        return np.asarray(sum((i * t for i, t in zip(at, strides, strict=True)), value_of(a.offset, self.sizes)))

    def _write(self, a: Array, at: Numbers, value: Numbers, reduce: str | None) -> None:
        """Store elements of an output, or combine them with the stored elements."""
        kind = numpy_dtype(a.dtype)
        with np.errstate(all="ignore"):
            at, value = np.broadcast_to(at, value.shape).reshape(-1), value.astype(kind).reshape(-1)
        if reduce is not None:
            self.serial = True
            where, back = np.unique(at, return_inverse=True)
            total = self.memory.read(self.buffers[a.name], where, a.dtype).copy()
            COMBINE[reduce].at(total, back, value)
            at, value = where, total
        rewrites = isinstance(self.form, SerialGroup)
        self.memory.write(self.buffers[a.name], at, value, a.dtype, rewrites=rewrites)
        self.made.setdefault(a.name, []).append((at, value))

    def _keep(self, a: Array, place: tuple[Numbers, ...], value: Numbers, reduce: str | None) -> None:
        """Store elements of a local array of the kernel."""
        room = self._local(a)
        if room.ndim == 0:
            new = value.reshape(-1)[-1]
            room[()] = new if reduce is None else COMBINE[reduce](room, new)
        elif reduce is None:
            room[place] = value
        else:
            COMBINE[reduce].at(room, place, value.astype(room.dtype))

    def _local(self, a: Array) -> Numbers:
        if a.name not in self.locals:
            extents = {x: size_of(e, self.sizes) for s in self.group.statements for x, e in s.iters}
            front = [extents[x] for x in self.batch] if a.role == "rows" else []
            kind = numpy_dtype(a.dtype)
            shape = [*front, *(size_of(e, self.sizes) for e in a.shape)]
            self.locals[a.name] = np.full(shape, np.nan if kind.kind == "f" else INITIAL_INTEGER, kind)
        return self.locals[a.name]

    def _load(self, name: str, subscripts: tuple[Index, ...], env: Mapping[str, Any], mask: Numbers | None) -> Numbers:
        """Return elements of an array, in memory or inside the kernel."""
        a = self.group.arrays[name]
        at = [self.evaluator.index(i, env, mask) for i in subscripts]
        if a.role not in ("local", "rows"):
            return self.memory.read(self.buffers[name], self._address(a, at), a.dtype, mask)
        room = self._local(a)
        at = [*(env[x] for x in self.batch if a.role == "rows"), *at]
        if mask is not None:
            at = [np.clip(i, 0, n - 1) for i, n in zip(at, room.shape, strict=True)]
        return np.asarray(room[tuple(at)])

    # -- orders ------------------------------------------------------------------------------------------------------

    def _order(self, form: ArgSortGroup) -> None:
        """Sort each line and write the positions of its first elements."""
        (s,) = self.group.statements
        assert isinstance(s.value, Load)
        env: dict[str, Any] = dict(self.sizes)
        extents = [size_of(e, self.sizes) for _, e in s.iters]
        for k, (x, _) in enumerate(s.iters):
            env[x] = np.arange(extents[k]).reshape([-1 if j == k else 1 for j in range(len(extents) + 1)])
        source, target = self.group.arrays[s.value.buffer], self.group.arrays[s.array]
        count = size_of(form.count, self.sizes)
        at = value_of(s.value.index[0], env) + size_of(form.stride, self.sizes) * np.arange(count)
        lines = np.broadcast_to(self.memory.read(self.buffers[source.name], at, source.dtype), (*extents, count))
        keys = lines.astype(np.int64 if lines.dtype.kind in "iu" else np.float64)
        ranks = np.argsort(-keys if form.largest else keys, axis=-1, kind="stable")
        ranks = ranks[..., : size_of(form.positions, self.sizes)]
        places = [*(value_of(i, env) for i in s.index[:-1]), np.arange(ranks.shape[-1])]
        self._write(target, self._address(target, places), ranks, None)
