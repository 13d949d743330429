"""The results of propagation for every tensor, and the context in which an operator's shape rule runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polydyn.errors import ModelError, ShapeError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.importer import ImportedGraph
from polydyn.graph.ir import Dim, HostStep, SymbolSource, Tensor
from polydyn.graph.operators.registry import Inferred, OnnxNode, RanksDiffer
from polydyn.graph.shape_values import as_constant, dims_only, elements
from polydyn.schedules.expr import Array
from polydyn.schedules.index import Index
from polydyn.shapes.context import ShapeContext, Undecidable, Undecided

Key = tuple[Any, ...]
"""Key that identifies a step of the host."""


def step_key(
    node: OnnxNode, kind: str, inputs: Sequence[str], dims: Sequence[Dim], settings: Mapping[str, Any] | None
) -> Key:
    """Return a key that is equal for steps with equal sizes. Incoming sizes may change form, so their key names the
    node.
    """
    chosen = settings or {}
    return (kind, tuple(inputs), tuple(sorted(chosen.items())), node.name if dims and "node" not in chosen else "")


@dataclass
class HostStepRequests:
    """Requests of shape rules: host steps by key, the first part in which a tensor exists, and bodies of nodes."""

    steps: dict[Key, HostStep] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    enter: Callable[[ImportedGraph, Any], Any] | None = None
    """Function that infers the shapes inside a body (``graph/inner.py``)."""
    inner: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Maps node and role of a body to its ``Inner``."""

    def level(self, names: Sequence[str]) -> int:
        """Return the highest level of tensors."""
        return max((self.levels.get(x, 0) for x in names if x), default=0)


@dataclass(frozen=True)
class Typed:
    """The result of propagation: every tensor's type, shape and, if it holds sizes, value."""

    graph: ImportedGraph
    nodes: tuple[OnnxNode, ...]
    facts: ShapeContext
    inferred: Mapping[str, Inferred]
    constants: Mapping[str, Array]
    sources: tuple[SymbolSource, ...]
    asked: HostStepRequests = field(default_factory=HostStepRequests)

    def tensor(self, name: str) -> Tensor:
        """Return type and canonical shape of a tensor."""
        known = self.inferred[name]
        return Tensor(name, known.dtype, tuple(map(self.facts.canonical, known.shape)))

    def known_elements(self, name: str) -> Array | None:
        """Return the known elements, Dims and Ratios, and None for each of the others; None if none is known."""
        if name in self.constants:
            return elements(self.constants[name])
        value = self.inferred[name].value
        if value is None:
            return None
        out: Array = value.copy()
        for i, x in enumerate(value.flat):
            out.flat[i] = self.facts.canonical(x) if isinstance(x, Index) else x
        return out

    def elements(self, name: str) -> Array | None:
        """Return the elements, Dims and Ratios, if all are known, else None."""
        known = self.known_elements(name)
        return None if known is None or any(x is None for x in known.flat) else known

    def value(self, name: str) -> Array | None:
        """Return the elements if all are Dims, else None."""
        return dims_only(self.elements(name))

    def constant(self, name: str) -> Array | None:
        """Return the numpy array of a constant, including shape arithmetic that turned out to be constant."""
        if name in self.constants:
            return self.constants[name]
        return as_constant(self.elements(name), self.inferred[name].dtype)


