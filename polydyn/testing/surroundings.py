"""Random models around ONNX's node cases: other nodes before the inputs and after the outputs.

The surrounding nodes return their input unchanged, so the case's own outputs are the expected ones, for every operator
that has a case. The compiler does not see an identity: it fuses, merges and proves them with the case's node.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIGNED_TYPES = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64}
MIN_OPSET = 14
"""From this opset on axes are inputs everywhere, and a Reshape may treat 0 as a size."""


class Surroundings:
    """Nodes that are added to a model, a function of the seed."""

    def __init__(self, model: onnx.ModelProto, seed: int) -> None:
        self.random = random.Random(seed)
        self.model, self.graph = model, model.graph
        self.count = 0

    def const(self, value: Any) -> str:
        """Add a vector of int64."""
        return self._constant(np.asarray(value, np.int64))

    def _constant(self, array: Any) -> str:
        self.count += 1
        self.graph.initializer.append(numpy_helper.from_array(array, f"around.k{self.count}"))
        return f"around.k{self.count}"

    def op(self, name: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output at the end of the graph."""
        self.count += 1
        out = f"around.{self.count}"
        self.graph.node.append(helper.make_node(name, inputs, [out], f"around_{name}_{self.count}", **attributes))
        return out

    def chain(self, x: str, kind: int, rank: int) -> str:
        """Add one to three steps after a tensor; return the name of the equal result."""
        steps: list[Callable[[str, int, int], str]] = [self.reshaped]
        if rank:
            steps += [self.transposed, self.squeezed, self.sliced, self.joined]
        if kind in SIGNED_TYPES:
            steps += [self.negated, self.added]
        if kind == TensorProto.FLOAT:
            steps += [self.widened, self.called]
        for step in self.random.choices(steps, k=self.random.randint(1, 3)):
            x = step(x, kind, rank)
        return x

    # -- steps: each returns its input unchanged
    # ------------------------------------------------------------------------

    def reshaped(self, x: str, kind: int, rank: int) -> str:
        """Merge all axes into one, and back."""
        shape = self.op("Shape", x)
        return (
            self.op("Reshape", self.op("Reshape", x, self.const([-1])), shape, allowzero=1)
            if rank
            else self.op("Identity", x)
        )

    def transposed(self, x: str, kind: int, rank: int) -> str:
        """Transpose, and back."""
        perm = self.random.sample(range(rank), rank)
        back = [perm.index(a) for a in range(rank)]
        return self.op("Transpose", self.op("Transpose", x, perm=perm), perm=back)

    def squeezed(self, x: str, kind: int, rank: int) -> str:
        """Add an axis, and remove it."""
        axes = self.const([self.random.randrange(rank + 1)])
        return self.op("Squeeze", self.op("Unsqueeze", x, axes), axes)

    def sliced(self, x: str, kind: int, rank: int) -> str:
        """Reverse along an axis, twice."""
        axis, last, first = self.const([self.random.randrange(rank)]), self.const([-1]), self.const([-(2**62)])
        for _ in range(2):
            x = self.op("Slice", x, last, first, axis, last)
        return x

    def joined(self, x: str, kind: int, rank: int) -> str:
        """Repeat along an axis, and take the first half."""
        axis = self.random.randrange(rank)
        size = self.op("Gather", self.op("Shape", x), self.const([axis]))
        both = self.op("Concat", x, x, axis=axis)
        return self.op("Slice", both, self.const([0]), size, self.const([axis]))

    def negated(self, x: str, kind: int, rank: int) -> str:
        """Negate, and back."""
        return self.op("Neg", self.op("Neg", x))

    def added(self, x: str, kind: int, rank: int) -> str:
        """Add a broadcast zero."""
        return self.op("Add", x, self._constant(np.zeros([1] * rank, helper.tensor_dtype_to_np_dtype(kind))))

    def widened(self, x: str, kind: int, rank: int) -> str:
        """Cast to float64, and back."""
        return self.op("Cast", self.op("Cast", x, to=TensorProto.DOUBLE), to=TensorProto.FLOAT)

    def called(self, x: str, kind: int, rank: int) -> str:
        """Call a function of the model, whose default attribute makes it an identity."""
        if not self.model.functions:
            body = helper.make_node("LeakyRelu", ["x"], ["y"])
            body.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
            opset = helper.make_opsetid("", next(o.version for o in self.model.opset_import if not o.domain))
            slope = [helper.make_attribute("slope", 1.0)]
            self.model.functions.append(
                helper.make_function("around", "Same", ["x"], ["y"], [body], [opset], attribute_protos=slope)
            )
            self.model.opset_import.append(helper.make_opsetid("around", 1))
        return self.op("Same", x, domain="around")


def surrounded(model: onnx.ModelProto, seed: int, ranks: dict[str, tuple[int, int]]) -> onnx.ModelProto | None:
    """Return the model with nodes around it, or None if its opset is too old.

    ``ranks``: element type and rank of outputs.
    """
    opset = next((o.version for o in model.opset_import if not o.domain), 0)
    if opset < MIN_OPSET:
        return None
    out = onnx.ModelProto()
    out.CopyFrom(model)
    around = Surroundings(out, seed)
    own = list(out.graph.node)
    del out.graph.node[:]
    inner = {}
    for x in out.graph.input:
        t = x.type.tensor_type
        if x.type.HasField("tensor_type") and t.HasField("shape") and t.elem_type != TensorProto.STRING:
            inner[x.name] = around.chain(x.name, t.elem_type, len(t.shape.dim))
    made = {y.name: f"{y.name}.inside" for y in out.graph.output if y.name in ranks}
    for n in own:
        n.input[:] = [inner.get(x, made.get(x, x)) for x in n.input]
        n.output[:] = [made.get(y, y) for y in n.output]
    out.graph.node.extend(own)
    for y, name in made.items():
        last = around.chain(name, *ranks[y])
        out.graph.node.append(helper.make_node("Identity", [last], [y]))
    return out
