"""The rows that the nodes of a group have in common: which axes of each node, and which rows two groups share.

BladeDISC's terms: *group-dims* are the axes that all nodes of a group share, *tile-dims* are the others. *Locality*
holds if a reader reads the results of the group only in its own row. Group-dims need not lead: a softmax over the
channels of an image shares the axes before and after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

from polydyn.fusion.plan import FusedGroup, Rows
from polydyn.graph.ir import Compute, Graph, dim_name, reduction_name
from polydyn.schedules.expr import Load, loads
from polydyn.schedules.index import ONE, Index, product


def node_rows(graph: Graph, output: str) -> tuple[int, ...]:
    """Return all axes of a tensor except those of extent 1: the rows of a node that is not fused."""
    return tuple(a for a, e in enumerate(graph.tensors[output].shape) if e != ONE)


def rest_of(graph: Graph, output: str, rows: Rows) -> tuple[int, ...]:
    """Return the axes of a node inside a row."""
    return tuple(a for a in node_rows(graph, output) if a not in rows[output])


def tile_dims(graph: Graph, n: Compute, rows: Rows) -> Index:
    """Return the number of elements of a row that a node runs over."""
    shape = graph.tensors[n.output].shape
    return product((*(shape[a] for a in rest_of(graph, n.output, rows)), *n.reduction))


def lead(graph: Graph, rows: Rows) -> bool:
    """Check whether rows are the leading axes of every node, and the axes inside a row follow them."""
    return all(node_rows(graph, t)[: len(axes)] == axes for t, axes in rows.items())


def reads_of(tensors: Collection[str], n: Compute) -> list[Load]:
    """Return the loads of a node from the given tensors."""
    return [x for x in loads(n.body) if x.buffer in tensors]


def common_rows(graph: Graph, a: FusedGroup, b: FusedGroup) -> Rows | None:
    """Return the common rows of two groups: axes along which ``b`` reads results of ``a`` only at its own position.

    Returns None if the groups run over them in different orders, or if ``a`` has rows but none is common.
    """
    pairs: dict[int, int] | None = None  # row of a -> row of b
    for n, x in _crossing(a, b):
        aligned = _pairs(graph, a.rows[x.buffer], n, b.rows[n.output], x)
        pairs = aligned if pairs is None else {k: v for k, v in pairs.items() if aligned.get(k) == v}
    common = sorted(pairs or {})
    order = [pairs[k] for k in common] if pairs else []
    if (not common and any(a.rows.values())) or any(x >= y for x, y in pairwise(order)):
        return None
    rows = {m.output: tuple(a.rows[m.output][k] for k in common) for m in a.nodes}
    return rows | {n.output: tuple(b.rows[n.output][k] for k in order) for n in b.nodes}


def _crossing(a: FusedGroup, b: FusedGroup) -> Iterator[tuple[Compute, Load]]:
    """Yield the loads by which nodes of ``b`` read ``a``."""
    outputs = {m.output for m in a.nodes}
    for n in b.nodes:
        for x in reads_of(outputs, n):
            yield n, x


def _pairs(graph: Graph, source: tuple[int, ...], n: Compute, reader: tuple[int, ...], x: Load) -> dict[int, int]:
    """Map rows of the tensor that is read to equal rows of the reader: (position in ``source``) to (position in
    ``reader``).
    """
    shape, extents = graph.tensors[x.buffer].shape, graph.tensors[n.output].shape
    places = {dim_name(a): k for k, a in enumerate(reader)}
    matches = {k: (a, places[str(x.index[a])]) for k, a in enumerate(source) if str(x.index[a]) in places}
    return {k: place for k, (a, place) in matches.items() if shape[a] == extents[reader[place]]}


def is_aligned(graph: Graph, n: Compute, x: Load, rows: Rows) -> bool:
    """Check whether a map reads its own row element by element: at its own axes inside the row, in order."""
    places = {dim_name(a): k for k, a in enumerate(rest_of(graph, n.output, rows))}
    at = [places.get(str(x.index[a]), -1) for a in rest_of(graph, x.buffer, rows)]
    return all(k >= 0 for k in at) and all(j < k for j, k in pairwise(at))


def is_reduced(graph: Graph, n: Compute, x: Load, rows: Rows) -> bool:
    """Check whether a reduction runs over a whole row of the tensor that it reads, in order."""
    reduced = [reduction_name(j) for j, e in enumerate(n.reduction) if e != ONE]
    return [str(x.index[a]) for a in rest_of(graph, x.buffer, rows)] == reduced


def reads_whole_rows(graph: Graph, n: Compute, x: Load, rows: Rows) -> bool:
    """Check whether the iterators that subscript a tensor inside its row run over the whole row.

    Every size is a separate parameter of a kernel, so no kernel can state that one size is a part of another. Rows that
    are read from their second element on are a part too.
    """
    extents = {dim_name(a): e for a, e in enumerate(graph.tensors[n.output].shape)}
    extents |= {reduction_name(j): e for j, e in enumerate(n.reduction)}
    shape = graph.tensors[x.buffer].shape
    at = [(x.index[a], shape[a]) for a in rest_of(graph, x.buffer, rows)]
    shifted = any((i - v).constant and extents[v].constant is None for i, _ in at for v in i.symbols() & extents.keys())
    return not shifted and all(extents.get(str(i), e) == e for i, e in at)
