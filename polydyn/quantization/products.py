"""Find the products of a model whose weights are constants, and why a weight cannot be replaced."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

MIN_WEIGHTS = 4096
"""Constants with fewer elements are not listed if other nodes than products read them."""
PRODUCTS, OPERANDS = ("MatMul", "Gemm"), 2
FLOATS: dict[Any, str] = {
    TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16",
    TensorProto.DOUBLE: "float64",
}  # fmt: skip
OVERRIDABLE_FROM = 4
"""First version of ONNX's files in which an initializer that is an input may be overridden by a call."""


@dataclass
class Scope:
    """A graph, the graph around it, and the constants that nodes inside can read by name."""

    graph: GraphProto
    outer: Scope | None
    overridable: frozenset[str]
    constants: dict[str, TensorProto] = field(default_factory=dict)
    producers: dict[str, NodeProto] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()

    @staticmethod
    def of(graph: GraphProto, outer: Scope | None, free_initializers: bool) -> Scope:
        """Read the constants of a graph. ``free_initializers``: one that is an input may be overridden by a call."""
        inputs = frozenset(v.name for v in graph.input)
        constants = {t.name: t for t in graph.initializer}
        overridable = inputs & constants.keys() if free_initializers and outer is None else frozenset()
        scope = Scope(graph, outer, overridable, constants, inputs=inputs - constants.keys())
        for n in graph.node:
            scope.producers |= dict.fromkeys(n.output, n)
            value = next((a for a in n.attribute if n.op_type == "Constant" and a.name == "value"), None)
            if value is not None:
                constants[n.output[0]] = value.t
        return scope

    def find(self, name: str) -> tuple[Scope, TensorProto] | None:
        """Return the graph that defines a constant, and the constant; None if a node or an input defines the name."""
        if name in self.constants:
            return self, self.constants[name]
        if name in self.producers or name in self.inputs:
            return None
        return self.outer.find(name) if self.outer else None

    def maker(self, name: str) -> tuple[Scope, NodeProto] | None:
        """Return the node that computes a tensor, with its graph."""
        if name in self.producers:
            return self, self.producers[name]
        return self.outer.maker(name) if self.outer and name not in self.inputs else None


def scopes(model: onnx.ModelProto) -> Iterator[Scope]:
    """Yield the graph of a model and the graphs inside of its nodes, outer ones first."""

    def inside(scope: Scope) -> Iterator[Scope]:
        yield scope
        for n in scope.graph.node:
            for a in n.attribute:
                graphs = [a.g] if a.type == AttributeProto.GRAPH else a.graphs
                for g in graphs:
                    yield from inside(Scope.of(g, scope, False))

    yield from inside(Scope.of(model.graph, None, model.ir_version >= OVERRIDABLE_FROM))


@dataclass(frozen=True)
class Product:
    """A MatMul or Gemm by a constant. ``turned``: the constant is [columns, steps]. ``factor``: Gemm's alpha."""

    node: NodeProto
    scope: Scope
    weight: TensorProto
    home: Scope
    turned: bool
    factor: float = 1.0

    @property
    def name(self) -> str:
        """The node's name, or that of its result."""
        return self.node.name or self.node.output[0]

    @property
    def steps(self) -> int:
        """The length of the sum, K."""
        return int(self.weight.dims[-1 if self.turned else -2])

    @property
    def columns(self) -> int:
        """The number of columns, N."""
        return int(self.weight.dims[-2 if self.turned else -1])

    @property
    def dtype(self) -> str:
        """The weights' dtype."""
        return str(FLOATS[self.weight.data_type])

    @property
    def key(self) -> tuple[int, str, bool, float]:
        """Equal for products that can share their packed weights."""
        return id(self.home.graph), self.weight.name, self.turned, self.factor


@dataclass(frozen=True)
class Unsuited:
    """A constant that stays as it is, and the reason."""

    name: str
    weight: TensorProto
    reason: str


def find_products(model: onnx.ModelProto, keep: Collection[str] = ()) -> list[Product | Unsuited]:
    """Return the products by constants in order, and the large constants that are read in another way.

    ``keep``: patterns of names of nodes or constants that stay as they are (``*`` and ``?`` as in file names).
    """
    found: list[Product | Unsuited] = []
    for scope in scopes(model):
        for n in scope.graph.node:
            if n.op_type in ("Transpose", "Identity") and scope.find(n.input[0] if n.input else ""):
                continue  # its readers are looked at
            for position, name in enumerate(n.input):
                resolved = _resolve(scope, name)
                if resolved is not None:
                    x = _read(n, position, scope, *resolved, keep)
                    operand = n.op_type in PRODUCTS and position < OPERANDS
                    found += [x] if operand or math.prod(x.weight.dims) >= MIN_WEIGHTS else []
    return found


def _resolve(scope: Scope, name: str) -> tuple[Scope, TensorProto, bool] | None:
    """Follow a name through transpositions to a constant of floats. The flag: its two last axes are exchanged."""
    turned = False
    while True:
        held = scope.find(name)
        if held is not None:
            t = held[1]
            return (*held, turned) if t.data_type in FLOATS and len(t.dims) >= 2 else None
        made = scope.maker(name)
        if made is None or made[1].op_type not in ("Transpose", "Identity") or made[1].domain not in ("", "ai.onnx"):
            return None
        scope, n = made
        if n.op_type == "Transpose":
            perm = next((list(a.ints) for a in n.attribute if a.name == "perm"), None)
            if perm is not None and perm != [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]:
                return None
            if perm is None and not _is_matrix(scope, n.input[0]):
                return None
            turned = not turned
        name = n.input[0]


def _is_matrix(scope: Scope, name: str) -> bool:
    """Check whether a tensor behind transpositions is a constant of two axes: then a Transpose needs no order."""
    held = scope.find(name)
    return held is not None and len(held[1].dims) == 2


def _read(
    n: NodeProto, position: int, scope: Scope, home: Scope, weight: TensorProto, turned: bool, keep: Collection[str]
) -> Product | Unsuited:  # fmt: skip
    """Return how a node reads a constant."""
    name = n.name or (n.output[0] if n.output else n.op_type)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in n.attribute if a.type != AttributeProto.GRAPH}

    def unsuited(reason: str) -> Unsuited:
        return Unsuited(name, weight, reason)

    if n.op_type not in PRODUCTS or n.domain not in ("", "ai.onnx"):
        return unsuited(f"{n.op_type} reads it, and only products (MatMul, Gemm) are quantized")
    if any(fnmatchcase(x, p) for x in (name, weight.name) for p in keep):
        return unsuited("keep names it")
    if weight.name in home.overridable:
        return unsuited("it is an input of the model, so a call may give it another value")
    if position != 1:
        return unsuited("it is the left operand" if position == 0 else "it is the bias")
    if scope.find(n.input[0]):
        return unsuited("both operands are constants")
    if n.op_type == "MatMul":
        return Product(n, scope, weight, home, turned)
    if attributes.get("transA", 0):
        return unsuited("transA is 1")
    if len(n.input) > 2 and n.input[2] and attributes.get("beta", 1.0) != 1:
        return unsuited(f"beta is {attributes['beta']}")
    return Product(n, scope, weight, home, turned != bool(attributes.get("transB", 0)), attributes.get("alpha", 1.0))
