"""Hoisting: divisions that do not change in an inner loop get a name outside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polydyn.codegen.ir import Body, For, Let, Node, map_node_indices, node_indices, rewrite, walk
from polydyn.schedules.index import Atom, Index


def hoist_divisions(body: Body, prefix: str) -> Body:
    """Every floor division is computed once per iteration of the innermost loop that it depends on.

    Names ``<prefix><n>`` stand for the quotients; divisions that depend on no loop of the body stay where they are.
    """
    names: dict[Atom, str] = {}

    def inside(b: Body) -> Body:
        return tuple(loop(n) if isinstance(n, For) else n for n in b)

    def loop(n: For) -> Node:
        inner = {x.var for x in walk(n.body) if isinstance(x, (For, Let))}
        found: list[tuple[str, Index]] = []
        body = n.body
        while True:
            atoms = (a for x in walk(body) for i in node_indices(x) for a in _varying(i, n.var))
            ready = (a for a in atoms if not _symbols(a) & inner)
            a = next(ready, None)
            if a is None:
                break
            name = names.setdefault(a, f"{prefix}{len(names)}")
            found.append((name, Index({(a,): 1})))
            body = _named(body, a, name)
        body = inside(body)
        for name, value in reversed(found):
            body = (Let(name, value, body),)
        return replace(n, body=body)

    return inside(body)


def _varying(i: Index, var: str) -> Iterator[Atom]:
    """Floor divisions that depend on ``var`` and hold no others that do."""
    for a in i.atoms():
        if isinstance(a, Atom) and var in _symbols(a):
            held = [x for arg in a.args for x in _varying(arg, var)]
            yield from held
            if a.kind == "floordiv" and not held:
                yield a


def _symbols(a: Atom) -> frozenset[str]:
    return frozenset(s for i in a.args for s in i.symbols())


def _named(body: Body, a: Atom, name: str) -> Body:
    return rewrite(body, lambda x: map_node_indices(x, lambda i: _put(i, a, name)))


def _put(i: Index, a: Atom, name: str) -> Index:
    def f(b: Atom) -> Index:
        return Index.of(name) if b == a else Index({(replace(b, args=tuple(_put(x, a, name) for x in b.args)),): 1})

    return i.map_atoms(f) if i.atoms() else i
