"""Execute a scheduled group directly, with the tile map as the only source of subscripts.

Loops come from the tree, elements and cells from the map, and operands from the buffers that the flow names, as in code
generation. The interpreter needs no compiler, so it finds errors of a schedule in milliseconds, and it decides which
mutations of a tile map change a result. A cell of a buffer must be written before it is read. Memory outside an operand
reads as zero, as in a padded copy. A store outside an output is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import OPS, REDUCTIONS, Const, FromIndex, Load, Op, Value
from polydyn.schedules.index import Index
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import Coord, End, Meets
from polydyn.schedules.tree.nodes import Band, Mark, Sequence, Tree
from polydyn.schedules.tree.scheduled import Buffer, Scheduled, flat
from polydyn.schedules.tree.tilemap import Loop

V = Index.of
Memory = dict[str, npt.NDArray[Any]]
Env = Mapping[str, int]


@dataclass(frozen=True)
class Instance:
    """An executed instance: its coordinates, the elements of the group's iterators, the digits of its axes."""

    statement: str
    at: Mapping[Coord, int]
    iterators: Mapping[str, int]
    digits: Mapping[str, tuple[int, ...]]


def instances(t: Scheduled, sizes: Mapping[str, int]) -> list[Instance]:
    """Return the instances of all statements in the order of the schedule; ``sizes`` as for ``interpret``."""
    run = _Order(t, sizes, {})
    run.walk(flat(t.tree), frozenset(t.map.views), {})
    return run.found


def interpret(t: Scheduled, sizes: Mapping[str, int], memory: Memory) -> dict[str, int]:
    """Execute the group; return how often each statement ran.

    ``sizes`` gives the group's parameters and the symbolic tile sizes that are not counts. ``memory`` has the inputs,
    and arrays for the outputs, which are written. LegalityError: a cell is read before it is written, or a store is
    outside its array.
    """
    run = _Run(t, sizes, memory)
    run.walk(flat(t.tree), frozenset(t.map.views), {})
    return run.count


