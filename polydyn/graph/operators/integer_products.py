"""Products of quantized tensors: MatMulInteger, QLinearMatMul, ConvInteger, QLinearConv.

Each is one sum ``acc:int32 += (int32(a) - zero_a) * (int32(b) - zero_b)`` over int8 or uint8 arrays. A target may
compute it in any order, because sums wrap. The QLinear operators then convert the sum to the output's scale, with one
factor for the tensor or for each column or channel: ``saturate(round(acc * (scale_a * scale_b / scale_y)) + zero_y)``
(docs/adr/0013-quantization.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydyn.graph.operators.common import Shape, at, emit, given, iterators, reduce_to, refuse, wide
from polydyn.graph.operators.convolutions import conv_infer, conv_subscripts, pad_spatial, windows_of
from polydyn.graph.operators.products import matmul_infer, matmul_subscripts
from polydyn.graph.operators.quantization import along_axis, centred, fits_axis, is_zero, saturated
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import Value, cast, op
from polydyn.schedules.index import ZERO, Index

BYTE_DTYPES = ("int8", "uint8")
ROW, COLUMN = -2, -1


@dataclass(frozen=True)
class Sides:
    """The inputs of a quantized product by name, None if absent: operands with zero points and scales, result."""

    a: str
    b: str
    zero_a: str | None
    zero_b: str | None
    scale_a: str = ""
    scale_b: str = ""
    scale_y: str = ""
    zero_y: str = ""


def _integer(node: OnnxNode) -> Sides:
    return Sides(node.inputs[0], node.inputs[1], given(node.inputs, 2), given(node.inputs, 3))


def _linear(node: OnnxNode) -> Sides:
    a, scale_a, zero_a, b, scale_b, zero_b, scale_y, zero_y = node.inputs[:8]
    return Sides(a, b, zero_a, zero_b, scale_a, scale_b, scale_y, zero_y)


def _check_bytes(node: OnnxNode, ctx: InferContext, s: Sides) -> None:
    for name in filter(None, (s.a, s.b, s.zero_y)):
        if ctx.tensor(name).dtype not in BYTE_DTYPES:
            raise refuse(node, f"{name} of {ctx.tensor(name).dtype}")


def _rescaled(ctx: ExpandContext, s: Sides, total: Value, factor: Value, zero: Value | None) -> Value:
    """Convert the int32 sum to the output's scale."""
    scaled = op("rint", op("mul", cast(total, "float32"), factor))
    return saturated(scaled, zero, ctx.tensor(s.zero_y).dtype)


def _factors(ctx: ExpandContext, s: Sides) -> str:
    """Compute ``scale_a * scale_b / scale_y`` in the shape of ``scale_b``. It is folded if the scales are constants."""
    shape = ctx.tensor(s.scale_b).shape
    a, y = along_axis(ctx, s.scale_a, (), 0), along_axis(ctx, s.scale_y, (), 0)
    b = wide(at(ctx, s.scale_b, iterators(len(shape))))
    return ctx.compute(shape, op("div", op("mul", a, b), y))


# -- matrix products -------------------------------------------------------------------------------------------------


def _fits_side(node: OnnxNode, ctx: InferContext, name: str, operand: Shape, axis: int) -> None:
    """Require one number, one per row (column), or an operand's shape with 1 along the reduction.

    Raises UnsupportedError if the parameter changes along the reduction.
    """
    sizes = ctx.tensor(name).shape
    if all(d == 1 for d in sizes):
        return
    if len(sizes) == 1 and len(operand) > 1:
        fits_axis(node, ctx, name, operand, axis)
        return
    if len(sizes) < 2 or len(sizes) != len(operand) or sizes[ROW + COLUMN - axis] != 1:
        raise refuse(node, f"{name} of shape {list(map(str, sizes))}", "give one number, or one for each row or column")
    for d, e in zip(sizes, operand, strict=True):
        if d != 1:
            ctx.unify(d, e, f"{node.op} {node.name}: {name} fits its operand")


def _on_side(ctx: ExpandContext, name: str, index: Sequence[Index], axis: int) -> Value:
    """Return the parameter for the element of an operand at ``index``."""
    sizes = ctx.tensor(name).shape
    if len(sizes) < 2 or all(d == 1 for d in sizes):
        return along_axis(ctx, name, index, axis)
    return wide(at(ctx, name, tuple(ZERO if d == 1 else i for d, i in zip(sizes, index, strict=True))))


def _matmul_infer(node: OnnxNode, ctx: InferContext, s: Sides) -> Shape:
    _check_bytes(node, ctx, s)
    a, b = ctx.tensor(s.a).shape, ctx.tensor(s.b).shape
    (product,) = matmul_infer(replace(node, inputs=(s.a, s.b)), ctx)
    for name in filter(None, (s.zero_a, s.scale_a)):
        _fits_side(node, ctx, name, a, ROW)
    for name in filter(None, (s.zero_b, s.scale_b)):
        _fits_side(node, ctx, name, b, COLUMN)
    return product.shape


def _matmul(ctx: ExpandContext, s: Sides, rank: int) -> tuple[Value, Sequence[Index], Sequence[Index]]:
    """Return the product that is summed, and the subscripts of its two operands."""
    a, b = ctx.tensor(s.a), ctx.tensor(s.b)
    row, column = matmul_subscripts(a.shape, b.shape, rank)
    zero_a = None if s.zero_a is None or is_zero(ctx, s.zero_a) else _on_side(ctx, s.zero_a, row, ROW)
    zero_b = None if s.zero_b is None or is_zero(ctx, s.zero_b) else _on_side(ctx, s.zero_b, column, COLUMN)
    x, y = centred(at(ctx, s.a, row), zero_a), centred(at(ctx, s.b, column), zero_b)
    return op("mul", x, y), row, column


