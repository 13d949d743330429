"""Cut a graph with host steps into parts that have none (docs/adr/0027-parts.md).

Everything has a level. Inputs and constants have level 0. The result of a step is one level above the step. Everything
else has the maximum level of its operands and of the sizes that it mentions. The nodes of one level form a part, which
is an ordinary graph. Its inputs are the tensors that it takes from earlier levels. A size that no axis of these shows
comes in as the size of an additional input that is never read (``size_input``). So guards on late sizes are guards on
the sizes of inputs, and no pass over a graph needs to know about parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polydyn.errors import PolydynError
from polydyn.graph.ir import (
    Compute,
    Dim,
    Graph,
    Guard,
    HostStep,
    IndexBound,
    Node,
    SymbolSource,
    Tensor,
    dim_name,
    size_input,
)  # fmt: skip
from polydyn.graph.verify import free_symbols, verify_graph
from polydyn.schedules.expr import Load
from polydyn.schedules.index import ZERO, Index, product


@dataclass(frozen=True)
class Part:
    """The nodes of one level as a graph. ``sizes`` maps its inputs that only carry a size to the symbol."""

    graph: Graph
    sizes: Mapping[str, str]


@dataclass(frozen=True)
class Parts:
    """A graph in execution order: parts and steps. ``guards``: guards that no part checks."""

    graph: Graph
    order: tuple[Part | HostStep, ...]
    guards: tuple[Guard, ...] = ()
    constants: tuple[str, ...] = field(default=())
    """Constants that steps read."""
    reshaped: Mapping[str, str] = field(default_factory=dict)
    """Maps an output to the step's tensor of which it is a reshape."""


def cut(graph: Graph, inner: bool = False) -> Parts:
    """Return the parts of a graph and the steps between them, verified.

    An output that is a reshape of a step's tensor shares its memory. ``inner``: the graph is a body, whose results are
    not reshaped.
    """
    reshaped = {} if inner else _reshaped(graph)
    graph = replace(graph, nodes=tuple(n for n in graph.nodes if n.output not in reshaped))
    levels = _Levels(graph)
    homes = _homes(graph, levels)
    last = max((*homes.values(), *(levels.step(s) for s in graph.steps), 0))
    order: list[Part | HostStep] = []
    waiting = list(graph.guards)
    bounds = _bounds(graph, levels, homes)
    for level in range(-1, last + 1):
        nodes = [n for n in graph.nodes if homes[n.output] == level]
        if nodes:
            guards = [g for g in waiting if levels.of(g.left, g.right) <= level]
            waiting = [g for g in waiting if g not in guards]
            part = _part(graph, bounds, homes, level, nodes, guards)
            verify_graph(part.graph)
            order.append(part)
        order += [s for s in graph.steps if levels.step(s) == level]
    read = {x for s in graph.steps for x in s.inputs if x in graph.constants}
    return Parts(graph, tuple(order), tuple(waiting), tuple(x for x in graph.constants if x in read), reshaped)


def _reshaped(graph: Graph) -> dict[str, str]:
    """Map outputs without other readers to the step's tensor whose elements they hold in order; each tensor occurs
    once.
    """
    step_tensors = {x for s in graph.steps for x in s.outputs} - set(graph.outputs)
    read = {x for n in graph.nodes for x in n.inputs} | {x for s in graph.steps for x in s.inputs}
    sources_of_outputs: dict[str, str] = {}
    for n in graph.nodes:
        if n.output not in graph.outputs or n.output in read or not isinstance(n, Compute) or not n.is_view:
            continue
        assert isinstance(n.body, Load)
        source, target = graph.tensors[n.body.buffer], graph.tensors[n.output]
        here = {dim_name(k): ZERO for k, d in enumerate(target.shape) if d == 1}
        at = _place(target.shape, [Index.of(dim_name(k)) for k in range(len(target.shape))]).subs(here)
        whole = product(source.shape) == product(target.shape) and source.dtype == target.dtype
        unused = step_tensors - {*sources_of_outputs.values()}
        if whole and at == _place(source.shape, n.body.index).subs(here) and source.name in unused:
            sources_of_outputs[n.output] = source.name
    return sources_of_outputs


