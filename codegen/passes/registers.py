"""Unrolling, scalar replacement and common loads: turn a tile of memory accesses into register code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import count
from typing import TypeAlias

from polydyn.codegen import ir
from polydyn.codegen.indices import substitute
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Value, neutral
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.lanes import FLOAT_LANES

Copies: TypeAlias = "dict[tuple[int, Index], tuple[ir.Body, ir.Body]]"
"""(identity of a loop's body, value of its variable) -> (the body, its copy for the value)."""
V = Index.of


def unroll(body: ir.Body, loops: Collection[str], copies: Copies | None = None) -> ir.Body:
    """Unroll the named loops completely; their extents must be constants.

    ``copies`` caches the iterations of loops: variants of one body with other trip counts share them.
    """
    memo: Copies = {} if copies is None else copies

    def copy(loop: ir.For, at: Index) -> ir.Body:
        key = id(loop.body), at
        if key not in memo:
            memo[key] = loop.body, substitute(loop.body, {loop.var: at})
        return memo[key][1]

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if not (isinstance(n, ir.For) and n.var in loops):
            return n
        trips = (n.hi - n.lo).constant
        if trips is None:
            raise CodegenError(f"{n.var} in [{n.lo}, {n.hi}) has no constant extent to unroll")
        return tuple(x for i in range(trips) for x in copy(n, n.lo + i))

    return ir.rewrite(body, f)


def partial_unroll(body: ir.Body, var: str, factor: int) -> ir.Body:
    """Let the C compiler unroll the loop ``var`` by ``factor``."""

    def f(n: ir.Node) -> ir.Node:
        return replace(n, kind=f"unroll{factor}") if isinstance(n, ir.For) and n.var == var else n

    return ir.rewrite(body, f)


def split_chains(body: ir.Body, var: str, count: int) -> ir.Body:
    """Let loops ``var`` from 0 add alternately to ``count`` independent registers instead of one.

    Before: ``for k: s += x[k]``; after: ``for k: s += x[2*k]; s1 += x[2*k + 1]``, the rest, ``s += s1``.
    """

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if not (isinstance(n, ir.For) and n.var == var and n.lo == ZERO and count > 1):
            return n
        own = {x.reg for x in ir.walk(n.body) if isinstance(x, ir.Def)}
        sums = {x.reg: x for x in ir.walk(n.body) if isinstance(x, ir.Set) and x.reduce and x.reg not in own}
        main, out = n.hi // count, list[ir.Node]()
        steps: ir.Body = ()
        for c in range(count):
            names = {r: f"{r}_{c}" for r in (own if c == 0 else {*own, *sums})}
            steps += _renamed(substitute(n.body, {var: V(var) * count + c}), names)
            out += [ir.Def(names[r], neutral(str(x.reduce), x.value.dtype), x.lanes) for r, x in sums.items() if c]
        out.append(replace(n, hi=main, body=steps))
        out.append(replace(n, hi=n.hi - main * count, body=substitute(n.body, {var: main * count + var})))
        out += [
            ir.Set(r, ir.Reg(x.value.dtype, f"{r}_{c}", x.lanes), x.lanes, x.reduce)
            for c in range(1, count)
            for r, x in sums.items()
        ]
        return tuple(out)

    return ir.rewrite(body, f)


def _renamed(body: ir.Body, names: Mapping[str, str]) -> ir.Body:
    """Return the body with registers renamed."""

    def value(v: Value) -> Value:
        return replace(v, name=names[v.name]) if isinstance(v, ir.Reg) and v.name in names else v

    def f(n: ir.Node) -> ir.Node:
        if isinstance(n, (ir.Def, ir.Set)):
            return replace(n, reg=names.get(n.reg, n.reg), value=ir.map_value(n.value, value))
        return replace(n, value=ir.map_value(n.value, value)) if isinstance(n, ir.Store) else n

    return ir.rewrite(body, f)


def keep_loads(body: ir.Body) -> ir.Body:
    """Keep loaded vectors in registers: a compiler may assume that loading them again costs nothing."""

    def f(n: ir.Node) -> ir.Node:
        whole = (
            isinstance(n, ir.Def) and isinstance(n.value, ir.FlatLoad) and n.value.dtype in FLOAT_LANES and n.lanes > 1
        )
        return (
            replace(n, value=ir.Apply(n.value.dtype, "vkeep_f32", (n.value,))) if isinstance(n, ir.Def) and whole else n
        )

    return ir.rewrite(body, f)


def registers(body: ir.Body, buffer: str, dtype: str) -> ir.Body:
    """Scalar replacement: every access to ``buffer`` (which must have a constant address) becomes a named register.

    The registers are declared at the top of the body, each with the lanes of its writes. A read of more lanes gets all
    of them; the additional lanes have undefined values.
    """
    seen: dict[int, int] = {}

    def at(address: int | None) -> int:
        if address is None:
            raise CodegenError(f"an address of {buffer} is not constant: it cannot live in registers")
        return address

    for n in ir.walk(body):
        if isinstance(n, ir.Store) and n.buffer == buffer:
            a = at(n.address.constant)
            if seen.setdefault(a, n.lanes) != n.lanes:
                raise CodegenError(f"{buffer}[{a}] is set with different numbers of lanes: {seen[a]}, {n.lanes}")

    def value(v: Value) -> Value:
        if isinstance(v, ir.FlatLoad) and v.buffer == buffer:
            lanes = seen.setdefault(at(v.address.constant), v.lanes)
            if lanes > v.lanes:
                raise CodegenError(f"{v.lanes} of the {lanes} lanes of {buffer}[{v.address}] are read")
            return ir.Reg(v.dtype, f"{buffer}_{v.address.constant}", lanes)
        return v

    def f(n: ir.Node) -> ir.Node:
        if isinstance(n, (ir.Store, ir.Def, ir.Set)):
            n = replace(n, value=ir.map_value(n.value, value))
            if isinstance(n, ir.Store) and n.buffer == buffer:
                return ir.Set(f"{buffer}_{n.address.constant}", n.value, n.lanes, n.reduce)
        return n

    out = ir.rewrite(body, f)
    return (*(ir.Def(f"{buffer}_{a}", ir.Undefined(dtype), lanes) for a, lanes in sorted(seen.items())), *out)


def share_loads(body: ir.Body, prefix: str = "t") -> ir.Body:
    """Within straight-line runs, read a load that occurs more than once into a register.

    A scalar load that feeds vectors is broadcast once, for narrow ones too. A store ends the sharing of its own
    buffer's loads.
    """
    fresh = count()

    def run(seq: list[ir.Store | ir.Def | ir.Set]) -> ir.Body:
        uses = Counter(x for n in seq for x in ir.walk_value(n.value) if isinstance(x, ir.FlatLoad))
        out: list[ir.Node] = []
        copies: dict[ir.FlatLoad, ir.Reg] = {}
        for n in seq:
            width = n.lanes

            def shared(v: Value, width: int = width) -> Value:
                if not isinstance(v, ir.FlatLoad) or uses[v] < 2:
                    return v
                if v not in copies:
                    lanes = max(v.lanes, width)
                    source = ir.Broadcast(v.dtype, v, lanes) if v.lanes < lanes else v
                    copies[v] = ir.Reg(v.dtype, f"{prefix}{next(fresh)}", lanes)
                    out.append(ir.Def(copies[v].name, source, lanes))
                if copies[v].lanes in (1, width):
                    return copies[v]
                return ir.Broadcast(v.dtype, copies[v], width) if v.lanes == 1 < width < copies[v].lanes else v

            out.append(replace(n, value=ir.map_value(n.value, shared)))
            if isinstance(n, ir.Store):
                for v in [v for v in copies if v.buffer == n.buffer]:
                    del copies[v]
        return tuple(out)

    def sequences(b: ir.Body) -> ir.Body:
        out: list[ir.Node] = []
        current: list[ir.Store | ir.Def | ir.Set] = []
        for n in b:
            if isinstance(n, (ir.Store, ir.Def, ir.Set)):
                current.append(n)
                continue
            out += run(current)
            current = []
            out.append(ir.with_bodies(n, tuple(map(sequences, ir.bodies(n)))))
        return (*out, *run(current))

    return sequences(body)
