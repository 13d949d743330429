"""The graph: typed, immutable, one computing primitive.

``Compute`` is a loop nest over the output's elements, with an optional reduction: what other systems call map,
reduce, contract (matmul, convolution, pooling), view, gather, pad and iota are classifications of it, found by
looking at its body, never by an operator's name (``docs/adr/0002-one-primitive.md``).
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
    """The iterator of output axis ``axis`` in a Compute's body."""
    return f"d{axis}"


def reduction_name(axis: int) -> str:
    """The iterator of reduction dim ``axis`` in a Compute's body."""
    return f"r{axis}"


@dataclass(frozen=True)
class Compute:
    """``output[d0, d1, ...] = reduce over r0, r1, ... of body``.

    Iterator ``d<i>`` runs over output axis i, ``r<j>`` over ``reduction[j]``. ``body`` loads tensors at logical
    subscripts, which are Index expressions over iterators, symbols and fetched integers. Without ``reduce``, a plain
    assignment. An empty reduction gives the neutral element. ``origin`` is the ONNX node's name, for messages.
    """

    output: str
    body: Value
    reduction: tuple[Dim, ...] = ()
    reduce: str | None = None
    origin: str = ""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the tensors read, each once, in order of first use (fetched ones included)."""
        names = [x.buffer for x in loads(self.body)]
        names += [a.name for i in indices(self.body) for a in sorted(i.fetches(), key=str)]
        return tuple(dict.fromkeys(names))

    def at(self, index: Sequence[Index]) -> Value:
        """The body for the output's element at ``index``."""
        return substitute(self.body, {dim_name(a): i for a, i in enumerate(index)})

    @property
    def is_view(self) -> bool:
        """True when it only renames elements: one load, no fetched subscripts, no reduction, no change of dtype."""
        return self.reduce is None and isinstance(self.body, Load) and not any(i.fetches() for i in self.body.index)

    @property
    def is_map(self) -> bool:
        """True when nothing is reduced."""
        return self.reduce is None


@dataclass(frozen=True)
class Concat:
    """Joins tensors along ``axis``; kept apart so that producers may write straight into their part."""

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
    """The input that brings a size to a part or a body: a vector of so many bytes, which nobody reads."""
    return f"size of {symbol}"


@dataclass(frozen=True)
class HostStep:
    """What the host does between two parts of a program (docs/adr/0027-parts.md).

    ``kind``: one of ``polydyn.program.frame.KINDS``, or "onnxruntime": a function of the arrays ``inputs``
    (tensor names, ``""`` for absent ones), the sizes ``dims`` and ``settings`` (JSON values by name). It gives the
    tensors ``outputs`` (``""``: nobody asks) and, for each of ``symbols``, a size. ``bodies``: the models that it runs,
    by name.
    ``level``: of the part before it; it is done no earlier. ``origin``: the ONNX node.
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
    """Where a symbol's value comes from at run time: the size of an input along an axis."""

    symbol: str
    input: str
    axis: int


@dataclass(frozen=True)
class Guard:
    """A condition on symbols that every call must meet: ``left relation right`` with relation ``==``, ``<=``, ``%==``.

    ``a %== b``: a is a multiple of b. ``message`` says which node, tensor and dim needs it and why; ``words`` say the
    condition simpler, as ``H is a multiple of 32, or up to 7 less``.
    """

    left: Dim
    relation: str
    right: Dim
    message: str
    words: str = ""


@dataclass(frozen=True)
class IndexBound:
    """Every integer of ``tensor`` plus ``offset`` is a subscript of an axis of ``size``: it lies in [-size, size).

    ``node``: the ONNX node that uses it so. ``part``: (first, step) of the integers meant, where tuples of subscripts
    lie one behind the other. ``formula``: where ``tensor`` is a view or arithmetic that nobody computes for itself, the
    integers meant over ``d<axis>`` of ``shape``. Checked on the data of every call; ``status``: the tensor in which
    a device says what it found (``polydyn/program/index_checks.py``), empty: the host looks. ``kept``: the tensor in
    which the host finds them, where they are nowhere else in memory.
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

    ``inputs``/``outputs``: tensor names in the model's order. ``constants``: arrays by tensor name.
    ``sources``: where each symbol comes from (exactly one each). ``guards``: facts assumed, to be checked per call.
    ``bounds``: tensors whose elements are used as subscripts. ``steps``: what the host does in between; a graph
    that has some is cut into parts that have none (``graph/cut.py``) before anything else happens to it.
    ``guessed``: pairs of sizes that are taken to be equal, where one of them might be 1.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Array]
    nodes: tuple[Node, ...]
    sources: tuple[SymbolSource, ...] = ()
    guards: tuple[Guard, ...] = ()
    notes: tuple[str, ...] = field(default=())
    bounds: tuple[IndexBound, ...] = ()
    steps: tuple[HostStep, ...] = ()
    guessed: tuple[tuple[Dim, Dim], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the model says of itself, for those who ask a program: plain data."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Outputs that are inputs of the model: the tensor that is a copy -> the name of both."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Conversions by the host before and after a call (``graph/texts.py``): JSON data."""
    optional: Mapping[str, tuple[tuple[int | str | None, ...], Array]] = field(default_factory=dict)
    """Initializers that are inputs too: their axes as the model says, and their values."""

    def producer(self) -> dict[str, Node]:
        """Tensor name -> the node that computes it."""
        return {n.output: n for n in self.nodes}

    def consumers(self) -> dict[str, list[Node]]:
        """Tensor name -> the nodes that read it, in order."""
        out: dict[str, list[Node]] = {t: [] for t in self.tensors}
        for n in self.nodes:
            for t in n.inputs:
                out[t].append(n)
        return out


def value_size(v: Value) -> int:
    """Number of operations in an expression (what recomputing it costs, roughly)."""
    return sum(1 for x in walk(v) if not isinstance(x, Load))


def iterators(graph: Graph, node: Compute) -> Iterator[tuple[str, Dim]]:
    """(iterator, extent) of a Compute: output axes, then reduction dims."""
    for a, e in enumerate(graph.tensors[node.output].shape):
        yield dim_name(a), e
    for j, e in enumerate(node.reduction):
        yield reduction_name(j), e
