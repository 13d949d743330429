"""The operator registry: each ONNX operator has one entry with its shape rule and its expansion.

``infer`` runs in the worklist (TSCompiler 4.1, Algorithm 1), possibly several times while facts arrive. ``expand`` runs
once, with all shapes known, and writes primitives. No stage after expansion uses an operator's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import onnx
import onnx.defs

from polydyn.errors import ShapeError, UnsupportedError
from polydyn.graph.ir import Dim, Tensor
from polydyn.schedules.expr import Array, Value
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import Ranges


@dataclass(frozen=True)
class OnnxNode:
    """A node as imported. Absent optional inputs are ``""``; attributes are plain Python values and numpy arrays."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int
    fallback: str = ""
    """Reason why another runtime computes it (``graph/fallback.py``). Empty if its operator has rules."""

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the attribute's value; if absent, ONNX's default for the node's opset, else ``default``.

        Floats are float32, as ONNX stores them, whatever the type of the tensors.
        """
        if name in self.attributes:
            return self.attributes[name]
        default_value = _default(self.op, self.opset, name)
        default_value = default if default_value is None else default_value
        return float(np.float32(default_value)) if isinstance(default_value, float) else default_value


@lru_cache(maxsize=4096)
def _default(op: str, opset: int, name: str) -> Any:
    """Return ONNX's default number for an attribute that a node of this opset lacks, or None.

    Text defaults are not used: GRU's direction is ``foward`` in opset 1.
    """
    domain, _, short = op.rpartition("::")
    try:
        known = onnx.defs.get_schema(short, opset, domain).attributes
    except onnx.defs.SchemaError:
        return None
    if name not in known or not known[name].default_value.name:
        return None
    value = onnx.helper.get_attribute_value(known[name].default_value)
    return value if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Inferred:
    """The inferred type of one output.

    ``value``: for small tensors that hold shape arithmetic, a numpy object array of the output's shape: a ``Dim`` (or
    a ``Ratio`` in a tensor of floats) for each element, None for an element that is data; None if it holds no sizes.
    """

    dtype: str
    shape: tuple[Dim, ...]
    value: Array | None = None


class Rewritten(Exception):
    """Raised by a shape rule to replace the node by ``graph``, an ``ImportedGraph`` with the node's outputs."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.graph = graph


class RanksDiffer(Exception):
    """Raised if the branches of an If give a tensor different ``ranks``, in its first and in its second branch.

    ``sizes``: names of sizes that decide which. ``is_nested``: the ranks are those of an If inside a branch.
    """

    def __init__(self, tensor: str, ranks: tuple[int, int], sizes: Sequence[str] = (), is_nested: bool = False) -> None:
        super().__init__()
        self.tensor, self.ranks, self.sizes, self.is_nested = tensor, ranks, tuple(sizes), is_nested

    def error(self, node: OnnxNode) -> UnsupportedError:
        """Return the error for a rank that must be known."""
        a, b = self.ranks
        remedy = "export the model so that this rank is fixed"
        if self.sizes:
            pinned = ", ".join(f"{s!r}: (1, 1)" for s in self.sizes)
            remedy = f"give sizes that decide it, as in dims={{{pinned}}}, or {remedy}"
        return UnsupportedError(
            f"{self.tensor} has rank {a} or rank {b}, as the branches of an If say, but every result has one rank",
            node=f"{node.name} ({node.op})", tensor=self.tensor, dim=", ".join(self.sizes) or None, remedy=remedy,
        )  # fmt: skip


