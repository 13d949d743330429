"""Turn a concatenation of pieces of one tensor into a map that selects: the halves of a rotation (rotary positions), a
roll.

``concat(-x[.., d:], x[.., :d])`` costs a kernel and a tensor for each half, although one element-wise reader uses both.
The map ``where(i < d, -x[.., i + d], x[.., i - d])`` joins that reader.
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
"""Maximum parts of such a concatenation, and maximum operations of a part."""


def choose_pieces(graph: Graph) -> Graph:
    """Let maps read pieces of known lengths of one tensor without a concatenation."""
    makers, readers = graph.producer(), graph.consumers()

    def only_maps(n: Concat) -> bool:
        return all(isinstance(x, Compute) and x.is_map for x in readers[n.output])

    new_nodes: list[Node] = []
    for n in graph.nodes:
        if isinstance(n, Concat) and only_maps(n) and (parts := _pieces(graph, n, makers)):
            n = _choice(graph, n, parts)
        new_nodes.append(n)
    unchanged = all(a is b for a, b in zip(new_nodes, graph.nodes, strict=True))
    return graph if unchanged else live(replace(graph, nodes=tuple(new_nodes)))


def _pieces(graph: Graph, n: Concat, makers: Mapping[str, Node]) -> list[Compute] | None:
    """Return the node that computes each part, if all parts are cheap to compute from one tensor; else None."""
    parts = [m for x in n.parts if isinstance(m := makers.get(x), Compute)]
    if n.output in graph.outputs or len(parts) < len(n.parts) or not 2 <= len(parts) <= MOST_PARTS:
        return None
    small = all(m.is_map and len(m.inputs) == 1 and value_size(m.body) <= MOST_SIZE for m in parts)
    known = all(graph.tensors[x].shape[n.axis].constant is not None for x in n.parts)
    part_outputs = set(n.parts) & set(graph.outputs)
    one_base = len({_base(x, makers) for m in parts for x in m.inputs}) == 1
    return parts if small and known and not part_outputs and one_base else None


def _base(name: str, makers: Mapping[str, Node]) -> str:
    """Return the tensor at the end of a chain of views."""
    while isinstance(n := makers.get(name), Compute) and n.is_view:
        (name,) = n.inputs
    return name


def _choice(graph: Graph, n: Concat, parts: Sequence[Compute]) -> Compute:
    """Return the concatenation as a map, built from the last part to the first."""
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
