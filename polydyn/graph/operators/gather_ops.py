"""Operators that read at subscripts from other tensors: Gather, GatherElements, GatherND, OneHot."""

from __future__ import annotations

import numpy as np

from polydyn.errors import ShapeError, UnsupportedError
from polydyn.graph.ir import Dim
from polydyn.graph.moved_sizes import read_sizes
from polydyn.graph.operators.common import iterators, normalize_axis
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.slice_ops import wrap
from polydyn.graph.subscripts import boxed, sizes
from polydyn.schedules.expr import FromIndex, cast, const, load, op
from polydyn.schedules.index import Index, fetch, maximum, minimum


def element(
    ctx: ExpandContext, indices: str, at: tuple[Index, ...], n: Dim, component: int | None = None, negative: bool = True
) -> Index:
    """Return the subscript that ``indices`` holds at ``at`` for an axis of size n. Negative ones count from the end.

    ``component``: its position in the tuples along the last axis of ``indices``. ``negative``: negative ones are
    allowed.
    """
    t = ctx.tensor(indices)
    if "int" not in t.dtype:
        raise ShapeError(f"indices of dtype {t.dtype}", tensor=indices, rule="indices are integers")
    ctx.bound(indices, n, component, natural=not negative)
    value = ctx.value(indices)
    if value is not None and value.ndim == 0:
        return wrap(value.item(), n)
    found = fetch(indices, at)
    if ctx.never_negative(indices):
        return found
    if n.constant is not None or not ctx.is_data(indices, at):
        return found % n  # a division by a constant is cheap; one of a formula goes where its bounds are proven
    # The bound allows -n to n - 1, so n is added at most once, which costs half a division. The clamp is for devices:
    # they report a wrong index after the kernel has read.
    return maximum(0, minimum(wrap(found, n), n - 1))


def infer_gather(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Gather: the indices' shape replaces the axis. For a vector of sizes, also infer the values."""
    x, i = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    axis = normalize_axis(node, node.attribute("axis", 0), len(x.shape))
    shape = x.shape[:axis] + i.shape + x.shape[axis + 1 :]
    value, at = ctx.known_elements(x.name), ctx.constant(i.name)
    if value is None or at is None:
        return (Inferred(x.dtype, shape),)
    n = value.shape[axis]
    if ((at < -n) | (at >= n)).any():
        raise ShapeError(f"an index of {i.name} lies outside [-{n}, {n})", tensor=i.name, rule="Gather")
    taken = np.take(value, at, axis=axis)
    return (Inferred(x.dtype, shape, taken if isinstance(taken, np.ndarray) else boxed(taken)),)


def _negative(node: OnnxNode) -> bool:
    """Check whether negative indices count from the end, as in ONNX. Operators of polydyn's domain reject them."""
    return "::" not in node.op


@operator("Gather", "polydyn::Gather", infer=infer_gather)
def expand_gather(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a load with a fetched subscript."""
    x, i, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    axis = normalize_axis(node, node.attribute("axis", 0), len(x.shape))
    d = iterators(len(y.shape))
    middle = element(ctx, i.name, d[axis : axis + len(i.shape)], x.shape[axis], negative=_negative(node))
    at = (*d[:axis], middle, *d[axis + len(i.shape) :])
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)


def infer_gather_elements(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the shape of the indices."""
    x, i = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    if len(x.shape) != len(i.shape):
        raise ShapeError(f"{x.name} and {i.name} have different ranks", tensor=i.name, rule="GatherElements")
    axis = normalize_axis(node, node.attribute("axis", 0), len(x.shape))
    for a, (n, m) in enumerate(zip(i.shape, x.shape, strict=True)):
        if a != axis:
            ctx.at_most(n, m, f"axis {a} of {i.name} is no longer than that of {x.name}")
    return (Inferred(x.dtype, i.shape, read_sizes(node, ctx) if _negative(node) else None),)


@operator("GatherElements", "polydyn::GatherElements", infer=infer_gather_elements)
def expand_gather_elements(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a load whose subscript along the axis is fetched at the output's position."""
    x, i, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    axis = normalize_axis(node, node.attribute("axis", 0), len(x.shape))
    d = iterators(len(y.shape))
    fetched = element(ctx, i.name, d, x.shape[axis], negative=_negative(node))
    at = tuple(fetched if a == axis else k for a, k in enumerate(d))
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)


def _depth(node: OnnxNode, indices: tuple[Dim, ...]) -> tuple[int, int]:
    """Return (batch_dims, length of an index tuple) of a GatherND."""
    k = indices[-1].constant if indices else None
    if k is None:
        raise UnsupportedError("the last axis of GatherND's indices must be a constant", node=node.name)
    return int(node.attribute("batch_dims", 0)), k


def infer_gather_nd(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a GatherND: every vector along the last axis of the indices selects a slice."""
    x, i = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    b, k = _depth(node, i.shape)
    if b + k > len(x.shape):
        raise ShapeError(f"index tuples of length {k} for rank {len(x.shape)}", tensor=i.name, rule="GatherND")
    for a in range(b):
        ctx.unify(x.shape[a], i.shape[a], f"batch axis {a} of {x.name} and {i.name}")
    return (Inferred(x.dtype, i.shape[:-1] + x.shape[b + k :], read_sizes(node, ctx)),)


@operator("GatherND", infer=infer_gather_nd)
def expand_gather_nd(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a load with several fetched subscripts."""
    x, i, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    b, k = _depth(node, i.shape)
    d = iterators(len(y.shape))
    q = len(i.shape) - 1
    picked = tuple(element(ctx, i.name, (*d[:q], Index.of(j)), x.shape[b + j], j) for j in range(k))
    ctx.compute(y.shape, load(x.name, (*d[:b], *picked, *d[q:]), x.dtype), output=y.name)


def infer_one_hot(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a OneHot: a new axis of size depth, which must be shape arithmetic."""
    i, values = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[2])
    (depth,) = sizes(node, ctx, 1, "depth") or ()
    axis = normalize_axis(node, node.attribute("axis", -1), len(i.shape) + 1)
    ctx.unify(values.shape[0], Index.of(2), f"{values.name} holds the off and the on value")
    return (Inferred(values.dtype, (*i.shape[:axis], depth, *i.shape[axis:])),)


@operator("OneHot", infer=infer_one_hot)
def expand_one_hot(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the on value where the new axis equals the index (counted from the end if negative), else the off
    value.
    """
    i, values, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[2]), ctx.tensor(node.outputs[0])
    axis = normalize_axis(node, node.attribute("axis", -1), len(y.shape))
    d = iterators(len(y.shape))
    at = cast(load(i.name, (*d[:axis], *d[axis + 1 :]), i.dtype), "int64")
    size = FromIndex("int64", y.shape[axis])
    at = op("where", op("lt", at, const(0, "int64")), op("add", at, size), at)
    hit = op("eq", at, FromIndex("int64", d[axis]))
    body = op("where", hit, load(values.name, (1,), values.dtype), load(values.name, (0,), values.dtype))
    ctx.compute(y.shape, body, output=y.name)