class _Run:
    def __init__(self, t: Scheduled, sizes: Mapping[str, int], memory: Memory) -> None:
        self.t, self.memory = t, memory
        self.env: dict[str, int] = dict(sizes)
        for n, (_, value) in t.map.sizes().items():
            if n not in self.env:
                self.env[n] = value.evaluate(self.env)
        self.cells: dict[tuple[str | int, ...], Any] = {}
        self.statements = {s.name: s for s in t.group.statements}
        self.live = {n: t.live(n) for n in t.map.views}
        self.places: dict[tuple[str, str], tuple[Index, ...]] = {}
        self.count = dict.fromkeys(t.map.views, 0)
        self.element = {(n, ax): t.map.element(n, ax) for (n, it), ax in t.map.iterators.items() if self._full(n, ax)}

    def _full(self, n: str, axis: str) -> bool:
        return set(self.t.map.axes[axis]) <= set(self.t.map.views[n].digits)

    # -- the tree ------------------------------------------------------------------------------------------------

    def walk(self, node: Tree, names: frozenset[str], at: Env) -> None:
        """Run the statements ``names`` of a node; ``at`` has the coordinates of the loops around it."""
        if isinstance(node, Mark):
            self.walk(node.child, names, at)
        elif isinstance(node, Sequence):
            for part, below in node.children:
                if names & part:
                    self.walk(below, names & part, at)
        elif isinstance(node, Band) and node.members:
            k, rest = Coord(node.members[0]), Band(node.members[1:], node.child)
            bounds = {n: self._bounds(n, k, at) for n in names}
            for x in range(min(lo for lo, _ in bounds.values()), max(hi for _, hi in bounds.values())):
                inside = frozenset(n for n in names if bounds[n][0] <= x < bounds[n][1])
                if inside:
                    self.walk(rest, inside, self._origins({**at, k: x}, next(iter(inside)), k))
        elif isinstance(node, Band):
            self.walk(node.child, names, at)
        else:
            for n in sorted(names):
                self.execute(n, at)

    def _bounds(self, n: str, k: Coord, at: Env) -> tuple[int, int]:
        """Return the steps of a loop that a statement runs."""
        view = self.t.view(n)
        x = view.loop(k)
        if x is None:
            raise LegalityError(f"{n} has no loop {k}", node=n, rule="tile map")
        lo, hi = self._range(x, at)
        for c, low, short in view.guard:
            if c == k:
                lo, hi = lo + low, hi - short
        return (lo, hi) if x.at is None else (lo, min(hi, lo + 1)) if x.at is End.FIRST else (max(lo, hi - 1), hi)

    def _range(self, x: Loop, at: Env) -> tuple[int, int]:
        env, tm = {**self.env, **at}, self.t.map
        axis = x.digits[0].axis if x.digits else ""
        share, origin, digits = tm.shares.get(axis), tm.origins.get(axis), tm.axes.get(axis, ())
        tile = digits[1:2] if share else ()
        if share and x.digits == tile:  # counts along the axis
            return env[share.tiles], env[f"{share.tiles} end"]
        if share and x.digits[0] in tile:  # several digits as one number, inside the block's share
            if origin and origin.even:
                return 0, env[f"{share.elements} end"] - env[share.elements]
            below = Index.of(1)
            for d in x.digits[1:]:
                below = below * d.size
            return 0, (env[f"{share.tiles} end"] - env[share.tiles]) * below.evaluate(env)
        if origin and origin.even and digits.index(x.digits[0]) == digits.index(origin.tile) + 1:
            return 0, min(x.extent.evaluate(env), env[f"{origin.symbol} end"] - env[origin.symbol])
        return 0, x.extent.evaluate(env)

    def _origins(self, at: Env, n: str, k: Coord) -> Env:
        """Add the kernels' symbols for the first tile and element of the parts that loop ``k`` has just entered."""
        x = self.t.view(n).loop(k)
        if x is None or len(x.digits) != 1 or x.at:
            return at
        (d,), tm, out = x.digits, self.t.map, dict(at)
        env, share, origin = {**self.env, **at}, tm.shares.get(d.axis), tm.origins.get(d.axis)
        if share and d == share.block:
            for end, block in (("", at[k]), (" end", at[k] + 1)):
                tile = tm.share(d.axis, V(block)).evaluate(env)
                out[share.tiles + end] = tile
                if origin:
                    out[share.elements + end] = tm.origin(d.axis, V(tile)).evaluate(env)
        if origin and d == origin.tile:
            out[origin.symbol] = tm.origin(d.axis, V(at[k])).evaluate(env)
            out[f"{origin.symbol} end"] = tm.origin(d.axis, V(at[k] + 1)).evaluate(env)
        return out

    # -- statements ----------------------------------------------------------------------------------------------

    def execute(self, n: str, at: Env) -> None:
        """Execute one instance, with all points of the digits that it hides."""
        hidden = self.t.view(n).hidden
        for point in np.ndindex(*(d.size.evaluate(self.env) for d in hidden)):
            env = {**self.env, **at, **{d.name: int(x) for d, x in zip(hidden, point, strict=True)}}
            if all(e.evaluate(env) < x.evaluate(env) for e, x in self.live[n]):
                self.count[n] += 1
                if n in self.statements:
                    self.compute(self.statements[n], env)
                else:
                    self.copy(n, env)

    def compute(self, s: Statement, env: Env) -> None:
        """Execute a statement of the group: store its value in a buffer or in memory."""
        value = self._value(s.name, s.value, env)
        combine = OPS[REDUCTIONS[s.reduce]].numpy if s.reduce else None
        for into in self._buffers_of(s.name, s.array, Meets.WRITES, Meets.UPDATES):
            cell = self._cell(s.name, into, env)
            self.cells[cell] = combine(self._read_cell(s.name, cell), value) if combine else value
            return
        at, array = self._at(s.name, s.index, env), self.memory[s.array]
        if not all(0 <= i < e for i, e in zip(at, array.shape, strict=True)):
            what = f"{s.name} stores {s.array}{list(at)}, which has {array.shape}"
            raise LegalityError(what, node=s.name, tensor=s.array)
        array[at] = combine(array[at], value) if combine else value

    def copy(self, n: str, env: Env) -> None:
        """Execute a statement that a transformation added.

        It copies from a buffer or memory into a buffer, or sends results to memory.
        """
        met = {f.meets: self.t.buffer(f.buffer) for f in self.t.flow if f.statement == n}
        into, source = met.get(Meets.WRITES), met.get(Meets.READS)
        if source is not None:
            value = self._read_cell(n, self._cell(n, source, env))
            if into is None:
                s = next(s for s in self.t.group.statements if s.array == source.array)
                self.memory[s.array][self._at(n, s.index, env)] = value
                return
        else:
            assert into is not None
            reader = next(f.statement for f in self.t.flow if f.buffer == into.name and f.meets is Meets.READS)
            value = self._operand(n, self._root(reader), into, env)
        self.cells[self._cell(n, into, env)] = value

    def _root(self, reader: str) -> Statement:
        """Return the statement of the group that a chain of copies serves."""
        while reader not in self.statements:
            held = next(f.buffer for f in self.t.flow if f.statement == reader and f.meets is Meets.WRITES)
            reader = next(f.statement for f in self.t.flow if f.buffer == held and f.meets is Meets.READS)
        return self.statements[reader]

    def _operand(self, n: str, reader: Statement, into: Buffer, env: Env) -> Any:
        for x in _loads(reader.value):
            if x.buffer == into.array and self.t.holding([into], self._axes(reader.name, x)):
                return self._memory(x.buffer, self._at(n, x.index, env))
        raise LegalityError(f"{reader.name} does not read {into.array} along {into.axes}", node=n, tensor=into.array)

    # -- values --------------------------------------------------------------------------------------------------

    def _value(self, n: str, v: Value, env: Env) -> Any:
        if isinstance(v, Const):
            return v.value
        if isinstance(v, FromIndex):
            return self._at(n, (v.index,), env)[0]
        if isinstance(v, Load):
            return self._load(n, v, env)
        assert isinstance(v, Op)
        return OPS[v.name].numpy(*(self._value(n, x, env) for x in v.args))

    def _load(self, n: str, v: Load, env: Env) -> Any:
        for x in self.t.holding(self._buffers_of(n, v.buffer, Meets.READS, Meets.UPDATES), self._axes(n, v)):
            return self._read_cell(n, self._cell(n, x, env))
        return self._memory(v.buffer, self._at(n, v.index, env))

    def _axes(self, n: str, v: Load) -> set[str]:
        """Return the axes of a statement that a read runs over."""
        of = self.t.map.iterators
        return {of[n, s] for i in v.index for s in i.symbols() if (n, s) in of}

    def _memory(self, array: str, at: tuple[int, ...]) -> Any:
        x = self.memory[array]
        inside = all(0 <= i < e for i, e in zip(at, x.shape, strict=True))
        return x[at] if inside else x.dtype.type(0)

    def _at(self, n: str, index: tuple[Index, ...], env: Env) -> tuple[int, ...]:
        where = {it: self.element[n, ax].evaluate(env) for (s, it), ax in self.t.map.iterators.items()
                 if s == n and (n, ax) in self.element}  # fmt: skip
        return tuple(i.evaluate({**env, **where}) for i in index)

    def _buffers_of(self, n: str, array: str, *kinds: Meets) -> list[Buffer]:
        """Return the buffers in which a statement of the group accesses an array."""
        carried = {c.memory for c in self.t.carried}
        met = [self.t.buffer(f.buffer) for f in self.t.flow if f.statement == n and f.meets in kinds]
        return [x for x in met if x.array == array and x.name not in carried]

    def _cell(self, n: str, x: Buffer, env: Env) -> tuple[str | int, ...]:
        if (n, x.name) not in self.places:
            self.places[n, x.name] = tuple(self.t.cell(n, x.name).values())
        return (x.name, *(env.get(k, 0) for k in x.scope), *(i.evaluate(env) for i in self.places[n, x.name]))

    def _read_cell(self, n: str, cell: tuple[str | int, ...]) -> Any:
        if cell not in self.cells:
            what = f"{n} reads {cell[0]}{list(cell[1:])}, where nothing was written"
            raise LegalityError(what, node=n, tensor=str(cell[0]))
        return self.cells[cell]


class _Order(_Run):
    """Records instances instead of executing them."""

    def __init__(self, t: Scheduled, sizes: Mapping[str, int], memory: Memory) -> None:
        super().__init__(t, sizes, memory)
        self.found: list[Instance] = []
        self.values = {n: t.map.values(n) for n in t.map.views}

    def compute(self, s: Statement, env: Env) -> None:
        """Record an instance of a statement of the group."""
        self._note(s.name, env, {x: self._at(s.name, (V(x),), env)[0] for x in s.iterators})

    def copy(self, n: str, env: Env) -> None:
        """Record an instance of a statement that a transformation added."""
        self._note(n, env, {})

    def _note(self, n: str, env: Env, iterators: Mapping[str, int]) -> None:
        values, digits = self.values[n], {}
        for axis, ds in self.t.map.axes.items():
            digits[axis] = tuple(values[d].evaluate(env) for d in ds if d in values)
        at = {x.coord: env[x.coord] for x in self.t.view(n).loops if x.coord in env}
        self.found.append(Instance(n, at, iterators, digits))


def _loads(v: Value) -> list[Load]:
    if isinstance(v, Load):
        return [v]
    return [x for c in getattr(v, "args", ()) for x in _loads(c)]
