"""Dependences in a graph, and a topological order after nodes were merged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polydyn.errors import PolydynError
from polydyn.graph.ir import Graph, Node


class Dependences:
    """Bit set of the nodes on which each node's output depends, itself included."""

    def __init__(self, graph: Graph) -> None:
        self._position = {n.output: k for k, n in enumerate(graph.nodes)}
        self._before: list[int] = []
        for k, n in enumerate(graph.nodes):
            bits = 1 << k
            for t in n.inputs:
                if t in self._position:
                    bits |= self._before[self._position[t]]
            self._before.append(bits)

    def depends(self, t: str, on: str) -> bool:
        """Check whether tensor ``t`` is computed from ``on`` or equals it."""
        place, other = self._position.get(t), self._position.get(on)
        return t == on or (place is not None and other is not None and bool(self._before[place] >> other & 1))

    def independent(self, outputs: Sequence[str]) -> bool:
        """Check that there is no path between any two of these nodes."""
        places = [self._position[t] for t in outputs]
        return not any(self._before[a] >> b & 1 for a in places for b in places if a != b)


def in_order(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Sort nodes topologically, keeping their order where possible. Raises PolydynError for a cycle."""
    nodes = tuple(nodes)
    producers = {n.output: n for n in nodes}
    done: dict[str, Node] = {}
    open_: set[str] = set()
    for n in nodes:
        stack = [n.output]
        while stack:
            t = stack[-1]
            missing = [i for i in producers[t].inputs if i in producers and i not in done]
            if t in done or not missing:
                done.setdefault(t, producers[t])
                open_.discard(stack.pop())
            elif t in open_:
                raise PolydynError("nodes were merged that depend on one another", tensor=t)
            else:
                open_.add(t)
                stack += reversed(missing)
    return tuple(done.values())
