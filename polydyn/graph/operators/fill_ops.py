"""Operators that build tensors from sizes, and prefix sums: Range, ConstantOfShape, CumSum."""

from __future__ import annotations

import numpy as np

from polydyn.errors import ShapeError, UnsupportedError
from polydyn.graph.operators.common import iterators, normalize_axis, single
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.shape_values import MAX_ELEMENTS, Ratio
from polydyn.graph.subscripts import boxed, ints, sizes
from polydyn.schedules.expr import FLOATS, FromIndex, Value, const, load, neutral, op
from polydyn.schedules.index import ONE, ZERO, Index, maximum


def infer_range(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Range: ``max(ceil((limit - start) / delta), 0)`` numbers, of sizes, fractions of sizes or constants."""
    dtype = ctx.tensor(node.inputs[0]).dtype
    if _of_data(node, ctx):
        (n,) = ctx.ask("count", node.inputs, ["count"], settings={"dtype": dtype})
        return (Inferred(dtype, (n,)),)
    if dtype in FLOATS:
        return (Inferred(dtype, (_count_of_floats(node, ctx, dtype),)),)
    start, limit, delta = _bounds(node, ctx)
    step = delta.constant
    if step is None or step == 0:
        raise UnsupportedError(f"Range with the step {delta} is not supported", node=node.name, dim=str(delta))
    n = maximum((limit - start).ceildiv(step) if step > 0 else (start - limit).ceildiv(-step), 0)
    count = n.constant
    value = boxed([start + step * i for i in range(count)]) if count is not None and count <= MAX_ELEMENTS else None
    return (Inferred(dtype, (n,), value),)


def _of_data(node: OnnxNode, ctx: Context) -> bool:
    return any(ctx.constant(x) is None and ctx.elements(x) is None for x in node.inputs)


def _count_of_floats(node: OnnxNode, ctx: InferContext, dtype: str) -> Index:
    """Return the number of steps below the limit. Raises UnsupportedError for data or a step that is not constant."""
    known = [ctx.constant(x) for x in node.inputs]
    if all(k is not None for k in known):
        start, limit, delta = (k.reshape(-1)[0] for k in known if k is not None)
        with np.errstate(all="ignore"):
            steps = float(np.ceil((limit - start) / delta))
        if not np.isfinite(steps):
            raise ShapeError(f"a range from {start} to {limit} by {delta}", rule="the step of Range is not 0")
        return Index.of(max(int(steps), 0))
    ratios = [_ratio(node, ctx, x) for x in node.inputs]
    start, limit, delta = ratios
    step = delta.top.constant
    if not step:
        raise UnsupportedError(f"Range of {dtype} with a step that is not constant is not supported", node=node.name)
    way = (limit.top * start.bottom - start.top * limit.bottom) * (delta.bottom if step > 0 else -delta.bottom)
    return maximum(way.ceildiv(limit.bottom * start.bottom * abs(step)), 0)


def _ratio(node: OnnxNode, ctx: Context, name: str) -> Ratio:
    found = ctx.elements(name)
    if found is None:
        raise UnsupportedError(
            "Range over floats needs constants or arithmetic on sizes", node=node.name, tensor=name,
        )  # fmt: skip
    x = found.reshape(-1)[0]
    return x if isinstance(x, Ratio) else Ratio(x, 1)


def _bounds(node: OnnxNode, ctx: Context) -> tuple[Index, Index, Index]:
    names = ("start", "limit", "delta")
    start, limit, delta = ((sizes(node, ctx, i, name) or (ZERO,))[0] for i, name in enumerate(names))
    return start, limit, delta


@operator("Range", infer=infer_range)
def expand_range(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``start + d0 * delta``."""
    y = ctx.tensor(node.outputs[0])
    if _of_data(node, ctx):
        base, factor = single(ctx, node.inputs[0]), single(ctx, node.inputs[2])
        ctx.compute(y.shape, op("add", base, op("mul", FromIndex(y.dtype, Index.of("d0")), factor)), output=y.name)
        return
    if y.dtype in FLOATS:
        start, delta = (_number(node, ctx, node.inputs[k], y.dtype) for k in (0, 2))
        step = op("mul", FromIndex(y.dtype, Index.of("d0")), delta)
        ctx.compute(y.shape, op("add", start, step), output=y.name)
        return
    first, _, by = _bounds(node, ctx)
    ctx.compute(y.shape, FromIndex(y.dtype, first + by * "d0"), output=y.name)


def _number(node: OnnxNode, ctx: ExpandContext, name: str, dtype: str) -> Value:
    """Return a constant or a fraction of sizes as a scalar of a float dtype."""
    known = ctx.constant(name)
    if known is not None:
        return const(float(known.reshape(-1)[0]), dtype)
    x = _ratio(node, ctx, name)
    top = FromIndex(dtype, x.top)
    return top if x.bottom == 1 else op("div", top, const(x.bottom, dtype))


def infer_constant_of_shape(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a ConstantOfShape: one value everywhere."""
    shape = sizes(node, ctx, 0, "input") or ()
    fill = node.attribute("value", np.zeros(1, np.float32))
    known, size = [d.constant for d in shape], 1
    for c in known:
        size *= MAX_ELEMENTS + 1 if c is None else c
    value = None
    if fill.dtype.kind in "iub" and size <= MAX_ELEMENTS and None not in known:
        value = boxed([Index.of(int(fill.reshape(-1)[0]))] * size, tuple(int(d) for d in shape))
    return (Inferred(str(fill.dtype), shape, value),)


@operator("ConstantOfShape", infer=infer_constant_of_shape)
def expand_constant_of_shape(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a Compute without loads."""
    y = ctx.tensor(node.outputs[0])
    fill = node.attribute("value", np.zeros(1, np.float32))
    ctx.compute(y.shape, const(fill.reshape(-1)[0].item(), y.dtype), output=y.name)


def infer_cum_sum(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape for CumSum and CumProd. The axis must be constant."""
    x = ctx.tensor(node.inputs[0])
    if x.dtype == "bool" or not x.shape:
        raise ShapeError(f"{node.op} of a {x.dtype} of rank {len(x.shape)}", tensor=x.name)
    axis = normalize_axis(node, (ints(node, ctx, 1, "axis") or (0,))[0], len(x.shape))
    value = ctx.value(x.name) if node.op == "CumSum" else None
    if value is not None:
        forth = np.flip(value, axis) if node.attribute("reverse", 0) else value
        total = np.cumsum(forth, axis) - (forth if node.attribute("exclusive", 0) else ZERO)
        value = np.flip(total, axis) if node.attribute("reverse", 0) else total
    return (Inferred(x.dtype, x.shape, value),)


@operator("CumSum", "CumProd", infer=infer_cum_sum)
def expand_cum_sum(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute a sum or product over all positions up to each one (``reverse``: from it on);
    ``polydyn/fusion/scan.py``.
    """
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    axis = normalize_axis(node, (ints(node, ctx, 1, "axis") or (0,))[0], len(x.shape))
    d, r = iterators(len(x.shape)), Index.of("r0")
    last = d[axis] if not node.attribute("exclusive", 0) else d[axis] + (ONE if node.attribute("reverse", 0) else -ONE)
    relation = "ge" if node.attribute("reverse", 0) else "le"
    term = load(x.name, tuple(r if a == axis else i for a, i in enumerate(d)), x.dtype)
    kind = "sum" if node.op == "CumSum" else "prod"
    body = op("where", op(relation, FromIndex("int64", r), FromIndex("int64", last)), term, neutral(kind, x.dtype))
    ctx.compute(y.shape, body, output=y.name, reduction=(x.shape[axis],), reduce=kind)
