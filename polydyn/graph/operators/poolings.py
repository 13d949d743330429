"""Poolings: reductions over windows, whose taps outside the tensor are guarded."""

from __future__ import annotations

from functools import partial

from polydyn.graph.operators.common import (
    all_of,
    at,
    emit,
    in_range,
    iterators,
    like,
    mean_of,
    reduce_to,
    same_as_input,
    square,
    wide,
)
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.windows import Window, fit, windows
from polydyn.schedules.expr import FLOATS, FromIndex, Value, const, neutral, op
from polydyn.schedules.index import ONE, Index, product


def _windows(node: OnnxNode, ctx: Context) -> tuple[Window, ...]:
    kernel = tuple(Index.of(int(k)) for k in node.attribute("kernel_shape"))
    return windows(node, ctx.tensor(node.inputs[0]).shape[2:], kernel)


def pool_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C, windows...]."""
    x = ctx.tensor(node.inputs[0])
    axes = _windows(node, ctx)
    fit(node, ctx, axes)
    shape = (*x.shape[:2], *(a.output for a in axes))
    return (Inferred(x.dtype, shape), Inferred("int64", shape))[: len(node.outputs)]


def _source(axes: tuple[Window, ...]) -> tuple[list[Index], Value | None]:
    """Return the subscripts of the element under a tap, and the condition that it exists."""
    n, c, *position = iterators(2 + len(axes))
    places = [(a, p, Index.of(f"r{j}")) for j, (a, p) in enumerate(zip(axes, position, strict=True))]
    inside = all_of([a.inside(p, k) for a, p, k in places if a.may_leave])
    return [n, c, *(a.source(p, k) for a, p, k in places)], inside


def _tap(node: OnnxNode, ctx: ExpandContext, axes: tuple[Window, ...], reduction: str) -> Value:
    """Return the element under a tap, or the neutral element outside."""
    place, inside = _source(axes)
    x = wide(at(ctx, node.inputs[0], place))
    return x if inside is None else op("where", inside, x, neutral(reduction, x.dtype))


@operator("MaxPool", infer=pool_infer)
def max_pool(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the maximum of each window, and the first position that holds it, counted over all axes of the input."""
    axes, extents = _windows(node, ctx), tuple(Index.of(int(k)) for k in node.attribute("kernel_shape"))
    reduce_to(ctx, node, "max", _tap(node, ctx, axes, "max"), extents)
    if len(node.outputs) < 2 or not node.outputs[1]:
        return
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    place, inside = _source(axes)
    element, greatest = wide(at(ctx, x.name, place)), wide(at(ctx, y.name, iterators(len(y.shape))))
    is_maximum = op("eq", element, greatest)
    if x.dtype in FLOATS:
        is_maximum = op("or", is_maximum, op("isnan", element))
    if inside is not None:
        is_maximum = op("where", inside, is_maximum, const(False, "bool"))
    order = list(range(len(place)))
    if node.attribute("storage_order", 0):  # columns first
        order[2:] = order[:1:-1]
    linear = Index.of(0)
    for a in order:
        linear = linear * x.shape[a] + place[a]
    nowhere = FromIndex("int64", product(x.shape))
    body = op("where", is_maximum, FromIndex("int64", linear), nowhere)
    ctx.compute(y.shape, body, output=node.outputs[1], reduction=extents, reduce="min")


def _power(x: Value, p: float) -> Value:
    """Return ``|x| ** p``."""
    x = op("abs", x)
    return x if p == 1 else square(x) if p == 2 else op("pow", x, like(p, x))


def _root(x: Value, p: float) -> Value:
    return x if p == 1 else op("sqrt", x) if p == 2 else op("pow", x, like(1 / p, x))


@operator("LpPool", infer=pool_infer)
def lp_pool(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the norm of each window. Taps outside count as zeros."""
    axes, p = _windows(node, ctx), node.attribute("p", 2)
    place, inside = _source(axes)
    x = _power(wide(at(ctx, node.inputs[0], place)), p)
    body = x if inside is None else op("where", inside, x, like(0, x))
    reduce_to(ctx, node, "sum", body, tuple(a.kernel for a in axes), lambda total: _root(total, p))


@operator("AveragePool", infer=pool_infer)
def average_pool(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the mean of each window, over the taps inside the tensor or, if requested, inside the padded tensor."""
    axes = _windows(node, ctx)
    padding = bool(node.attribute("count_include_pad", 0))
    position = iterators(2 + len(axes))[2:]
    counts = [
        a.taps_inside(p, padding) if (a.ceil and a.stride != 1) or (a.has_padding and not padding) else a.kernel
        for a, p in zip(axes, position, strict=True)
    ]

    def mean(total: Value) -> Value:  # a separate count per axis: a row of pixels divides once
        varying = [c for c in counts if c.constant is None]
        fixed = product(c for c in counts if c.constant is not None)
        for count in (*varying, *([fixed] if fixed != ONE else [])):
            total = op("mul", total, op("div", like(1, total), FromIndex(total.dtype, count)))
        return total

    reduce_to(ctx, node, "sum", _tap(node, ctx, axes, "sum"), tuple(a.kernel for a in axes), mean)


def global_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C, 1, ...]."""
    x = ctx.tensor(node.inputs[0])
    return (Inferred(x.dtype, (*x.shape[:2], *(ONE for _ in x.shape[2:]))),)


@operator("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", infer=global_infer)
def global_pool(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the mean, the maximum or the norm over all spatial axes."""
    t = ctx.tensor(node.inputs[0])
    extents = t.shape[2:]
    inner = [Index.of(f"r{j}") for j in range(len(extents))]
    x = wide(at(ctx, t.name, (*iterators(2), *inner)))
    if node.op == "GlobalMaxPool":
        reduce_to(ctx, node, "max", x, extents)
    elif node.op == "GlobalLpPool":
        p = node.attribute("p", 2)
        reduce_to(ctx, node, "sum", _power(x, p), extents, lambda total: _root(total, p))
    else:
        reduce_to(ctx, node, "sum", x, extents, partial(mean_of, extents=extents))


@operator("LRN", infer=same_as_input)
def local_response(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``x / (bias + alpha/size * sum of squares over size neighbouring channels) ** beta``."""
    t = ctx.tensor(node.inputs[0])
    size = node.attribute("size")
    index = iterators(len(t.shape))
    neighbour = index[1] + "r0" - (size - 1) // 2
    x = wide(at(ctx, t.name, (index[0], neighbour, *index[2:])))
    squares = op("where", in_range(neighbour, t.shape[1]), square(x), like(0, x))
    total = at(ctx, ctx.compute(t.shape, squares, reduction=(Index.of(size),), reduce="sum"), index)
    scaled = op("mul", like(node.attribute("alpha", 1e-4) / size, total), total)
    base = op("add", like(node.attribute("bias", 1.0), total), scaled)
    root = op("sqrt", base)
    beta = node.attribute("beta", 0.75)
    power = op("mul", root, op("sqrt", root)) if beta == 0.75 else op("pow", base, like(beta, base))
    emit(ctx, node, op("div", wide(at(ctx, t.name, index)), power))
