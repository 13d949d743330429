"""Lowerings of the statements of any schedule, with subscripts, extents and storage from the tile map.

They depend on neither the purpose of the schedule nor the target: ``cpu.scheduled`` and ``cuda.scheduled`` build
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Compare, FlatLoad, If, Store
from polydyn.codegen.lower import Lowering
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import FromIndex, Load, Op, Value, transform
from polydyn.schedules.expr import loads as loads_of
from polydyn.schedules.group.polyhedra import padded_read, reads
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import Meets
from polydyn.schedules.tree.scheduled import Buffer, Scheduled
from polydyn.schedules.tree.tilemap import Digit, When


class Instances:
    """The lowering of each instance of a scheduled group.

    ``sizes``: the tile sizes that the schedule left as symbols. ScheduleError: one is missing; the schedule has parts
    of uneven size, hidden digits or padding, which need the passes of a kernel family; a local of the group has no
    storage.
    """

    units, evens = False, False
    """Whether there are units, which have storage of their own; whether tiles may have nearly equal sizes."""

    def __init__(self, schedule: Scheduled, sizes: Mapping[str, int] | None = None) -> None:
        self.schedule, self.group = schedule, schedule.group
        self.sizes = self._sizes(sizes or {})
        self._refuse_what_needs_a_family()

    def apart(self, buffer: Buffer) -> frozenset[Digit]:
        """Return the digits whose values each have separate storage."""
        return frozenset()

    def _sizes(self, given: Mapping[str, int]) -> dict[str, Index]:
        out: dict[str, Index] = {}
        for n, (when, value) in self.schedule.map.sizes().items():
            if when is When.COUNT:
                out[n] = value
            elif n in given:
                out[n] = Index.of(given[n])
            else:
                remedy = f"pass sizes={{{n!r}: 8}}"
                raise ScheduleError(f"the size {n} has no value", rule="sizes of tiles", remedy=remedy)
        return {n: v.subs(out) for n, v in out.items()}

    def _refuse_what_needs_a_family(self) -> None:
        t = self.schedule
        even = {x for x, o in t.map.origins.items() if o.even and o.lines is None and self.evens}
        uneven = sorted({*t.map.shares, *(t.map.origins.keys() - even)})
        hidden = sorted(n for n, view in t.map.views.items() if view.hidden)
        scoped = sorted(x.name for x in t.buffers if x.scope and not self.units)
        for found, what in (
            (uneven, "parts of uneven size along"), (hidden, "digits hidden in an instruction in"),
            (scoped, "storage for each unit in"), (sorted(t.padded), "padding in"),
        ):  # fmt: skip
            if found:
                raise ScheduleError(
                    f"{what} {', '.join(found)}", rule="schedules without a kernel family",
                    remedy="leave out balance, begins, pad, hidden digits and scopes",
                )  # fmt: skip
        for n, a in self.group.arrays.items():
            if a.role == "local" and all(x.array != n for x in t.buffers):
                raise ScheduleError(
                    f"{n} has no storage", tensor=n, rule="locals live in buffers",
                    remedy=f"keep(t, {n!r}, {n!r}, below=...) inside the loops of the tasks",
                )  # fmt: skip

    # -- coordinates -----------------------------------------------------------------------------------------------

    def _cell(self, statement: str, buffer: Buffer, at: Mapping[str, Index]) -> Index:
        """Return the offset in a buffer that a statement accesses, in elements, row-major over its axes."""
        address, left = ZERO, buffer.fixed | self.apart(buffer)
        for axis in buffer.axes:
            place = self.schedule.map.element(statement, axis, left)
            address = address * self._shape(buffer, axis) + place
        return address.subs(self.sizes).subs(at)

    def _shape(self, buffer: Buffer, axis: str) -> Index:
        left = buffer.fixed | self.apart(buffer)
        return product(d.size for d in self.schedule.map.axes[axis] if d not in left)

    def elements(self, buffer: Buffer) -> Index:
        """Return the elements of a buffer."""
        return product(self._shape(buffer, axis) for axis in buffer.axes).subs(self.sizes)

    def _memory(self) -> frozenset[str]:
        """Return the names of buffers that are arrays of the group, in which sums pass from step to step."""
        return frozenset(x.memory for x in self.schedule.carried)

    def storage(self) -> list[Buffer]:
        """Return the buffers that are not arrays of the group."""
        return [x for x in self.schedule.buffers if x.name not in self._memory()]

    def _buffer(self, statement: str, array: str, *meets: Meets) -> list[Buffer]:
        """Return the buffers in which a statement of the group accesses an array."""
        met = [f.buffer for f in self.schedule.flow if f.statement == statement and f.meets in meets]
        found = map(self.schedule.buffer, (n for n in met if n not in self._memory()))
        return [x for x in found if x.array == array]

    # -- statements ------------------------------------------------------------------------------------------------

    def lowerings(self) -> dict[str, Lowering]:
        """Return statement -> the lowering of an instance."""
        own = {s.name: s for s in self.group.statements}
        return {n: self._lowering(n, own.get(n)) for n in self.schedule.map.views}

    def _lowering(self, name: str, statement: Statement | None) -> Lowering:
        starts = self.starts()

        def f(at: Mapping[str, Index]) -> Body:
            stored = self._computed(statement, at) if statement else self._copied(name, at)
            alive = [tuple(x.subs(self.sizes).subs(at) for x in cut) for cut in self._live(name)]
            condition = tuple(Compare("<", e, x) for e, x in alive)
            body: Body = (If(condition, (stored,)),) if condition else (stored,)
            return substitute(body, {n: e.subs(at) for n, e in starts.items()}) if starts else body

        return f

    def _live(self, name: str) -> list[tuple[Index, Index]]:
        """Return (element, extent) for each axis along which a statement is cut and whose last tile may be shorter."""
        whole = set()
        for axis, digits in self.schedule.map.axes.items():
            tile = product(d.size for d in digits[1:]).subs(self.sizes)
            divides = (self.schedule.map.extents[axis] % tile) == ZERO
            if digits[0].when is When.COUNT and divides and not self.schedule.map.has_empty_step(axis):
                whole.add(axis)
        cut = [x.axis for x in self.schedule.clips if x.statement == name]
        alive = zip(cut, self.schedule.live(name), strict=True)
        return [self._tile_end(x, y) for x, y in alive if x in self.schedule.map.origins or x not in whole]

    def _tile_end(self, axis: str, cut: tuple[Index, Index]) -> tuple[Index, Index]:
        """Return a cut that ends where the next tile begins, for tiles of nearly equal sizes."""
        tm = self.schedule.map
        if axis not in tm.origins:
            return cut
        return cut[0], tm.origin(axis, Index.of(tm.origins[axis].tile.name) + 1)

    def starts(self) -> dict[str, Index]:
        """Return the symbols of tiles of nearly equal sizes -> their first elements."""
        tm = self.schedule.map
        return {o.symbol: tm.origin(x, Index.of(o.tile.name)).subs(self.sizes) for x, o in tm.origins.items()}

    def _env(self, name: str, at: Mapping[str, Index]) -> dict[str, Index]:
        return {x: e.subs(self.sizes).subs(at) for x, e in self.schedule.map.environment(name).items()}

    def _computed(self, s: Statement, at: Mapping[str, Index]) -> Store:
        value = transform(s.value, lambda v: self._read(s.name, v, at))
        for into in self._buffer(s.name, s.array, Meets.WRITES, Meets.UPDATES):
            return Store(into.name, self._cell(s.name, into, at), value, s.reduce)
        env = self._env(s.name, at)
        return Store(s.array, self._address(s.array, s.index, env), value, s.reduce)

    def _read(self, name: str, v: Value, at: Mapping[str, Index]) -> Value:
        """Return a part of a value with the elements of the group at their coordinates."""
        env = self._env(name, at)
        if isinstance(v, FromIndex):
            return replace(v, index=v.index.subs(env))
        if isinstance(v, Op) and v.name == "where" and isinstance(v.args[1], FlatLoad):
            return v.args[1] if v.args[1].buffer in self._copies else v  # the copy holds what padding gives
        if not isinstance(v, Load):
            return v
        met = self._buffer(name, v.buffer, Meets.READS, Meets.UPDATES)
        for x in self.schedule.holding(met, self._axes(name, v)):
            return FlatLoad(v.dtype, x.name, self._cell(name, x, at))
        return FlatLoad(v.dtype, v.buffer, self._address(v.buffer, v.index, env))

    def _axes(self, name: str, v: Load) -> set[str]:
        """Return the axes of a statement that a read runs over."""
        of = self.schedule.map.iterators
        return {of[name, x] for i in v.index for x in i.symbols() if (name, x) in of}

    def _address(self, array: str, index: tuple[Index, ...], env: Mapping[str, Index]) -> Index:
        return self.group.arrays[array].address(tuple(i.subs(env) for i in index))

    def _copied(self, name: str, at: Mapping[str, Index]) -> Store:
        """Return the store of a statement that a transformation added: from a buffer or memory to a buffer or memory.
        """
        met = {f.meets: self.schedule.buffer(f.buffer) for f in self.schedule.flow if f.statement == name}
        into, source = met[Meets.WRITES], met.get(Meets.READS)
        dtype = self.group.arrays[into.array].dtype
        if source is None:
            value: Value = self._operand(name, into, at)
        elif source.name in self._memory():
            value = FlatLoad(dtype, *self._carrier(name, at))
        else:
            value = FlatLoad(dtype, source.name, self._cell(name, source, at))
        if into.name in self._memory():
            return Store(*self._carrier(name, at), value)
        return Store(into.name, self._cell(name, into, at), value)

    def _carrier(self, name: str, at: Mapping[str, Index]) -> tuple[str, Index]:
        """Return the output that carries sums from block to block, and the address in it."""
        dtype = self.group.backbone.value.dtype
        s = next(x for x in self.group.epilogues if x.value.dtype == dtype)
        return s.array, self._address(s.array, s.index, self._env(name, at))

    @cached_property
    def _copies(self) -> frozenset[str]:
        """The buffers that copies of elements of memory are in."""
        written = {f.buffer: f.statement for f in self.schedule.flow if f.meets is Meets.WRITES}
        own = {s.name for s in self.group.statements}
        return frozenset(b for b, n in written.items() if n not in own and b not in self._memory())

    def _operand(self, name: str, into: Buffer, at: Mapping[str, Index]) -> Value:
        """Return the element that a copy reads, or the choice between it and the value of a padding."""
        reader = self._reader(into.name)
        if choice := padded_read(reader, into.array):
            return transform(choice, lambda v: self._element(name, v, at))
        if any(x.guarded for x in reads(reader) if x.access.array == into.array):
            reason = f"{reader.name} reads {into.array} only where a condition holds"
            raise ScheduleError(reason, tensor=into.array, rule="copies of padded reads")
        for x in loads_of(reader.value):
            if x.buffer == into.array and self.schedule.holding([into], self._axes(reader.name, x)):
                return FlatLoad(x.dtype, x.buffer, self._address(x.buffer, x.index, self._env(name, at)))
        raise ScheduleError(f"{reader.name} does not read {into.array} along {into.axes}", tensor=into.array)

    def _element(self, name: str, v: Value, at: Mapping[str, Index]) -> Value:
        """Return a part of a value with elements in memory."""
        env = self._env(name, at)
        if isinstance(v, FromIndex):
            return replace(v, index=v.index.subs(env))
        return FlatLoad(v.dtype, v.buffer, self._address(v.buffer, v.index, env)) if isinstance(v, Load) else v

    def _reader(self, buffer: str) -> Statement:
        """Return the statement of the group that a chain of copies serves."""
        own = {s.name: s for s in self.group.statements}
        while True:
            reader = next(f.statement for f in self.schedule.flow if f.buffer == buffer and f.meets is Meets.READS)
            if reader in own:
                return own[reader]
            buffer = next(f.buffer for f in self.schedule.flow if f.statement == reader and f.meets is Meets.WRITES)
