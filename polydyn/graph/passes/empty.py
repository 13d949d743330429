"""Remove constant sizes of 0: an empty tensor needs no computation, an empty reduction is its neutral element.

After this pass no node reads or joins a tensor that is empty at all sizes, and no reduction runs over an axis of
constant size 0. Later passes may assume that constant sizes are positive, except in shapes of written tensors.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.graph.ir import Compute, Concat, Graph, Node, dim_name
from polydyn.graph.rewriting import live
from polydyn.schedules.expr import Load, Value, const, load, neutral, transform
from polydyn.schedules.index import Index


def without_empty(graph: Graph) -> Graph:
    """Return the graph without reads of empty tensors. Each empty tensor becomes a map that reads nothing."""
    empty = {t for t, x in graph.tensors.items() if 0 in x.shape}
    nodes = tuple(
        _joined(graph, n, empty) if isinstance(n, Concat) else _computed(graph, n, empty) for n in graph.nodes
    )
    unchanged = all(a is b for a, b in zip(nodes, graph.nodes, strict=True))
    return graph if unchanged else live(replace(graph, nodes=nodes))


def _computed(graph: Graph, n: Compute, empty: set[str]) -> Compute:
    if n.output in empty:
        return _filled(n, const(0, graph.tensors[n.output].dtype))
    if n.reduce is not None and 0 in n.reduction:
        return _filled(n, neutral(n.reduce, n.body.dtype))

    def replace_empty(v: Value) -> Value:  # nothing executes such a load
        return const(0, v.dtype) if isinstance(v, Load) and v.buffer in empty else v

    body = transform(n.body, replace_empty)
    return n if body is n.body else replace(n, body=body)


def _joined(graph: Graph, n: Concat, empty: set[str]) -> Node:
    parts = tuple(t for t in n.parts if t not in empty)
    x = graph.tensors[n.output]
    if n.output in empty:
        return Compute(n.output, const(0, x.dtype), origin=n.origin)
    if len(parts) == 1:
        index = tuple(Index.of(dim_name(a)) for a in range(len(x.shape)))
        return Compute(n.output, load(parts[0], index, x.dtype), origin=n.origin)
    return n if parts == n.parts else replace(n, parts=parts)


def _filled(n: Compute, value: Value) -> Compute:
    return n if n.body == value and n.reduce is None else replace(n, body=value, reduction=(), reduce=None)