def matmul_integer_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer int32 of the matrix product's shape."""
    return (Inferred("int32", _matmul_infer(node, ctx, _integer(node))),)


@operator("MatMulInteger", infer=matmul_integer_infer)
def matmul_integer(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``sum((a - zero_a) * (b - zero_b))`` in int32."""
    s = _integer(node)
    product, _, _ = _matmul(ctx, s, len(ctx.tensor(node.outputs[0]).shape))
    reduce_to(ctx, node, "sum", product, ctx.tensor(s.a).shape[-1:])


def qlinear_matmul_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the matrix product's shape with the dtype of the output's zero point."""
    s = _linear(node)
    shape = _matmul_infer(node, ctx, s)
    for name in (s.scale_y, s.zero_y):
        _fits_side(node, ctx, name, shape, ROW)
    return (Inferred(ctx.tensor(s.zero_y).dtype, shape),)


@operator("QLinearMatMul", infer=qlinear_matmul_infer)
def qlinear_matmul(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the sum of MatMulInteger in the output's scale."""
    s, y = _linear(node), ctx.tensor(node.outputs[0])
    here = iterators(len(y.shape))
    product, row, column = _matmul(ctx, s, len(here))
    total = at(ctx, ctx.compute(y.shape, product, reduction=ctx.tensor(s.a).shape[-1:], reduce="sum"), here)
    if all(d == 1 for name in (s.scale_a, s.scale_y) for d in ctx.tensor(name).shape):
        factor = _on_side(ctx, _factors(ctx, s), column, COLUMN)
    else:
        scales = op("mul", _on_side(ctx, s.scale_a, row, ROW), _on_side(ctx, s.scale_b, column, COLUMN))
        factor = op("div", scales, _on_side(ctx, s.scale_y, here, ROW))
    zero = None if is_zero(ctx, s.zero_y) else _on_side(ctx, s.zero_y, here, ROW)
    emit(ctx, node, _rescaled(ctx, s, total, factor, zero))


# -- convolutions ----------------------------------------------------------------------------------------------------


def _plain(node: OnnxNode, s: Sides) -> OnnxNode:
    """Return the Conv over the same tensors."""
    bias = given(node.inputs, 8) if s.scale_y else None
    return replace(node, inputs=(s.a, s.b, *([bias] if bias else [])))


def _conv_infer(node: OnnxNode, ctx: InferContext, s: Sides) -> Shape:
    _check_bytes(node, ctx, s)
    (image,) = conv_infer(_plain(node, s), ctx)
    weight = ctx.tensor(s.b).shape
    for name in filter(None, (s.zero_a, s.scale_a, s.scale_y, s.zero_y)):
        if any(d != 1 for d in ctx.tensor(name).shape):
            raise refuse(node, f"{name} with more than one number")
    for name in filter(None, (s.zero_b, s.scale_b)):
        fits_axis(node, ctx, name, weight, 0)
    return image.shape


def _conv(node: OnnxNode, ctx: ExpandContext, s: Sides) -> tuple[Value, Shape]:
    """Return the product that is summed, and the extents of the sum. Padding holds the zero point, which represents
    0.
    """
    plain = _plain(node, s)
    image, weight, extents = conv_subscripts(plain, ctx)
    point = None if s.zero_a is None or is_zero(ctx, s.zero_a) else along_axis(ctx, s.zero_a, (), 0)
    padded = pad_spatial(ctx, s.a, windows_of(plain, ctx), point)
    zero = None if s.zero_b is None or is_zero(ctx, s.zero_b) else along_axis(ctx, s.zero_b, weight, 0)
    return op("mul", centred(at(ctx, padded, image), point), centred(at(ctx, s.b, weight), zero)), extents


def conv_integer_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer int32 of the convolution's shape."""
    return (Inferred("int32", _conv_infer(node, ctx, _integer(node))),)


@operator("ConvInteger", infer=conv_integer_infer)
def conv_integer(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``sum((x - zero_x) * (w - zero_w))`` in int32."""
    product, extents = _conv(node, ctx, _integer(node))
    if extents:
        reduce_to(ctx, node, "sum", product, extents)
    else:
        emit(ctx, node, product)


def qlinear_conv_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the convolution's shape with the dtype of the output's zero point. A bias must be int32."""
    s = _linear(node)
    bias = given(node.inputs, 8)
    if bias and ctx.tensor(bias).dtype != "int32":
        raise refuse(node, f"a bias of {ctx.tensor(bias).dtype}")
    return (Inferred(ctx.tensor(s.zero_y).dtype, _conv_infer(node, ctx, s)),)


@operator("QLinearConv", infer=qlinear_conv_infer)
def qlinear_conv(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the sum of ConvInteger plus a bias of the same scale, in the output's scale."""
    s, y, bias = _linear(node), ctx.tensor(node.outputs[0]), given(node.inputs, 8)
    here = iterators(len(y.shape))
    total, extents = _conv(node, ctx, s)
    if extents:
        total = at(ctx, ctx.compute(y.shape, total, reduction=extents, reduce="sum"), here)
    if bias:
        total = op("add", total, at(ctx, bias, here[1:2]))
    factor = along_axis(ctx, _factors(ctx, s), here[1:2], 0)
    zero = None if is_zero(ctx, s.zero_y) else along_axis(ctx, s.zero_y, (), 0)
    emit(ctx, node, _rescaled(ctx, s, total, factor, zero))
