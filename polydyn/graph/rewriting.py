"""Shared helpers for graph rewriting: building the new graph, inlining maps into readers, removing unused nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polydyn.graph.ir import Compute, Dim, Graph, Node, Tensor
from polydyn.schedules.expr import Array, Load, Value, map_index, transform, walk
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import Ranges, simplify


class Rewriting:
    """The state of a rewriting pass: old and new tensors and constants, the new nodes, and notes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors, self.constants = dict(graph.tensors), dict(graph.constants)
        self.nodes: list[Node] = []
        self.notes: list[str] = []

    def fresh_name(self, name: str) -> str:
        """Return a name that no tensor has: this one, perhaps with marks appended."""
        while name in self.tensors:
            name += "@"
        return name

    def constant(self, name: str, array: Array) -> str:
        """Add a constant under a fresh name and return the name."""
        name = self.fresh_name(name)
        self.constants[name] = array
        self.tensors[name] = Tensor(name, str(array.dtype), tuple(map(Index.of, array.shape)))
        return name

    def add(self, n: Compute, shape: tuple[Dim, ...]) -> str:
        """Add a node that computes a new tensor and return the tensor's name."""
        self.tensors[n.output] = Tensor(n.output, n.body.dtype, shape)
        self.nodes.append(n)
        return n.output

    def result(self) -> Graph:
        """Return the graph with the added nodes in order."""
        return replace(
            self.graph, nodes=tuple(self.nodes), tensors=self.tensors, constants=self.constants,
            notes=(*self.graph.notes, *self.notes),
        )  # fmt: skip


def compose(n: Compute, maps: Iterable[Compute], ranges: Ranges | None = None) -> Compute:
    """Inline maps into a node: every read of their outputs is replaced by their bodies.

    ``ranges``: extents of the node's iterators, used to simplify the inlined subscripts.
    """
    producers = {m.output: m for m in maps}

    def inline(v: Value) -> Value:
        if not isinstance(v, Load) or v.buffer not in producers:
            return v
        inside = transform(producers[v.buffer].at(v.index), inline)
        return inside if ranges is None else map_index(inside, lambda i: simplify(i, ranges))

    return replace(n, body=transform(n.body, inline))


def composed_size(n: Compute, maps: Iterable[Compute]) -> int:
    """Return the number of values in ``compose(n, maps)``, without building it: it doubles with each map that reads
    another one twice. ``maps``: producers before readers.
    """
    sizes: dict[str, int] = {}

    def size(body: Value) -> int:
        return sum(sizes.get(v.buffer, 1) if isinstance(v, Load) else 1 for v in walk(body))

    for m in maps:
        sizes[m.output] = size(m.body)
    return size(n.body)


def live_nodes(nodes: Iterable[Node], outputs: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes, in order, on which some tensors depend."""
    needed, live_reversed = set(outputs), list[Node]()
    for n in reversed(tuple(nodes)):
        if n.output in needed:
            live_reversed.append(n)
            needed.update(n.inputs)
    return tuple(reversed(live_reversed))


def live(graph: Graph) -> Graph:
    """Remove nodes, constants and tensors that are no longer needed."""
    return pruned(replace(graph, nodes=live_nodes(graph.nodes, {*graph.outputs, *(b.tensor for b in graph.bounds)})))


def pruned(graph: Graph) -> Graph:
    """Remove constants without readers and tensors without a definition."""
    read = {*graph.outputs, *(b.tensor for b in graph.bounds), *(t for n in graph.nodes for t in n.inputs)}
    constants = {t: a for t, a in graph.constants.items() if t in read}
    defined = {*graph.inputs, *constants, *(n.output for n in graph.nodes)}
    return replace(graph, tensors={t: x for t, x in graph.tensors.items() if t in defined}, constants=constants)
