"""The fusion plan: which primitives become one kernel, and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from polydyn.fusion.append import Append
from polydyn.graph.ir import Compute, Graph
from polydyn.schedules.index import Index
from polydyn.schedules.model import row_major


@dataclass(frozen=True)
class Window:
    """A tensor that lives inside another one (a part of a concatenation): from ``offset`` along ``axis``."""

    target: str
    axis: int
    offset: Index


@dataclass(frozen=True)
class Prologue:
    """Maps that a group's first node computes where it reads them; ``reader``: that node as it was before."""

    maps: tuple[Compute, ...]
    reader: Compute


@dataclass(frozen=True)
class FusedGroup:
    """One kernel to be.

    ``kind``: ``contract`` (a sum of products and its epilogue), ``nest`` (element-wise, reductions, stitch) or
    ``attention`` (contraction, stitch, contraction).
    ``nodes`` in topological order; ``outputs``: tensors others read; ``prefix``: leading axes that all nodes share.
    ``reasons``: one line for each node that joined. ``parts`` (attention): the groups it is made of,
    scores, rows, values. ``prologue``: what was put into the body of the first node.
    """

    kind: str
    nodes: tuple[Compute, ...]
    outputs: tuple[str, ...]
    prefix: int
    reasons: tuple[str, ...]
    parts: tuple[FusedGroup, ...] = ()
    prologue: Prologue | None = None


@dataclass(frozen=True)
class FusionPlan:
    """Groups in launch order.

    ``windows``: tensors written straight into a part of another tensor. ``appends``: outputs that may share memory with
    an input. ``strides``: tensors whose leading strides are the caller's, with the symbols that hold those strides.
    """

    graph: Graph
    groups: tuple[FusedGroup, ...]
    windows: dict[str, Window] = field(default_factory=dict)
    appends: tuple[Append, ...] = ()
    strides: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def strides_of(self, tensor: str) -> tuple[Index, ...]:
        """Strides of a tensor in memory, in elements."""
        free = tuple(map(Index.of, self.strides.get(tensor, ())))
        return (*free, *row_major(self.graph.tensors[tensor].shape)[len(free) :])
