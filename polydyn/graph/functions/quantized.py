"""Quantized operators of com.microsoft: integers with separate scales and zero points, sometimes with float results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from onnx import TensorProto

from polydyn.errors import ModelError
from polydyn.graph.bodies import Body, body
from polydyn.graph.functions.attention import MICROSOFT

PER_BYTE = 8
"""Bits of a number that fills a byte."""


def dequantized(b: Body, first: int) -> str:
    """Dequantize the tensor at a position. Its scale and zero point follow it."""
    x, scale, zero = (b.input(first + i) for i in range(3))
    return b.op("DequantizeLinear", x, scale, *([zero] if zero else []))


def quantized(b: Body, x: str, first: int) -> str:
    """Quantize floats by the scale at a position and the zero point at the next one."""
    scale, zero = b.input(first), b.input(first + 1)
    return b.op("QuantizeLinear", x, scale, *([zero] if zero else []))


class Writer(Protocol):
    """Writes nodes: a body, or a step of a recurrence."""

    @property
    def op(self) -> Callable[..., str]:
        """Add a node with one output and return its name."""

    @property
    def ops(self) -> Callable[..., tuple[str, ...]]:
        """Add a node with several outputs and return their names."""


def dynamic_product(w: Writer, x: str, weight: str, scale: str, zero: str) -> str:
    """Multiply ``x``, quantized by its own extremes, by integers with a scale and a zero point ("" for 0)."""
    rows, scale_x, zero_x = w.ops("DynamicQuantizeLinear", 3, x)
    total = w.op("MatMulInteger", rows, weight, zero_x, *_optional(zero))
    return w.op("Mul", w.op("CastLike", total, x), w.op("Mul", scale_x, scale))


@body(f"{MICROSOFT}::QuantizeLinear", f"{MICROSOFT}::DequantizeLinear")
def own_quantization(b: Body) -> None:
    """Expand to ONNX's operator. Quantizers write this one for 16-bit and 4-bit integers below opset 21."""
    names = [x for x in (b.input(i) for i in range(3)) if x]
    b.set_output(b.op(b.node.op.removeprefix(f"{MICROSOFT}::"), *names, axis=b.attribute("axis", 1)))


def _binary(b: Body, name: str) -> None:
    b.set_output(quantized(b, b.op(name, dequantized(b, 0), dequantized(b, 3)), 6))


@body(f"{MICROSOFT}::QLinearAdd")
def q_add(b: Body) -> None:
    """Add two dequantized tensors."""
    _binary(b, "Add")


@body(f"{MICROSOFT}::QLinearMul")
def q_mul(b: Body) -> None:
    """Multiply two dequantized tensors."""
    _binary(b, "Mul")


@body(f"{MICROSOFT}::QLinearSigmoid")
def q_sigmoid(b: Body) -> None:
    """Compute the sigmoid of a dequantized tensor."""
    b.set_output(quantized(b, b.op("Sigmoid", dequantized(b, 0)), 3))


@body(f"{MICROSOFT}::QLinearLeakyRelu")
def q_leaky_relu(b: Body) -> None:
    """Compute the leaky Relu of a dequantized tensor."""
    b.set_output(quantized(b, b.op("LeakyRelu", dequantized(b, 0), alpha=b.attribute("alpha", 0.01)), 3))


@body(f"{MICROSOFT}::QLinearSoftmax")
def q_softmax(b: Body) -> None:
    """Compute the softmax of a dequantized tensor along one axis."""
    rank = len(b.tensor(b.input(0)).shape)
    axis = b.attribute("axis", -1) % max(rank, 1)
    if b.attribute("opset", 13) < 13 and axis != rank - 1:
        raise b.refuse(f"axis {axis} of opset {b.attribute('opset')}")
    b.set_output(quantized(b, b.op("Softmax", dequantized(b, 0), axis=axis), 3))


def _channels(b: Body, x: str, last: bool, forward: bool) -> str:
    """Move channels from the last axis to the second (forward) or back."""
    if not last:
        return x
    rank = len(b.tensor(b.input(0)).shape)
    perm = (0, rank - 1, *range(1, rank - 1)) if forward else (0, *range(2, rank), 1)
    return b.op("Transpose", x, perm=perm)


