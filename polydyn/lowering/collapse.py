"""Collapse adjacent iterators that walk memory like one iterator, and split an iterator that walks like two.

``(x, y)`` collapse if every address moves ``extent(y)`` times as far for a step of ``x`` as for a step of ``y``
(BladeDISC's dim collapse, decided on addresses): the rows (B, L) of a dense activation become B*L rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polydyn.lowering.flatten import FlatNode, map_addresses
from polydyn.schedules.expr import Value, indices, map_index
from polydyn.schedules.index import ONE, ZERO, Atom, Index
from polydyn.schedules.ranges import simplify

Axis = tuple[str, Index]


def collapse_shared(nodes: tuple[FlatNode, ...]) -> tuple[FlatNode, ...]:
    """Merge the shared iterators of all nodes as far as all addresses allow."""
    i = 0
    while i + 1 < len(nodes[0].shared):
        x, y = nodes[0].shared[i], nodes[0].shared[i + 1]
        if all(mergeable(p, x, y) for n in nodes for p in _positions(n)):
            nodes = tuple(_merge_shared(n, i) for n in nodes)
        else:
            i += 1
    return nodes


def collapse_reduction(node: FlatNode) -> FlatNode:
    """Merge the reduction iterators of a single node."""
    i = 0
    while i + 1 < len(node.reduction):
        x, y = node.reduction[i], node.reduction[i + 1]
        if all(mergeable(p, x, y) for p in _positions(node)):
            merged = (y[0], x[1] * y[1])
            node = replace(node, reduction=(*node.reduction[:i], merged, *node.reduction[i + 2 :]))
            node = map_addresses(node, {x[0]: Index.of(0)})
        else:
            i += 1
    return node


def _merge_shared(n: FlatNode, i: int) -> FlatNode:
    x, y = n.shared[i], n.shared[i + 1]
    # x*c*extent(y) + y*c is c*(merged): keep y's coefficient, drop the terms of x
    merged = (y[0], x[1] * y[1])
    return map_addresses(replace(n, shared=(*n.shared[:i], merged, *n.shared[i + 2 :])), {x[0]: Index.of(0)})


def _positions(n: FlatNode) -> Iterator[Index]:
    """Yield every integer expression that may depend on iterators: addresses, plain indices, local subscripts."""
    yield n.address
    yield from indices(n.body)


def mergeable(p: Index, x: Axis, y: Axis) -> bool:
    """Check whether an expression moves ``extent(y)`` times as far for a step of ``x`` as for a step of ``y``."""
    if not p.symbols() & {x[0], y[0]}:
        return True
    cx, rest = p.split(x[0])
    cy, rest = rest.split(y[0])
    if {x[0], y[0]} & (cx.symbols() | cy.symbols()) or cx != cy * y[1]:
        return False
    return all(_atom_mergeable(a, x, y) for a in rest.atoms() if isinstance(a, Atom))


def _atom_mergeable(a: Atom, x: Axis, y: Axis) -> bool:
    if not {x[0], y[0]} & {s for i in a.args for s in i.symbols()}:
        return True
    if a.kind == "floordiv" and {x[0], y[0]} & a.args[1].symbols():
        return False
    return all(mergeable(i, x, y) for i in a.args)


def in_order(axes: tuple[Axis, ...], address: Index) -> tuple[Axis, ...]:
    """Sort axes by the stride of an address, largest first."""
    return tuple(sorted(axes, key=lambda a: _steepness(address.split(a[0])[0]), reverse=True))


def _steepness(stride: Index) -> tuple[int, int]:
    """Return a sort key for strides, as far as symbols allow: degree first."""
    degree = max((len(m) for m in stride.terms), default=0)
    return degree, sum(abs(c) for m, c in stride.terms.items() if len(m) == degree)


def split_divided(nodes: tuple[FlatNode, ...]) -> tuple[FlatNode, ...]:
    """Split an iterator that the first node uses as ``x // n`` into two, ``x = n*outer + inner``, in all nodes.

    Groups of channels and shuffled channels are affine in the two iterators; ``n`` must divide the extent. The outer
    one is named ``<x>g``.
    """
    for x, e in nodes[0].shared:
        size = next((n for n in _divisors(nodes[0].body, x) if e.constant and e.constant % n == 0), None)
        if size is None or e.constant is None:
            continue
        group = f"{x}g"
        env = {x: Index.of(group) * size + x}
        pair = ((group, Index.of(e.constant // size)), (x, Index.of(size)))
        out = []
        for n in nodes:
            shared = tuple(p for a in n.shared for p in (pair if a[0] == x else (a,)) if p[1] != ONE)
            drop = {y: ZERO for y, extent in pair if extent == ONE}
            ranges = dict([*shared, *n.reduction])
            moved = map_addresses(map_addresses(n, env), drop)
            body = map_index(moved.body, lambda i, r=ranges: simplify(i, r))  # type: ignore[misc]
            out.append(replace(moved, shared=shared, body=body))
        return tuple(out)
    return nodes


def _divisors(v: Value, x: str) -> Iterator[int]:
    for i in indices(v):
        for a in _atoms(i):
            if a.kind == "floordiv" and a.args[0] == Index.of(x) and a.args[1].constant:
                yield a.args[1].constant


def _atoms(i: Index) -> Iterator[Atom]:
    for a in i.atoms():
        if isinstance(a, Atom):
            yield a
            for x in a.args:
                yield from _atoms(x)
