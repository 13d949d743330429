"""Bytes are dequantized where they are read (docs/adr/0013-quantization.md).

A tensor between two layers of a QDQ model is quantized for one reader and dequantized for another (a residual sum). The
floats would be four times as many bytes as what they are made of, which lies in memory anyway.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.graph.ir import Compute, Graph, dim_name, iterators
from polydyn.graph.passes.steps import dequantization, live, number
from polydyn.schedules.expr import Load, Value, loads, map_index, substitute, transform
from polydyn.schedules.ranges import simplify


def dequantize_in_readers(graph: Graph) -> Graph:
    """The graph in which maps dequantize for themselves what is quantized with one scale, where maps alone read it."""
    consumers = graph.consumers()
    gone = dict[str, Compute]()
    for n in graph.nodes:
        if isinstance(n, Compute) and n.output not in graph.outputs and _one_scale(graph, n):
            readers = consumers[n.output]
            shape = graph.tensors[n.output].shape
            if all(isinstance(r, Compute) and r.is_map and graph.tensors[r.output].shape == shape for r in readers):
                gone[n.output] = n
    if not gone:
        return graph
    return live(
        replace(graph, nodes=tuple(_inlined(graph, n, gone) if isinstance(n, Compute) else n for n in graph.nodes))
    )


def _one_scale(graph: Graph, n: Compute) -> bool:
    """Whether a node dequantizes bytes that a node makes, with one known scale and zero point."""
    step = dequantization(n)
    if step is None or step.x.dtype not in ("int8", "uint8") or step.x.buffer in graph.constants:
        return False
    return all(number(graph.constants, v) is not None for v in (step.scale, step.zero))


def _inlined(graph: Graph, n: Compute, gone: dict[str, Compute]) -> Compute:
    if not any(x.buffer in gone for x in loads(n.body)):
        return n
    ranges = dict(iterators(graph, n))

    def put(v: Value) -> Value:
        if not (isinstance(v, Load) and v.buffer in gone):
            return v
        inside = substitute(gone[v.buffer].body, {dim_name(a): i for a, i in enumerate(v.index)})
        return map_index(inside, lambda i: simplify(i, ranges))

    return replace(n, body=transform(n.body, put))
