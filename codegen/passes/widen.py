"""Vectors of memory: a short loop over neighbouring elements becomes wide accesses around unrolled arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from polydyn.codegen.ir import Alloc, Body, Call, Def, FlatLoad, For, Node, Pointer, Set, Store
from polydyn.schedules.expr import ITEMSIZE, WIDENED, Op, Value
from polydyn.schedules.index import ONE, ZERO, Atom, Index

Multiples = tuple[tuple[Index, int], ...]
"""What must be multiples of which number."""


def multiples(rest: Index, vector: int, iterators: Collection[str]) -> Multiples | None:
    """What must be multiples of ``vector`` so that ``rest`` is one for all iterators; None when it cannot be said.

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
    body: Body, var: str, lanes: int, buffers: Mapping[str, str], iterators: Collection[str]
) -> tuple[Body, Multiples] | None:
    """``for var in [0, lanes): body`` with wide accesses, and what must be multiples of ``lanes`` for them.

    ``body``: registers and stores only. ``buffers``: those in global memory, with their dtypes; ``iterators``: symbols
    other than parameters, which addresses may use in any multiple. Loads of unit stride whose alignment can be said
    become wide, unless a guard may keep them from happening. None when a store cannot become wide.
    """
    return _Widening(var, lanes, buffers, iterators).build(body)


def stored_value(v: Value) -> Value:
    """A value on its way to memory, without the rounding to fewer bits that the store does."""
    rounds = isinstance(v, Op) and v.name == "cast" and WIDENED.get(v.dtype) == "float32"
    return v.args[0] if rounds and isinstance(v, Op) and v.args[0].dtype == "float32" else v


class _Widening:
    def __init__(self, var: str, lanes: int, buffers: Mapping[str, str], iterators: Collection[str]) -> None:
        self.var, self.lanes, self.buffers, self.iterators = var, lanes, buffers, iterators
        self.requirements: dict[tuple[Index, int], None] = {}
        self.loads: dict[tuple[str, Index], str] = {}
        self.stores: dict[tuple[str, Index], str] = {}

    def build(self, body: Body) -> tuple[Body, Multiples] | None:
        if not all(isinstance(n, (Def, Set, Store)) for n in body):
            return None
        nodes = tuple(map(self._node, body))
        if any(isinstance(n, Store) and n.buffer in self.buffers for n in nodes):
            return None
        out: Body = (
            *(self._move("pd_ldg_wide", r, b, a, True) for (b, a), r in self.loads.items()),
            For(self.var, ZERO, Index.of(self.lanes), nodes, "unroll"),
            *(self._move("pd_stg_wide", r, b, a, False) for (b, a), r in self.stores.items()),
        )
        for (b, _), r in (*self.loads.items(), *self.stores.items()):
            out = (Alloc(r, self.buffers[b], Index.of(self.lanes), "register", out),)
        return out, tuple(self.requirements)

    def _move(self, function: str, register: str, buffer: str, address: Index, load: bool) -> Node:
        inside, outside = Pointer(self.buffers[buffer], register, ZERO), Pointer(self.buffers[buffer], buffer, address)
        return Call(f"{function}<{self.lanes}>", (inside, outside) if load else (outside, inside))

    def _aligned(self, buffer: str, address: Index) -> Index | None:
        """The address of the vector's first element, when the vector may move as one."""
        stride, rest = address.split(self.var)
        size = ITEMSIZE[self.buffers[buffer]] * self.lanes
        if stride != ONE or self.var in rest.symbols() or size % 4 or self.buffers[buffer] == "float64":
            return None
        requirements = multiples(rest, self.lanes, self.iterators)
        if requirements is None:
            return None
        self.requirements |= dict.fromkeys(requirements)
        return rest

    def _node(self, n: Node) -> Node:
        assert isinstance(n, (Def, Set, Store))
        n = replace(n, value=self._value(n.value))
        if isinstance(n, Store) and n.buffer in self.buffers and n.reduce is None:
            first = self._aligned(n.buffer, n.address)
            if first is not None:
                name = self.stores.setdefault((n.buffer, first), f"out{len(self.stores)}")
                return Store(name, Index.of(self.var), stored_value(n.value))
        return n

    def _value(self, v: Value) -> Value:
        if isinstance(v, FlatLoad) and v.buffer in self.buffers:
            first = self._aligned(v.buffer, v.address)
            if first is None:
                return v
            name = self.loads.setdefault((v.buffer, first), f"in{len(self.loads)}")
            return FlatLoad(v.dtype, name, Index.of(self.var))
        if isinstance(v, Op) and v.name == "where":  # the branches may address what does not exist
            return replace(v, args=(self._value(v.args[0]), *v.args[1:]))
        return replace(v, args=tuple(map(self._value, v.args))) if isinstance(v, Op) else v
