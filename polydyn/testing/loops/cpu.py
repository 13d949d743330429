"""Execute the loop IR of a CPU kernel. A value of several lanes is an array; tasks run one after another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from polydyn.codegen import ir
from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.testing.loops.indices import Env, Indices, Run
from polydyn.testing.loops.leaves_cpu import CALLS, FUNCTIONS, Tiles, leaf
from polydyn.testing.loops.rooms import Broken, Room, Unbound, poisoned, value_dtype
from polydyn.testing.loops.values import REDUCE, Values, fit

Action = Callable[[Env], None]
MAX_STEPS = 1 << 22
"""Maximum number of loop iterations of a run: a kernel that needs more is taken for one that never ends."""


class CpuRun:
    """One run of a kernel. ``buffers``: name -> (dtype, elements); outputs are written in place. ``width``: lanes of a
    whole float32 vector.
    """

    def __init__(self, buffers: Mapping[str, tuple[str, Array]], width: int) -> None:
        self.rooms = {n: Room(n, t, a) for n, (t, a) in buffers.items()}
        self.width, self.steps, self.tiles = width, 0, Tiles()
        self.executed: set[Hashable] = set()
        """Identities of executed nodes, and pairs (identity, event): a branch, a number of steps, a vector with a
        mask."""
        self.stored, self.loaded, self.unread = (
            {n: np.zeros(a.shape, bool) for n, (_, a) in buffers.items()} for _ in range(3)
        )
        """The elements of each buffer that are stored, that are read, and that are stored and not read afterwards."""
        self.indices = Indices(self._fetch)
        self.values = Values(self.indices, self._load, self._apply)

    def run(self, body: ir.Body, env: Mapping[str, int]) -> None:
        """Execute a body. Raises Broken if it accesses memory out of bounds or never ends."""
        action = self.block(body)
        try:
            with np.errstate(all="ignore"):
                action({n: int(v) for n, v in env.items()})
        except KeyError as e:
            raise Unbound(f"{e} has no value") from e

    def _fetch(self, e: Env, name: str, at: int) -> int:
        room = self.rooms[name]
        room.check(at, at)
        return int(room.data[at])

    def note(self, room: Room, places: Any, stored: bool, again: bool = False) -> None:
        """Note the elements of memory that are read or stored.

        Raises Broken if an element is stored twice and not read in between, unless ``again``.
        """
        unread = self.unread.get(room.name)
        if unread is None or not unread.size:
            return
        if room.data.size != unread.size or np.max(places) >= unread.size:  # elements of another type
            return
        if stored and not again and unread[places].any():
            raise Broken(f"{room.name}[{np.min(places)}..{np.max(places)}] is stored twice, not read in between")
        (self.stored if stored else self.loaded)[room.name][places] = True
        unread[places] = stored

    # -- nodes -------------------------------------------------------------------------------------------------------

    def block(self, body: ir.Body) -> Action:
        """Return the function that executes nodes one after another."""
        actions = [self.node(n) for n in body]
        declared = [n.reg for n in body if isinstance(n, ir.Def)]
        if len(actions) == 1:
            return actions[0]

        def run(e: Env) -> None:
            for name in declared:  # no value is left of the last time
                e.pop(name, None)
            for a in actions:
                a(e)

        return run

    def node(self, n: ir.Node) -> Action:
        """Return the function that executes a node, and notes its identity in ``executed``."""
        action, number = self._action(n), id(n)

        def run(e: Env) -> None:
            self.executed.add(number)
            action(e)

        return run

    def _action(self, n: ir.Node) -> Action:
        if isinstance(n, ir.For):
            return self._for(n)
        if isinstance(n, ir.Let):
            var, value, inner = n.var, self.indices.compile(n.value), self.block(n.body)

            def bind(e: Env) -> None:
                e[var] = value(e)
                inner(e)

            return bind
        if isinstance(n, ir.If):
            return self._if(n)
        if isinstance(n, ir.Switch):
            return self._switch(n)
        if isinstance(n, ir.Alloc):
            return self._alloc(n)
        if isinstance(n, (ir.Mark, ir.Outline)):
            return self.block(n.body)
        if isinstance(n, ir.Store):
            return self._store(n)
        if isinstance(n, (ir.Def, ir.Set)):
            return self._assign(n)
        if isinstance(n, ir.Call):
            called: Action = leaf(n.function, CALLS)(self, n)
            return called
        raise Broken(f"a node without meaning: {n!r}")

    def _for(self, n: ir.For) -> Action:
        var, lo, hi, inner = n.var, self.indices.compile(n.lo), self.indices.compile(n.hi), self.block(n.body)
        number, seen = id(n), self.executed

        def run(e: Env) -> None:
            first, end = lo(e), hi(e)
            self.steps += max(0, end - first)
            seen.add((number, min(2, max(0, end - first))))
            if self.steps > MAX_STEPS:
                raise Broken(f"loop {var} does not end")
            for x in range(first, end):
                e[var] = x
                inner(e)

        return run

    def _if(self, n: ir.If) -> Action:
        tests, then, orelse = [self.indices.compare(c) for c in n.cond], self.block(n.then), self.block(n.orelse)
        number, seen = id(n), self.executed

        def run(e: Env) -> None:
            failed = next((k for k, t in enumerate(tests) if not t(e)), None)
            seen.add((number, "yes" if failed is None else failed))
            (then if failed is None else orelse)(e)

        return run

    def _switch(self, n: ir.Switch) -> Action:
        on, cases = self.indices.compile(n.on), [(k, self.block(b)) for k, b in n.cases]
        number, seen = id(n), self.executed

        def run(e: Env) -> None:
            value = on(e)
            for k, b in cases:
                if value <= k:
                    seen.add((number, k))
                    return b(e) if value > 0 else None
            raise Broken(f"a switch on {value}, beyond its cases")

        return run

    def _alloc(self, n: ir.Alloc) -> Action:
        size, inner, name, dtype = self.indices.compile(n.size), self.block(n.body), n.buffer, n.dtype
        self.rooms.setdefault(name, Room(name, dtype, poisoned(0, dtype)))

        def run(e: Env) -> None:
            self.rooms[name].data = poisoned(max(0, size(e)), dtype)
            inner(e)

        return run

    # -- values ------------------------------------------------------------------------------------------------------

    def _assign(self, n: ir.Def | ir.Set) -> Action:
        name, value, lanes, kind = n.reg, self.values.compile(n.value), n.lanes, value_dtype(n.value.dtype)
        if isinstance(n, ir.Set) and n.reduce:
            combine = REDUCE[n.reduce]

            def update(e: Env) -> None:
                e[name] = np.asarray(combine(e[name], fit(value(e), lanes))).astype(kind)[()]

            return update

        def assign(e: Env) -> None:
            e[name] = fit(value(e), lanes)

        return assign

    def _apply(self, v: ir.Apply, args: list[Run]) -> Run:
        meaning = leaf(v.function, FUNCTIONS)
        return lambda e: meaning(self.width, *[a(e) for a in args])

    def room(self, name: str, dtype: str) -> Room:
        """Return the room of a buffer; before the pass that allocates a buffer it grows as it is used."""
        if name not in self.rooms:
            self.rooms[name] = Growing(name, dtype, poisoned(0, dtype))
        return self.rooms[name]

    def _load(self, v: ir.FlatLoad) -> Run:
        room, kind, lanes, dtype = self.room(v.buffer, v.dtype), value_dtype(v.dtype), v.lanes, v.dtype
        at, stride = self.indices.compile(v.address), self.indices.compile(v.stride)
        live, guard = self._live(v), None if v.guard is None else self.values.compile(v.guard)
        number = id(v)
        if ITEMSIZE[dtype] > ITEMSIZE[room.dtype]:
            return lambda e: _word(room, at(e), dtype).astype(kind)[()]
        if lanes == 1:

            def scalar(e: Env) -> Any:
                i = at(e)
                if guard is not None and not guard(e):
                    return kind.type(0)
                room.check(i, i)
                self.note(room, i, False)
                return room.view(dtype)[i].astype(kind)

            return scalar

        def vector(e: Env) -> Any:
            count = min(lanes, max(0, live(e)))
            mask = np.arange(lanes) < count
            if guard is not None:
                mask &= np.asarray(fit(guard(e), lanes), bool)
            self.executed.add((number, int(np.sign(count) + (count == lanes))))
            out = np.zeros(lanes, kind)
            places = (at(e) + stride(e) * np.arange(lanes))[mask]
            if places.size:
                room.check(places.min(), places.max())
                self.note(room, places, False)
                out[mask] = room.view(dtype)[places].astype(kind)
            return out

        return vector

    def _live(self, n: ir.FlatLoad | ir.Store) -> Run:
        lanes = n.lanes
        return self.indices.compile(n.mask) if n.mask is not None else lambda e: lanes

    def _store(self, n: ir.Store) -> Action:
        room, lanes, kind = self.room(n.buffer, n.value.dtype), n.lanes, value_dtype(n.value.dtype)
        at, stride, live, value = (
            self.indices.compile(n.address), self.indices.compile(n.stride), self._live(n), self.values.compile(n.value)
        )  # fmt: skip
        combine, number = REDUCE[n.reduce] if n.reduce else None, id(n)
        again = bool(n.reduce or n.again)

        def store(e: Env) -> None:
            new = fit(value(e), lanes)
            count = min(lanes, max(0, live(e)))
            places = at(e) + stride(e) * np.arange(count) if lanes > 1 else np.array([at(e)])
            self.executed.add((number, int(np.sign(places.size) + (places.size == lanes))))
            if not places.size:
                return
            room.check(places.min(), places.max())
            x = np.broadcast_to(np.asarray(new), (lanes,))[: len(places)]
            if combine is not None:
                x = np.asarray(combine(room.data[places].astype(kind), x)).astype(kind)
            room.data[places] = x.astype(room.data.dtype)
            self.note(room, places, True, again)

        return store


class Growing(Room):
    """A buffer that no pass has allocated yet."""

    def check(self, low: Any, high: Any) -> None:
        """Make room up to ``high``."""
        if low < 0:
            raise Broken(f"{self.name}[{low}]")
        if high >= self.size:
            self.data = np.concatenate([self.data, poisoned(int(high) + 1 - self.size, self.dtype)])


def _word(room: Room, at: int, dtype: str) -> Any:
    """Return several elements, from ``at`` on, as one."""
    count = ITEMSIZE[dtype] // ITEMSIZE[room.dtype]
    room.check(at, at + count - 1)
    return np.ascontiguousarray(room.data[at : at + count]).view(numpy_dtype(dtype))[0]
