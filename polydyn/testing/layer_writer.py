"""Writes a random ONNX model, and draws the sizes of its symbols."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from polydyn.schedules.expr import Array

WORK = 1_000_000
"""Approximate maximum of multiply-adds of a layer at one shape."""
MICROSOFT = "com.microsoft"
Dims = Sequence[int | str]


@dataclass(frozen=True)
class Layer:
    """A model and the sizes of its symbols to run it at; ``exact``: rounding cannot make a difference."""

    name: str
    model: onnx.ModelProto
    shapes: tuple[Mapping[str, int], ...]
    exact: bool = False


@dataclass
class Writer:
    """Grows one model. ``sizes``: allowed sizes of a symbol; ``sums``: symbols that are sums of others."""

    seed: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: dict[str, tuple[int, Dims]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sums: dict[str, tuple[str, ...]] = field(default_factory=dict)
    work: float = 1.0
    """Multiply-adds for each element of the product of all symbols."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)

    def pick(self, *of: Any) -> Any:
        """Return one of the arguments."""
        return self.random.choice(of)

    def chance(self, p: float) -> bool:
        """Return True with probability ``p``."""
        return self.random.random() < p

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """Add a constant."""
        name = f"k{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def floats(self, *shape: int, scale: float = 1.0, positive: bool = False) -> str:
        """Add random constants that every float type holds."""
        a = self.numbers.standard_normal(shape) * scale
        return self.const(exact(np.abs(a) + 0.5 if positive else a), np.float32)

    def input(self, name: str, dims: Dims, kind: int = TensorProto.FLOAT) -> str:
        """Add an input."""
        self.inputs[name] = (kind, dims)
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return the name of its first output; others have the suffixes ``_1`` and so on."""
        name = f"n{len(self.nodes)}"
        names = [name, *(f"{name}_{i}" for i in range(1, outputs))]
        domain = {"domain": attributes.pop("domain")} if "domain" in attributes else {}
        self.nodes.append(helper.make_node(op, list(inputs), names, name=f"{op}_{name}", **attributes, **domain))
        return name

    def shapes(self, count: int) -> tuple[Mapping[str, int], ...]:
        """Return sizes of all symbols; the first shapes are ordinary, some of the others have sizes of 0."""
        found: list[dict[str, int]] = []
        for _ in range(50 * count):
            shape = {s: self.random.choice(of) for s, of in self.sizes.items()}
            if len(found) < 2:
                shape = {s: n or 1 for s, n in shape.items()}
            every = shape | {s: sum(shape[p] for p in parts) for s, parts in self.sums.items()}
            points = prod(max(n, 1) for n in every.values())
            if len(found) < count and every not in found and points * self.work <= WORK:
                found.append(every)
        return tuple(found)

    def layer(self, family: str, count: int, exact: bool = False) -> Layer:
        """Return the current model. In every fourth model one dim is a number, often 1."""
        free = [s for s in self.sizes if not any(s in parts for parts in self.sums.values())]
        if free and self.seed % 4 == 3:
            fixed = self.pick(*free)
            size: int = self.pick(1, self.pick(*self.sizes[fixed]) or 1)
            self.sizes[fixed] = (size,)
            self.inputs = {n: (k, [size if d == fixed else d for d in dims]) for n, (k, dims) in self.inputs.items()}
        used = {x for n in self.nodes for x in n.input} | set(self.outputs)
        graph = helper.make_graph(
            self.nodes, f"{family}{self.seed}",
            [helper.make_tensor_value_info(n, k, list(d)) for n, (k, d) in self.inputs.items() if n in used],
            [onnx.ValueInfoProto(name=o) for o in self.outputs], [c for c in self.constants if c.name in used],
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 22), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return Layer(f"{family} {self.seed}", model, self.shapes(count), exact)

    # -- parts that families share -----------------------------------------------------------------------------------

    def activation(self, x: str) -> str:
        """Apply an element-wise operator."""
        alone = ("Relu", "HardSwish", "LeakyRelu", "Tanh", "Gelu")
        kind = self.pick(*alone, "clip", "tanh gelu", "silu", "scaled", "none")
        if kind in alone:
            return self.add(kind, x)
        if kind == "tanh gelu":
            return self.add("Gelu", x, approximate="tanh")
        if kind == "silu":
            return self.add("Mul", x, self.add("Sigmoid", x))
        if kind == "clip":
            return self.add("Clip", x, self.const(0, np.float32), self.const(6, np.float32))
        return self.add("Mul", x, self.const(0.5, np.float32)) if kind == "scaled" else x

    def norm(self, x: str, width: int) -> str:
        """Apply a norm of the last axis."""
        if self.chance(0.7):
            return self.add("LayerNormalization", x, self.floats(width), self.floats(width), axis=-1)
        mean = self.add("ReduceMean", self.add("Mul", x, x), self.const([-1]), keepdims=1)
        root = self.add("Sqrt", self.add("Add", mean, self.const(2.0**-10, np.float32)))
        return self.add("Mul", self.add("Div", x, root), self.floats(width))


def exact(a: Any) -> Array:
    """Return the nearest float32 that bfloat16, and nearly always float16, holds."""
    return np.asarray(np.asarray(a).astype(ml_dtypes.bfloat16), np.float32)
