"""Random generators: RandomNormal, RandomUniform, their Like forms, Dropout in training mode.

An element is a hash of its position and of the node's seed. Every call and every compilation gives the same numbers, in
any order and on any number of threads. A node without a seed derives one from its name. The numbers differ from those
of other runtimes. Bernoulli and Multinomial expand to these operators.
"""

from __future__ import annotations

import struct
import zlib

from polydyn.graph.dtypes import onnx_dtype
from polydyn.graph.operators.common import at, emit, given, iterators, like, refuse, single, wide
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import WIDENED, FromIndex, Value, cast, const, op
from polydyn.schedules.index import ZERO, Index

FLOAT = 1
"""ONNX's code of float32."""
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))
"""Shifts and factors of a 32-bit mixing function (C. Wellons, hash-prospector, public domain)."""


def _dtype(node: OnnxNode, ctx: InferContext) -> str:
    """Return the dtype that a node names, else that of its input, else float32."""
    if node.attribute("dtype"):
        return onnx_dtype(node.attribute("dtype"), tensor=node.outputs[0])
    return ctx.tensor(node.inputs[0]).dtype if node.inputs else onnx_dtype(FLOAT)


def random_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the shape of the attribute, or that of the input. Raises UnsupportedError for a dtype that is not a
    float.
    """
    dtype = _dtype(node, ctx)
    if WIDENED.get(dtype, dtype) not in ("float32", "float64"):
        raise refuse(node, f"numbers of {dtype}", "floats")
    shape = ctx.tensor(node.inputs[0]).shape if node.inputs else tuple(map(Index.of, node.attribute("shape")))
    return (Inferred(dtype, shape),)


def _key(node: OnnxNode) -> int:
    """Return the node's seed as 32 bits."""
    seed = node.attribute("seed")
    text = f"{node.op}:{node.name}:{node.outputs[0]}".encode()
    return zlib.crc32(text if seed is None else struct.pack("<d", float(seed)), 0x9E3779B9)


def bits(place: Index, key: int) -> Value:
    """Return 32 random bits for a position."""
    x = op("mul", FromIndex("uint32", place + 1), const(0x9E3779B9, "uint32"))
    x = op("bitxor", x, const(key, "uint32"))
    for shift, factor in ROUNDS:
        x = op("bitxor", x, op("shr", x, const(shift, "uint32")))
        x = op("mul", x, const(factor, "uint32"))
    return op("bitxor", x, op("shr", x, const(16, "uint32")))


def uniform(place: Index, key: int, dtype: str) -> Value:
    """Return a number in [0, 1): 24 random bits for float32, 53 for float64."""
    if dtype == "float64":
        high, low = (op("shr", bits(place, k), const(s, "uint32")) for k, s in ((key, 5), (key ^ 0x5BD1E995, 6)))
        whole = op("add", op("mul", cast(high, dtype), const(2.0**26, dtype)), cast(low, dtype))
        return op("mul", whole, const(2.0**-53, dtype))
    return op("mul", cast(op("shr", bits(place, key), const(8, "uint32")), dtype), const(2.0**-24, dtype))


def normal(place: Index, key: int, dtype: str) -> Value:
    """Return a number of the standard normal distribution (Box and Muller 1958)."""
    radius = op("sub", const(1, dtype), uniform(place, key, dtype))  # in (0, 1]
    angle = op("mul", const(6.283185307179586, dtype), uniform(place, ~key & 0xFFFFFFFF, dtype))
    return op("mul", op("sqrt", op("mul", const(-2, dtype), op("log", radius))), op("cos", angle))


def _place(ctx: ExpandContext, name: str) -> Index:
    """Return the row-major position of an element of a tensor."""
    shape, place = ctx.tensor(name).shape, ZERO
    for d, e in zip(iterators(len(shape)), shape, strict=True):
        place = place * e + d
    return place


@operator("RandomUniform", "RandomUniformLike", infer=random_infer)
def random_uniform(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute numbers from ``low`` to below ``high``."""
    y = ctx.tensor(node.outputs[0])
    dtype, low, high = WIDENED.get(y.dtype, y.dtype), node.attribute("low", 0.0), node.attribute("high", 1.0)
    x = uniform(_place(ctx, y.name), _key(node), dtype)
    emit(ctx, node, op("add", op("mul", x, const(high - low, dtype)), const(low, dtype)))


@operator("RandomNormal", "RandomNormalLike", infer=random_infer)
def random_normal(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute normally distributed numbers with a mean and a standard deviation (``scale``)."""
    y = ctx.tensor(node.outputs[0])
    dtype, mean, scale = WIDENED.get(y.dtype, y.dtype), node.attribute("mean", 0.0), node.attribute("scale", 1.0)
    x = normal(_place(ctx, y.name), _key(node), dtype)
    emit(ctx, node, op("add", op("mul", x, const(scale, dtype)), const(mean, dtype)))


# -- Dropout ----------------------------------------------------------------------------------------------------------


def _is_identity(node: OnnxNode, ctx: Context) -> bool:
    """Check whether the model shows that nothing is dropped: in inference, or with a ratio of 0."""
    training, ratio = (given(node.inputs, k) for k in (2, 1))
    if training is None:
        return True
    mode, part = (None if name is None else ctx.constant(name) for name in (training, ratio))
    return (mode is not None and not mode.any()) or (part is not None and not part.any())


def dropout_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's type and shape, and a mask of the elements that are not dropped."""
    x = ctx.tensor(node.inputs[0])
    value = ctx.known_elements(x.name) if _is_identity(node, ctx) else None
    return Inferred(x.dtype, x.shape, value), Inferred("bool", x.shape)


@operator("Dropout", infer=dropout_infer)
def dropout(node: OnnxNode, ctx: ExpandContext) -> None:
    """Alias the input in inference. In training, zero each element or scale it by 1 / (1 - ratio)."""
    mask, x = given(node.outputs, 1), ctx.tensor(node.inputs[0])
    if _is_identity(node, ctx):
        ctx.alias(node.outputs[0], x.name)
        if mask:
            ctx.compute(x.shape, const(True, "bool"), output=mask)
        return
    here = iterators(len(x.shape))
    ratio, training = given(node.inputs, 1), single(ctx, node.inputs[2])
    part = cast(wide(single(ctx, ratio)), "float32") if ratio else const(0.5, "float32")
    keep_mask = op("ge", uniform(_place(ctx, x.name), _key(node), "float32"), part)
    keep_mask = op("or", keep_mask, op("not", training))
    if mask:
        keep_mask = at(ctx, ctx.compute(x.shape, keep_mask, output=mask), here)
    element = wide(at(ctx, x.name, here))
    rest = op("where", training, op("sub", const(1, "float32"), part), const(1, "float32"))
    emit(ctx, node, op("where", keep_mask, op("div", element, cast(rest, element.dtype)), like(0, element)))
