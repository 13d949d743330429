"""Select the nodes that another runtime computes, and group them into regions (docs/adr/0030-fallback.md).

Each region becomes one node. Regions are as large as possible without a compiled node in between. Values that cannot
leave the other runtime (strings, sequences) stay inside one region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.graph.importer import ImportedGraph
from polydyn.graph.inner import captured_by
from polydyn.graph.operators.registry import OnnxNode
from polydyn.onnx_runtime import FALLBACK

KIND = FALLBACK
"""Kind of the regions' nodes and of the host's steps, and the value of ``Options.fallback``."""
NOT_BUILT = "the operator is not built"


class CannotCross(Exception):
    """Raised if a tensor of a region is of a type that cannot pass between it and the program."""

    def __init__(self, tensor: str, kind: str) -> None:
        super().__init__(f"{tensor} is {kind}")
        self.tensor, self.kind = tensor, kind


class RepropagationNeeded(Exception):
    """Raised if more nodes go to the other runtime than before, so that the graph must be propagated again."""


@dataclass
class FallbackNodes:
    """The nodes and tensors that the other runtime handles so far. It only grows."""

    nodes: dict[str, str] = field(default_factory=dict)
    """Maps a node to the reason."""
    tensors: dict[str, str] = field(default_factory=dict)
    """Maps a tensor that cannot cross to its type."""
    callers: dict[str, str] = field(default_factory=dict)
    """Maps a node of an inlined body to the node that had this body, which goes to the other runtime as a whole."""

    def leave(self, error: PolydynError, *nodes: str) -> None:
        """Leave nodes that were rejected or whose plan failed, or the nodes that have them in their bodies.

        Raises ``error`` if all of them are left already.
        """
        new = {self.callers.get(n, n) for n in nodes} - self.nodes.keys()
        if not new:
            raise error
        self.nodes.update((n, error.message.split("\n")[0]) for n in new)

    def keep(self, node: OnnxNode, crossing: CannotCross) -> None:
        """Keep a tensor and all its readers inside a region. Raises UnsupportedError if it crosses the region's
        boundary.
        """
        if crossing.tensor in self.tensors:
            raise UnsupportedError(
                f"{node.name} cannot be left to ONNX Runtime: {crossing}", node=node.name, tensor=crossing.tensor,
                rule="fallback", remedy=node.fallback,
            )  # fmt: skip
        self.tensors[crossing.tensor] = crossing.kind

    def replacement(self, node: OnnxNode, graph: ImportedGraph, built: Callable[[OnnxNode], bool]) -> ImportedGraph:
        """Return the graph that replaces a node. A branch of an If has its own regions, a body has none."""
        caller = self.callers.get(node.name, "" if node.op == "If" else node.name)
        if not caller:
            return with_regions(graph, self, built)
        self.callers.update((n.name, caller) for n in graph.nodes)
        return graph


def members(node: OnnxNode) -> tuple[OnnxNode, ...]:
    """Return the nodes of a region, or an ordinary node itself."""
    return tuple(node.attribute("members")) if node.fallback else (node,)


def region(nodes: Sequence[OnnxNode], read: Iterable[str], graph: ImportedGraph) -> OnnxNode:
    """Join nodes of a graph, in order, into one node whose outputs are the results that others read."""
    outputs_of_nodes = {o for n in nodes for o in n.outputs if o}
    inputs = dict.fromkeys(x for n in nodes for x in reads(n) if x not in outputs_of_nodes)
    first, more = nodes[0], len(nodes) - 1
    name = f"{first.name} and {more} more" if more else first.name
    outputs = tuple(dict.fromkeys(x for x in read if x in outputs_of_nodes))
    dims = {o: graph.declared[o].dims for o in outputs if o in graph.declared}
    ranks = {o: len(d) for o, d in dims.items() if d is not None}
    attributes = {"members": tuple(nodes), "ranks": ranks}
    return OnnxNode(name, KIND, tuple(inputs), outputs, attributes, first.opset, first.fallback)


def reads(node: OnnxNode) -> list[str]:
    """Return the tensors that a node and its bodies read."""
    return [x for x in (*node.inputs, *captured_by(node)) if x]


def with_regions(graph: ImportedGraph, left: FallbackNodes, built: Callable[[OnnxNode], bool]) -> ImportedGraph:
    """Form the regions of a graph: nodes that are not ``built``, and the nodes in ``left``."""
    left.tensors.update((x, "a tensor of strings") for x, a in graph.constants.items() if a.dtype == object)
    nodes = [replace(m, fallback="") for n in graph.nodes for m in members(n)]
    cut = _Cut([replace(n, fallback=_reason(n, left, built)) for n in nodes], left)
    return replace(graph, nodes=cut.nodes(graph)) if any(n.fallback for n in cut.given) else graph


def _reason(node: OnnxNode, left: FallbackNodes, built: Callable[[OnnxNode], bool]) -> str:
    """Return the reason why a node is left to the other runtime, or "" if it is not."""
    inside = next((f"{x} is {left.tensors[x]}" for x in (*node.outputs, *reads(node)) if x in left.tensors), "")
    return left.nodes.get(node.name, inside if built(node) else NOT_BUILT)


class _Cut:
    """Nodes in phases: even phases are compiled, odd ones are left. A phase reads results of its own and earlier
    phases.
    """

    def __init__(self, nodes: list[OnnxNode], left: FallbackNodes) -> None:
        self.given = nodes
        maker = {o: k for k, n in enumerate(nodes) for o in n.outputs if o}
        self.before = [{maker[x] for x in reads(n) if x in maker} for n in nodes]
        self.after: list[set[int]] = [set() for _ in nodes]
        for k, makers in enumerate(self.before):
            for j in makers:
                self.after[j].add(k)
        self.unit = [{k} for k in range(len(nodes))]
        for x in left.tensors.keys() & maker.keys():
            for k in self.after[maker[x]]:
                if x in reads(nodes[k]):
                    self.join(maker[x], k)
        self.close()
        self.phase = self.phases()

    def join(self, a: int, b: int) -> None:
        """Put two nodes into the same region."""
        both = self.unit[a] | self.unit[b]
        for k in both:
            self.unit[k] = both

    def close(self) -> None:
        """Join the nodes on paths between nodes that must stay together."""
        again = True
        while again:
            again = False
            for k, unit in enumerate(self.unit):
                if min(unit) != k or len(unit) == 1:
                    continue
                between = (self.reached(unit, self.before) & self.reached(unit, self.after)) - unit
                for j in between:
                    if not self.given[j].fallback:
                        why = f"it lies between nodes that stay together ({self.given[k].name})"
                        self.given[j] = replace(self.given[j], fallback=why)
                    self.join(k, j)
                    again = True

    def reached(self, start: set[int], edges: Sequence[set[int]]) -> set[int]:
        found, waiting = set(start), list(start)
        while waiting:
            new = {j for k in edges[waiting.pop()] for j in self.unit[k]} - found
            found |= new
            waiting += new
        return found

    def phases(self) -> list[int]:
        """Return the earliest phase of every node. A node that only regions read belongs to the first of these."""
        phase = [int(bool(n.fallback)) for n in self.given]
        again = True
        while again:
            again = False
            for k, makers in enumerate(self.before):
                least = max((phase[j] + (phase[j] - phase[k]) % 2 for j in makers), default=0)
                if least > phase[k]:
                    again = True
                    for j in self.unit[k]:
                        phase[j] = least
        for k in reversed(range(len(phase))):
            readers = {j for i in self.unit[k] for j in self.after[i]} - self.unit[k]
            if phase[k] % 2 and readers and all(phase[j] % 2 for j in readers):
                for j in self.unit[k]:
                    phase[j] = min(phase[r] for r in readers)
        return phase

    def nodes(self, graph: ImportedGraph) -> tuple[OnnxNode, ...]:
        """Return all nodes in order, each region of an odd phase as one node. Regions without readers are dropped."""
        for k, makers in enumerate(self.before):
            for j in makers:
                if self.phase[k] % 2 and self.phase[j] == self.phase[k]:
                    self.join(k, j)
        placed: list[tuple[int, int, OnnxNode]] = []
        for k, unit in enumerate(self.unit):
            if not self.phase[k] % 2:
                placed.append((self.phase[k], k, self.given[k]))
            elif min(unit) == k:
                others = (x for j, n in enumerate(self.given) if j not in unit for x in reads(n))
                one = region([self.given[j] for j in sorted(unit)], (*others, *graph.outputs), graph)
                if one.outputs:
                    placed.append((self.phase[k], k, one))
        return tuple(n for _, _, n in sorted(placed, key=lambda f: f[:2]))
