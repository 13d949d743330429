"""The graph: typed, immutable, with one computing primitive.

``Compute`` is a loop nest over the output's elements, with an optional reduction. Other systems distinguish map,
reduce, contract (matmul, convolution, pooling), view, gather, pad and iota. Here these are classifications of a Compute
by its body, never by an operator's name (``docs/adr/0002-one-primitive.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from polydyn.schedules.expr import Array, Load, Value, indices, loads, substitute, walk
from polydyn.schedules.index import ZERO, Index

Dim = Index
"""A symbolic size. Symbols are named by the model (``B``, ``L``) or by the importer."""


@dataclass(frozen=True)
class Tensor:
    """A typed value with a symbolic shape."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


def dim_name(axis: int) -> str:
    """Return the iterator of output axis ``axis`` in a Compute's body."""
    return f"d{axis}"


def reduction_name(axis: int) -> str:
    """Return the iterator of reduction dim ``axis`` in a Compute's body."""
    return f"r{axis}"


@dataclass(frozen=True)
class Compute:
    """``output[d0, d1, ...] = reduce over r0, r1, ... of body``.

    Iterator ``d<i>`` runs over output axis i, ``r<j>`` over ``reduction[j]``. ``body`` loads tensors at logical
    subscripts, which are Index expressions over iterators, symbols and fetched integers. Without ``reduce`` it is a
    plain assignment. An empty reduction gives the neutral element. ``origin`` is the ONNX node's name, for messages.
    """

    output: str
    body: Value
    reduction: tuple[Dim, ...] = ()
    reduce: str | None = None
    origin: str = ""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors read, each once, in order of first use (including fetched ones)."""
        names = [x.buffer for x in loads(self.body)]
        names += [a.name for i in indices(self.body) for a in sorted(i.fetches(), key=str)]
        return tuple(dict.fromkeys(names))

    def at(self, index: Sequence[Index]) -> Value:
        """Return the body for the output's element at ``index``."""
        return substitute(self.body, {dim_name(a): i for a, i in enumerate(index)})

    @property
    def is_view(self) -> bool:
        """Whether it only renames elements: one load, no fetched subscripts, no reduction, no change of dtype."""
        return self.reduce is None and isinstance(self.body, Load) and not any(i.fetches() for i in self.body.index)

    @property
    def is_map(self) -> bool:
        """Whether nothing is reduced."""
        return self.reduce is None


@dataclass(frozen=True)
class Concat:
    """Joins tensors along ``axis``. It is not a Compute, so that producers may write directly into their part."""

    output: str
    parts: tuple[str, ...]
    axis: int
    origin: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors read, each once."""
        return tuple(dict.fromkeys(self.parts))


Node = Compute | Concat


def size_input(symbol: str) -> str:
    """Return the input that carries a size to a part or a body: a vector of that many bytes, which is never read."""
    return f"size of {symbol}"


@dataclass(frozen=True)
class HostStep:
    """Work of the host between two parts of a program (docs/adr/0027-parts.md).

    ``kind``: one of ``polydyn.program.frame.KINDS``, or "onnxruntime". The step is a function of the arrays ``inputs``
    (tensor names, ``""`` for absent ones), the sizes ``dims`` and ``settings`` (JSON values by name). It computes the
    tensors ``outputs`` (``""`` if unused) and, for each of ``symbols``, a size. ``bodies``: the models that it runs, by
    name. ``level``: the level of the previous part; the step runs no earlier. ``origin``: the ONNX node.
    """

    kind: str
    inputs: tuple[str, ...]
    dims: tuple[Dim, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    bodies: tuple[tuple[str, Any], ...] = field(default=(), compare=False, repr=False)
    level: int = 0
    origin: str = ""


@dataclass(frozen=True)
class SymbolSource:
    """The source of a symbol's value at run time: the size of an input along an axis."""

    symbol: str
    input: str
    axis: int


@dataclass(frozen=True)
class Guard:
    """A condition on symbols that every call must satisfy: ``left relation right``, relation ``==``, ``<=`` or ``%==``.

    ``a %== b``: a is a multiple of b. ``message`` names the node, tensor and dim that need it, and the reason.
    ``words`` is a simpler form of the condition, such as ``H is a multiple of 32, or up to 7 less``.
    """

    left: Dim
    relation: str
    right: Dim
    message: str
    words: str = ""


@dataclass(frozen=True)
class IndexBound:
    """A check that every integer of ``tensor`` plus ``offset`` is in [-size, size), because it subscripts an axis.

    ``node``: the ONNX node that uses the integers as subscripts. ``part``: (first, step) of the checked integers, if
    tuples of subscripts are stored one after another. ``formula``: the checked integers over ``d<axis>`` of ``shape``,
    if ``tensor`` is a view or arithmetic that is not computed by itself. The data of every call are checked.
    ``status``: the tensor in which a device reports the result (``polydyn/program/index_checks.py``); if empty, the
    host checks. ``kept``: the tensor in which the host finds the integers if they are nowhere else in memory.
    """

    tensor: str
    size: Dim
    node: str
    offset: Dim = ZERO
    part: tuple[int, int] = (0, 1)
    formula: Dim | None = None
    shape: tuple[Dim, ...] = ()
    status: str = ""
    kept: str = ""


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order over named tensors.

    ``inputs``/``outputs``: tensor names in the model's order. ``constants``: arrays by tensor name. ``sources``: the
    source of each symbol (exactly one each). ``guards``: assumed facts that every call checks. ``promises``: facts that
    hold by construction, such as that a slice ends inside its tensor. ``bounds``: tensors whose elements are used as
    subscripts. ``steps``: work of the host in between. A graph with steps is cut into parts without steps
    (``graph/cut.py``) before any other stage. ``guessed``: pairs of sizes that are assumed equal although one of them
    might be 1.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Array]
    nodes: tuple[Node, ...]
    sources: tuple[SymbolSource, ...] = ()
    guards: tuple[Guard, ...] = ()
    promises: tuple[Guard, ...] = ()
    notes: tuple[str, ...] = field(default=())
    bounds: tuple[IndexBound, ...] = ()
    steps: tuple[HostStep, ...] = ()
    guessed: tuple[tuple[Dim, Dim], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the model for users of a program: plain data."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Outputs that are inputs of the model: maps the tensor that is a copy to the name of both."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Conversions by the host before and after a call (``graph/texts.py``): JSON data."""
    optional: Mapping[str, tuple[tuple[int | str | None, ...], Array]] = field(default_factory=dict)
    """Initializers that are inputs too: their declared axes, and their values."""

    @property
    def facts(self) -> tuple[Guard, ...]:
        """All facts about sizes."""
        return (*self.guards, *self.promises)

    def producer(self) -> dict[str, Node]:
        """Map each tensor name to the node that computes it."""
        return {n.output: n for n in self.nodes}

    def consumers(self) -> dict[str, list[Node]]:
        """Map each tensor name to the nodes that read it, in order."""
        out: dict[str, list[Node]] = {t: [] for t in self.tensors}
        for n in self.nodes:
            for t in n.inputs:
                out[t].append(n)
        return out


def value_size(v: Value) -> int:
    """Return the number of operations in an expression (roughly the cost of recomputing it)."""
    return sum(1 for x in walk(v) if not isinstance(x, Load))


def iterators(graph: Graph, node: Compute) -> Iterator[tuple[str, Dim]]:
    """Yield (iterator, extent) of a Compute: output axes, then reduction dims."""
    for a, e in enumerate(graph.tensors[node.output].shape):
        yield dim_name(a), e
    for j, e in enumerate(node.reduction):
        yield reduction_name(j), e
