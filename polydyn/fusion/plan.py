"""The fusion plan: which primitives become one kernel, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from polydyn.fusion.append import Append
from polydyn.graph.ir import Compute, Graph
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.lanes import VECTOR_DTYPES
from polydyn.schedules.model import row_major

Rows: TypeAlias = Mapping[str, tuple[int, ...]]
"""Maps a node's output to its axes that run over the group's rows, in an order that all nodes of the group share.

Axes of extent 1 belong to no row.
"""


@dataclass(frozen=True)
class Window:
    """The part of another tensor that stores a tensor (a part of a concatenation): from ``offset`` along ``axis``."""

    target: str
    axis: int
    offset: Index


@dataclass(frozen=True)
class Prologue:
    """Maps that a group's first node computes where it reads them. ``reader`` is that node without the maps."""

    maps: tuple[Compute, ...]
    reader: Compute


@dataclass(frozen=True)
class FusedGroup:
    """The nodes of one future kernel.

    ``kind``: ``contract`` (a sum of products and its epilogue), ``nest`` (element-wise, reductions, stitch),
    ``scatter``, ``scan``, ``order`` (see the ``fusion`` modules that mark them) or ``attention`` (contraction, stitch,
    contraction). ``nodes`` are in topological order. ``outputs``: tensors that others read. ``rows``: the axes of each
    node that all nodes share. ``reasons``: one line for each node that joined. ``parts`` (attention): the original
    groups scores, rows, values. ``prologue``: the maps in the body of the first node.
    """

    kind: str
    nodes: tuple[Compute, ...]
    outputs: tuple[str, ...]
    rows: Rows
    reasons: tuple[str, ...]
    parts: tuple[FusedGroup, ...] = ()
    prologue: Prologue | None = None


@dataclass(frozen=True)
class FusionPlan:
    """Groups in launch order.

    ``windows``: tensors that are written directly into a part of another tensor. ``appends``: outputs that may share
    memory with an input. ``strides`` maps tensors whose leading strides the caller chooses to the symbols of these
    strides. ``refused`` maps (tensor, reader) to the reason why the reader did not join the group that computes the
    tensor. ``lanes``: dtypes that register tiles of the target hold.
    """

    graph: Graph
    groups: tuple[FusedGroup, ...]
    windows: dict[str, Window] = field(default_factory=dict)
    appends: tuple[Append, ...] = ()
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    lanes: tuple[str, ...] = VECTOR_DTYPES

    @cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Maps a node's output to the tensors that the node reads."""
        return {n.output: n.inputs for n in self.graph.nodes}

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Maps a tensor to the outputs of the nodes that read it."""
        out: dict[str, list[str]] = {}
        for reader, inputs in self.inputs.items():
            for t in inputs:
                out.setdefault(t, []).append(reader)
        return {t: tuple(r) for t, r in out.items()}

    @cached_property
    def concatenations(self) -> frozenset[str]:
        """Tensors that are written in parts."""
        return frozenset(w.target for w in self.windows.values())

    @cached_property
    def stored(self) -> frozenset[str]:
        """Tensors that must be in memory for any reader: outputs, and parts of concatenations."""
        return frozenset((*self.graph.outputs, *self.windows))

    def outputs_of(self, nodes: tuple[Compute, ...]) -> tuple[str, ...]:
        """Return the tensors that a group of these nodes must store in memory."""
        names = {n.output for n in nodes}
        return tuple(
            t for t in (n.output for n in nodes)
            if t in self.stored or any(r not in names for r in self.readers.get(t, ()))
        )  # fmt: skip

    def why_apart(self, group: FusedGroup) -> tuple[str, ...]:
        """Return one line for each tensor that a group reads from another group: why the two are separate kernels."""
        outputs = {n.output for n in group.nodes}
        pairs = [
            (t, n.output) for n in group.nodes for t in self.inputs[n.output]
            if (t in self.inputs or t in self.concatenations) and t not in outputs
        ]  # fmt: skip
        parts = dict.fromkeys(self.concatenations, "it is a concatenation that several kernels write")
        default = "no pass that is on joins such a pair"
        return tuple(f"{r}: apart from {t}: {self.refused.get((t, r), parts.get(t, default))}" for t, r in pairs)

    def strides_of(self, tensor: str) -> tuple[Index, ...]:
        """Return the strides of a tensor in memory, in elements."""
        free = tuple(map(Index.of, self.strides.get(tensor, ())))
        return (*free, *row_major(self.graph.tensors[tensor].shape)[len(free) :])

    def address_of(self, tensor: str, subscripts: tuple[Index, ...]) -> tuple[str, Index]:
        """Return (buffer, element offset) of a tensor's element, through windows into concatenations."""
        window = self.windows.get(tensor)
        if window is not None:
            place = tuple(i + window.offset if a == window.axis else i for a, i in enumerate(subscripts))
            return self.address_of(window.target, place)
        return tensor, sum((i * s for i, s in zip(subscripts, self.strides_of(tensor), strict=True)), ZERO)
