"""Rewrite nodes of old opsets as nodes of newer ones. Only this module knows attributes that ONNX has dropped.

Propagation calls it when the types of a node's inputs are known, because old broadcasting counts an axis along the
first operand. Rules and expansions then see only the attributes of newer opsets.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx

from polydyn.graph.bodies import OPSET, Body
from polydyn.graph.importer import ImportedGraph, ModelInput, inner_prefix
from polydyn.graph.operators.registry import InferContext, OnnxNode
from polydyn.graph.subscripts import ints

Writer = Callable[[Body], None]
OLDER: dict[str, tuple[int, Writer]] = {}
"""Maps an operator to the opset from which its nodes need no rewriting, and to the function that rewrites older
ones.
"""


def modern(node: OnnxNode, ctx: InferContext) -> ImportedGraph | None:
    """Return the nodes that replace a node of an old opset, or None if it needs no rewriting."""
    opset, write = OLDER.get(node.op, (0, None))
    if write is None or node.opset >= opset:
        return None
    body = Body(node, ctx)
    body.ignore("consumed_inputs")
    write(body)
    return body.graph() if body.results else None


def _before(opset: int, *names: str) -> Callable[[Writer], Writer]:
    def register(write: Writer) -> Writer:
        for name in names:
            OLDER[name] = (opset, write)
        return write

    return register


def _spread(b: Body, name: str, before: int, after: int) -> str:
    """Add axes of size 1 before and after the axes of a tensor."""
    axes = (*range(before), *range(before + len(b.tensor(name).shape), before + len(b.tensor(name).shape) + after))
    return b.op("Unsqueeze", name, b.constant(axes)) if axes else name


@_before(7, "Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Less", "Greater", "Equal")
def _broadcast(b: Body) -> None:
    """Rewrite old broadcasting: ``axis`` aligns the second operand with the first from there on; by default at the end.

    Operands of equal rank need no alignment, whatever ``axis`` is, as in ``onnx.reference``.
    """
    x, y, axis = b.input(0), b.input(1), b.attribute("axis")
    left, right = len(b.tensor(x).shape), len(b.tensor(y).shape)
    if not b.attribute("broadcast", 0) or axis is None or axis == -1 or right in (0, left):
        b.ignore("axis")
        return
    axis = axis + left if axis < 0 else axis
    if not 0 <= axis <= left - right:
        raise b.wrong(f"its axis {axis} leaves no room for the {right} axes of {y} in the {left} of {x}")
    b.set_output(b.op(b.node.op, x, _spread(b, y, 0, left - axis - right)))


@_before(7, "PRelu")
def _slope(b: Body) -> None:
    """Reshape a vector of slopes to one slope per channel."""
    rank = len(b.tensor(b.input(0)).shape)
    if rank > 2 and len(b.tensor(b.input(1)).shape) == 1:
        b.set_output(b.op("PRelu", b.input(0), _spread(b, b.input(1), 0, rank - 2)))


@_before(4, "Concat")
def _concat(b: Body) -> None:
    b.set_output(b.op("Concat", *b.node.inputs, axis=b.attribute("axis", 1)))


@_before(6, "Cast")
def _cast(b: Body) -> None:
    """Convert ``to``, the name of a member of ONNX's enum."""
    name = b.attribute("to")
    kinds = dict(onnx.TensorProto.DataType.items())
    if name.upper() not in kinds:
        raise b.wrong(f"its attribute to is {name!r}, which is no type of ONNX")
    b.set_output(b.op("Cast", b.input(0), to=kinds[name.upper()]))


@_before(2, "Pad")
def _pad(b: Body) -> None:
    x = b.input(0)
    fill = b.like(b.attribute("value", 0.0), x)
    b.set_output(b.op("Pad", x, b.constant(b.attribute("paddings")), fill, mode=b.attribute("mode", "constant")))


@_before(6, "Tile")
def _tile(b: Body) -> None:
    """Rewrite a Tile along one axis: the count and the axis are one-element inputs."""
    rank, (axis,) = len(b.tensor(b.input(0)).shape), ints(b.node, b.ctx, 2, "axis") or (0,)
    if not -rank <= axis < rank:
        raise b.wrong(f"axis {axis} of a tensor with {rank} axes")
    count = b.reshape(b.op("Cast", b.input(1), to=onnx.TensorProto.INT64), 1)
    parts = [count if a == axis % rank else b.constant([1]) for a in range(rank)]
    b.set_output(b.op("Tile", b.input(0), b.op("Concat", *parts, axis=0)))


@_before(9, "Upsample")
def _upsample(b: Body) -> None:
    """Rewrite scales, which are an attribute (opset 1: one for each of the last two axes), and the mode bilinear."""
    scales = b.attribute("scales") or (1.0, 1.0, b.attribute("height_scale"), b.attribute("width_scale"))
    mode = {"bilinear": "linear"}.get(b.attribute("mode", "nearest"), b.attribute("mode", "nearest"))
    constant = b.constant(np.asarray(scales, np.float32), "float32")
    b.set_output(b.ops("Upsample", 1, b.input(0), constant, opset=9, mode=mode)[0])


@_before(10, "Dropout")
def _dropout(b: Body) -> None:
    """Cast the mask to the dtype of the input."""
    outputs = b.node.outputs
    if len(outputs) > 1 and outputs[1]:
        b.ignore("ratio", "is_test")
        y, mask = b.ops("Dropout", 2, b.input(0), opset=10)
        b.set_output(y, 0)
        b.set_output(b.op("CastLike", mask, b.input(0)), 1)


@_before(9, "Scan")
def _scan(b: Body) -> None:
    """Rewrite a batched Scan (axis 0 is the batch, axis 1 the sequence) as a Scan over samples of a Scan over the
    sequence.
    """
    if b.input(0):
        raise b.refuse("a length for each sample (sequence_lens)", "export with a newer opset")
    body, count, prefix = b.attribute("body"), b.attribute("num_scan_inputs"), inner_prefix(b.node)
    samples = tuple(f"{prefix}sample_{k}" for k in range(len(b.node.inputs) - 1))
    results = tuple(f"{prefix}result_{k}" for k in range(len(body.outputs)))
    directions = b.attribute("directions") or (0,) * count
    inside = {"body": body, "num_scan_inputs": count, "scan_input_directions": directions}
    sample = OnnxNode("sample", "Scan", samples, results, inside, OPSET)
    batch = ImportedGraph("batch", tuple(ModelInput(s, "", None) for s in samples), results, (sample,), {})
    outputs = b.ops("Scan", len(results), *b.node.inputs[1:], body=batch, num_scan_inputs=len(samples))
    for k, name in enumerate(outputs):
        b.set_output(name, k)
