"""Operators that take parts of tensors and join parts: Slice, Split, Concat, Pad, Trilu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polydyn.errors import ShapeError, UnsupportedError
from polydyn.graph.ir import Dim, Tensor
from polydyn.graph.operators.common import all_of, given, iterators, normalize_axis, scalar, single
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.subscripts import MAX_READ, data_count, ints, is_data, sizes
from polydyn.schedules.expr import Array, FromIndex, Value, const, load, op
from polydyn.schedules.index import ZERO, Index, maximum, minimum

TO_END = 2**31 - 1
"""Ends from this value on mean "to the end", as exporters write it (INT32_MAX, INT64_MAX)."""
ALL = (TO_END, 2**63 - 1)
"""As ends of negative steps these mean "to the first element", as in ONNX Runtime (docs/operators.md)."""


@dataclass(frozen=True)
class Cut:
    """One axis of a Slice: elements ``start + step * i`` for ``0 <= i < size``."""

    start: Dim
    step: Dim | int
    size: Dim


def wrap(i: Dim, n: Dim) -> Dim:
    """Return ``i`` if it is >= 0, else ``i + n``, for any integer i: exact, and resolved if the sign is known."""
    negative = -maximum(-1, minimum(i, 0))  # 1 if i < 0, else 0
    return i + n * negative


def cut(n: Dim, start: Dim, end: Dim, step: int) -> Cut:
    """Return a slice of an axis of size n, clamped as ONNX specifies.

    This is numpy's rule, except that a start before the axis is its first element also for negative steps.
    """
    if step == 0:
        raise ShapeError("a step of 0", rule="steps of Slice are not 0")
    s, e = start.constant, end.constant
    if step > 0:
        first = n if s is not None and s >= TO_END else ZERO if s is not None and s <= -TO_END else wrap(start, n)
        last = n if e is not None and e >= TO_END else ZERO if e is not None and e <= -TO_END else wrap(end, n)
        first, last = minimum(maximum(first, 0), n), minimum(maximum(last, 0), n)
        if s is not None and 0 <= s < step:  # no element if the axis ends before the start: the quotient is 0
            return Cut(start, step, (last - start).ceildiv(step))
        if s is not None and 0 <= s < TO_END:  # likewise; the size has ``n`` once, so that slices of slices stay short
            return Cut(start, step, maximum((last - start).ceildiv(step), 0))
        return Cut(first, step, maximum((last - first).ceildiv(step), 0))
    before_begin = s is not None and s <= -TO_END
    first = n - 1 if s is not None and s >= TO_END else Index.of(-1) if before_begin else wrap(start, n)
    first_too = e is not None and (e <= -TO_END or e in ALL)
    last = Index.of(-1) if first_too else n - 1 if e is not None and e >= TO_END else wrap(end, n)
    first, last = minimum(maximum(first, 0), n - 1), minimum(maximum(last, -1), n - 1)  # 0: unlike numpy
    return Cut(first, step, maximum((first - last).ceildiv(-step), 0))


def cuts(node: OnnxNode, ctx: Context) -> dict[int, Cut]:
    """Return the axes that a Slice changes."""
    x = ctx.tensor(node.inputs[0])
    if _by_data(node, ctx):
        return _cuts_by_data(node, ctx)
    starts, ends = sizes(node, ctx, 1, "starts") or (), sizes(node, ctx, 2, "ends") or ()
    axes = ints(node, ctx, 3, "axes")
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = _fixed_steps(node, ctx, len(starts))
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ShapeError("starts, ends, axes and steps of Slice have different lengths", tensor=x.name)
    out: dict[int, Cut] = {}
    for s, e, a, k in zip(starts, ends, axes, steps, strict=True):
        a = normalize_axis(node, a, len(x.shape))
        out[a] = cut(x.shape[a], s, e, k)
    return out


def _fixed_steps(node: OnnxNode, ctx: Context, count: int) -> tuple[int, ...]:
    """Return the constant steps. A step of ``MAX_STEP`` selects one element, like every longer one."""
    steps = ints(node, ctx, 4, "steps") or (1,) * count
    return tuple(max(-MAX_STEP, min(k, MAX_STEP)) for k in steps)


MAX_STEP = 1 << 40
"""More than the elements of any axis. Products of longer steps with sizes could overflow 64 bits."""


def _by_data(node: OnnxNode, ctx: Context) -> bool:
    """Check whether starts, ends, axes or steps of a Slice are data."""
    return any(is_data(node, ctx, k) for k in (1, 2, 3, 4))


def _cuts_by_data(node: OnnxNode, ctx: Context) -> dict[int, Cut]:
    """Request the start, the size and the step along every axis from the host. The part is inside the axes."""
    x, count = ctx.tensor(node.inputs[0]), data_count(node, ctx, node.inputs[1], "starts")
    axes, steps = given(node.inputs, 3), given(node.inputs, 4)
    fixed = None if axes and is_data(node, ctx, 3) else ints(node, ctx, 3, "axes") or tuple(range(count))
    known = None if steps and is_data(node, ctx, 4) else _fixed_steps(node, ctx, count)
    inputs = (*node.inputs[1:3], axes or "", steps or "")
    names = [f"{what}{a}" for a in range(len(x.shape)) for what in ("start", "size", "forwards", "backwards")]
    sizes_by_host = ctx.ask("slice", inputs, names, x.shape)
    touched = range(len(x.shape)) if fixed is None else [normalize_axis(node, a, len(x.shape)) for a in fixed]
    out = {}
    for k, a in enumerate(touched):
        start, size, forwards, backwards = sizes_by_host[4 * a : 4 * a + 4]
        step = forwards - backwards if known is None or fixed is None else Index.of(known[k])
        out[a] = Cut(start, step.constant or step, size)
    return out


def _promise_inside(node: OnnxNode, ctx: InferContext, host_cuts: dict[int, Cut]) -> None:
    """Record that a part computed by the host is inside its axis."""
    x = ctx.tensor(node.inputs[0])
    for a, c in host_cuts.items():
        ctx.promise(c.start, x.shape[a], f"a slice of axis {a} begins inside")
        ctx.promise(c.size, x.shape[a], f"a slice of axis {a} is no longer than the axis")
        if c.step == 1:
            ctx.promise(c.start + c.size, x.shape[a], f"a slice of axis {a} ends inside")


def infer_slice(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer sizes by numpy's rules. For a vector of sizes, also infer the values."""
    x = ctx.tensor(node.inputs[0])
    axis_cuts = cuts(node, ctx)
    if _by_data(node, ctx):
        _promise_inside(node, ctx, axis_cuts)
    shape = tuple(axis_cuts[a].size if a in axis_cuts else d for a, d in enumerate(x.shape))
    value = ctx.known_elements(x.name)
    if value is not None:
        for a, c in axis_cuts.items():
            start, size = c.start.constant, c.size.constant
            if start is None or size is None or not isinstance(c.step, int):
                return (Inferred(x.dtype, shape),)
            value = np.take(value, [start + c.step * i for i in range(size)], axis=a)
    return (Inferred(x.dtype, shape, value),)


