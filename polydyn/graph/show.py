"""Print a graph for people: dumps, golden tests."""

from __future__ import annotations

from polydyn.graph.ir import Compute, Graph, Node, Tensor, dim_name, reduction_name
from polydyn.schedules.expr import show as show_value

MAX_PRINTED_ELEMENTS = 8
"""Maximum elements of a constant whose values are printed. Larger constants show only their type."""


def show_graph(graph: Graph) -> str:
    """Print symbols, inputs, constants, nodes, outputs and guards, one per line."""
    lines = [f"graph {graph.name}"]
    lines += [f"symbol {s.symbol} = size of {s.input} along axis {s.axis}" for s in graph.sources]
    lines += [f"input {show_tensor(graph.tensors[x])}" for x in graph.inputs]
    lines += [f"constant {_constant(graph, x)}" for x in graph.constants]
    lines += [show_node(graph, n) for n in graph.nodes]
    lines += [f"output {x}" for x in graph.outputs]
    lines += [f"guard {g.left} {g.relation} {g.right}: {g.message}" for g in graph.guards]
    lines += [f"subscripts {b.tensor} + {b.offset} within {b.size}: {b.node}" for b in graph.bounds]
    return "\n".join((*lines, *(f"note {x}" for x in graph.notes))) + "\n"


def show_tensor(t: Tensor) -> str:
    """Print a tensor's name and type."""
    return f"{t.name}: {t.dtype}[{', '.join(map(str, t.shape))}]"


def show_node(graph: Graph, node: Node) -> str:
    """Print a node's expression and its ONNX node."""
    target, origin = show_tensor(graph.tensors[node.output]), f"  // {node.origin}" if node.origin else ""
    if not isinstance(node, Compute):
        return f"{target} = concatenation of {', '.join(node.parts)} along axis {node.axis}{origin}"
    axes = ", ".join(dim_name(a) for a in range(len(graph.tensors[node.output].shape)))
    over = ", ".join(f"{reduction_name(j)} < {e}" for j, e in enumerate(node.reduction))
    reduced = f"{node.reduce} over {over or 'nothing'} of " if node.reduce else ""
    return f"{target} at [{axes}] = {reduced}{show_value(node.body)}{origin}"


def _constant(graph: Graph, name: str) -> str:
    array = graph.constants[name]
    value = f" = {array.tolist()}" if array.size <= MAX_PRINTED_ELEMENTS else ""
    return f"{name}: {array.dtype}[{', '.join(map(str, array.shape))}]{value}"
