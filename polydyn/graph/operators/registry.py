"""The operator registry: each ONNX operator has one entry with its shape rule and its expansion side by side.

``infer`` runs in the worklist (TSCompiler 4.1, Algorithm 1), possibly several times while facts arrive; ``expand``
runs once, with all shapes known, and writes primitives. Nothing after expansion asks for an operator's name.
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
    """Why another runtime computes it (``graph/fallback.py``); empty: its operator has rules."""

    def attribute(self, name: str, default: Any = None) -> Any:
        """The attribute's value; where the node has none, ONNX's default for its opset, else the one given.

        Floats are float32, as ONNX stores them, whatever the type of the tensors.
        """
        if name in self.attributes:
            return self.attributes[name]
        found = _default(self.op, self.opset, name)
        found = default if found is None else found
        return float(np.float32(found)) if isinstance(found, float) else found


@lru_cache(maxsize=4096)
def _default(op: str, opset: int, name: str) -> Any:
    """The number that ONNX gives an attribute that a node of this opset does not have; None where it gives none.

    Texts are left out: GRU's direction is ``foward`` in opset 1.
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
    """What a rule knows of one output.

    ``value``: for small integer (or boolean) tensors that hold shape arithmetic, a numpy object array of ``Dim`` of
    the output's shape (rank 0 or 1); None when it does not hold sizes.
    """

    dtype: str
    shape: tuple[Dim, ...]
    value: Array | None = None


class Rewritten(Exception):
    """Raised by a shape rule: the node is to be replaced by ``graph``, an ``ImportedGraph`` with the node's outputs."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.graph = graph


class RanksDiffer(Exception):
    """The branches of an If give a tensor of different ``ranks``, of its first and of its second branch.

    ``sizes``: names of sizes that decide which. ``is_nested``: the ranks are those of an If inside a branch.
    """

    def __init__(self, tensor: str, ranks: tuple[int, int], sizes: Sequence[str] = (), is_nested: bool = False) -> None:
        super().__init__()
        self.tensor, self.ranks, self.sizes, self.is_nested = tensor, ranks, tuple(sizes), is_nested

    def error(self, node: OnnxNode) -> UnsupportedError:
        """The error where the rank must be known."""
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
    """What rules and expansions may both ask. A question that is undecidable raises ShapeError by name."""

    def tensor(self, name: str) -> Tensor:
        """Type and shape of a tensor: in a rule of an input of the node, in an expansion of any."""

    def value(self, name: str) -> Array | None:
        """Object array of Dims when the tensor's elements are known as shape arithmetic, else None."""

    def elements(self, name: str) -> Array | None:
        """As ``value``, with fractions too: elements are Dims and Ratios."""

    def constant(self, name: str) -> Array | None:
        """The numpy value when the tensor is a constant, else None."""

    def ask(
        self,
        kind: str,
        inputs: Sequence[str],
        names: Sequence[str],
        dims: Sequence[Dim] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[Dim, ...]:
        """Sizes that data decide, one for each of ``names``: the host finds them by a step of this kind (``HostStep``).

        Asked again, with equal inputs and settings, it gives the same symbols. Facts come first: a node that asks is
        processed when nothing else is left to do. Its expansion gets them by the same arguments.
        """


class InferContext(Context, Protocol):
    """What an ``infer`` rule may ask."""

    def equal(self, a: Dim, b: Dim) -> bool | None:
        """True or False when proven from the facts, None when undecided."""

    def unify(self, a: Dim, b: Dim, why: str) -> Dim:
        """Records ``a == b`` (a guard when it is not provable); returns the canonical dim. ShapeError if impossible."""

    def decide(self, condition: Dim, truth: bool, why: str) -> None:
        """Records the value of a condition on sizes, 1 or 0 (a guard when it is not provable)."""

    def at_most(self, a: Dim, b: Dim, why: str) -> None:
        """Records ``a <= b`` (a guard when it is not provable). ShapeError if impossible."""

    def broadcast(self, a: Dim, b: Dim, why: str) -> Dim:
        """The broadcast of two dims by numpy's rule."""

    def undecided(self, question: str, dims: Sequence[Dim], remedy: str) -> ShapeError:
        """The error for a question about dims that no fact decides: it says where they come from and what is known.

        While facts may still arrive it is one that has the node asked again.
        """

    def inside(self, role: str, types: Sequence[tuple[str, Sequence[Dim | None]]]) -> Any:
        """The body that is an attribute of the node, for inputs of these dtypes and shapes: a ``graph.inner.Inner``."""

    def refused(self, role: str, like: Any, why: str) -> Any:
        """A body in place of the attribute ``role``, with results like those of ``like``; a call that runs it fails."""

    def promise(self, a: Dim, b: Dim, why: str) -> None:
        """``a <= b`` holds by construction."""


class ExpandContext(Context, Protocol):
    """What an ``expand`` function may use to write primitives. Shapes are fully known."""

    def compute(
        self,
        shape: tuple[Dim, ...],
        body: Value,
        *,
        output: str | None = None,
        reduction: tuple[Dim, ...] = (),
        reduce: str | None = None,
    ) -> str:
        """Adds a Compute (dtype of the body) and returns its tensor's name; ``output`` names a node output."""

    def concat(self, parts: tuple[str, ...], axis: int, *, output: str | None = None) -> str:
        """Adds a Concat."""

    def alias(self, output: str, source: str) -> None:
        """The node's output is an existing tensor under another name."""

    def bound(self, indices: str, size: Dim, component: int | None = None, natural: bool = False) -> None:
        """Every element of ``indices`` is a subscript of an axis of ``size``: out of [-size, size) is refused.

        ``natural``: so are negative ones.
        """

    def position(self, indices: str, at: tuple[Index, ...], size: Dim, ranges: Ranges) -> Index | None:
        """The subscript that ``indices`` holds at ``at``, where it is a formula of the iterators of ``ranges``.

        It is >= 0 and, with a guard where that is needed, below ``size``. None: data, or a sign that is not known.
        """

    def made(
        self, kind: str, inputs: Sequence[str], types: Sequence[tuple[str | None, str, tuple[Dim, ...]]],
        dims: Sequence[Dim] = (), settings: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None,
        bodies: Sequence[str] = (),
    ) -> tuple[str, ...]:  # fmt: skip
        """Tensors that the host makes, in the step of ``ask`` by the same arguments or in a new one; their names.

        ``types``: (name, None for a new one; dtype; shape). ``more``: further settings. ``bodies``: attributes of the
        node that the step runs.
        """

    def below(self, tensor: str, size: Dim) -> None:
        """Every element of a tensor that the host makes is in [0, size)."""

    def inner(self, role: str) -> Any:
        """The body that the shape rule asked for, with its shapes."""

    def new_constant(self, array: Array, hint: str) -> str:
        """Adds a constant and returns its name."""


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
    """Registers an expansion for one or more ONNX operator names together with its shape rule."""

    def register(expand: ExpandRule) -> ExpandRule:
        for name in names:
            OPERATORS[name] = Operator(name, infer, expand)
        return expand

    return register
