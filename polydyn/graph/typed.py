"""What propagation knows of every tensor, and how an operator's shape rule asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polydyn.errors import ShapeError, UnsupportedError
from polydyn.graph.importer import ImportedGraph
from polydyn.graph.ir import SymbolSource, Tensor
from polydyn.graph.operators.registry import Inferred, OnnxNode
from polydyn.graph.shape_values import as_constant, dims_only, elements
from polydyn.schedules.expr import Array
from polydyn.schedules.index import Index
from polydyn.shapes.context import ShapeContext, Undecided


@dataclass(frozen=True)
class Typed:
    """The result of propagation: every tensor's type, shape and, where it holds sizes, value."""

    graph: ImportedGraph
    nodes: tuple[OnnxNode, ...]
    facts: ShapeContext
    inferred: Mapping[str, Inferred]
    constants: Mapping[str, Array]
    sources: tuple[SymbolSource, ...]

    def tensor(self, name: str) -> Tensor:
        """Type and canonical shape of a tensor."""
        known = self.inferred[name]
        return Tensor(name, known.dtype, tuple(map(self.facts.canonical, known.shape)))

    def elements(self, name: str) -> Array | None:
        """What is known of the elements: Dims and Ratios."""
        if name in self.constants:
            return elements(self.constants[name])
        value = self.inferred[name].value
        if value is None:
            return None
        out: Array = value.copy()
        for i, x in enumerate(value.flat):
            out.flat[i] = self.facts.canonical(x) if isinstance(x, Index) else x
        return out

    def value(self, name: str) -> Array | None:
        """The elements when all are Dims."""
        return dims_only(self.elements(name))

    def constant(self, name: str) -> Array | None:
        """The numpy array of a constant, also of shape arithmetic that turned out to be constant."""
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
        """Type and shape of an input."""
        return self.known.tensor(name)

    def value(self, name: str) -> Array | None:
        """Shape arithmetic held by an input."""
        return self.known.value(name)

    def elements(self, name: str) -> Array | None:
        """Shape arithmetic held by an input, fractions too."""
        return self.known.elements(name)

    def constant(self, name: str) -> Array | None:
        """The array of a constant input."""
        return self.known.constant(name)

    def equal(self, a: Index, b: Index) -> bool | None:
        """Proven equal or different."""
        return self.known.facts.equal(a, b)

    def unify(self, a: Index, b: Index, why: str) -> Index:
        """Learns an equality that the node needs."""
        return self.known.facts.unify(a, b, self.because(why))

    def at_most(self, a: Index, b: Index, why: str) -> None:
        """Learns an inequality that the node needs."""
        self.known.facts.at_most(a, b, self.because(why))

    def broadcast(self, a: Index, b: Index, why: str) -> Index:
        """numpy's rule for one axis."""
        return self.known.facts.broadcast(a, b, self.because(why), self.assume)

    def assume_multiple(self, a: Index, n: Index, why: str) -> None:
        """Learns a divisibility that the node needs."""
        self.known.facts.assume_multiple(a, n, self.because(why))

    def undecided(self, question: str, dims: Sequence[Index], remedy: str) -> ShapeError:
        """The error for a question that no fact decides."""
        kind = ShapeError if self.assume else Undecided
        dim = ", ".join(map(str, dims))
        return kind(self.known.facts.undecided(question, dims), node=self.place, dim=dim, remedy=remedy)

    @property
    def place(self) -> str:
        """The node with its operator."""
        return f"{self.node.name} ({self.node.op})"

    def fresh(self, hint: str) -> Index:
        """A size that only the data decides: not supported yet, so it is refused here by name."""
        raise UnsupportedError(
            f"{self.node.op} has an output whose size depends on the data ({hint})", node=self.node.name,
            remedy="sizes must follow from the sizes of the inputs",
        )  # fmt: skip

    def because(self, why: str) -> str:
        """The reason with the node's name, once."""
        return why if self.node.name in why else f"{self.place}: {why}"