@operator("Slice", infer=infer_slice)
def expand_slice(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a view with shifted, scaled subscripts."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    axis_cuts = cuts(node, ctx)
    d = iterators(len(x.shape))
    at = tuple(axis_cuts[a].start + i * axis_cuts[a].step if a in axis_cuts else i for a, i in enumerate(d))
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)


def parts_of(node: OnnxNode, ctx: Context) -> tuple[int, tuple[Dim, ...]]:
    """Return the axis of a Split and the sizes of its parts."""
    x = ctx.tensor(node.inputs[0])
    axis = normalize_axis(node, node.attribute("axis", 0), len(x.shape))
    n, count = x.shape[axis], len(node.outputs)
    requested = sizes(node, ctx, 1, "split")
    if requested is not None:
        if len(requested) != count:
            raise ShapeError(f"{len(requested)} sizes for {count} outputs", tensor=x.name)
        return axis, requested
    if node.attribute("num_outputs") is None:
        return axis, (n // count,) * count
    each = n.ceildiv(count)
    return axis, tuple(maximum(minimum(n - each * i, each), 0) for i in range(count))


def infer_split(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Split: equal parts, given sizes, or num_outputs with a smaller last part."""
    x = ctx.tensor(node.inputs[0])
    axis, parts = parts_of(node, ctx)
    if node.attribute("num_outputs") is None:
        ctx.unify(x.shape[axis], sum(parts, ZERO), f"axis {axis} of {x.name} is split into {len(parts)} parts")
    value, out, start = ctx.known_elements(x.name), [], 0
    for p in parts:
        part = None
        if p.constant is None:
            value = None  # the start of the next part is unknown too
        if value is not None and p.constant is not None:
            part = np.take(value, range(start, start + p.constant), axis=axis)
            start += p.constant
        out.append(Inferred(x.dtype, tuple(p if a == axis else d for a, d in enumerate(x.shape)), part))
    return tuple(out)


@operator("Split", infer=infer_split)
def expand_split(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add views with shifted subscripts."""
    x = ctx.tensor(node.inputs[0])
    axis, parts = parts_of(node, ctx)
    start = ZERO
    for name, size in zip(node.outputs, parts, strict=True):
        if name:
            at = tuple(i + start if a == axis else i for a, i in enumerate(iterators(len(x.shape))))
            ctx.compute(ctx.tensor(name).shape, load(x.name, at, x.dtype), output=name)
        start = start + size


def infer_concat(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Concat: sizes along the axis add up, all others agree."""
    xs = [ctx.tensor(t) for t in node.inputs]
    if any(len(x.shape) != len(xs[0].shape) or x.dtype != xs[0].dtype for x in xs):
        raise ShapeError(f"parts of different rank or dtype: {', '.join(f'{x.name} {list(x.shape)}' for x in xs)}")
    axis = normalize_axis(node, node.attribute("axis", 0), len(xs[0].shape))
    shape = list(xs[0].shape)
    for x in xs[1:]:
        for a, d in enumerate(x.shape):
            if a == axis:
                shape[a] = shape[a] + d
            else:
                shape[a] = ctx.unify(shape[a], d, f"axis {a} of {xs[0].name} and {x.name} in a Concat")
    return (Inferred(xs[0].dtype, tuple(shape), _joined(ctx, xs, axis)),)


def _joined(ctx: InferContext, xs: Sequence[Tensor], axis: int) -> Array | None:
    """Return the concatenated shape arithmetic. Parts of a vector of sizes may be data of known length."""
    values = [ctx.known_elements(x.name) for x in xs]
    if all(v is None for v in values):
        return None
    for k, x in enumerate(xs):
        if values[k] is None and x.dtype in SIZE_DTYPES and len(x.shape) == 1:
            n = x.shape[0].constant
            values[k] = None if n is None or n > MAX_READ else np.full(n, None, object)
    known = [v for v in values if v is not None]
    return np.concatenate(known, axis) if len(known) == len(values) else None


SIZE_DTYPES = ("int64", "int32")
"""Types of vectors of sizes of which a part may be data."""


@operator("Concat", infer=infer_concat)
def expand_concat(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a Concat, or alias a single part."""
    if len(node.inputs) == 1:
        ctx.alias(node.outputs[0], node.inputs[0])
        return
    axis = normalize_axis(node, node.attribute("axis", 0), len(ctx.tensor(node.inputs[0]).shape))
    ctx.concat(node.inputs, axis, output=node.outputs[0])


def pads_of(node: OnnxNode, ctx: Context) -> dict[int, tuple[Dim, Dim]]:
    """Map each axis to (elements before, elements after). Negative numbers crop."""
    rank = len(ctx.tensor(node.inputs[0]).shape)
    axes = tuple(range(rank)) if is_data(node, ctx, 3) else ints(node, ctx, 3, "axes")
    axes = tuple(range(rank)) if axes is None else axes
    if is_data(node, ctx, 1) or is_data(node, ctx, 3):
        count = data_count(node, ctx, node.inputs[1], "pads")
        names = [f"{side}{a}" for a in range(rank) for side in ("before", "front", "after", "back")]
        found = ctx.ask("pads", (node.inputs[1], given(node.inputs, 3) or ""), names, ctx.tensor(node.inputs[0]).shape)
        sides = [(found[4 * a] - found[4 * a + 1], found[4 * a + 2] - found[4 * a + 3]) for a in range(rank)]
        if is_data(node, ctx, 3) or count == 2 * len(axes):
            return {normalize_axis(node, a, rank): sides[normalize_axis(node, a, rank)] for a in axes}
        raise ShapeError(f"{count} pads for {len(axes)} axes", tensor=node.inputs[0])
    pads = sizes(node, ctx, 1, "pads") or ()
    if len(pads) != 2 * len(axes):
        raise ShapeError(f"{len(pads)} pads for {len(axes)} axes", tensor=node.inputs[0])
    return {normalize_axis(node, a, rank): (pads[i], pads[i + len(axes)]) for i, a in enumerate(axes)}


def infer_pad(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Pad in constant, edge, reflect or wrap mode. Pads may be shape arithmetic."""
    x = ctx.tensor(node.inputs[0])
    mode = node.attribute("mode", "constant")
    if mode not in ("constant", "edge", "reflect", "wrap"):
        raise UnsupportedError(f"Pad in mode {mode} is not supported", node=node.name)
    pads = pads_of(node, ctx)
    if mode != "constant":
        _pads_inside(node, ctx, mode, pads)
    shape = tuple(d + pads[a][0] + pads[a][1] if a in pads else d for a, d in enumerate(x.shape))
    return (Inferred(x.dtype, shape),)


def _pads_inside(node: OnnxNode, ctx: InferContext, mode: str, pads: dict[int, tuple[Dim, Dim]]) -> None:
    """Require enough elements to repeat outside: for reflect more than any pad, else at least one."""
    x = ctx.tensor(node.inputs[0])
    for a, sides in pads.items():
        for pad in sides:
            needed = maximum(pad, 0)
            why = f"axis {a} of {x.name} has {x.shape[a]} elements and is padded by {pad} in mode {mode}"
            some = minimum(needed, 1)  # without a pad there is no requirement
            if mode == "wrap":
                some = some * (1 - sum((minimum(p, 0) for p in sides), ZERO))
            ctx.at_most(needed + some if mode == "reflect" else some, x.shape[a], why)


@operator("Pad", infer=infer_pad)
def expand_pad(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add guarded access with a fill (constant), or clamped, mirrored, wrapped subscripts."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    mode = node.attribute("mode", "constant")
    at, inside = list(iterators(len(x.shape))), []
    for a, (before, after) in pads_of(node, ctx).items():
        if before == 0 and after == 0:
            continue
        i, n = at[a] - before, x.shape[a]
        if mode == "constant":
            at[a] = i
            if before != 0:
                inside.append(op("ge", FromIndex("int64", i), const(0, "int64")))
            if after != 0:
                inside.append(op("lt", FromIndex("int64", i), FromIndex("int64", n)))
        elif mode == "edge":
            at[a] = minimum(maximum(i, 0), n - 1)
        elif mode == "reflect":
            mirrored = maximum(i, -i)
            at[a] = minimum(mirrored, 2 * (n - 1) - mirrored)
        else:  # cropped elements cannot be repeated
            first = maximum(-before, 0)
            at[a] = first + (i - first) % (n - first - maximum(-after, 0))
    body: Value = load(x.name, tuple(at), x.dtype)
    if (guard := all_of(inside)) is not None:
        body = op("where", guard, body, _fill(node, ctx, x.dtype))
    ctx.compute(y.shape, body, output=y.name)


def _fill(node: OnnxNode, ctx: ExpandContext, dtype: str) -> Value:
    if len(node.inputs) <= 2 or not node.inputs[2]:
        return const(node.attribute("value", 0), dtype)
    known = ctx.constant(node.inputs[2])
    if known is not None:
        return const(known.reshape(-1)[0].item(), dtype)
    return single(ctx, node.inputs[2])


def infer_trilu(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the same shape."""
    x = ctx.tensor(node.inputs[0])
    if len(x.shape) < 2:
        raise ShapeError(f"{x.name} has rank {len(x.shape)}", tensor=x.name, rule="Trilu needs matrices")
    return (Inferred(x.dtype, x.shape),)


@operator("Trilu", infer=infer_trilu)
def expand_trilu(node: OnnxNode, ctx: ExpandContext) -> None:
    """Write the elements on one side of diagonal k, zero elsewhere."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    d = iterators(len(x.shape))
    diagonal: Value = const(0, "int64")
    if len(node.inputs) > 1 and node.inputs[1]:  # beyond every element, all diagonals are equivalent
        known, most = scalar(ctx, node.inputs[1]), 2**62
        if known is None:
            offset = op("min", single(ctx, node.inputs[1]), const(most, "int64"))
            diagonal = op("max", offset, const(-most, "int64"))
        else:
            diagonal = const(max(min(int(known), most), -most), "int64")
    relation = "ge" if node.attribute("upper", 1) else "le"
    keep = op(relation, FromIndex("int64", d[-1]), op("add", FromIndex("int64", d[-2]), diagonal))
    body = op("where", keep, load(x.name, d, x.dtype), const(0, x.dtype))
    ctx.compute(y.shape, body, output=y.name)
