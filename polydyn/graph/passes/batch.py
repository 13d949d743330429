"""GEMM batching (BladeDISC 4.3): independent contractions of equal form and provably equal shapes become a batched one.

Equal shapes are equal expressions over the model's symbols, after all shape constraints have been applied. Two sizes
that are neither equal nor of constant difference are undecided: the contractions stay separate, with a note.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from polydyn.graph.ir import Compute, Graph
from polydyn.graph.passes.join import GraphEditor, Stacked, as_contraction
from polydyn.graph.passes.merge import join_members
from polydyn.schedules.expr import Load, Value, transform

BATCHED = "merged into one batched contraction (their shapes are equal)"


def batch_contractions(graph: Graph) -> Graph:
    """Stack the independent contractions of a graph that differ only in what they read."""
    alike: dict[Hashable, list[Compute]] = {}
    for n in map(as_contraction, graph.nodes):
        if n is not None:
            key = (transform(n.body, _anonymous), len(n.reduction), len(graph.tensors[n.output].shape))
            alike.setdefault(key, []).append(n)
    editor = GraphEditor(graph)
    for members in alike.values():
        join_members(editor, members, [Stacked()], BATCHED)
    return editor.finish()


def _anonymous(v: Value) -> Value:
    return replace(v, buffer="") if isinstance(v, Load) else v
