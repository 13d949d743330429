"""What rewritings of a graph share: the graph to be, maps put into their readers, what is still needed in the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polydyn.graph.ir import Compute, Dim, Graph, Node, Tensor
from polydyn.schedules.expr import Array, Load, Value, map_index, transform
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import Ranges, simplify


class Rewriting:
    """A graph while a pass writes another one: its tensors and constants with the new ones, its nodes to be, notes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors, self.constants = dict(graph.tensors), dict(graph.constants)
        self.nodes: list[Node] = []
        self.notes: list[str] = []

    def fresh_name(self, name: str) -> str:
        """A name that no tensor has: this one, perhaps with marks behind it."""
        while name in self.tensors:
            name += "@"
        return name

    def constant(self, name: str, array: Array) -> str:
        """Adds a constant; its name is fresh."""
        name = self.fresh_name(name)
        self.constants[name] = array
        self.tensors[name] = Tensor(name, str(array.dtype), tuple(map(Index.of, array.shape)))
        return name

    def add(self, n: Compute, shape: tuple[Dim, ...]) -> str:
        """Adds a node whose tensor is new; its name."""
        self.tensors[n.output] = Tensor(n.output, n.body.dtype, shape)
        self.nodes.append(n)
        return n.output

    def result(self) -> Graph:
        """The graph with the nodes that were added, in their order."""
        return replace(
            self.graph, nodes=tuple(self.nodes), tensors=self.tensors, constants=self.constants,
            notes=(*self.graph.notes, *self.notes),
        )  # fmt: skip


def compose(n: Compute, maps: Iterable[Compute], ranges: Ranges | None = None) -> Compute:
    """The node with every read of the maps replaced by what they compute.

    ``ranges``: extents of the node's iterators, by which the subscripts of what comes in are simplified.
    """
    made = {m.output: m for m in maps}

    def put(v: Value) -> Value:
        if not isinstance(v, Load) or v.buffer not in made:
            return v
        inside = transform(made[v.buffer].at(v.index), put)
        return inside if ranges is None else map_index(inside, lambda i: simplify(i, ranges))

    return replace(n, body=transform(n.body, put))


def live_nodes(nodes: Iterable[Node], outputs: Iterable[str]) -> tuple[Node, ...]:
    """The nodes, given in order, that some tensors depend on."""
    needed, kept = set(outputs), list[Node]()
    for n in reversed(tuple(nodes)):
        if n.output in needed:
            kept.append(n)
            needed.update(n.inputs)
    return tuple(reversed(kept))


def live(graph: Graph) -> Graph:
    """The graph without nodes, constants and tensors that nothing needs any more."""
    return pruned(replace(graph, nodes=live_nodes(graph.nodes, {*graph.outputs, *(b.tensor for b in graph.bounds)})))


def pruned(graph: Graph) -> Graph:
    """The graph without constants that nobody reads, and without tensors that are not there."""
    read = {*graph.outputs, *(b.tensor for b in graph.bounds), *(t for n in graph.nodes for t in n.inputs)}
    constants = {t: a for t, a in graph.constants.items() if t in read}
    kept = {*graph.inputs, *constants, *(n.output for n in graph.nodes)}
    return replace(graph, tensors={t: x for t, x in graph.tensors.items() if t in kept}, constants=constants)
