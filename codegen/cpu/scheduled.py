"""The C kernel of any schedule: what a composition of transformations computes, without the passes of a kernel family.

Loops come from the tree, subscripts, extents and storage from the tile map: nothing here knows what the schedule is
for. Buffers lie in scratch or on the stack, innermost loops become vectors where they can, and all else stays as the
tree has it. A schedule that somebody writes in a notebook runs this way; compiled models take the kernels of families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.codegen.cpu.emit import bound_names, emit
from polydyn.codegen.cpu.kernel import CpuTarget, Kernel
from polydyn.codegen.ir import (
    Alloc,
    Body,
    Compare,
    FlatLoad,
    For,
    If,
    Mark,
    Node,
    Store,
    consume,
    rewrite,
    walk,
)
from polydyn.codegen.lower import Lowering, lower, scratch_bytes
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.tiles import TASK, task_count, tasks
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.schedules.errors import Declined, ScheduleError
from polydyn.schedules.expr import FromIndex, Load, Value, transform
from polydyn.schedules.expr import loads as loads_of
from polydyn.schedules.index import ONE, ZERO, Index, minimum, product
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import Meets, extent
from polydyn.schedules.tree.scheduled import Buffer, Scheduled
from polydyn.schedules.tree.tilemap import When

STACK_ELEMENTS = 1024
"""Buffers of a constant size up to this lie on the stack."""


class ScheduledKernel:
    """Builds the kernel of a scheduled group, on a CPU.

    ``sizes``: the tile sizes that the schedule left as symbols. ScheduleError: one is missing; the schedule has parts
    of uneven size, units, hidden digits or padding, which only the passes of a kernel family make; a local of the group
    has no storage.
    """

    def __init__(self, name: str, schedule: Scheduled, target: CpuTarget, sizes: Mapping[str, int] | None = None):
        self.name, self.schedule, self.target = name, schedule, target
        self.group, self.notes = schedule.group, list[str]()
        self.sizes = self._sizes(sizes or {})
        self._refuse_what_needs_a_family()

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
        uneven = sorted({*t.map.shares, *t.map.origins})
        hidden = sorted(n for n, view in t.map.views.items() if view.hidden)
        scoped = sorted(x.name for x in t.buffers if x.scope)
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

    # -- places ----------------------------------------------------------------------------------------------------

    def _cell(self, statement: str, buffer: Buffer, at: Mapping[str, Index]) -> Index:
        """Where a statement meets a buffer, in elements from its beginning: row-major over its axes."""
        cell, shape = self.schedule.cell(statement, buffer.name), self.schedule.shape(buffer.name)
        address = ZERO
        for axis, place in cell.items():
            address = address * shape[axis] + place
        return address.subs(self.sizes).subs(at)

    def _elements(self, buffer: Buffer) -> Index:
        return product(self.schedule.shape(buffer.name).values()).subs(self.sizes)

    def _memory(self) -> frozenset[str]:
        """Names of buffers that are arrays of the group: where sums pass through on their way."""
        return frozenset(x.memory for x in self.schedule.carried)

    def _storage(self) -> list[Buffer]:
        return [x for x in self.schedule.buffers if x.name not in self._memory()]

    def _buffer(self, statement: str, array: str, *meets: Meets) -> list[Buffer]:
        """The buffers in which a statement of the group meets an array."""
        met = [f.buffer for f in self.schedule.flow if f.statement == statement and f.meets in meets]
        found = map(self.schedule.buffer, (n for n in met if n not in self._memory()))
        return [x for x in found if x.array == array]

    # -- statements ------------------------------------------------------------------------------------------------

    def lowerings(self) -> dict[str, Lowering]:
        """Statement -> what executes an instance."""
        own = {s.name: s for s in self.group.statements}
        return {n: self._lowering(n, own.get(n)) for n in self.schedule.map.views}

    def _lowering(self, name: str, statement: Statement | None) -> Lowering:
        def f(at: Mapping[str, Index]) -> Body:
            stored = self._computed(statement, at) if statement else self._copied(name, at)
            alive = [(e.subs(self.sizes).subs(at), x.subs(self.sizes)) for e, x in self.schedule.live(name)]
            condition = tuple(Compare("<", e, x) for e, x in alive)
            return (If(condition, (stored,)),) if condition else (stored,)

        return f

    def _env(self, name: str, at: Mapping[str, Index]) -> dict[str, Index]:
        return {x: e.subs(self.sizes).subs(at) for x, e in self.schedule.map.environment(name).items()}

    def _computed(self, s: Statement, at: Mapping[str, Index]) -> Store:
        value = transform(s.value, lambda v: self._read(s.name, v, at))
        for into in self._buffer(s.name, s.array, Meets.WRITES, Meets.UPDATES):
            return Store(into.name, self._cell(s.name, into, at), value, s.reduce)
        env = self._env(s.name, at)
        return Store(s.array, self._address(s.array, s.index, env), value, s.reduce)

    def _read(self, name: str, v: Value, at: Mapping[str, Index]) -> Value:
        """A part of a value with elements of the group at their places."""
        env = self._env(name, at)
        if isinstance(v, FromIndex):
            return replace(v, index=v.index.subs(env))
        if not isinstance(v, Load):
            return v
        axes = {self.schedule.map.iterators.get((name, x)) for i in v.index for x in i.symbols()} - {None}
        for x in self._buffer(name, v.buffer, Meets.READS, Meets.UPDATES):
            if set(x.axes) == axes:
                return FlatLoad(v.dtype, x.name, self._cell(name, x, at))
        return FlatLoad(v.dtype, v.buffer, self._address(v.buffer, v.index, env))

    def _address(self, array: str, index: tuple[Index, ...], env: Mapping[str, Index]) -> Index:
        return self.group.arrays[array].address(tuple(i.subs(env) for i in index))

    def _copied(self, name: str, at: Mapping[str, Index]) -> Store:
        """A statement that a transformation added: from a buffer or memory into a buffer or memory."""
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
        """The output that carries sums from block to block, and the element there."""
        dtype = self.group.backbone.value.dtype
        s = next(x for x in self.group.epilogues if x.value.dtype == dtype)
        return s.array, self._address(s.array, s.index, self._env(name, at))

    def _operand(self, name: str, into: Buffer, at: Mapping[str, Index]) -> FlatLoad:
        reader = self._reader(into.name)
        for x in loads_of(reader.value):
            axes = {self.schedule.map.iterators.get((reader.name, n)) for i in x.index for n in i.symbols()} - {None}
            if x.buffer == into.array and axes == set(into.axes):
                return FlatLoad(x.dtype, x.buffer, self._address(x.buffer, x.index, self._env(name, at)))
        raise ScheduleError(f"{reader.name} does not read {into.array} along {into.axes}", tensor=into.array)

    def _reader(self, buffer: str) -> Statement:
        """The statement of the group that a chain of copies is for."""
        own = {s.name: s for s in self.group.statements}
        while True:
            reader = next(f.statement for f in self.schedule.flow if f.buffer == buffer and f.meets is Meets.READS)
            if reader in own:
                return own[reader]
            buffer = next(f.buffer for f in self.schedule.flow if f.statement == reader and f.meets is Meets.WRITES)

    # -- the kernel ------------------------------------------------------------------------------------------------

    def build(self) -> Kernel:
        """The kernel. CodegenError: a bug."""
        symbols = self.group.params
        names = bound_names(self.group.arrays, symbols)
        counts = {extent(k): e.subs(self.sizes) for k, e in self.schedule.extents().items()}
        body = loops(self.name, self.schedule.tiled())
        body = run(self.name, body, (
            Step("bind", "extents of loops", lambda b: bind(b, counts)),
            Step("marks", "only the tasks are a pass's", _only_tasks),
            Step("lower", "statements become stores", lambda b: lower(b, self.lowerings()),
                 tuple(x.name for x in self._storage())),
        ), names)  # fmt: skip
        count = task_count(body)
        body = run(self.name, body, (
            Step("tasks", "the coincident band becomes a range of tasks", tasks),
            Step("trim", "guards become bounds of loops", trim),
            Step("fold", "decided guards and single trips go", fold),
            Step("vectorise", "innermost loops become vectors", self.vectorise),
            Step("storage", "buffers around all tasks", self.allocate),
            Step("fold", "decided guards and single trips go", fold),
        ), names)  # fmt: skip
        scratch, notes = scratch_bytes(body), tuple(dict.fromkeys(self.notes))
        return emit(self.name, body, self.group.arrays, symbols, {}, count, scratch, notes, inline_math=True)

    def vectorise(self, body: Body) -> Body:
        """Innermost loops of stores as vectors; the others stay, with a note."""

        def f(n: Node) -> Node | Body:
            if not isinstance(n, For) or n.var == TASK or not all(isinstance(x, Store) for x in n.body):
                return n
            made = vectorise_loop(n, self.target.width)
            if isinstance(made, Declined):
                self.notes.append(f"loop {n.var} is scalar: {made}")
                return n
            return made

        return rewrite(body, f)

    def allocate(self, body: Body) -> Body:
        """Storage of all buffers, one after the other for each thread."""
        for x in self._storage():
            size, dtype = self._elements(x), self.group.arrays[x.array].dtype
            small = size.constant is not None and size.constant <= STACK_ELEMENTS
            body = (Alloc(x.name, dtype, size, "stack" if small else "scratch", body),)
        return body


def _only_tasks(body: Body) -> Body:
    """The parallel loops on top under the mark of tasks; no other mark."""
    names = {n.name for n in walk(body) if isinstance(n, Mark)}
    for name in names:
        body = consume(body, name)
    return (Mark(TASK, body),)


def trim(body: Body) -> Body:
    """Guards of a loop's whole body: those without its variable go outside, ``variable + rest < end`` shorten it."""

    def f(n: Node) -> Node | Body:
        if not (isinstance(n, For) and len(n.body) == 1 and isinstance(n.body[0], If) and not n.body[0].orelse):
            return n
        guard, hi = n.body[0], n.hi
        outside: list[Compare] = []
        inside: list[Compare] = []
        for c in guard.cond:
            left, right = (c.left - c.right).split(n.var)
            if c.relation != "<" or n.var in left.symbols() or n.var in right.symbols():
                inside.append(c)
            elif left == ZERO:
                outside.append(c)
            elif left == ONE:
                hi = minimum(hi, -right)
            else:
                inside.append(c)
        loop = For(n.var, n.lo, hi, (If(tuple(inside), guard.then),) if inside else guard.then, n.kind)
        return If(tuple(outside), (loop,)) if outside else loop

    return rewrite(body, f)
