"""Random ONNX models of shape arithmetic: sizes that are read, computed with, and passed to operators.

A model is a function of its seed. It mixes three kinds of values: float tensors (``t``), int64 vectors that hold sizes
(``v``) and int64 scalars (``s``). Every value is an output, so that one run shows every shape and every size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SYMBOLS = ("A", "B", "C")
SIZES = (0, 1, 2, 5, 10, 127, 128)
KINDS = (
    "Expand", "Tile", "Pad", "Resize", "Transpose", "Concat", "Add", "Unsqueeze", "Split", "Gather", "Reduce",
)  # fmt: skip
MAX_ELEMENTS = 200_000
"""Maximum number of elements of a feed or a result."""


class Builder:
    """Grows one model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: dict[str, list[int | str]] = {}
        self.tensors: dict[str, int] = {}
        """Maps float tensors to their ranks."""
        self.vectors: dict[str, int] = {}
        """Maps vectors of sizes to their lengths."""
        self.scalars: list[str] = []
        for i in range(self.random.randint(1, 3)):
            self.inputs[f"x{i}"] = [self._dim() for _ in range(self.random.randint(1, 3))]
            self.tensors[f"x{i}"] = len(self.inputs[f"x{i}"])
        if not any(isinstance(d, str) for dims in self.inputs.values() for d in dims):
            self.inputs["x0"][0] = "A"

    def _dim(self) -> int | str:
        return self.random.choice(SYMBOLS) if self.random.random() < 0.8 else self.random.choice((1, 2, 3, 4))

    # -- parts -------------------------------------------------------------------------------------------------------

    def const(self, value: Any, dtype: type = np.int64) -> str:
        """Add a constant."""
        name = f"k{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(self, op: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output."""
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"{op}_{name}", **attributes))
        return name

    def scalar(self) -> str:
        """Return a size, or a scalar computed from sizes."""
        if not self.scalars or self.random.random() < 0.3:
            t = self.tensor()
            axis = self.random.randrange(-self.tensors[t], self.tensors[t]) if self.tensors[t] else None
            if axis is None:
                return self.note_scalar(self.add("Size", [t]))
            return self.note_scalar(self.add("Gather", [self.shape_of(t), self.const(axis)], axis=0))
        return self.random.choice(self.scalars)

    def note_scalar(self, name: str) -> str:
        """Register a scalar."""
        self.scalars.append(name)
        return name

    def note(self, name: str, rank: int) -> str:
        """Register a tensor."""
        self.tensors[name] = rank
        return name

    def vector_of(self, scalars: Sequence[str]) -> str:
        """Build a vector from scalars."""
        parts = [self.add("Unsqueeze", [s, self.const([0])]) for s in scalars]
        name = self.add("Concat", parts, axis=0) if parts else self.const(np.zeros(0))
        if parts:
            self.vectors[name] = len(parts)
        return name

    def tensor(self) -> str:
        """Return any float tensor, later ones with higher probability."""
        names = list(self.tensors)
        return self.random.choice(names if self.random.random() < 0.5 else names[-3:])

    def shape_of(self, t: str) -> str:
        """Return the Shape of a tensor."""
        name = self.add("Shape", [t])
        self.vectors[name] = self.tensors[t]
        return name

    def clamped(self, low: int, high: int) -> str:
        """Return a scalar in [low, high]."""
        s = self.add("Max", [self.scalar(), self.const(low)])
        return self.note_scalar(self.add("Min", [s, self.const(high)]))

    # -- arithmetic on sizes -----------------------------------------------------------------------------------------

    def arithmetic(self) -> None:
        """Add one operation on scalars."""
        r, a = self.random, self.scalar()
        kind = r.choice(["Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Neg", "Abs", "half", "choose", "ratio"])
        if kind in ("Neg", "Abs"):
            out = self.add(kind, [a])
        elif kind in ("Div", "Mod"):
            b = self.const(r.choice([1, 2, 3, 4, 8])) if r.random() < 0.7 else self.clamped(1, 64)
            out = self.add(kind, [a, b])
        elif kind == "half":
            by = self.const(r.choice([0.5, 0.25, 2.0, 1.5]), np.float32)
            f = self.add("Mul", [self.add("Cast", [a], to=TensorProto.FLOAT), by])
            rounded = self.add(r.choice(["Floor", "Ceil"]), [f]) if r.random() < 0.7 else f
            out = self.add("Cast", [rounded], to=TensorProto.INT64)
        elif kind == "ratio":
            by = self.const(r.choice([2.0, 4.0, -2.0]), np.float32)
            f = self.add("Div", [self.add("Cast", [a], to=TensorProto.FLOAT), by])
            out = self.add("Cast", [self.add(r.choice(["Floor", "Ceil"]), [f])], to=TensorProto.INT64)
        elif kind == "choose":
            c = self.add(r.choice(["Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"]), [a, self.operand()])
            if r.random() < 0.3:
                c = self.add("Not", [c])
            if r.random() < 0.3:
                c = self.add(r.choice(["And", "Or"]), [c, self.add("Less", [self.scalar(), self.operand()])])
            out = self.add("Where", [c, self.operand(), self.scalar()])
        else:
            out = self.add(kind, [a, self.operand()])
        self.note_scalar(out)

    def operand(self) -> str:
        """Return a constant or a scalar."""
        return self.const(self.random.choice([-1, 0, 1, 2, 3, 7, 64])) if self.random.random() < 0.5 else self.scalar()

    def vectors_op(self) -> None:
        """Add one operation on vectors of sizes."""
        v = self.random.choice([*self.vectors, self.shape_of(self.tensor())])
        n = self.vectors[v]
        kind = self.random.choice(["Slice", "Gather", "reduce", "Concat", "elementwise"])
        if kind == "reduce" and n:
            op = self.random.choice(["ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin"])
            self.note_scalar(self.add(op, [v, self.const([0])], keepdims=0))
        elif kind == "Slice":
            a, b = sorted(self.random.choices(range(-n, n + 1), k=2))
            name = self.add("Slice", [v, self.const([a]), self.const([b if b else 2**31 - 1]), self.const([0])])
            self.vectors[name] = len(range(n)[a : b or None])
        elif kind == "Gather" and n:
            at = self.random.choices(range(-n, n), k=self.random.randint(1, 3))
            self.vectors[self.add("Gather", [v, self.const(at)], axis=0)] = len(at)
        elif kind == "Concat":
            w = self.random.choice(list(self.vectors))
            if n + self.vectors[w] <= 4:
                self.vectors[self.add("Concat", [v, w], axis=0)] = n + self.vectors[w]
        elif n:
            op = self.random.choice(["Add", "Mul", "Max", "Sub"])
            self.vectors[self.add(op, [v, self.const(self.random.choices([0, 1, 2, 3], k=n))])] = n

    # -- operators on sizes --------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Add a tensor made of sizes."""
        kind = self.random.choice(["Range", "ConstantOfShape", "Expand"])
        if kind == "Range":
            by = self.random.choice([1, 1, 2, 3, -1, -2])
            start = self.random.choice([self.const(0), self.clamped(-5, 20)])
            r = self.add("Range", [start, self.clamped(-10, 200), self.const(by)])
            self.note(self.add("Cast", [r], to=TensorProto.FLOAT), 1)
            return
        rank = self.random.randint(0, 2)
        dims = self.vector_of([self.clamped(0, 12) for _ in range(rank)])
        if kind == "Expand":
            self.note(self.add("Expand", [self.const(1.5, np.float32), dims]), rank)
        else:
            value = numpy_helper.from_array(np.array([2.5], np.float32))
            self.note(self.add("ConstantOfShape", [dims], value=value), rank)

    def cut(self) -> None:
        """Add a Slice with computed starts and ends."""
        t = self.tensor()
        if not self.tensors[t]:
            return
        axis = self.random.randrange(self.tensors[t])
        step = self.random.choice([1, 1, 1, 2, 3, -1, -2])
        ends = [self.scalar(), self.const(self.random.choice([-3, -1, 0, 1, 4, 2**62, -(2**62)])), self.clamped(-9, 9)]
        first, last = self.random.choices(ends, k=2)
        bounds = [self.add("Reshape", [e, self.const([1])]) for e in (first, last)]
        self.note(self.add("Slice", [t, *bounds, self.const([axis]), self.const([step])]), self.tensors[t])

    def reshape(self) -> None:
        """Add a Reshape by kept, merged or split dims, some as -1 or 0."""
        t = self.tensor()
        n, r = self.tensors[t], self.random
        kind = r.choice(["flat", "merge", "split", "rest", "zero", "permute"])
        shape = self.shape_of(t)
        dims = [self.add("Gather", [shape, self.const(a)], axis=0) for a in range(n)]
        if kind == "flat" or n == 0:
            self.note(self.add("Reshape", [t, self.const([-1])]), 1)
        elif kind == "merge" and n > 1:
            a = r.randrange(n - 1)
            merged = self.add("Mul", dims[a : a + 2])
            self.note(self.add("Reshape", [t, self.vector_of([*dims[:a], merged, *dims[a + 2 :]])]), n - 1)
        elif kind == "split":
            a, k = r.randrange(n), r.choice([1, 2, 4])
            parts = [self.add("Div", [dims[a], self.const(k)]), self.const(k)]
            if r.random() < 0.5:
                parts[0] = self.const(-1)
            self.note(self.add("Reshape", [t, self.vector_of([*dims[:a], *parts, *dims[a + 1 :]])]), n + 1)
        elif kind == "zero":
            self.note(self.add("Reshape", [t, self.const([0] * (n - 1) + [-1])]), n)
        elif kind == "rest":
            self.note(self.add("Reshape", [t, self.vector_of([self.const(-1), dims[-1]])]), 2)
        else:
            order = r.sample(range(n), n)
            self.note(self.add("Reshape", [t, self.vector_of([dims[a] for a in order])]), n)

    def transform(self) -> None:
        """Add operators that take sizes for every axis (Expand, Tile, Pad, Resize), and others without sizes."""
        t, r = self.tensor(), self.random
        n = self.tensors[t]
        kind = r.choice(KINDS)
        if kind == "Expand":
            extra = [self.clamped(0, 4) for _ in range(r.randint(0, 3 - min(n, 3)))]
            ones = [self.const(1)] * n
            self.note(self.add("Expand", [t, self.vector_of([*extra, *ones])]), max(n, len(extra) + n))
        elif kind == "Tile" and n:
            self.note(self.add("Tile", [t, self.vector_of([self.clamped(0, 3) for _ in range(n)])]), n)
        elif kind == "Pad" and n:
            pads = self.vector_of([self.clamped(0, 6) for _ in range(2 * n)])
            self.note(self.add("Pad", [t, pads, self.const(0.5, np.float32)]), n)
        elif kind == "Resize" and n:
            sizes = self.vector_of([self.clamped(1, 20) for _ in range(n)])
            attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            self.note(self.add("Resize", [t, "", "", sizes], **attributes), n)
        elif kind == "Transpose" and n:
            self.note(self.add("Transpose", [t], perm=r.sample(range(n), n)), n)
        elif kind == "Unsqueeze" and n < 3:
            self.note(self.add("Unsqueeze", [t, self.const([r.randrange(n + 1)])]), n + 1)
        elif kind == "Split" and n:
            self.split(t, r.randrange(n))
        elif kind == "Gather" and n:
            self.note(self.add("Gather", [t, self.const([0, -1])], axis=r.randrange(n)), n)
        elif kind == "Reduce" and n:
            self.note(self.add("ReduceSum", [t, self.const([r.randrange(n)])], keepdims=r.randint(0, 1)), n)
            if self.nodes[-1].attribute[0].i == 0:
                self.tensors[self.nodes[-1].output[0]] = n - 1
        elif kind in ("Concat", "Add"):
            alike = [u for u, m in self.tensors.items() if m == n]
            u = r.choice(alike)
            if kind == "Add":
                self.note(self.add("Add", [t, u]), n)
            elif n:
                self.note(self.add("Concat", [t, u], axis=r.randrange(n)), n)

    def split(self, t: str, axis: int) -> None:
        """Split into two parts: halves, or a computed size and the rest."""
        first, second = f"n{len(self.nodes)}a", f"n{len(self.nodes)}b"
        inputs = [t]
        attributes: dict[str, Any] = {"axis": axis}
        if self.random.random() < 0.5:
            size = self.add("Gather", [self.shape_of(t), self.const(axis)], axis=0)
            part = self.add("Min", [self.clamped(0, 9), size])
            inputs.append(self.vector_of([part, self.add("Sub", [size, part])]))
            first, second = f"n{len(self.nodes)}a", f"n{len(self.nodes)}b"
        else:
            attributes["num_outputs"] = 2
        self.nodes.append(helper.make_node("Split", inputs, [first, second], name=f"Split_{first}", **attributes))
        self.tensors |= {first: self.tensors[t], second: self.tensors[t]}

    def model(self) -> onnx.ModelProto:
        """Return the current model, with every value an output."""
        kinds = {n: (TensorProto.FLOAT, r) for n, r in self.tensors.items() if n not in self.inputs}
        kinds |= dict.fromkeys(self.vectors, (TensorProto.INT64, 1))
        kinds |= dict.fromkeys(self.scalars, (TensorProto.INT64, 0))
        made = {o for n in self.nodes for o in n.output}
        outputs = [
            helper.make_tensor_value_info(n, t, [None] * r) for n, (t, r) in kinds.items() if n in made
        ]  # fmt: skip
        inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, d) for n, d in self.inputs.items()]
        graph = helper.make_graph(self.nodes, "shapes", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def random_model(seed: int, steps: int = 0) -> onnx.ModelProto:
    """Return the model of a seed; ``steps`` operations are added, a random number of them if 0."""
    b = Builder(seed)
    steps = steps or b.random.randint(4, 16)
    kinds: Mapping[Callable[[], None], float] = {
        b.arithmetic: 4, b.vectors_op: 2, b.make: 2, b.cut: 2, b.reshape: 2, b.transform: 4,
    }  # fmt: skip
    for _ in range(steps):
        b.random.choices(list(kinds), list(kinds.values()))[0]()
    b.scalar()
    return b.model()


def random_feeds(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs at sizes from SIZES, small ones if the large ones would have too many elements."""
    r = random.Random(seed)
    dims = {x.name: [d.dim_param or d.dim_value for d in x.type.tensor_type.shape.dim] for x in model.graph.input}
    for attempt in range(20):
        chosen = {s: r.choice(SIZES if attempt < 10 else SIZES[:5]) for s in SYMBOLS}
        shapes = {n: tuple(chosen[d] if isinstance(d, str) else d for d in ds) for n, ds in dims.items()}
        if all(np.prod(s) <= MAX_ELEMENTS for s in shapes.values()):
            break
    numbers = np.random.default_rng(seed)
    return {n: numbers.integers(-9, 9, s).astype(np.float32) for n, s in shapes.items()}
