"""Trace the addresses that the loop IR of a kernel accesses, for all instances of a loop at once.

The loop IR is the input of the C printer. Loop variables are arrays; every task of the kernel is an instance, so that
accesses of different tasks are distinguished. Values are not computed: a data-dependent branch may be taken or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polydyn.codegen import ir
from polydyn.schedules.expr import ITEMSIZE, OPS, Array, Const, FromIndex, Op, Value
from polydyn.schedules.index import Index
from polydyn.testing.plan.arithmetic import RELATIONS, Fetch, Integers, value_of
from polydyn.testing.plan.leaves import as_loops

MAX_INSTANCES = 1 << 20
"""Maximum number of instances that are traced at once."""
ALL = 40 * MAX_INSTANCES
"""Maximum number of traced instances of a kernel."""
LINE = 64
"""Alignment of scratch in bytes."""
LOGIC_OPERATORS = ("and", "or", "not", "lt", "le", "gt", "ge", "eq", "ne")
"""Operations that keep a condition independent of data, if their operands are."""
Env = Mapping[str, Integers]


class Untraced(Exception):
    """A body cannot be traced; the message is the reason."""


class UnknownLeaf(Untraced):
    """A body calls a leaf that ``leaves.py`` does not describe."""


class Trace:
    """Accesses of one launch. ``types`` maps arrays in memory to dtypes; ``tasks`` is the number of tasks.

    ``touched`` maps (access kind, array) to arrays of ``byte * tasks + task``. Access kinds are "reads", "writes", "may
    read" and "may write". ``rooms``: elements of each local array; ``scratch``: maximum scratch bytes of a thread.
    """

    def __init__(self, types: Mapping[str, str], fetch: Fetch, tasks: int, width: int) -> None:
        self.types, self.tasks, self.width = dict(types), tasks, width
        self.instances = 0
        self.touched: dict[tuple[str, str], list[Array]] = {}
        self.rooms: dict[str, int] = {}
        self.scratch = self._held = 0
        self._fetch = fetch

    def run(self, body: ir.Body, env: Env, n: int, sure: bool = True) -> None:
        """Trace ``n`` instances. Values of ``env`` are numbers or arrays of n. ``sure``: they certainly run."""
        self.instances += n
        if self.instances > ALL:
            raise Untraced("too many instances")
        for x in body if n else ():
            self._node(x, env, n, sure)

    def all_of(self, kind: str, array: str) -> Array:
        """Return the distinct ``byte * tasks + task`` of an array, sorted."""
        pieces = self.touched.get((kind, array), [])
        return np.unique(np.concatenate(pieces)) if pieces else np.zeros(0, np.int64)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _node(self, x: ir.Node, env: Env, n: int, sure: bool) -> None:
        if isinstance(x, ir.For):
            self._loop(x, env, n, sure)
        elif isinstance(x, ir.Let):
            self.run(x.body, {**env, x.var: self._index(x.value, env)}, n, sure)
        elif isinstance(x, ir.If):
            keep = np.ones(n, bool)
            for c in x.cond:
                keep = keep & RELATIONS[c.relation](self._index(c.left, env), self._index(c.right, env))
            for body, mask in ((x.then, keep), (x.orelse, ~keep)):
                self.run(body, _some(env, mask), int(mask.sum()), sure)
        elif isinstance(x, ir.Switch):
            self._switch(x, env, n, sure)
        elif isinstance(x, ir.Alloc):
            self._alloc(x, env, n, sure)
        elif isinstance(x, (ir.Mark, ir.Outline)):
            self.run(x.body, env, n, sure)
        elif isinstance(x, ir.Store):
            self._value(x.value, env, n, sure)
            if x.reduce:
                self._touch("reads" if sure else "may read", x, env, n, ITEMSIZE[self._type(x.buffer)])
            self._touch("writes" if sure else "may write", x, env, n, ITEMSIZE[self._type(x.buffer)])
        elif isinstance(x, (ir.Def, ir.Set)):
            self._value(x.value, env, n, sure)
        elif isinstance(x, ir.Call):
            loops = as_loops(x, self.types, self.width)
            if loops is None:
                raise UnknownLeaf(x.function)
            self.run(loops, env, n, sure)
        else:
            assert isinstance(x, ir.Inst)
            raise Untraced("a statement that is not lowered")

    def _loop(self, x: ir.For, env: Env, n: int, sure: bool) -> None:
        low, high = (np.broadcast_to(self._index(i, env), (n,)) for i in (x.lo, x.hi))
        counts, first = np.maximum(high - low, 0), 0
        while first < n:  # as many of the instances around it as give no more than MOST inside
            ends = np.cumsum(counts[first:])
            last = first + max(1, int(np.searchsorted(ends, MAX_INSTANCES, "right")))
            part = counts[first:last]
            at = np.repeat(np.arange(first, min(last, n)), part)
            inside = np.arange(len(at)) - np.repeat(np.cumsum(part) - part, part)
            inner = {k: v[at] if np.ndim(v) else v for k, v in env.items()}
            self.run(x.body, {**inner, x.var: low[at] + inside}, len(at), sure)
            first = last

    def _switch(self, x: ir.Switch, env: Env, n: int, sure: bool) -> None:
        on, done = np.broadcast_to(self._index(x.on, env), (n,)), np.zeros(n, bool)
        for key, body in x.cases:
            mask = (on <= key) & ~done
            done |= mask
            self.run(body, _some(env, mask), int(mask.sum()), sure)

    def _alloc(self, x: ir.Alloc, env: Env, n: int, sure: bool) -> None:
        size = int(np.max(self._index(x.size, env)))
        self.types[x.buffer] = x.dtype
        self.rooms[x.buffer] = max(size, self.rooms.get(x.buffer, 0))
        own = -(-size * ITEMSIZE[x.dtype] // LINE) * LINE if x.scope == "scratch" else 0
        self._held += own
        self.scratch = max(self.scratch, self._held)
        self.run(x.body, env, n, sure)
        self._held -= own

    # -- values ------------------------------------------------------------------------------------------------------

    def _index(self, i: Index, env: Env) -> Integers:
        return value_of(i, env, self._fetch)

    def _type(self, buffer: str) -> str:
        if buffer not in self.types:
            raise Untraced(f"the dtype of {buffer} is unknown")
        return self.types[buffer]

    def _touch(self, kind: str, x: ir.Store | ir.FlatLoad, env: Env, n: int, item: int) -> None:
        """Record an access. ``item``: bytes per lane; addresses are in elements of the buffer."""
        unit, lane = ITEMSIZE[self._type(x.buffer)], np.arange(x.lanes)
        first, stride = (np.broadcast_to(self._index(i, env), (n,))[:, None] for i in (x.address, x.stride))
        at = (first + stride * lane).astype(np.int64)
        task = np.broadcast_to(np.broadcast_to(env["begin"], (n,))[:, None], at.shape)
        if x.mask is not None:
            live = lane < np.broadcast_to(self._index(x.mask, env), (n,))[:, None]
            at, task = at[live], task[live]
        pairs = np.unique(at.reshape(-1) * unit * self.tasks + task.reshape(-1))
        pieces = self.touched.setdefault((kind, x.buffer), [])
        pieces += [pairs + k * self.tasks for k in range(item)]

    def _value(self, v: Value, env: Env, n: int, sure: bool) -> None:
        if isinstance(v, ir.FlatLoad):
            if v.guard is not None:
                self._value(v.guard, env, n, sure)
            certain = sure and v.guard is None
            self._touch("reads" if certain else "may read", v, env, n, ITEMSIZE[v.dtype])
        elif isinstance(v, Op) and v.name == "where":
            self._value(v.args[0], env, n, sure)
            keep = self._decided(v.args[0], env, n)
            for a, mask in zip(v.args[1:], (keep, None if keep is None else ~keep), strict=True):
                if mask is None:
                    self._value(a, env, n, False)
                else:
                    self._value(a, _some(env, mask), int(mask.sum()), sure)
        else:
            for a in ir.subvalues(v):
                self._value(a, env, n, sure)

    def _decided(self, v: Value, env: Env, n: int) -> Any:
        """Return the values of a data-independent condition, or None if it depends on data or lanes."""
        if isinstance(v, Const):
            return np.broadcast_to(np.asarray(v.value), (n,))
        if isinstance(v, FromIndex):
            return np.broadcast_to(self._index(v.index, env), (n,))
        if not isinstance(v, Op) or v.name not in LOGIC_OPERATORS:
            return None
        args = [self._decided(a, env, n) for a in v.args]
        return None if any(a is None for a in args) else OPS[v.name].numpy(*args)


def _some(env: Env, mask: Array) -> dict[str, Integers]:
    return {k: v[mask] if np.ndim(v) else v for k, v in env.items()}