@body(f"{MICROSOFT}::QLinearAveragePool")
def q_average_pool(b: Body) -> None:
    """Compute the mean of each window of a dequantized tensor."""
    attributes = b.given("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    last = bool(b.attribute("channels_last", 0))
    x = _channels(b, dequantized(b, 0), last, True)
    b.set_output(_channels(b, quantized(b, b.op("AveragePool", x, **attributes), 3), last, False))


@body(f"{MICROSOFT}::QLinearGlobalAveragePool")
def q_global_average_pool(b: Body) -> None:
    """Compute the mean over all spatial axes of a dequantized tensor."""
    last = bool(b.attribute("channels_last", 0))
    x = _channels(b, dequantized(b, 0), last, True)
    b.set_output(_channels(b, quantized(b, b.op("GlobalAveragePool", x), 3), last, False))


@body(f"{MICROSOFT}::QLinearConv")
def q_conv(b: Body) -> None:
    """Expand to ONNX's QLinearConv. With channels last the map is transposed, the weight is not."""
    attributes = b.given("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    last = bool(b.attribute("channels_last", 0))
    x, *others = (b.input(k) for k in range(len(b.node.inputs)))
    y = b.op("QLinearConv", _channels(b, x, last, True), *filter(None, others), **attributes)
    b.set_output(_channels(b, y, last, False))


@body(f"{MICROSOFT}::NhwcMaxPool")
def nhwc_max_pool(b: Body) -> None:
    """Expand to ONNX's MaxPool between two transposes."""
    attributes = b.given("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
    y = b.op("MaxPool", _channels(b, b.input(0), True, True), **attributes)
    b.set_output(_channels(b, y, True, False))


@body(f"{MICROSOFT}::QLinearReduceMean")
def q_mean(b: Body) -> None:
    """Compute the mean over axes, by default all, of a dequantized tensor."""
    axes = b.attribute("axes") or range(len(b.tensor(b.input(0)).shape))
    mean = b.reduce("ReduceMean", dequantized(b, 0), *axes, keepdims=b.attribute("keepdims", 1))
    b.set_output(quantized(b, mean, 3))


@body(f"{MICROSOFT}::QLinearConcat")
def q_concat(b: Body) -> None:
    """Join dequantized parts in the scale of the result."""
    parts = [dequantized(b, k) for k in range(2, len(b.node.inputs), 3)]
    b.set_output(quantized(b, b.op("Concat", *parts, axis=b.attribute("axis")), 0))


@body(f"{MICROSOFT}::QLinearWhere")
def q_where(b: Body) -> None:
    """Select between two dequantized tensors."""
    b.set_output(quantized(b, b.op("Where", b.input(0), dequantized(b, 1), dequantized(b, 4)), 7))


@body(f"{MICROSOFT}::MatMulIntegerToFloat")
def matmul_integer_to_float(b: Body) -> None:
    """Compute an exact integer sum, times both scales, plus a bias."""
    a, weight, scale_a, scale_b, zero_a, zero_b, bias = (b.input(i) for i in range(7))
    total = b.op("MatMulInteger", a, weight, *_optional(zero_a, zero_b))
    scaled = b.op("Mul", b.op("CastLike", total, scale_a), b.op("Mul", scale_a, scale_b))
    b.set_output(b.op("Add", scaled, bias) if bias else scaled)


def _optional(*names: str) -> list[str]:
    """Return the names up to the last one that is present."""
    last = max((k for k, n in enumerate(names) if n), default=-1)
    return list(names[: last + 1])


@body(f"{MICROSOFT}::DynamicQuantizeMatMul")
def dynamic_quantize_matmul(b: Body) -> None:
    """Quantize the left operand by its own extremes, then multiply."""
    a, weight, scale, zero, bias = (b.input(i) for i in range(5))
    scaled = dynamic_product(b, a, weight, scale, zero)
    b.set_output(b.op("Add", scaled, bias) if bias else scaled)


@body(f"{MICROSOFT}::QGemm")
def q_gemm(b: Body) -> None:
    """Compute ``alpha * A B + C`` in the product of both scales. Quantize it if the result has a scale."""
    names = []
    for position, key in ((0, "transA"), (3, "transB")):
        turned = b.op("Transpose", b.input(position), perm=(1, 0)) if b.attribute(key, 0) else b.input(position)
        names.append(turned)
    total = b.op("MatMulInteger", *names, *_optional(b.input(2), b.input(5)))
    if b.input(6):
        total = b.op("Add", total, b.input(6))
    factor = b.op("Mul", b.op("Mul", b.input(1), b.input(4)), b.constant(b.attribute("alpha", 1.0), "float32"))
    scaled = b.op("Mul", b.cast(total, "float32"), factor)
    b.set_output(quantized(b, scaled, 7) if b.input(7) else scaled)


INT8_ACCURACY_LEVEL = 4
"""Accuracy level at which rows may be rounded to 8 bits."""


@body(f"{MICROSOFT}::MatMulNBits")
def matmul_n_bits(b: Body) -> None:
    """Multiply by weights of 2, 4 or 8 bits in blocks along the sum, each with a scale and a zero point.

    At accuracy level 4 with 4-bit weights, rows are rounded to 8 bits, with a scale per whole block.
    """
    a, packed, scales, zeros, order, bias = (b.input(i) for i in range(6))
    n, k, block, bits = (b.attribute(x, d) for x, d in (("N", None), ("K", None), ("block_size", None), ("bits", 4)))
    if order or bits not in (2, 4, 8):
        raise b.refuse("g_idx" if order else f"bits={bits}")
    blocks = -(-k // block)
    in_bytes = b.attribute("accuracy_level", 0) == INT8_ACCURACY_LEVEL and bits == 4 and k % block == 0
    if in_bytes and b.tensor(a).dtype == "float32":
        a = _rounded_by_blocks(b, a, block)
    if b.tensor(packed).shape[-1].constant not in (None, block * bits // 8):
        raise ModelError(f"{packed} has no {block * bits // 8} bytes for a block", node=b.node.name)
    values = _first(b, _unpacked(b, packed, bits, (n, -1)), k)
    scale = b.reshape(scales, n, blocks)
    whole = {"axis": 1, "block_size": block}
    if not zeros:
        zero = b.constant(np.full((n, blocks), 2 ** (bits - 1)), "uint8")
        weight = b.op("DequantizeLinear", values, scale, zero, **whole)
    elif b.tensor(zeros).dtype == "uint8":
        rows = _unpacked(b, b.reshape(zeros, n, -(-blocks * bits // 8)), bits, (n, -1))
        weight = b.op("DequantizeLinear", values, scale, _first(b, rows, blocks), **whole)
    else:
        padded = b.reshape(_unpacked(b, packed, bits, (n, -1)), n, blocks, block)
        moved = b.op("Sub", b.op("CastLike", padded, scales), b.op("CastLike", b.reshape(zeros, n, blocks, 1), scales))
        product = b.op("Mul", moved, b.reshape(scales, n, blocks, 1))
        weight = _first(b, b.reshape(product, n, blocks * block), k)
    total = b.op("MatMul", a, b.op("Transpose", b.op("CastLike", weight, a), perm=(1, 0)))
    b.set_output(b.op("Add", total, bias) if bias else total)


@body(f"{MICROSOFT}::GatherBlockQuantized")
def gather_block_quantized(b: Body) -> None:
    """Gather quantized rows with their scales, then dequantize them in blocks. A row past the end is 0."""
    data, indices, scales, zeros = (b.input(i) for i in range(4))
    bits, block = b.attribute("bits", 4), b.attribute("block_size", 128)
    shape, dtype = b.tensor(data).shape, b.tensor(data).dtype
    packed, rank = dtype == "uint8", len(shape)
    gathered, blocks = b.attribute("gather_axis", 0) % rank, b.attribute("quantize_axis", 1) % rank
    if not packed and dtype not in ("int4", "uint4"):
        raise b.refuse(f"data of {dtype}", "int4, uint4 and uint8 are built")
    if gathered == blocks or (packed and gathered):
        raise b.refuse(f"gather_axis {gathered} with quantize_axis {blocks}", "rows of whole blocks are built")
    if packed and bits not in (2, 4, 8):
        raise b.wrong(f"bits is {bits}")
    n = b.size(data, gathered)
    wide = b.cast(indices, "int64")
    inside = b.op("And", b.op("GreaterOrEqual", wide, b.op("Neg", n)), b.op("Less", wide, n))
    rows = b.op("Where", inside, wide, b.constant(0))
    count = len(b.tensor(indices).shape)

    def read(x: str) -> str:
        taken = b.op("Gather", x, rows, axis=gathered)
        if not packed or x == scales or bits == PER_BYTE:
            return taken
        return _unpacked(b, taken, bits, (*[0] * (count + rank - 2), -1))

    scale = read(scales)
    if zeros:
        zero = read(zeros)
    else:
        middle = b.constant(2 ** (bits - 1) if packed else 0, dtype)
        zero = b.op("Expand", middle, b.op("Shape", scale))
    axis = blocks + count - 1 if blocks > gathered else blocks
    values = read(data)
    if zeros and packed and bits != PER_BYTE:  # the last byte of a row of zero points may be padded
        zero = b.op("Slice", zero, b.constant([0]), b.size(scale, count + rank - 2), b.constant([-1]))
    whole = b.op("DequantizeLinear", values, scale, zero, axis=axis, block_size=block)
    after = rank - 1 - gathered
    kept = b.reshape(inside, *[0] * count, *[1] * after) if after else inside
    b.set_output(b.op("Where", kept, whole, b.op("CastLike", b.constant(0, "float32"), whole)))


def _rounded_by_blocks(b: Body, x: str, block: int) -> str:
    """Round rows to 8 bits with one scale per block: its largest magnitude is 127 steps."""
    front = [0] * (len(b.tensor(x).shape) - 1)
    blocks = b.reshape(x, *front, -1, block)
    scale = b.op("Div", b.reduce("ReduceMax", b.op("Abs", blocks), -1), b.constant(127, "float32"))
    whole = {"axis": -1, "block_size": block}
    rounded = b.op("QuantizeLinear", blocks, scale, output_dtype=int(TensorProto.INT8), **whole)
    return b.op("Reshape", b.op("DequantizeLinear", rounded, scale, **whole), b.op("Shape", x))


def _first(b: Body, x: str, count: int) -> str:
    """Return the first columns of a matrix."""
    return b.op("Slice", x, b.constant([0]), b.constant([count]), b.constant([1]))


def _unpacked(b: Body, packed: str, bits: int, shape: tuple[Any, ...]) -> str:
    """Unpack bytes to the numbers in them, lowest bits first."""
    if bits == 8:
        return b.reshape(packed, *shape)
    shifts = b.constant(np.arange(0, 8, bits), "uint8")
    apart = b.op("BitShift", b.op("Unsqueeze", packed, b.constant([-1])), shifts, direction="RIGHT")
    return b.reshape(b.op("BitwiseAnd", apart, b.constant(2**bits - 1, "uint8")), *shape)
