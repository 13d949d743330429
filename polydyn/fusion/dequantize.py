"""Bytes are dequantized where they are read (docs/adr/0013-quantization.md).

A tensor between two layers of a QDQ model is quantized for one reader and dequantized for another (a residual sum). The
floats would be four times as many bytes as what they are made of, which lies in memory anyway.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.graph.ir import Compute, Graph, iterators
from polydyn.graph.passes.steps import dequantization, number
from polydyn.graph.rewriting import compose, live


def dequantize_in_readers(graph: Graph) -> Graph:
    """The graph in which maps dequantize for themselves what is quantized with one scale, where maps alone read it."""
    consumers = graph.consumers()
    gone = list[Compute]()
    for n in graph.nodes:
        if isinstance(n, Compute) and n.output not in graph.outputs and _one_scale(graph, n):
            readers = consumers[n.output]
            shape = graph.tensors[n.output].shape
            if all(isinstance(r, Compute) and r.is_map and graph.tensors[r.output].shape == shape for r in readers):
                gone.append(n)
    if not gone:
        return graph
    nodes = (compose(n, gone, dict(iterators(graph, n))) if isinstance(n, Compute) else n for n in graph.nodes)
    return live(replace(graph, nodes=tuple(nodes)))


def _one_scale(graph: Graph, n: Compute) -> bool:
    """Whether a node dequantizes bytes that a node makes, with one known scale and zero point."""
    step = dequantization(n)
    if step is None or step.x.dtype not in ("int8", "uint8") or step.x.buffer in graph.constants:
        return False
    return all(number(graph.constants, v) is not None for v in (step.scale, step.zero))
