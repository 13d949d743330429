"""Loads that stay in range only under a condition, such as padding and borders."""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.graph.ir import Compute, Graph, iterators
from polydyn.schedules.expr import Load, Op, Value, loads, walk
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import is_nonnegative


def in_range(graph: Graph, x: Load, ranges: Mapping[str, Index]) -> bool:
    """Check whether a load provably stays inside its tensor for all values of the iterators."""
    return all(
        is_nonnegative(i, ranges) and is_nonnegative(e - 1 - i, ranges)
        for i, e in zip(x.index, graph.tensors[x.buffer].shape, strict=True)
    )


def is_eager(graph: Graph, v: Value, ranges: Mapping[str, Index]) -> bool:
    """Check whether both branches of a ``where`` may be evaluated: none of their loads needs the condition."""
    return isinstance(v, Op) and all(in_range(graph, x, ranges) for a in v.args[1:] for x in loads(a))


def needs_guard(graph: Graph, n: Compute) -> bool:
    """Check whether the node has a load that may leave its tensor if the enclosing ``where`` does not choose it.

    Register tiles evaluate every lane and share loads, so such a node cannot be part of a contraction.
    """
    ranges = dict(iterators(graph, n))
    return any(isinstance(v, Op) and v.name == "where" and not is_eager(graph, v, ranges) for v in walk(n.body))
