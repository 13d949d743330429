"""Softmax and the normalizations: reductions to statistics, then a map."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from polydyn.errors import ModelError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    Shape,
    aligned,
    at,
    emit,
    fits,
    given,
    iterators,
    like,
    mean_of,
    normalize_axis,
    refuse,
    same_as_input,
    square,
    wide,
)
from polydyn.graph.operators.reductions import reduced_shape, source_index
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import Value, cast, op
from polydyn.schedules.index import ONE, ZERO, Index

# -- softmax ---------------------------------------------------------------------------------------------------------


@operator("Softmax", "LogSoftmax", infer=same_as_input)
def softmax(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``e * (1 / sum(e))`` with ``e = exp(x - max(x))``; before opset 13 over all axes from ``axis`` on."""
    t = ctx.tensor(node.inputs[0])
    rank = len(t.shape)
    new = node.opset >= 13
    axis = normalize_axis(node, node.attribute("axis", -1 if new else 1), rank)
    axes = (axis,) if new else tuple(range(axis, rank))
    shape = reduced_shape(t.shape, axes, keepdims=True)
    extents = tuple(t.shape[a] for a in axes)
    inner = source_index(rank, axes, keepdims=True)
    here = iterators(rank)
    row_index = tuple(ZERO if a in axes else i for a, i in enumerate(here))
    greatest = ctx.compute(shape, wide(at(ctx, t.name, inner)), reduction=extents, reduce="max")
    shifted = op("sub", wide(at(ctx, t.name, here)), at(ctx, greatest, row_index))
    if node.op == "LogSoftmax":
        exps = op("exp", op("sub", wide(at(ctx, t.name, inner)), at(ctx, greatest, iterators(rank))))
        total = ctx.compute(shape, exps, reduction=extents, reduce="sum")
        emit(ctx, node, op("sub", shifted, op("log", at(ctx, total, row_index))))
        return
    exp = ctx.compute(t.shape, op("exp", shifted))
    total = ctx.compute(shape, at(ctx, exp, inner), reduction=extents, reduce="sum")
    # one division per row: the sum is at least 1, so its reciprocal loses at most half a unit in the last place
    inverse = ctx.compute(shape, op("reciprocal", at(ctx, total, here)))
    emit(ctx, node, op("mul", at(ctx, exp, here), at(ctx, inverse, row_index)))


# -- statistics ------------------------------------------------------------------------------------------------------


def inverse_root(variance: Value, epsilon: float) -> Value:
    """Return ``1 / sqrt(variance + epsilon)``."""
    return op("reciprocal", op("sqrt", op("add", variance, like(epsilon, variance))))


def mean_and_variance(
    ctx: ExpandContext, shape: Shape, extents: tuple[Dim, ...], element: Callable[[], Value]
) -> tuple[str, str]:
    """Compute the mean and the mean squared deviation (two passes) of ``element``. Return the names of both tensors."""
    here = iterators(len(shape))
    x = element()
    total = ctx.compute(shape, x, reduction=extents, reduce="sum")
    mean = ctx.compute(shape, mean_of(at(ctx, total, here), extents))
    spread = ctx.compute(shape, square(op("sub", x, at(ctx, mean, here))), reduction=extents, reduce="sum")
    return mean, ctx.compute(shape, mean_of(at(ctx, spread, here), extents))


def _affine(x: Value, scale: Value, shift: Value | None) -> Value:
    out = op("mul", x, scale)
    return out if shift is None else op("add", out, shift)


# -- batch, instance, group ------------------------------------------------------------------------------------------


def batch_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's type and shape, then the running mean and variance. The channels agree with the parameters."""
    t = ctx.tensor(node.inputs[0])
    training = bool(node.attribute("training_mode", 0))
    if not training and len([o for o in node.outputs if o]) > 1:
        raise refuse(node, "statistics without training mode", "export the model for inference")
    spatial = node.attribute("spatial", 1)
    shape = (t.shape[1:2] if spatial else t.shape[1:]) or (ONE,)  # a vector has one channel
    for x in node.inputs[1:]:
        if len(ctx.tensor(x).shape) != len(shape):
            raise ModelError(f"{x} has {len(ctx.tensor(x).shape)} axes, not {len(shape)}", node=node.name, tensor=x)
        for a, (n, m) in enumerate(zip(shape, ctx.tensor(x).shape, strict=True), 1):
            per = "channel" if len(shape) == 1 else f"element of axis {a}"
            ctx.unify(n, m, f"{node.op} {node.name} has one {x} per {per}")
    running = tuple(Inferred(ctx.tensor(x).dtype, t.shape[1:2] or (ONE,)) for x in node.inputs[3:5])
    return (Inferred(t.dtype, t.shape), *(running if training else ()))


