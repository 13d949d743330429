"""Vectors of memory: a short loop over adjacent elements becomes wide accesses around unrolled arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from polydyn.codegen import ir
from polydyn.codegen.passes.hoist import comparison
from polydyn.schedules.expr import FLOATS, ITEMSIZE, WIDENED, Const, Op, Value, conjuncts
from polydyn.schedules.index import ONE, ZERO, Atom, Index

OPPOSITE = {"<": ">=", ">=": "<"}
"""The opposite of a relation."""
Multiples = tuple[tuple[Index, int], ...]
"""Required multiples: (expression, number)."""


def multiples(rest: Index, vector: int, iterators: Collection[str]) -> Multiples | None:
    """Return the expressions that must be multiples of ``vector`` so that ``rest`` is one for all iterators, or None.

    Floor divisions, minima and maxima may have any value, as iterators may.
    """
    if vector == 1:
        return ()
    parts: dict[tuple[str | Atom, ...], Index] = {}
    for m, c in rest.terms.items():
        moving = tuple(a for a in m if isinstance(a, Atom) or a in iterators)
        fixed = tuple(a for a in m if a not in moving)
        parts[moving] = parts.get(moving, ZERO) + Index({fixed: c})
    requirements = []
    for p in parts.values():
        if all(c % vector == 0 for c in p.terms.values()):
            continue
        if p.constant is not None:
            return None
        requirements.append((p, vector))
    return tuple(dict.fromkeys(requirements))


def widen(
    body: ir.Body, var: str, lanes: int, buffers: Mapping[str, str], iterators: Collection[str]
) -> tuple[ir.Body, Multiples] | None:
    """Return ``for var in [0, lanes): body`` with wide accesses, and the required multiples of ``lanes``.

    ``body``: registers, stores, and loops and choices around them, in which every lane has its own registers.
    ``buffers``: those in global memory, with their dtypes; ``iterators``: symbols other than parameters, which
    addresses may use in any multiple. Loads of unit stride whose alignment can be required become wide. A guarded load
    becomes wide only if its guard is uniform over lanes and its value outside is a number. Return None if a store
    cannot become wide.
    """
    return _Widening(var, lanes, buffers, iterators).build(body)


def stored_value(v: Value) -> Value:
    """Return a stored value without the rounding to fewer bits that the store does itself."""
    rounds = isinstance(v, Op) and v.name == "cast" and WIDENED.get(v.dtype) == "float32"
    return v.args[0] if rounds and isinstance(v, Op) and v.args[0].dtype == "float32" else v


@dataclass(frozen=True)
class _Source:
    """Adjacent elements in memory from an address on; if ``guard`` is set, their value outside it is ``other``."""

    buffer: str
    first: Index
    guard: tuple[ir.Compare, ...] = ()
    other: Const | None = None


class _Widening:
    def __init__(self, var: str, lanes: int, buffers: Mapping[str, str], iterators: Collection[str]) -> None:
        self.var, self.lanes, self.buffers, self.iterators = var, lanes, buffers, set(iterators)
        self.requirements: dict[tuple[Index, int], None] = {}
        self.loads: dict[_Source, str] = {}
        self.stores: dict[tuple[str, Index], str] = {}
        self.own: dict[str, str] = {}
        """Registers that outlive a loop over lanes: arrays of them, with their dtypes."""

    def build(self, body: ir.Body) -> tuple[ir.Body, Multiples] | None:
        nodes = list(ir.walk(body))
        if not all(isinstance(n, (ir.Def, ir.Set, ir.Store, ir.For, ir.If)) for n in nodes):
            return None
        if any(isinstance(n, (ir.For, ir.If)) for n in nodes):
            self.own = {n.reg: n.value.dtype for n in nodes if isinstance(n, ir.Def)}
        out = self._nodes(body)
        if out is None:
            return None
        for reg, dtype in self.own.items():
            out = (ir.Alloc(reg, dtype, Index.of(self.lanes), "register", out),)
        return out, tuple(self.requirements)

    def _nodes(self, body: ir.Body) -> ir.Body | None:
        """Return the body with its loops and choices, and a loop over lanes for each run of other statements."""
        out: ir.Body = ()
        for around, part in groupby(body, lambda n: isinstance(n, (ir.For, ir.If))):
            for run in ([n] for n in part) if around else [list(part)]:
                n = run[0]
                made = (
                    self._loop(n) if isinstance(n, ir.For) else self._if(n) if isinstance(n, ir.If) else self._run(run)
                )
                if made is None:
                    return None
                out += made
        return out

    def _loop(self, n: ir.For) -> ir.Body | None:
        if self.var in n.lo.symbols() | n.hi.symbols():
            return None
        self.iterators.add(n.var)
        body = self._nodes(n.body)
        return None if body is None else (replace(n, body=body),)

    def _if(self, n: ir.If) -> ir.Body | None:
        """Widen the branches of a condition that is uniform over lanes."""
        if any(self.var in c.left.symbols() | c.right.symbols() for c in n.cond):
            return None
        then, orelse = self._nodes(n.then), self._nodes(n.orelse)
        return None if then is None or orelse is None else (replace(n, then=then, orelse=orelse),)

    def _run(self, run: Sequence[ir.Node]) -> ir.Body | None:
        self.loads, self.stores = {}, {}
        nodes = tuple(n for n in map(self._node, run) if n is not None)
        if any(isinstance(n, ir.Store) and n.buffer in self.buffers for n in nodes):
            return None
        out: ir.Body = (
            *(self._load(r, x) for x, r in self.loads.items()),
            ir.For(self.var, ZERO, Index.of(self.lanes), nodes, "unroll"),
            *(self._move("pd_stg_wide", r, b, a, False) for (b, a), r in self.stores.items()),
        )
        names = [*((r, x.buffer) for x, r in self.loads.items()), *((r, b) for (b, _), r in self.stores.items())]
        for r, b in names:
            out = (ir.Alloc(r, self.buffers[b], Index.of(self.lanes), "register", out),)
        return out

    def _load(self, register: str, x: _Source) -> ir.Node:
        move = self._move("pd_ldg_wide", register, x.buffer, x.first, True)
        if x.other is None:
            return move
        outside = ir.For(
            self.var, ZERO, Index.of(self.lanes), (ir.Store(register, Index.of(self.var), x.other),), "unroll"
        )
        return ir.If(x.guard, (move,), (outside,))

    def _move(self, function: str, register: str, buffer: str, address: Index, load: bool) -> ir.Node:
        inside, outside = (
            ir.Pointer(self.buffers[buffer], register, ZERO),
            ir.Pointer(self.buffers[buffer], buffer, address),
        )
        return ir.Call(f"{function}<{self.lanes}>", (inside, outside) if load else (outside, inside))

    def _aligned(self, buffer: str, address: Index, load: bool = False) -> Index | None:
        """Return the address of the vector's first element if the vector may move as one, else None."""
        stride, rest = address.split(self.var)
        size = ITEMSIZE[self.buffers[buffer]] * self.lanes
        moves = size % 4 == 0 or (load and size == 2)
        if stride != ONE or self.var in rest.symbols() or not moves or self.buffers[buffer] == "float64":
            return None
        requirements = multiples(rest, self.lanes, self.iterators)
        if requirements is None:
            return None
        self.requirements |= dict.fromkeys(requirements)
        return rest

    def _node(self, n: ir.Node) -> ir.Node | None:
        assert isinstance(n, (ir.Def, ir.Set, ir.Store))
        n = replace(n, value=self._value(n.value))
        if isinstance(n, ir.Store) and n.buffer in self.buffers and n.reduce is None:
            first = self._aligned(n.buffer, n.address)
            if first is not None:
                name = self.stores.setdefault((n.buffer, first), f"out{len(self.stores)}")
                return ir.Store(name, Index.of(self.var), stored_value(n.value))
        if isinstance(n, (ir.Def, ir.Set)) and n.reg in self.own:
            if isinstance(n.value, ir.Undefined):
                return None
            return ir.Store(n.reg, Index.of(self.var), n.value, n.reduce if isinstance(n, ir.Set) else None)
        return n

    def _value(self, v: Value, guard: tuple[ir.Compare, ...] = (), other: Const | None = None) -> Value:
        """Return a value of a lane, with loads from vectors; with ``other`` they occur only under a guard."""
        if isinstance(v, ir.Reg) and v.name in self.own:
            return ir.FlatLoad(v.dtype, v.name, Index.of(self.var))
        if isinstance(v, ir.FlatLoad) and v.buffer in self.buffers:
            return self._from(v, guard, other) or v
        if isinstance(v, Op) and v.name == "where":
            return self._choice(v, guard)
        return replace(v, args=tuple(self._value(a, guard, other) for a in v.args)) if isinstance(v, Op) else v

    def _choice(self, v: Op, around: tuple[ir.Compare, ...] = ()) -> Value:
        """Return one of two values; values under a guard may have addresses that do not exist elsewhere.

        ``around``: the guard around the choice.
        """
        choice, then, orelse = v.args
        compared = [comparison(x) for x in conjuncts(choice)]
        guard = tuple(self._of_all_lanes(c) for c in compared if c is not None)
        if None in compared or any(self.var in c.left.symbols() | c.right.symbols() for c in guard):
            return replace(v, args=(self._value(choice), *map(self._registers, v.args[1:])))
        read = then.args[0] if isinstance(then, Op) and then.name == "cast" and then.dtype == "float32" else then
        alike = read is then or (isinstance(read, ir.FlatLoad) and WIDENED.get(read.dtype) == "float32")
        if isinstance(read, ir.FlatLoad) and isinstance(orelse, Const) and alike:  # no choice remains
            found = self._from(read, guard, orelse) if not around and read.buffer in self.buffers else None
            return v if found is None else found if read is then else Op(then.dtype, "cast", (found,))
        nothing = Const("float32", 0.0)
        if len(guard) == 1 and (other := OPPOSITE.get(guard[0].relation)):
            last = self._value(orelse, (*around, replace(guard[0], relation=other)), nothing)
        else:
            last = self._registers(orelse)
        return replace(v, args=(choice, self._value(then, (*around, *guard), nothing), last))

    def _of_all_lanes(self, c: ir.Compare) -> ir.Compare:
        """Return a comparison of the vector's first element, if with whole vectors all elements compare equally."""
        stride, rest = c.left.split(self.var)
        alike = stride == ONE and all(multiples(x, self.lanes, self.iterators) == () for x in (rest, c.right))
        return replace(c, left=rest) if alike and c.relation in ("<", ">=") else c

    def _registers(self, v: Value) -> Value:
        """Return the value with registers of the lane."""
        if isinstance(v, ir.Reg) and v.name in self.own:
            return ir.FlatLoad(v.dtype, v.name, Index.of(self.var))
        return replace(v, args=tuple(map(self._registers, v.args))) if isinstance(v, Op) else v

    def _from(self, v: ir.FlatLoad, guard: tuple[ir.Compare, ...], other: Const | None) -> Value | None:
        """Return a lane's part of a load that becomes wide."""
        first = self._aligned(v.buffer, v.address, load=True)
        if first is None:
            return None
        if other is not None:
            other = Const(v.dtype, other.value if v.dtype in FLOATS else int(other.value))
        name = self.loads.setdefault(_Source(v.buffer, first, guard, other), f"in{len(self.loads)}")
        return ir.FlatLoad(v.dtype, name, Index.of(self.var))