@dataclass(frozen=True)
class Asking:
    """The InferContext of one node."""

    node: OnnxNode
    known: Typed
    assume: bool

    def tensor(self, name: str) -> Tensor:
        """Return type and shape of an input."""
        return self.known.tensor(name)

    def value(self, name: str) -> Array | None:
        """Return the shape arithmetic that an input holds."""
        return self.known.value(name)

    def elements(self, name: str) -> Array | None:
        """Return the shape arithmetic that an input holds, including fractions."""
        return self.known.elements(name)

    def known_elements(self, name: str) -> Array | None:
        """Return the shape arithmetic that an input holds in part."""
        return self.known.known_elements(name)

    def constant(self, name: str) -> Array | None:
        """Return the array of a constant input."""
        return self.known.constant(name)

    def equal(self, a: Index, b: Index) -> bool | None:
        """Return whether two sizes are proven equal or different; None if neither."""
        return self.known.facts.equal(a, b)

    def unify(self, a: Index, b: Index, why: str) -> Index:
        """Learn an equality that the node needs."""
        return self.known.facts.unify(a, b, self.because(why))

    def decide(self, condition: Index, truth: bool, why: str) -> None:
        """Learn the value of a condition on sizes."""
        self.known.facts.decide(condition, truth, self.because(why))

    def at_most(self, a: Index, b: Index, why: str) -> None:
        """Learn an inequality that the node needs."""
        self.known.facts.at_most(a, b, self.because(why))

    def broadcast(self, a: Index, b: Index, why: str) -> Index:
        """Broadcast one axis by numpy's rule."""
        return self.known.facts.broadcast(a, b, self.because(why), self.assume)

    def undecided(self, question: str, dims: Sequence[Index], remedy: str) -> ShapeError:
        """Return the error for a question that no fact decides."""
        kind = Undecidable if self.assume else Undecided
        dim = ", ".join(map(str, dims))
        return kind(self.known.facts.undecided_error(question, dims), node=self.place, dim=dim, remedy=remedy)

    @property
    def place(self) -> str:
        """The node's name with its operator."""
        return f"{self.node.name} ({self.node.op})"

    def ask(
        self,
        kind: str,
        inputs: Sequence[str],
        names: Sequence[str],
        dims: Sequence[Dim] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[Dim, ...]:
        """Return symbols for sizes that depend on data. Raises Undecided while later facts may still determine them."""
        facts, asked = self.known.facts, self.known.asked
        key = step_key(self.node, kind, inputs, dims, settings)
        if key not in asked.steps:
            if not self.assume:
                raise Undecided(f"{self.place} has sizes that data decide", rule=kind)
            level = max(asked.level(inputs), facts.level(*dims))
            symbols = tuple(str(facts.fresh_symbol(size_name(self.node, n), level + 1)) for n in names)
            given = tuple(sorted((settings or {}).items()))
            asked.steps[key] = HostStep(
                kind, tuple(inputs), tuple(dims), given, symbols=symbols, level=level, origin=self.node.name
            )  # fmt: skip
        return tuple(map(facts.canonical, asked.steps[key].symbols))

    def inside(self, role: str, types: Sequence[tuple[str, Sequence[Dim | None]]]) -> Any:
        """Return the body in attribute ``role`` for inputs of these types, as an ``Inner``. Raises Undecided if it is
        too early.
        """
        body, asked = self.node.attribute(role), self.known.asked
        if not isinstance(body, ImportedGraph) or len(body.inputs) != len(types) or asked.enter is None:
            raise ModelError(f"{role} is not a graph with {len(types)} inputs", node=self.node.name, rule=self.node.op)
        if not self.assume:
            raise Undecided(f"{self.place} has a body", rule=role)
        try:
            inner = asked.enter(body, types)
        except RanksDiffer as e:
            if self.node.op != "If":
                raise e.error(self.node) from e
            raise RanksDiffer(self.node.outputs[body.outputs.index(e.tensor)], e.ranks, e.sizes, True) from e
        asked.inner[self.node.name, role] = inner
        return inner

    def refused(self, role: str, like: Any, why: str) -> Any:
        """Return a body that no call may run, in place of the attribute ``role``. It reads nothing."""
        asked = self.known.asked
        assert asked.enter is not None  # otherwise ``like`` would not exist
        names = [f"{self.node.name}/{role}/{k}" for k in range(len(self.node.outputs))]
        arrays = [np.zeros((1,) * len(like.shape(k)), numpy_dtype(like.dtype(k))) for k in range(len(names))]
        body = ImportedGraph(role, (), tuple(names), (), dict(zip(names, arrays, strict=True)))
        inner = asked.enter(body, ())
        inner.typed.facts.forbid(f"{self.because(why)}; this call takes it")
        self.known.facts.notes.append(f"{self.because(why)}; calls that take it are refused")
        asked.inner[self.node.name, role] = replace(inner, is_refused=True)
        return asked.inner[self.node.name, role]

    def promise(self, a: Index, b: Index, why: str) -> None:
        """Learn a fact that holds by construction."""
        self.known.facts.assume_at_most(a, b, self.because(why))

    def because(self, why: str) -> str:
        """Return the reason with the node's name, once."""
        return why if self.node.name in why else f"{self.place}: {why}"


def size_name(node: OnnxNode, name: str) -> str:
    """Return the name of a size that depends on data."""
    place = "".join(c if c.isalnum() or c in "._" else "_" for c in node.name).lstrip("_0123456789.") or node.op
    return f"{place}.{name}"