def _place(shape: Sequence[Dim], at: Sequence[Index]) -> Index:
    """Return the offset of an element in a dense tensor, in elements."""
    place = ZERO
    for d, i in zip(shape, at, strict=True):
        place = place * d + i
    return place


class _Levels:
    """The level of every tensor, size and step."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producer = graph.producer()
        self.made = {x: s for s in graph.steps for x in s.outputs if x}
        self.sizes = {x: s for s in graph.steps for x in s.symbols}
        self._tensors: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        for n in graph.nodes:  # in order, which bounds the recursion depth
            self.tensor(n.output)

    def tensor(self, name: str) -> int:
        if name not in self._tensors:
            if name in self.made:
                level = self.step(self.made[name]) + 1
            elif name in self.producer:
                level = self.node(self.producer[name])
            else:
                level = 0
            self._tensors[name] = level
        return self._tensors[name]

    def node(self, n: Node) -> int:
        shape = self.graph.tensors[n.output].shape
        return max((self.of(*shape), self.symbols(free_symbols(n)), *map(self.tensor, n.inputs)))

    def step(self, s: HostStep) -> int:
        key = id(s)
        if key not in self._steps:
            read = [self.tensor(x) for x in s.inputs if x]  # without inputs it can run before the first part
            self._steps[key] = max((s.level, self.of(*s.dims) - (not s.inputs), *read))
        return self._steps[key]

    def symbols(self, names: Iterable[str]) -> int:
        return max((self.step(self.sizes[s]) + 1 for s in names if s in self.sizes), default=0)

    def of(self, *dims: Dim) -> int:
        return self.symbols(s for d in dims for s in d.symbols())


def _homes(graph: Graph, levels: _Levels) -> dict[str, int]:
    """Return the level at which each node is computed: its own, or for a free node the level of its readers."""
    homes = {n.output: levels.tensor(n.output) for n in graph.nodes}
    stored = {*graph.outputs, *(x for s in graph.steps for x in s.inputs), *(b.tensor for b in graph.bounds)}
    consumers = graph.consumers()
    for n in reversed(graph.nodes):
        readers = {homes[c.output] for c in consumers[n.output]}
        if n.output not in stored and readers and _is_free(n):
            homes[n.output] = max(homes[n.output], min(readers))
    return homes


def _is_free(n: Node) -> bool:
    """Check for a view, or for numbers that follow from their position."""
    return isinstance(n, Compute) and (n.is_view or (n.is_map and not n.inputs))


def _part(
    graph: Graph, checked: Sequence[tuple[IndexBound, int]], homes: Mapping[str, int], level: int,
    nodes: Sequence[Node], guards: Sequence[Guard],
) -> Part:  # fmt: skip
    computed = {n.output for n in nodes}
    read = list(dict.fromkeys(x for n in nodes for x in n.inputs if x not in computed))
    bounds = [b for b, at in checked if at == level]
    checked_tensors = [b.tensor for b in bounds if b.tensor in graph.tensors]
    read += [t for t in checked_tensors if t not in computed and t not in read]
    inputs = [x for x in read if x not in graph.constants]
    if not level:  # like the model: a part before any step has the model's interface
        inputs = [*graph.inputs, *(x for x in inputs if x not in graph.inputs)]
    later = {x for n in graph.nodes if homes[n.output] > level for x in n.inputs}
    later |= {x for s in graph.steps for x in s.inputs} | set(graph.outputs)
    later |= {b.tensor for b, at in checked if at > level}
    tensors = {x: graph.tensors[x] for x in dict.fromkeys([*inputs, *read, *(n.output for n in nodes)])}
    used = {s for t in tensors.values() for d in t.shape for s in d.symbols()} | {
        s for n in nodes for s in free_symbols(n)
    }
    used |= {s for b in bounds for d in (b.size, b.offset, *b.shape, b.formula) if d is not None for s in d.symbols()}
    used -= {s for s in used if s[:1] in "dr" and s[1:].isdigit()}
    own = [g for g in graph.guards if g in guards or g.left.symbols() | g.right.symbols() <= used]
    used |= {s for g in own for s in g.left.symbols() | g.right.symbols()}
    promises = tuple(g for g in graph.promises if g.left.symbols() | g.right.symbols() <= used)
    sources, sizes = _sources(graph, inputs, used)
    tensors |= {x: Tensor(x, "uint8", (Dim.of(s),)) for x, s in sizes.items()}
    part = replace(
        graph, name=f"{graph.name} part {level}", inputs=(*inputs, *sizes),
        outputs=tuple(n.output for n in nodes if n.output in later), tensors=tensors,
        constants={x: a for x, a in graph.constants.items() if x in read}, nodes=tuple(nodes), sources=sources,
        guards=tuple(own), promises=promises, guessed=(), bounds=tuple(bounds), steps=(),
        notes=graph.notes if not level else (),
    )  # fmt: skip
    return Part(part, sizes)


def piece(graph: Graph, first: int, last: int) -> Graph:
    """Return nodes ``first`` to ``last`` (exclusive) of a graph without steps, as a graph."""
    homes = {n.output: 1 + (k >= first) + (k >= last) for k, n in enumerate(graph.nodes)}
    return _part(graph, (), homes, 2, graph.nodes[first:last], ()).graph


def _sources(
    graph: Graph, inputs: Sequence[str], used: Iterable[str]
) -> tuple[tuple[SymbolSource, ...], dict[str, str]]:
    """Return the sources of a part's sizes: the model's inputs if possible, else an axis of that size, else a new
    input.
    """
    sources = {s.symbol: s for s in graph.sources if s.input in inputs}
    for x in inputs:
        for axis, d in enumerate(graph.tensors[x].shape):
            if d.is_symbol and str(d) in used:
                sources.setdefault(str(d), SymbolSource(str(d), x, axis))
    sizes = {size_input(s): s for s in sorted(used) if s not in sources}
    return (*sources.values(), *(SymbolSource(s, x, 0) for x, s in sizes.items())), sizes


def _bounds(graph: Graph, levels: _Levels, homes: Mapping[str, int]) -> list[tuple[IndexBound, int]]:
    """Return the index bounds with the level of the part that checks each one.

    That is the first part that reads the integers and knows the size. A bound without readers is dropped.
    """
    consumers, out = graph.consumers(), list[tuple[IndexBound, int]]()
    for b in graph.bounds:
        names = {b.tensor} if b.formula is None else {a.name for a in b.formula.fetches()}
        least = max((levels.of(b.size, b.offset, *b.shape), *map(levels.tensor, names & graph.tensors.keys())))
        at = [homes[n.output] for x in names for n in consumers.get(x, ()) if homes[n.output] >= least]
        out += [(b, min(at))] if at else []
    return out


def verify_parts(parts: Parts) -> None:
    """Raise PolydynError unless everything is available before it is read, and every output at the end."""
    there = {*parts.graph.inputs, *parts.constants, *(s.symbol for s in parts.graph.sources), ""}
    for stage in parts.order:
        if isinstance(stage, Part):
            needs = {x for x in stage.graph.inputs if x not in stage.sizes} | set(stage.sizes.values())
            gives = set(stage.graph.outputs)
        else:
            needs = {*stage.inputs, *(s for d in stage.dims for s in d.symbols())}
            gives = {*stage.outputs, *stage.symbols}
        if missing := sorted(needs - there):
            raise PolydynError(f"a part of the program reads {missing[0]} before it is there", tensor=missing[0])
        there |= gives
    if missing := sorted({parts.reshaped.get(x, x) for x in parts.graph.outputs} - there):
        raise PolydynError("no part of the program gives an output", tensor=missing[0])
