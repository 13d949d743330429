"""Reductions over axes, and ArgMax/ArgMin, which are two reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from polydyn.graph.ir import reduction_name
from polydyn.graph.operators.common import (
    Shape,
    at,
    emit,
    given,
    is_float,
    iterators,
    like,
    mean_of,
    normalize_axis,
    reduce_to,
    refuse,
    square,
    wide,
)
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import Array, FromIndex, Value, cast, const, op
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product


def reduced_axes(node: OnnxNode, ctx: Context) -> tuple[int, ...] | None:
    """Return the axes, ascending, or None if nothing is reduced (``noop_with_empty_axes``)."""
    rank = len(ctx.tensor(node.inputs[0]).shape)
    name = given(node.inputs, 1)
    axes = node.attribute("axes")
    if name is not None:
        array = ctx.constant(name)
        if array is None:
            raise refuse(node, f"axes {name} that are not constant", "make the axes an initializer")
        axes = array.reshape(-1).tolist()
    if axes is None or len(axes) == 0:
        return None if node.attribute("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({normalize_axis(node, int(a), rank) for a in axes}))


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """Return the output's shape."""
    return tuple(ONE if a in axes else d for a, d in enumerate(shape) if keepdims or a not in axes)


def source_index(rank: int, axes: tuple[int, ...], keepdims: bool) -> tuple[Index, ...]:
    """Return the subscripts of the input: reduction iterators on the reduced axes, output iterators on the others."""
    out: list[Index] = []
    output_count = reduced_count = 0
    for a in range(rank):
        if a in axes:
            out.append(Index.of(reduction_name(reduced_count)))
            reduced_count += 1
        else:
            out.append(Index.of(f"d{a if keepdims else output_count}"))
            output_count += 1
    return tuple(out)


def reduce_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape without the reduced axes, or with ones in their place."""
    t = ctx.tensor(node.inputs[0])
    axes = reduced_axes(node, ctx)
    keepdims = bool(node.attribute("keepdims", 1))
    shape = t.shape if axes is None else reduced_shape(t.shape, axes, keepdims)
    value = ctx.value(t.name)
    if value is not None and node.op in SIZE_REDUCTIONS:
        value = value if axes is None else _reduced_value(value, axes, keepdims, SIZE_REDUCTIONS[node.op])
        return (Inferred(t.dtype, shape, value),)
    return (Inferred(t.dtype, shape),)


SIZE_REDUCTIONS: dict[str, Callable[..., Index]] = {
    "ReduceSum": lambda *xs: sum(xs, ZERO), "ReduceProd": lambda *xs: product(xs),
    "ReduceMax": maximum, "ReduceMin": minimum,
}  # fmt: skip
"""Reductions of shape arithmetic."""


def _reduced_value(value: Array, axes: tuple[int, ...], keepdims: bool, f: Callable[..., Index]) -> Array | None:
    """Reduce shape arithmetic over axes. Returns None for an extreme of no elements."""
    if any(value.shape[a] == 0 for a in axes):
        return None
    rows = np.moveaxis(value, axes, range(len(axes)))
    rows = rows.reshape(-1, *rows.shape[len(axes) :])
    out = np.empty(rows.shape[1:], object)
    for i in np.ndindex(*out.shape):
        out[i] = f(*(row[i] if i else row for row in rows))
    return np.expand_dims(out, axes) if keepdims else out


def _identity(x: Value) -> Value:
    return x


Scalar = Callable[[Value], Value]
REDUCTION_KINDS: dict[str, tuple[str, Scalar, Scalar | None]] = {
    "ReduceSum": ("sum", _identity, None),
    "ReduceProd": ("prod", _identity, None),
    "ReduceMax": ("max", _identity, None),
    "ReduceMin": ("min", _identity, None),
    "ReduceMean": ("sum", _identity, None),
    "ReduceSumSquare": ("sum", square, None),
    "ReduceL1": ("sum", lambda x: op("abs", x), None),
    "ReduceL2": ("sum", square, lambda x: op("sqrt", x)),
    "ReduceLogSum": ("sum", _identity, lambda x: op("log", x)),
}
"""Maps an operator to its reduction, the function of each element, and the function of the result."""


ROOTS = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
"""Reductions with a root or a logarithm. Integers are computed in float64 and truncated at the end."""


def _element(node: OnnxNode, x: Value) -> Value:
    """Return an element in the dtype of the reduction's arithmetic."""
    return cast(x, "float64") if node.op in ROOTS and not is_float(x.dtype) else wide(x)