class Context(Protocol):
    """Queries that rules and expansions share. An undecidable question raises ShapeError with the names involved."""

    def tensor(self, name: str) -> Tensor:
        """Return type and shape of a tensor: for a rule, an input of the node; for an expansion, any tensor."""

    def value(self, name: str) -> Array | None:
        """Return an object array of Dims if the tensor's elements are known as shape arithmetic, else None."""

    def elements(self, name: str) -> Array | None:
        """Like ``value``, but elements may also be fractions: Dims and Ratios."""

    def known_elements(self, name: str) -> Array | None:
        """Like ``elements``, but some elements may be data: None in their places. None if all are."""

    def constant(self, name: str) -> Array | None:
        """Return the numpy value if the tensor is a constant, else None."""

    def ask(
        self,
        kind: str,
        inputs: Sequence[str],
        names: Sequence[str],
        dims: Sequence[Dim] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[Dim, ...]:
        """Request sizes that depend on data, one for each of ``names``. The host computes them in a step of this kind
        (``HostStep``).

        Equal inputs and settings give the same symbols. Facts come first: a node with a request is processed when no
        other work is left. Its expansion gets the sizes by the same arguments.
        """


class InferContext(Context, Protocol):
    """The context of an ``infer`` rule."""

    def equal(self, a: Dim, b: Dim) -> bool | None:
        """Return True or False if proven from the facts, None if undecided."""

    def unify(self, a: Dim, b: Dim, why: str) -> Dim:
        """Record ``a == b`` (with a guard if not provable). Return the canonical dim. Raises ShapeError if
        impossible.
        """

    def decide(self, condition: Dim, truth: bool, why: str) -> None:
        """Record the value of a condition on sizes, 1 or 0 (with a guard if not provable)."""

    def at_most(self, a: Dim, b: Dim, why: str) -> None:
        """Record ``a <= b`` (with a guard if not provable). Raises ShapeError if impossible."""

    def broadcast(self, a: Dim, b: Dim, why: str) -> Dim:
        """Return the broadcast of two dims by numpy's rule."""

    def undecided(self, question: str, dims: Sequence[Dim], remedy: str) -> ShapeError:
        """Return the error for a question about dims that no fact decides. It gives their origin and the known facts.

        While facts may still arrive, the error causes the node to be processed again later.
        """

    def inside(self, role: str, types: Sequence[tuple[str, Sequence[Dim | None]]]) -> Any:
        """Return the body in an attribute of the node, for inputs of these dtypes and shapes: a
        ``graph.inner.Inner``.
        """

    def refused(self, role: str, like: Any, why: str) -> Any:
        """Return a body in place of the attribute ``role``, with results like those of ``like``. A call that runs it
        fails.
        """

    def promise(self, a: Dim, b: Dim, why: str) -> None:
        """Record ``a <= b``, which holds by construction."""


class ExpandContext(Context, Protocol):
    """The context of an ``expand`` function, which writes primitives. Shapes are fully known."""

    def compute(
        self,
        shape: tuple[Dim, ...],
        body: Value,
        *,
        output: str | None = None,
        reduction: tuple[Dim, ...] = (),
        reduce: str | None = None,
    ) -> str:
        """Add a Compute (dtype of the body) and return its tensor's name. ``output`` names a node output."""

    def concat(self, parts: tuple[str, ...], axis: int, *, output: str | None = None) -> str:
        """Add a Concat."""

    def alias(self, output: str, source: str) -> None:
        """Make the node's output another name of an existing tensor."""

    def bound(self, indices: str, size: Dim, component: int | None = None, natural: bool = False) -> None:
        """Record that every element of ``indices`` subscripts an axis of ``size``: values out of [-size, size) are
        rejected.

        ``natural``: negative values are rejected too.
        """

    def never_negative(self, indices: str) -> bool:
        """Return whether constants decide that no element of ``indices`` is negative."""

    def is_data(self, indices: str, at: tuple[Index, ...]) -> bool:
        """Return whether a subscript depends on data: it is no formula of sizes and positions."""

    def position(self, indices: str, at: tuple[Index, ...], size: Dim, ranges: Ranges) -> Index | None:
        """Return the subscript that ``indices`` holds at ``at`` if it is a formula of the iterators of ``ranges``.

        It is >= 0 and, with a guard if needed, below ``size``. Returns None for data or an unknown sign.
        """

    def made(
        self, kind: str, inputs: Sequence[str], types: Sequence[tuple[str | None, str, tuple[Dim, ...]]],
        dims: Sequence[Dim] = (), settings: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None,
        bodies: Sequence[str] = (),
    ) -> tuple[str, ...]:  # fmt: skip
        """Add tensors that the host computes, in the step of ``ask`` with the same arguments or in a new one. Return
        their names.

        ``types``: (name or None for a new one, dtype, shape). ``more``: further settings. ``bodies``: attributes of the
        node that the step runs.
        """

    def below(self, tensor: str, size: Dim) -> None:
        """Record that every element of a tensor made by the host is in [0, size)."""

    def inner(self, role: str) -> Any:
        """Return the body that the shape rule requested, with its shapes."""

    def new_constant(self, array: Array, hint: str) -> str:
        """Add a constant and return its name."""


InferRule = Callable[[OnnxNode, InferContext], tuple[Inferred, ...]]
ExpandRule = Callable[[OnnxNode, ExpandContext], None]


@dataclass(frozen=True)
class Operator:
    """One operator: name, shape rule, expansion."""

    name: str
    infer: InferRule
    expand: ExpandRule


OPERATORS: dict[str, Operator] = {}


def operator(*names: str, infer: InferRule) -> Callable[[ExpandRule], ExpandRule]:
    """Register an expansion for one or more ONNX operator names together with its shape rule."""

    def register(expand: ExpandRule) -> ExpandRule:
        for name in names:
            OPERATORS[name] = Operator(name, infer, expand)
        return expand

    return register