@operator("BatchNormalization", infer=batch_infer)
def batch_normalization(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``x * s + t`` with ``s = scale / sqrt(variance + epsilon)`` and ``t = bias - mean * s``, folded if
    constant.

    Before opset 9, each element of a sample may have its own parameters (``spatial=0``).
    """
    x, scale, bias, mean, variance = node.inputs
    epsilon = node.attribute("epsilon", 1e-5)
    if node.attribute("training_mode", 0):
        mean, variance = _batch_statistics(node, ctx)
    arrays = [ctx.constant(n) for n in (scale, bias, mean, variance)]
    if all(a is not None for a in arrays):
        s, b, m, v = (np.asarray(a, np.float64) for a in arrays)
        factor = s / np.sqrt(v + epsilon)
        dtype = np.float64 if ctx.tensor(x).dtype == "float64" else np.float32
        multiply = ctx.new_constant(factor.astype(dtype), f"{node.name}.scale")
        shift = ctx.new_constant((b - m * factor).astype(dtype), f"{node.name}.shift")
    else:
        channels = ctx.tensor(scale).shape
        here = iterators(len(channels))
        kind = wide(at(ctx, x, iterators(len(ctx.tensor(x).shape)))).dtype
        factor, offset, middle, spread = (cast(wide(at(ctx, p, here)), kind) for p in (scale, bias, mean, variance))
        multiply = ctx.compute(channels, op("mul", factor, inverse_root(spread, epsilon)))
        shift = ctx.compute(channels, op("sub", offset, op("mul", middle, at(ctx, multiply, here))))
    index = iterators(len(ctx.tensor(x).shape))
    body, own = wide(at(ctx, x, index)), index[1 : 1 + len(ctx.tensor(scale).shape)] or (ZERO,)
    emit(ctx, node, _affine(body, *(cast(at(ctx, p, own), body.dtype) for p in (multiply, shift))))


def _batch_statistics(node: OnnxNode, ctx: ExpandContext) -> tuple[str, str]:
    """Compute mean and variance of each channel in this batch, and update the running ones towards them."""
    x = ctx.tensor(node.inputs[0])
    extents = (x.shape[0], *x.shape[2:])
    inner = [Index.of(f"r{j}") for j in range(len(extents))]
    channel = Index.of("d0")
    vector = len(x.shape) == 1
    element = wide(at(ctx, x.name, (inner[0],) if vector else (inner[0], channel, *inner[1:])))
    found = mean_and_variance(ctx, x.shape[1:2] or (ONE,), extents, lambda: element)
    keep = node.attribute("momentum", 0.9)
    for position, (old, new) in enumerate(zip(node.inputs[3:5], found, strict=True), 1):
        if given(node.outputs, position):
            before = wide(at(ctx, old, (channel,)))
            now = cast(at(ctx, new, (channel,)), before.dtype)
            moved = op("add", op("mul", before, like(keep, before)), op("mul", now, like(1 - keep, now)))
            emit(ctx, node, moved, position)
    return found


def _groups(node: OnnxNode, ctx: ExpandContext, count: Dim) -> None:
    """Normalize the channels of each of ``count`` groups together, over all spatial axes."""
    t = ctx.tensor(node.inputs[0])
    batch, channels, *spatial = t.shape
    size = Index.of(1) if count == channels else channels // count
    d0, d1 = Index.of("d0"), Index.of("d1")
    extents = (*(() if size == 1 else (size,)), *spatial)
    inner = [Index.of(f"r{j}") for j in range(len(extents))]
    channel = d1 if size == 1 else d1 * size + inner.pop(0)
    element = wide(at(ctx, t.name, (d0, channel, *inner)))
    mean, variance = mean_and_variance(ctx, (batch, count), extents, lambda: element)
    index = iterators(len(t.shape))
    group = d1 if size == 1 else d1 // size
    centred = op("sub", wide(at(ctx, t.name, index)), at(ctx, mean, (d0, group)))
    y = op("mul", centred, inverse_root(at(ctx, variance, (d0, group)), node.attribute("epsilon", 1e-5)))
    per_channel = node.op == "InstanceNormalization" or node.opset >= 21
    parameter = d1 if per_channel else group
    places = (ZERO if _is_for_all(node, ctx, p) else parameter for p in node.inputs[1:3])
    scale, shift = (cast(at(ctx, p, (i,)), y.dtype) for p, i in zip(node.inputs[1:3], places, strict=True))
    emit(ctx, node, _affine(y, scale, shift))


def groups_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's type and shape. Groups must be whole, with one parameter per channel or group."""
    t = ctx.tensor(node.inputs[0])
    parameters = channels = t.shape[1]
    if node.op == "GroupNormalization":
        count = Index.of(node.attribute("num_groups"))
        ctx.unify(channels // count * count, channels, f"the channels of {t.name} are {count} groups")
        parameters = channels if node.opset >= 21 else count
    for x in node.inputs[1:3]:
        if not _is_for_all(node, ctx, x):
            ctx.unify(ctx.tensor(x).shape[0], parameters, f"{node.op} {node.name} has {parameters} of {x}")
    return (Inferred(t.dtype, t.shape),)


def _is_for_all(node: OnnxNode, ctx: Context, parameter: str) -> bool:
    """Check whether one scale or shift is used for all channels: the steps of ONNX's GroupNormalization broadcast
    it.
    """
    return node.op == "GroupNormalization" and ctx.tensor(parameter).shape[0] == 1


@operator("InstanceNormalization", infer=groups_infer)
def instance_normalization(node: OnnxNode, ctx: ExpandContext) -> None:
    """Normalize each channel of each sample to mean 0 and variance 1, then apply scale and bias per channel."""
    _groups(node, ctx, ctx.tensor(node.inputs[0]).shape[1])


@operator("GroupNormalization", infer=groups_infer)
def group_normalization(node: OnnxNode, ctx: ExpandContext) -> None:
    """Normalize groups of channels. Scale and bias are per group before opset 21, per channel since."""
    _groups(node, ctx, Index.of(node.attribute("num_groups")))


# -- layer, root mean square -----------------------------------------------------------------------------------------


def layer_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape, then mean and inverse deviation with ones on the normalized axes."""
    t = ctx.tensor(node.inputs[0])
    axes = _trailing(node, len(t.shape))
    for x in node.inputs[1:]:
        if x:
            fits(node, ctx, x, t.shape)
    statistics = Inferred(_stash(node, t.dtype), reduced_shape(t.shape, axes, keepdims=True))
    return (Inferred(t.dtype, t.shape), statistics, statistics)[: len(node.outputs)]


def _trailing(node: OnnxNode, rank: int) -> tuple[int, ...]:
    return tuple(range(normalize_axis(node, node.attribute("axis", -1), rank), rank))


def _stash(node: OnnxNode, dtype: str) -> str:
    """Return the dtype of the statistics. stash_type 1 (float32) never narrows float64."""
    if node.attribute("stash_type", 1) != 1:
        raise refuse(node, f"stash_type {node.attribute('stash_type')}")
    return "float64" if dtype == "float64" else "float32"


@operator("LayerNormalization", infer=layer_infer)
def layer_normalization(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``(x - mean) / sqrt(variance + epsilon) * scale + bias`` over the axes from ``axis`` on."""
    t = ctx.tensor(node.inputs[0])
    rank = len(t.shape)
    axes = _trailing(node, rank)
    shape = reduced_shape(t.shape, axes, keepdims=True)
    element = wide(at(ctx, t.name, source_index(rank, axes, keepdims=True)))
    mean, variance = mean_and_variance(ctx, shape, tuple(t.shape[a] for a in axes), lambda: element)
    inverse = ctx.compute(
        shape, inverse_root(at(ctx, variance, iterators(rank)), node.attribute("epsilon", 1e-5)),
        output=given(node.outputs, 2),
    )  # fmt: skip
    if given(node.outputs, 1):
        emit(ctx, node, at(ctx, mean, iterators(rank)), 1)
    here = iterators(rank)
    row_index = tuple(ZERO if a in axes else i for a, i in enumerate(here))
    centred = op("sub", wide(at(ctx, t.name, here)), at(ctx, mean, row_index))
    _scaled_output(node, ctx, op("mul", centred, at(ctx, inverse, row_index)))


@operator("RMSNormalization", infer=layer_infer)
def rms_normalization(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``x / sqrt(mean(x*x) + epsilon) * scale`` over the axes from ``axis`` on."""
    t = ctx.tensor(node.inputs[0])
    rank = len(t.shape)
    axes = _trailing(node, rank)
    shape = reduced_shape(t.shape, axes, keepdims=True)
    extents = tuple(t.shape[a] for a in axes)
    element = wide(at(ctx, t.name, source_index(rank, axes, keepdims=True)))
    total = ctx.compute(shape, square(element), reduction=extents, reduce="sum")
    mean = mean_of(at(ctx, total, iterators(rank)), extents)
    inverse = ctx.compute(shape, inverse_root(mean, node.attribute("epsilon", 1e-5)))
    here = iterators(rank)
    row_index = tuple(ZERO if a in axes else i for a, i in enumerate(here))
    _scaled_output(node, ctx, op("mul", wide(at(ctx, t.name, here)), at(ctx, inverse, row_index)))


def _scaled_output(node: OnnxNode, ctx: ExpandContext, y: Value) -> None:
    """Apply scale and optional bias, which broadcast to the input."""
    here = iterators(len(ctx.tensor(node.inputs[0]).shape))
    bias = given(node.inputs, 2)
    scale = cast(aligned(ctx, node.inputs[1], here), y.dtype)
    emit(ctx, node, _affine(y, scale, cast(aligned(ctx, bias, here), y.dtype) if bias else None))
