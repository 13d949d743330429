"""GEMM batching (BladeDISC 4.3): independent contractions of equal form and provably equal shapes become a batched one.

Equal shapes are equal expressions over the model's symbols, after everything that shape constraints say was applied.
Two sizes that are neither equal nor of constant difference are not decided: the contractions stay apart, with a note.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from polydyn.graph.ir import Compute, Graph
from polydyn.graph.passes.join import Stacked, Workplace, as_contraction
from polydyn.graph.passes.merge import join_members
from polydyn.schedules.expr import Load, Value, transform

BATCHED = "merged into one batched contraction (their shapes are equal)"


def batch_contractions(graph: Graph) -> Graph:
    """Stacks the independent contractions of a graph that differ in what they read only."""
    alike: dict[Hashable, list[Compute]] = {}
    for n in map(as_contraction, graph.nodes):
        if n is not None:
            key = (transform(n.body, _anonymous), len(n.reduction), len(graph.tensors[n.output].shape))
            alike.setdefault(key, []).append(n)
    place = Workplace(graph)
    for members in alike.values():
        join_members(place, members, [Stacked()], BATCHED)
    return place.finish()


def _anonymous(v: Value) -> Value:
    return replace(v, buffer="") if isinstance(v, Load) else v
