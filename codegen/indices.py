"""The Index expressions of the loop IR: read, map, substitute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from polydyn.codegen import ir
from polydyn.schedules.expr import FromIndex, Load, Value
from polydyn.schedules.index import Index, IndexLike

INDEX_FIELDS: dict[type, tuple[str, ...]] = {
    ir.FlatLoad: ("address", "stride", "mask"),
    Load: ("index",),
    FromIndex: ("index",),
    ir.Tile: ("start", "row", "column"),
    ir.Pointer: ("address",),
    ir.Ramp: ("start", "step"),
    ir.Blend: ("count",),
    ir.Between: ("low", "high"),
    ir.For: ("lo", "hi"),
    ir.Let: ("value",),
    ir.Inst: ("args",),
    ir.Switch: ("on",),
    ir.Alloc: ("size",),
    ir.Store: ("address", "stride", "mask", "stream"),
}
"""Fields of nodes and values that have an Index, None, or a tuple of them; not conditions of ``If`` and values of
nodes."""


def map_value_indices(v: Value, g: Callable[[Index], Index]) -> Value:
    """Apply ``g`` to every Index inside a value."""
    return ir.map_value(v, lambda x: _with_indices(x, g))


def map_node_indices(n: ir.Node, g: Callable[[Index], Index]) -> ir.Node:
    """Apply ``g`` to every Index of one node (not of its child bodies)."""
    if isinstance(n, (ir.Store, ir.Def, ir.Set)):
        value = map_value_indices(n.value, g)
        n = n if value is n.value else replace(n, value=value)
    elif isinstance(n, ir.Call):
        return replace(n, args=tuple(map_value_indices(a, g) for a in n.args))
    elif isinstance(n, ir.If):
        sides = [(g(c.left), g(c.right)) for c in n.cond]
        if any(a is not c.left or b is not c.right for (a, b), c in zip(sides, n.cond, strict=True)):
            return replace(n, cond=tuple(ir.Compare(c.relation, *x) for c, x in zip(n.cond, sides, strict=True)))
        return n
    return _with_indices(n, g)


_T = TypeVar("_T")


def _with_indices(x: _T, g: Callable[[Index], Index]) -> _T:
    """Apply ``g`` to the Index fields of a node or value; return the same object if none changes."""
    changed: dict[str, Any] = {}
    for name in INDEX_FIELDS.get(type(x), ()):
        old: Any = getattr(x, name)
        if isinstance(old, Index):
            new: Any = g(old)
        elif old is None:
            continue
        else:
            new = tuple(map(g, old))
            new = old if all(map(operator.is_, new, old)) else new
        if new is not old:
            changed[name] = new
    return replace(x, **changed) if changed else x  # type: ignore[type-var]


def substitute(body: ir.Body, env: Mapping[str, IndexLike]) -> ir.Body:
    """Substitute symbols everywhere in the body (names bound inside must not be among them)."""
    memo: dict[Index, Index] = {}  # unrolled and vectorised bodies repeat their addresses

    def g(i: Index) -> Index:
        if i.symbols().isdisjoint(env):
            return i
        new = memo.get(i)
        if new is None:
            new = memo[i] = i.subs(env)
        return new

    return ir.rewrite(body, lambda n: n if mentions(n)[0].isdisjoint(env) else map_node_indices(n, g))


def mentions(n: ir.Node) -> tuple[frozenset[str], frozenset[str]]:
    """Return (symbols, buffers fetched from) of every Index of one node; cached in the node, which never changes."""
    cache: tuple[frozenset[str], frozenset[str]] | None = n.__dict__.get("_mentions")
    if cache is None:
        indices = set(node_indices(n))
        fetched = frozenset(a.name for i in indices for a in i.fetches())
        cache = n.__dict__["_mentions"] = frozenset().union(*(i.symbols() for i in indices)), fetched
    return cache


def node_indices(n: ir.Node) -> Iterator[Index]:
    """Yield every Index of one node, including those inside its values."""
    yield from _indices(n)
    if isinstance(n, ir.If):
        for c in n.cond:
            yield c.left
            yield c.right
    for v in (n.value,) if isinstance(n, (ir.Store, ir.Def, ir.Set)) else n.args if isinstance(n, ir.Call) else ():
        for x in ir.walk_value(v):
            yield from _indices(x)


def _indices(x: object) -> Iterator[Index]:
    """Yield the Index fields of a node or value."""
    for name in INDEX_FIELDS.get(type(x), ()):
        i = getattr(x, name)
        if isinstance(i, Index):
            yield i
        elif i is not None:
            yield from i


def node_buffers(n: ir.Node) -> frozenset[str]:
    """Return the buffers that one node stores to, loads from or fetches from; cached like ``mentions``."""
    cache: frozenset[str] | None = n.__dict__.get("_buffers")
    if cache is None:
        cache = n.__dict__["_buffers"] = _node_buffers(n)
    return cache


def _node_buffers(n: ir.Node) -> frozenset[str]:
    out: set[str] = set()
    if isinstance(n, ir.Store):
        out.add(n.buffer)
    if isinstance(n, (ir.Store, ir.Def, ir.Set)):
        out.update(x.buffer for x in ir.walk_value(n.value) if isinstance(x, ir.FlatLoad))
    if isinstance(n, ir.Call):
        out.update(x.buffer for a in n.args for x in ir.walk_value(a) if isinstance(x, ir.Pointer))
    return mentions(n)[1].union(out)
