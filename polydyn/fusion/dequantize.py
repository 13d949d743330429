"""Dequantize 8-bit values in the nodes that read them (docs/adr/0013-quantization.md).

In a QDQ model, a tensor between two layers is quantized for one reader and dequantized for another (a residual sum).
The floats would need four times as many bytes as the quantized tensor, which is in memory anyway.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.graph.ir import Compute, Graph, iterators
from polydyn.graph.passes.steps import dequantization, number
from polydyn.graph.rewriting import compose, live


def dequantize_in_readers(graph: Graph) -> Graph:
    """Move each dequantization with one scale into its readers if all of these are maps of the same shape."""
    consumers = graph.consumers()
    inlined = list[Compute]()
    for n in graph.nodes:
        if isinstance(n, Compute) and n.output not in graph.outputs and _one_scale(graph, n):
            readers = consumers[n.output]
            shape = graph.tensors[n.output].shape
            if all(isinstance(r, Compute) and r.is_map and graph.tensors[r.output].shape == shape for r in readers):
                inlined.append(n)
    if not inlined:
        return graph
    nodes = (compose(n, inlined, dict(iterators(graph, n))) if isinstance(n, Compute) else n for n in graph.nodes)
    return live(replace(graph, nodes=tuple(nodes)))


def _one_scale(graph: Graph, n: Compute) -> bool:
    """Check whether a node dequantizes a computed 8-bit tensor with one known scale and zero point."""
    step = dequantization(n)
    if step is None or step.x.dtype not in ("int8", "uint8") or step.x.buffer in graph.constants:
        return False
    return all(number(graph.constants, v) is not None for v in (step.scale, step.zero))
