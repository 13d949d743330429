"""Operators whose result sizes depend on data: NonZero, Compress, Unique, NonMaxSuppression.

The host computes the positions (``polydyn/runtime/c/host_steps.c``). The results are ordinary gathers from them.
"""

from __future__ import annotations

import numpy as np

from polydyn.errors import ShapeError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import given, iterators, normalize_axis
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.search import decoded
from polydyn.graph.subscripts import boxed
from polydyn.schedules.expr import FromIndex, Value, const, load
from polydyn.schedules.index import ONE, Index, fetch, product


def infer_non_zero(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [rank, n]: the positions of all nonzero elements, at most as many as there are elements."""
    x, known = ctx.tensor(node.inputs[0]), ctx.constant(node.inputs[0])
    if known is not None:
        found = np.array(np.nonzero(known), np.int64).reshape(known.ndim, -1)
        value = boxed([Index.of(int(i)) for i in found.flat], found.shape)
        return (Inferred("int64", tuple(map(Index.of, found.shape)), value),)
    (n,) = ctx.ask("non_zero", node.inputs, ["n"])
    ctx.promise(n, product(x.shape), f"no more elements of {x.name} than it has are not 0")
    return (Inferred("int64", (Index.of(len(x.shape)), n)),)


@operator("NonZero", infer=infer_non_zero)
def non_zero(node: OnnxNode, ctx: ExpandContext) -> None:
    """Split row-major positions from the host into subscripts: one row per axis, so that readers of a row see the
    formula.
    """
    x, (_, n) = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0]).shape
    (places,) = ctx.made("non_zero", node.inputs, [(None, "int64", (n,))])
    ctx.below(places, product(x.shape))
    at = decoded(fetch(places, (Index.of("d1"),)), x.shape)
    if len(at) > 1:
        rows = [ctx.compute((ONE, n), FromIndex("int64", i)) for i in at]
        ctx.concat(tuple(rows), 0, output=node.outputs[0])
        return
    body: Value = FromIndex("int64", at[0]) if at else const(0, "int64")
    ctx.compute((Index.of(len(at)), n), body, output=node.outputs[0])


def _compressed(node: OnnxNode, ctx: Context) -> tuple[int | None, Dim]:
    """Return the axis of a Compress (None for the flattened input) and its size."""
    x = ctx.tensor(node.inputs[0])
    axis = node.attribute("axis")
    if axis is None:
        return None, product(x.shape)
    axis = normalize_axis(node, axis, len(x.shape))
    return axis, x.shape[axis]


def infer_compress(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input with n elements along the axis, or a vector of n elements."""
    x, c = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    if c.dtype != "bool" or len(c.shape) != 1:
        what = f"a condition {c.dtype}{list(map(str, c.shape))}"
        raise ShapeError(what, tensor=c.name, rule="a condition of Compress is a vector of booleans")
    axis, size = _compressed(node, ctx)
    ctx.at_most(c.shape[0], size, f"{c.name} is no longer than what it chooses from")
    (n,) = ctx.ask("non_zero", (c.name,), ["n"])
    ctx.promise(n, c.shape[0], f"no more elements of {c.name} than it has are true")
    shape = (n,) if axis is None else (*x.shape[:axis], n, *x.shape[axis + 1 :])
    return (Inferred(x.dtype, shape),)


@operator("Compress", infer=infer_compress)
def compress(node: OnnxNode, ctx: ExpandContext) -> None:
    """Gather at the positions of true elements."""
    x, y, c = (ctx.tensor(t) for t in (node.inputs[0], node.outputs[0], node.inputs[1]))
    axis, _ = _compressed(node, ctx)
    n, d = y.shape[axis or 0], iterators(len(y.shape))
    (places,) = ctx.made("non_zero", (c.name,), [(None, "int64", (n,))])
    if axis is None:
        at = decoded(fetch(places, d), x.shape)
    else:
        at = (*d[:axis], fetch(places, (d[axis],)), *d[axis + 1 :])
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)


def _unique_settings(node: OnnxNode, ctx: Context) -> dict[str, int | None]:
    axis = node.attribute("axis")
    rank = len(ctx.tensor(node.inputs[0]).shape)
    settings = {"sorted": int(node.attribute("sorted", 1))}
    return settings | {"axis": None if axis is None else normalize_axis(node, axis, rank)}


def infer_unique(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer n different elements, or slices along an axis, and three vectors of positions and counts."""
    x, settings = ctx.tensor(node.inputs[0]), _unique_settings(node, ctx)
    (n,) = ctx.ask("unique", node.inputs, ["n"], settings=settings)
    axis = settings["axis"]
    size = product(x.shape) if axis is None else x.shape[axis]
    ctx.promise(n, size, f"{x.name} has no more different elements than elements")
    shape = (n,) if axis is None else (*x.shape[:axis], n, *x.shape[axis + 1 :])
    vectors = ((n,), (size,), (n,))
    return (Inferred(x.dtype, shape), *(Inferred("int64", v) for v in vectors))[: len(node.outputs)]


@operator("Unique", infer=infer_unique)
def unique(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute everything on the host, because sorting has no schedule tree."""
    x, settings = ctx.tensor(node.inputs[0]), _unique_settings(node, ctx)
    (n,) = ctx.ask("unique", node.inputs, ["n"], settings=settings)
    axis = settings["axis"]
    size = product(x.shape) if axis is None else x.shape[axis]
    shape = (n,) if axis is None else (*x.shape[:axis], n, *x.shape[axis + 1 :])
    types = [(given(node.outputs, 0), x.dtype, shape)]
    types += [(given(node.outputs, k), "int64", v) for k, v in enumerate([(n,), (size,), (n,)], 1)]
    ctx.made("unique", node.inputs, types, settings=settings, more={"dtype": x.dtype})


def _suppress_inputs(node: OnnxNode) -> tuple[str, ...]:
    return tuple(given(node.inputs, k) or "" for k in range(5))


def infer_suppress(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [n, 3]: batch, class and box of the selected boxes."""
    boxes, scores = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    ctx.unify(boxes.shape[0], scores.shape[0], "boxes and scores are of the same batch")
    ctx.unify(boxes.shape[1], scores.shape[2], "every box has a score in each class")
    ctx.unify(boxes.shape[2], Index.of(4), "a box has four numbers")
    (n,) = ctx.ask("suppress", _suppress_inputs(node), ["n"], settings=_center(node))
    ctx.promise(n, product(scores.shape), "no more boxes stay than there are")
    return (Inferred("int64", (n, Index.of(3))),)


def _center(node: OnnxNode) -> dict[str, int]:
    return {"center": int(node.attribute("center_point_box", 0))}


@operator("NonMaxSuppression", infer=infer_suppress)
def suppress(node: OnnxNode, ctx: ExpandContext) -> None:
    """Run greedy selection on the host: each decision depends on the boxes selected before."""
    y = ctx.tensor(node.outputs[0])
    ctx.made("suppress", _suppress_inputs(node), [(y.name, "int64", y.shape)], settings=_center(node))
