"""Constant folding: the reference evaluator computes nodes that read only constants, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from polydyn.graph.ir import Graph, Node
from polydyn.graph.reference import evaluate_node
from polydyn.graph.rewriting import pruned
from polydyn.graph.verify import free_symbols
from polydyn.schedules.expr import Array


def fold(graph: Graph) -> Graph:
    """Replace primitives that read only constants by their results.

    Nodes that would enlarge the constants (an Expand of one number) stay, and fusion absorbs them.
    """
    constants, nodes = dict(graph.constants), list[Node]()
    for n in graph.nodes:
        if n.output not in graph.outputs and _is_foldable(graph, n, constants):
            constants[n.output] = evaluate_node(n, graph.tensors[n.output], {}, constants)
        else:
            nodes.append(n)
    return pruned(replace(graph, nodes=tuple(nodes), constants=constants))


def _is_foldable(graph: Graph, n: Node, constants: Mapping[str, Array]) -> bool:
    """Check whether a node reads only constants, has a constant size that is not much larger, and uses no symbol."""
    sizes = [d.constant for d in graph.tensors[n.output].shape]
    if not n.inputs or any(t not in constants for t in n.inputs) or None in sizes:
        return False
    most = max(1024, 2 * sum(constants[t].size for t in n.inputs))
    return prod(s or 0 for s in sizes) <= most and not free_symbols(n)
