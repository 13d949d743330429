"""Quantized tensors: QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear (docs/adr/0013-quantization.md).

A quantized tensor holds small integers ``q`` that represent ``scale * (q - zero_point)``. Scales and quotients are
float32, whatever floats a model stores; quotients are rounded half to even and saturate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polydyn.errors import ModelError
from polydyn.graph.dtypes import onnx_dtype
from polydyn.graph.ir import reduction_name
from polydyn.graph.operators.common import Shape, at, emit, given, iterators, like, normalize_axis, refuse, wide
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.shape_ops import converted
from polydyn.schedules.expr import SMALL, SMALL_FLOATS, Value, cast, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike

QUANTIZED_DTYPES = ("int8", "uint8", "int16", "uint16", *SMALL)
"""Output dtypes of QuantizeLinear."""
INTEGER_LIMITS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}
"""Minimum and maximum of integer dtypes that numpy lacks."""
HALF = ("float16", "bfloat16")
SCALE_DTYPES = ("float32", *HALF)
UINT8, FLOAT = 2, 1
"""ONNX's codes of two element types."""


# -- parameters: one number for a tensor, or one for each step along an axis -------------------------------------------


def is_zero(ctx: ExpandContext, name: str | None) -> bool:
    """Check whether a zero point is absent, or known to be 0 everywhere."""
    known = ctx.constant(name) if name else None
    return name is None or (known is not None and not known.any())


def fits_blocks(node: OnnxNode, ctx: InferContext, name: str, shape: Shape, axis: int, block: int) -> None:
    """Require that a scale or zero point has one number per ``block`` elements along ``axis``."""
    sizes, axis = ctx.tensor(name).shape, normalize_axis(node, axis, len(shape))
    if len(sizes) != len(shape):
        raise ModelError(f"{name} has {len(sizes)} axes, not {len(shape)}", node=node.name, tensor=name)
    for a, (dim, size) in enumerate(zip(sizes, shape, strict=True)):
        expected = size.ceildiv(block) if a == axis else size
        ctx.unify(dim, expected, f"{node.op} {node.name}: axis {a} of {name} has a number for each block")


def fits_axis(node: OnnxNode, ctx: InferContext, name: str, shape: Shape, axis: int) -> None:
    """Require that a scale or zero point is one number, or has one per step along ``axis`` of ``shape``.

    An unknown size must be 1 if the tensor has no such axis. Raises UnsupportedError if it has several axes, which
    means one number per block of elements.
    """
    sizes = ctx.tensor(name).shape
    if len(sizes) > 1:
        raise refuse(node, f"{name} with {len(sizes)} axes (blocks of elements)", "quantize by tensor or by axis")
    for dim in sizes:
        if dim != 1:
            one = dim.constant is None and not -len(shape) <= axis < len(shape)
            size = ONE if one else shape[normalize_axis(node, axis, len(shape))]
            ctx.unify(dim, size, f"{node.op} {node.name}: {name} has one number for each step along axis {axis}")


