"""Constant folding: what reads only constants is computed once, by the reference evaluator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Graph, Node
from polydyn.graph.verify import free_symbols, verify_graph
from polydyn.schedules.expr import Array

Evaluator = Callable[[Graph, Mapping[str, Array]], Mapping[str, Array]]


@dataclass(frozen=True)
class _Foldable:
    nodes: tuple[Node, ...]
    names: frozenset[str]


def fold(graph: Graph, evaluate: Evaluator | None = None) -> Graph:
    """Replaces primitives that read only constants by their results.

    ``evaluate(graph, feeds)`` gives the outputs by name (default: the reference evaluator). Nodes that would
    grow the constants (an Expand of one number) stay, fusion absorbs them.
    """
    found = _foldable(graph)
    if not found.nodes:
        return graph
    if evaluate is None:
        evaluate = importlib.import_module("polydyn.graph.reference").evaluate
        assert evaluate is not None
    read = {t for n in graph.nodes if n.output not in found.names for t in n.inputs}
    wanted = tuple(n.output for n in found.nodes if n.output in read)
    needed = {t for n in found.nodes for t in n.inputs}
    part = Graph(
        name=f"{graph.name}.constants", inputs=(), outputs=wanted,
        tensors={t: graph.tensors[t] for t in (*needed, *(n.output for n in found.nodes))},
        constants={t: a for t, a in graph.constants.items() if t in needed}, nodes=found.nodes,
    )  # fmt: skip
    results = evaluate(part, {})
    constants = {t: a for t, a in graph.constants.items() if t in read}
    constants |= {t: np.asarray(results[t], numpy_dtype(graph.tensors[t].dtype)) for t in wanted}
    nodes = tuple(n for n in graph.nodes if n.output not in found.names)
    kept = {*graph.inputs, *constants, *(n.output for n in nodes)}
    out = Graph(
        name=graph.name, inputs=graph.inputs, outputs=graph.outputs,
        tensors={t: x for t, x in graph.tensors.items() if t in kept}, constants=constants, nodes=nodes,
        sources=graph.sources, guards=graph.guards, notes=graph.notes, bounds=graph.bounds,
    )  # fmt: skip
    verify_graph(out)
    return out


def _foldable(graph: Graph) -> _Foldable:
    known = {t: a.size for t, a in graph.constants.items()}
    nodes: list[Node] = []
    for n in graph.nodes:
        sizes = [d.constant for d in graph.tensors[n.output].shape]
        if not n.inputs or any(t not in known for t in n.inputs) or None in sizes or n.output in graph.outputs:
            continue
        size = int(np.prod([s or 0 for s in sizes], dtype=np.int64))
        if size <= max(1024, 2 * sum(known[t] for t in n.inputs)) and not _symbolic(n):
            known[n.output] = size
            nodes.append(n)
    return _Foldable(tuple(nodes), frozenset(n.output for n in nodes))


def _symbolic(node: Node) -> bool:
    """True when the body or a reduction's extent depends on a size that is only known at run time."""
    return bool(free_symbols(node))
