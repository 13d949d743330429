"""Find the nodes of a model that cause a planning failure, by planning pieces of its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from polydyn.errors import NOT_OF_PLANS, PolydynError, failed_plan
from polydyn.graph.cut import piece
from polydyn.graph.ir import Graph

T = TypeVar("T")


def planned(graph: Graph, plan: Callable[[Graph], T], step: str) -> T:
    """Return ``plan(graph)``. Every error names nodes of the model, from a small piece that fails alone.

    ``step``: the name of the step in errors that name none.
    """
    try:
        return plan(graph)
    except NOT_OF_PLANS:
        raise
    except Exception as e:
        if isinstance(e, PolydynError) and e.origins:
            raise
        first, last = failing_piece(graph, plan)
        nodes = dict.fromkeys(n.origin for n in graph.nodes[first:last] if n.origin)
        raise failed_plan(e, step, tuple(nodes)) from e


def failing_piece(graph: Graph, plan: Callable[[Graph], object]) -> tuple[int, int]:
    """Return the range of a graph's nodes, found by halving, for which ``plan`` raises.

    It is the whole graph if its nodes do not fail as a piece.
    """

    def fails(first: int, last: int) -> bool:
        try:
            plan(piece(graph, first, last))
        except Exception:
            return True
        return False

    count = len(graph.nodes)
    if not count or not fails(0, count):
        return 0, count
    low, last = 1, count
    while low < last:
        middle = (low + last) // 2
        low, last = (low, middle) if fails(0, middle) else (middle + 1, last)
    first, high = 0, last - 1
    while first < high:
        middle = (first + high + 1) // 2
        first, high = (middle, high) if fails(middle, last) else (first, middle - 1)
    return first, last
