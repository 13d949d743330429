"""Concatenations of pieces of one tensor, as a map that chooses: the halves of a rotation (rotary positions), a roll.

``concat(-x[.., d:], x[.., :d])`` is a copy of each half, a kernel and a tensor for each, that one element-wise reader
reads. As a map ``where(i < d, -x[.., i + d], x[.., i - d])`` it joins that reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from polydyn.graph.ir import Compute, Concat, Graph, Node, dim_name, value_size
from polydyn.graph.rewriting import live
from polydyn.schedules.expr import FromIndex, const, op
from polydyn.schedules.index import Index

MOST_PARTS, MOST_SIZE = 4, 4
"""Parts of such a concatenation; operations of a part."""


def choose_pieces(graph: Graph) -> Graph:
    """The graph in which maps read pieces of one tensor, of known lengths, without a concatenation."""
    makers, readers = graph.producer(), graph.consumers()

    def only_maps(n: Concat) -> bool:
        return all(isinstance(x, Compute) and x.is_map for x in readers[n.output])

    made: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Concat) and only_maps(n) and (parts := _pieces(graph, n, makers)):
            n = _choice(graph, n, parts)
        made.append(n)
    unchanged = all(a is b for a, b in zip(made, graph.nodes, strict=True))
    return graph if unchanged else live(replace(graph, nodes=tuple(made)))


def _pieces(graph: Graph, n: Concat, makers: Mapping[str, Node]) -> list[Compute] | None:
    """What makes each part, where all are cheap to make from one tensor."""
    parts = [m for x in n.parts if isinstance(m := makers.get(x), Compute)]
    if n.output in graph.outputs or len(parts) < len(n.parts) or not 2 <= len(parts) <= MOST_PARTS:
        return None
    small = all(m.is_map and len(m.inputs) == 1 and value_size(m.body) <= MOST_SIZE for m in parts)
    known = all(graph.tensors[x].shape[n.axis].constant is not None for x in n.parts)
    kept = set(n.parts) & set(graph.outputs)
    return parts if small and known and not kept and len({_base(m.inputs[0], makers) for m in parts}) == 1 else None


def _base(name: str, makers: Mapping[str, Node]) -> str:
    """The tensor that a view is of."""
    while isinstance(n := makers.get(name), Compute) and n.is_view:
        (name,) = n.inputs
    return name


def _choice(graph: Graph, n: Concat, parts: Sequence[Compute]) -> Compute:
    """The concatenation as a map, the last part first made."""
    along = Index.of(dim_name(n.axis))
    rank = len(graph.tensors[n.output].shape)
    starts = [0, *accumulate(int(graph.tensors[x].shape[n.axis]) for x in n.parts)]
    values = [
        m.at([along - start if a == n.axis else Index.of(dim_name(a)) for a in range(rank)])
        for m, start in zip(parts, starts, strict=False)
    ]
    body = values.pop()
    for value, end in zip(reversed(values), reversed(starts[1 : len(parts)]), strict=True):
        body = op("where", op("lt", FromIndex("int64", along), const(end, "int64")), value, body)
    return Compute(n.output, body, origin=n.origin)