def along_axis(ctx: ExpandContext, name: str, index: Sequence[IndexLike], axis: int, block: int = 0) -> Value:
    """Return the parameter for the element at ``index``, 16-bit floats widened. ``block``: elements per parameter."""
    if block:
        place = [Index.of(i) // block if a == axis % len(index) else i for a, i in enumerate(index)]
        return wide(at(ctx, name, tuple(place)))
    return wide(at(ctx, name, tuple(ZERO if dim == 1 else index[axis] for dim in ctx.tensor(name).shape)))


def _axis(node: OnnxNode) -> int:
    return int(node.attribute("axis", 1))


def _parameters(node: OnnxNode, ctx: InferContext, shape: Shape) -> None:
    """Check the scale and the zero point. Raises UnsupportedError for a scale of another dtype, or one per block."""
    if (scale := ctx.tensor(node.inputs[1]).dtype) not in SCALE_DTYPES:
        raise refuse(node, f"a scale of {scale}", "scales are float32, or 16-bit floats")
    block = node.attribute("block_size", 0)
    for name in (node.inputs[1], given(node.inputs, 2)):
        if name is not None and block:
            fits_blocks(node, ctx, name, shape, _axis(node), block)
        elif name is not None:
            fits_axis(node, ctx, name, shape, _axis(node))


# -- bodies ----------------------------------------------------------------------------------------------------------


def centred(x: Value, zero: Value | None) -> Value:
    """Return ``x - zero_point`` as int32."""
    wider = cast(wide(x), "int32")
    return wider if zero is None else op("sub", wider, cast(zero, "int32"))


def saturated(x: Value, zero: Value | None, dtype: str) -> Value:
    """Add a zero point to an integral float32 and saturate it to the integer dtype. NaN becomes 0."""
    if zero is not None:
        x = op("add", x, cast(cast(zero, "int32"), "float32"))
    limits = INTEGER_LIMITS.get(dtype)
    low, high = limits or (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    x = op("min", op("max", x, like(low, x)), like(high, x))
    return cast(cast(x, "int32"), dtype)


def quantized(x: Value, scale: Value, zero: Value | None, dtype: str, saturate: bool = True) -> Value:
    """Return ``saturate(round(x / scale) + zero_point)``. A small float rounds the quotient itself, without zero
    point.
    """
    if dtype in SMALL_FLOATS:
        return converted(op("div", cast(x, "float32"), scale), dtype, saturate)
    return saturated(op("rint", op("div", cast(x, "float32"), scale)), zero, dtype)


def dequantized(q: Value, scale: Value, zero: Value | None) -> Value:
    """Return ``(q - zero_point) * scale``. A small float has no zero point."""
    if q.dtype in SMALL_FLOATS:
        return op("mul", wide(q), scale)
    return op("mul", cast(centred(q, zero), "float32"), scale)


# -- operators -------------------------------------------------------------------------------------------------------


def quantize_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape, with the dtype of the zero point, else of the attribute, else uint8."""
    x, zero = ctx.tensor(node.inputs[0]), given(node.inputs, 2)
    named = onnx_dtype(node.attribute("output_dtype", 0) or UINT8, tensor=node.outputs[0])
    dtype = ctx.tensor(zero).dtype if zero else named
    if dtype not in QUANTIZED_DTYPES or x.dtype not in (*SCALE_DTYPES, "int32"):
        raise refuse(node, f"{x.dtype} to {dtype}")
    if node.attribute("output_dtype", 0) and dtype != named:
        raise ModelError(f"output_dtype is {named} and {zero} is {dtype}, they must agree", node=node.name)
    if node.attribute("precision", 0) not in (0, FLOAT):
        raise refuse(node, f"precision={node.attribute('precision')}", "quotients are float32")
    _parameters(node, ctx, x.shape)
    return (Inferred(dtype, x.shape),)


@operator("QuantizeLinear", infer=quantize_infer)
def quantize_linear(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``saturate(round(x / scale) + zero_point)``, half to even."""
    y, zero = ctx.tensor(node.outputs[0]), given(node.inputs, 2)
    index = iterators(len(y.shape))
    place = index, _axis(node), node.attribute("block_size", 0)
    x, scale = wide(at(ctx, node.inputs[0], index)), along_axis(ctx, node.inputs[1], *place)
    point = None if zero is None or is_zero(ctx, zero) else along_axis(ctx, zero, *place)
    emit(ctx, node, quantized(x, scale, point, y.dtype, bool(node.attribute("saturate", 1))))


def dequantize_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape, with the scale's dtype or that of the attribute."""
    x, scale = (ctx.tensor(n) for n in node.inputs[:2])
    named = node.attribute("output_dtype", 0)
    dtype = onnx_dtype(named, tensor=node.outputs[0]) if named else scale.dtype
    if x.dtype not in (*QUANTIZED_DTYPES, "int32") or dtype not in SCALE_DTYPES:
        raise refuse(node, f"{x.dtype} to {dtype}")
    _parameters(node, ctx, x.shape)
    return (Inferred(dtype, x.shape),)


@operator("DequantizeLinear", infer=dequantize_infer)
def dequantize_linear(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``(x - zero_point) * scale``."""
    zero = given(node.inputs, 2)
    index = iterators(len(ctx.tensor(node.outputs[0]).shape))
    place = index, _axis(node), node.attribute("block_size", 0)
    scale = along_axis(ctx, node.inputs[1], *place)
    point = None if zero is None or is_zero(ctx, zero) else along_axis(ctx, zero, *place)
    emit(ctx, node, dequantized(at(ctx, node.inputs[0], index), scale, point))


def dynamic_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer uint8 of the input's shape, its scale and its zero point."""
    x = ctx.tensor(node.inputs[0])
    if x.dtype != "float32":
        raise refuse(node, f"an input of {x.dtype}")
    return Inferred("uint8", x.shape), Inferred("float32", ()), Inferred("uint8", ())


@operator("DynamicQuantizeLinear", infer=dynamic_infer)
def dynamic_quantize_linear(node: OnnxNode, ctx: ExpandContext) -> None:
    """Map the minimum and the maximum element, including 0, to 0 and 255.

    ``scale = (max - min) / 255``. It is 1 if all elements are 0 or there are none, where the formula is undefined.
    """
    x = ctx.tensor(node.inputs[0])
    y, scale_name, zero_name = (*node.outputs, "", "")[:3]
    low, high = (at(ctx, _extreme(ctx, x.name, r), ()) for r in ("min", "max"))
    low, high = op("min", low, like(0, low)), op("max", high, like(0, high))
    reach = op("sub", high, low)
    step = op("where", op("eq", reach, like(0, reach)), like(1, reach), op("div", reach, like(255, reach)))
    scale = at(ctx, ctx.compute((), step, output=scale_name or None), ())
    lowest = op("rint", op("sub", like(0, low), op("div", low, scale)))
    zero = at(ctx, ctx.compute((), saturated(lowest, None, "uint8"), output=zero_name or None), ())
    element = at(ctx, x.name, iterators(len(x.shape)))
    ctx.compute(x.shape, quantized(element, scale, zero, "uint8"), output=y or None)


def _extreme(ctx: ExpandContext, name: str, reduce: str) -> str:
    """Compute the minimum or maximum of a tensor: first per row, in many tasks, then over the rows."""
    shape = ctx.tensor(name).shape
    if len(shape) > 1:
        row = at(ctx, name, (*iterators(len(shape) - 1), Index.of(reduction_name(0))))
        name = ctx.compute(shape[:-1], row, reduction=shape[-1:], reduce=reduce)
        shape = shape[:-1]
    if not shape:
        return ctx.compute((), at(ctx, name, ()))
    every = tuple(Index.of(reduction_name(j)) for j in range(len(shape)))
    return ctx.compute((), at(ctx, name, every), reduction=shape, reduce=reduce)
