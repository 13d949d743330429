"""Vectorise the columns of a register tile: whole vectors, a masked last one, a narrow last one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from polydyn.codegen.indices import node_indices
from polydyn.codegen.ir import Body, Compare, Def, FlatLoad, For, If, Node, Set, Store, rewrite, walk, walk_value
from polydyn.codegen.passes.tiles import COLUMN, ROW, first_columns, one_vector, unswitch
from polydyn.codegen.passes.vectorise import vectorise_tile
from polydyn.schedules.index import Index


@dataclass(frozen=True)
class Columns:
    """A micro-kernel's columns.

    ``count`` columns are in vectors of ``width``; the last one is narrow if ``count`` is not a multiple. ``live``:
    columns from the start of the last vector on; ``full``, ``partial``: whether there are tiles in which all of its
    lanes are columns, and other tiles; ``exact``: the last vector of a partial tile is whole anyway. ``tile``: the name
    of the accumulators; ``safe``: buffers of whole vectors, which may be read past the last column.
    """

    width: int
    count: int
    live: Index
    full: bool
    partial: bool
    exact: bool
    tile: str
    safe: frozenset[str]


def vector_columns(body: Body, c: Columns) -> Body:
    """Vectorise loops along the columns.

    Nests that access memory by column get a second version for a partial tile, in which the last vector is masked (only
    that one: micro-kernels are exact in vectors). The choice is made outside the reduction. A narrow last vector is
    narrow where the accumulators change; code that only reads them reads whole vectors.
    """
    last = c.count % c.width or c.width

    def f(x: Node) -> Node | Body:
        if not (isinstance(x, For) and x.var == ROW):
            return x
        touches = _touches_columns(x, c.safe)
        if last < c.width:
            if any(isinstance(n, Store) and n.buffer != c.tile for n in walk(x.body)):
                return _split(x, c, c.width, c.live)
            return _split(x, c, last, c.live if touches and not c.exact else None)
        full = vectorise_tile((x,), COLUMN, c.width)
        if c.exact or not c.partial or not touches:
            return full
        masked = _split(x, c, c.width, c.live)
        return If((Compare("<=", Index.of(c.width), c.live),), full, masked) if c.full else masked

    return unswitch(rewrite(body, f))


def _split(x: For, c: Columns, lanes: int, mask: Index | None) -> Body:
    """Return the nest with its last vector split off, in ``lanes`` lanes and masked if required."""
    before = c.count - (c.count % c.width or c.width)
    (last,) = vectorise_tile(one_vector(x, Index.of(before), lanes), COLUMN, lanes, mask)
    head = vectorise_tile(first_columns(x, Index.of(before)), COLUMN, c.width) if before else ()
    assert isinstance(last, For)
    inner = tuple(y for z in head if isinstance(z, For) for y in z.body)
    return (replace(last, body=(*inner, *last.body)),)


def _touches_columns(x: For, safe: Collection[str]) -> bool:
    """Whether an address in memory depends on the column, except addresses in safe buffers."""
    for n in walk((x,)):
        if not isinstance(n, (Store, Def, Set)):
            continue
        at = [(v.buffer, v.address) for v in walk_value(n.value) if isinstance(v, FlatLoad)]
        at += [(n.buffer, n.address)] if isinstance(n, Store) else []
        at += [(f.name, x) for i in node_indices(n) for f in i.fetches() for x in f.args]
        if any(name not in safe and COLUMN in i.symbols() for name, i in at):
            return True
    return False