def _reduce(node: OnnxNode, ctx: ExpandContext) -> None:
    reduce, before, after = REDUCTION_KINDS[node.op]
    t = ctx.tensor(node.inputs[0])
    axes = reduced_axes(node, ctx)
    if axes is None:
        x = before(_element(node, at(ctx, t.name, iterators(len(t.shape)))))
        emit(ctx, node, after(x) if after else x)
        return
    index = source_index(len(t.shape), axes, bool(node.attribute("keepdims", 1)))
    extents = tuple(t.shape[a] for a in axes)
    if node.op == "ReduceMean":
        after = partial(mean_of, extents=extents)
    if not axes:  # a tensor of rank 0
        x = before(_element(node, at(ctx, t.name, index)))
        emit(ctx, node, after(x) if after else x)
        return
    reduce_to(ctx, node, reduce, before(_element(node, at(ctx, t.name, index))), extents, after)


for _name in REDUCTION_KINDS:
    operator(_name, infer=reduce_infer)(_reduce)


@operator("ReduceLogSumExp", infer=reduce_infer)
def log_sum_exp(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``m + log(sum(exp(x - m)))`` with the maximum m, or 0 if that is infinite."""
    t = ctx.tensor(node.inputs[0])
    axes = reduced_axes(node, ctx)
    if axes is None or not axes:
        emit(ctx, node, wide(at(ctx, t.name, iterators(len(t.shape)))))
        return
    out = ctx.tensor(node.outputs[0])
    x = _element(node, at(ctx, t.name, source_index(len(t.shape), axes, bool(node.attribute("keepdims", 1)))))
    extents = tuple(t.shape[a] for a in axes)
    here = iterators(len(out.shape))
    greatest = at(ctx, ctx.compute(out.shape, x, reduction=extents, reduce="max"), here)
    finite = op("where", op("isinf", greatest), like(0, x), greatest)
    shift = at(ctx, ctx.compute(out.shape, finite), here)
    exps = op("exp", op("sub", x, shift))
    reduce_to(ctx, node, "sum", exps, extents, lambda total: op("add", op("log", total), shift))


def arg_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer int64 positions, without the axis or with 1 in its place. A scalar is its own extreme, as in ONNX
    Runtime.
    """
    t = ctx.tensor(node.inputs[0])
    if not t.shape:
        return (Inferred("int64", ()),)
    axis = normalize_axis(node, node.attribute("axis", 0), len(t.shape))
    return (Inferred("int64", reduced_shape(t.shape, (axis,), bool(node.attribute("keepdims", 1)))),)


@operator("ArgMax", "ArgMin", infer=arg_infer)
def arg_extreme(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the extreme, then the first (or last) position that holds it. The first NaN is the extreme, as in
    numpy.
    """
    t = ctx.tensor(node.inputs[0])
    out = ctx.tensor(node.outputs[0])
    if not t.shape:
        emit(ctx, node, const(0, "int64"))
        return
    axis = normalize_axis(node, node.attribute("axis", 0), len(t.shape))
    keepdims = bool(node.attribute("keepdims", 1))
    x = at(ctx, t.name, source_index(len(t.shape), (axis,), keepdims))
    extent = t.shape[axis]
    best = ctx.compute(out.shape, wide(x), reduction=(extent,), reduce="max" if node.op == "ArgMax" else "min")
    is_extreme = op("eq", wide(x), at(ctx, best, iterators(len(out.shape))))
    if is_float(t.dtype):
        is_extreme = op("or", is_extreme, op("isnan", wide(x)))
    last = bool(node.attribute("select_last_index", 0))
    dtype = "int32" if extent.constant is not None and extent.constant < 2**31 else "int64"  # twice as many lanes
    nowhere = const(-1, dtype) if last else FromIndex(dtype, extent)
    position = op("where", is_extreme, FromIndex(dtype, Index.of(reduction_name(0))), nowhere)
    reduce = "max" if last else "min"
    if dtype == "int64":
        ctx.compute(out.shape, position, output=out.name, reduction=(extent,), reduce=reduce)
        return
    found = ctx.compute(out.shape, position, reduction=(extent,), reduce=reduce)
    emit(ctx, node, cast(at(ctx, found, iterators(len(out.shape))), "int64"))
