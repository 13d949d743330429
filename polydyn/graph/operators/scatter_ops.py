"""Scatters. Exporters write ``x[:, 1:] = y`` as a ScatterND at positions that are formulas.

A primitive defines each output element, so a scatter must be inverted: each element determines whether and from where
it is written. If each index of the updates moves along one axis of the data by 1, no element is written twice, and the
inverse is a formula. If indices are data, each element tests all updates (``polydyn/fusion/scatter.py`` turns this into
one loop).
"""

from __future__ import annotations

from polydyn.errors import ShapeError
from polydyn.graph.moved_sizes import written_sizes
from polydyn.graph.operators.common import (
    Shape,
    all_of,
    at,
    emit,
    given,
    in_range,
    iterators,
    normalize_axis,
    refuse,
    same_as_input,
    wide,
)
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.search import decoded, integer, last_match, wrapped
from polydyn.schedules.expr import Value, const, neutral, op
from polydyn.schedules.index import ONE, ZERO, Index, fetch

REDUCTIONS = {"add": "add", "mul": "mul", "max": "max", "min": "min"}
"""Maps ONNX's name of the reduction to the operation that combines old and new elements."""
BOOLEAN_REDUCTIONS = {"add": "max", "mul": "min"}
"""For booleans a sum is "or" and a product "and", as in numpy."""


def _reduction(node: OnnxNode, ctx: ExpandContext) -> str:
    """Return the reduction of old and new elements: ``none``, or a key of ``REDUCTIONS``."""
    reduction = str(node.attribute("reduction", "none"))
    return BOOLEAN_REDUCTIONS.get(reduction, reduction) if ctx.tensor(node.inputs[0]).dtype == "bool" else reduction


def infer_scatter_nd(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the shape of the data. The updates have one slice per index tuple."""
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    if node.attribute("reduction", "none") not in ("none", *REDUCTIONS):
        raise refuse(node, f"reduction {node.attribute('reduction')}")
    k = indices.shape[-1].constant if indices.shape else None
    if k is None:
        raise refuse(node, "a tuple length that is not constant")
    if k > len(data.shape):
        raise ShapeError(f"index tuples of length {k} for rank {len(data.shape)}", tensor=indices.name)
    expected = indices.shape[:-1] + data.shape[int(k) :]
    if len(updates.shape) != len(expected):
        raise ShapeError(f"{len(updates.shape)} axes of updates, not {len(expected)}", tensor=updates.name)
    for a, (have, want) in enumerate(zip(updates.shape, expected, strict=True)):
        ctx.unify(have, want, f"ScatterND {node.name}: axis {a} of {updates.name} fits the indices and the data")
    return (Inferred(data.dtype, data.shape, written_sizes(node, ctx)),)


@operator("ScatterND", infer=infer_scatter_nd)
def expand_scatter_nd(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``out[d...] = updates[source of d]`` if d was written, else ``data[d...]``."""
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    k, outer = int(indices.shape[-1].constant or 0), len(indices.shape) - 1
    d = iterators(len(data.shape))
    inverse = _turned_round(node, ctx, k)
    if inverse is None:
        scatter_by_search(node, ctx, k)
        return
    source, inside = inverse
    place = (*source, *d[k:])
    assert len(place) == outer + len(d) - k
    old, new = at(ctx, data.name, d), at(ctx, updates.name, place)
    reduction = _reduction(node, ctx)
    if reduction != "none":
        new = op(REDUCTIONS[reduction], old, new)
    condition = all_of(inside)
    emit(ctx, node, new if condition is None else op("where", condition, new, old))


def _turned_round(node: OnnxNode, ctx: ExpandContext, k: int) -> tuple[list[Index], list[Value]] | None:
    """Return the subscripts of the updates' outer axes over the data's iterators, and the conditions that they exist.

    Returns None if a position is data, or does not move by 1 along one axis.
    """
    data, indices = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    sizes = indices.shape[:-1]
    names = [f"s{a}" for a in range(len(sizes))]
    ranges = {n: e for n, e in zip(names, sizes, strict=True) if e != ONE}
    where = tuple(Index.of(n) if n in ranges else ZERO for n in names)
    left: dict[int, Index] = {}
    for j in range(k):
        position = ctx.position(indices.name, (*where, Index.of(j)), data.shape[j], ranges)
        if position is None:
            return None
        left[j] = position
    d, source, inside = iterators(len(data.shape)), [], []
    for n, e in zip(names, sizes, strict=True):
        if n not in ranges:
            source.append(ZERO)
            continue
        moving = [j for j, f in left.items() if n in f.symbols()]
        step, rest = left[moving[0]].split(n) if len(moving) == 1 else (ZERO, ZERO)
        if step != ONE or rest.symbols() & ranges.keys():
            return None
        source.append(d[moving[0]] - rest)
        inside.append(in_range(source[-1], e))
        del left[moving[0]]
    return source, inside + [in_range(d[j] - f, ONE) for j, f in left.items()]


def infer_scatter_elements(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the shape of the data. The updates have the indices' shape, which is nowhere larger except along the
    axis.
    """
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    if not len(data.shape) == len(indices.shape) == len(updates.shape):
        raise ShapeError("data, indices and updates have different ranks", tensor=indices.name, rule=node.op)
    axis = normalize_axis(node, node.attribute("axis", 0), len(data.shape))
    if node.attribute("reduction", "none") not in ("none", *REDUCTIONS):
        raise refuse(node, f"reduction {node.attribute('reduction')}")
    for a, (n, m, d) in enumerate(zip(indices.shape, updates.shape, data.shape, strict=True)):
        ctx.unify(n, m, f"axis {a} of {indices.name} and {updates.name}")
        if a != axis:
            ctx.at_most(n, d, f"axis {a} of {indices.name} is no longer than that of {data.name}")
    return (Inferred(data.dtype, data.shape, written_sizes(node, ctx)),)


@operator("ScatterElements", "Scatter", infer=infer_scatter_elements)
def scatter_elements(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute each element from the updates of its line along the axis. Without a reduction, the last one wins."""
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    axis = normalize_axis(node, node.attribute("axis", 0), len(data.shape))
    d, r = iterators(len(data.shape)), Index.of("r0")
    ctx.bound(indices.name, data.shape[axis])
    place = (*d[:axis], r, *d[axis + 1 :])
    match = op("eq", wrapped(at(ctx, indices.name, place), data.shape[axis]), integer(d[axis]))
    shapes = zip(d, indices.shape, data.shape, strict=True)
    inside = all_of([in_range(i, n) for a, (i, n, m) in enumerate(shapes) if a != axis and n != m])
    if inside is not None:
        match = op("where", inside, match, const(False, "bool"))
    extents = (indices.shape[axis],)
    reduction = _reduction(node, ctx)
    old = at(ctx, data.name, d)
    if reduction == "none":
        last = last_match(ctx, data.shape, match, extents)
        new = at(ctx, updates.name, (*d[:axis], fetch(last, d), *d[axis + 1 :]))
        emit(ctx, node, op("where", op("ge", at(ctx, last, d), const(0, "int64")), new, old))
        return
    emit(ctx, node, _combined(ctx, reduction, data.shape, old, match, at(ctx, updates.name, place), extents))


def _combined(
    ctx: ExpandContext, reduction: str, shape: Shape, old: Value, match: Value, update: Value, extents: Shape
) -> Value:
    """Combine the old element with all updates that match it."""
    kind = {"add": "sum", "mul": "prod"}.get(reduction, reduction)
    update = wide(update)
    body = op("where", match, update, neutral(kind, update.dtype))
    total = ctx.compute(shape, body, reduction=extents, reduce=kind) if extents else ctx.compute(shape, body)
    return op(REDUCTIONS[reduction], wide(old), at(ctx, total, iterators(len(shape))))


def scatter_by_search(node: OnnxNode, ctx: ExpandContext, k: int) -> None:
    """Expand a ScatterND with index tuples that are data: every element searches the tuples."""
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    d, extents = iterators(len(data.shape)), indices.shape[:-1]
    q = tuple(Index.of(f"r{j}") for j in range(len(extents)))
    tests = []
    for j in range(k):
        ctx.bound(indices.name, data.shape[j], j)
        component = wrapped(at(ctx, indices.name, (*q, Index.of(j))), data.shape[j])
        tests.append(op("eq", component, integer(d[j])))
    match, reduction = all_of(tests) or const(True, "bool"), _reduction(node, ctx)
    old = at(ctx, data.name, d)
    if reduction != "none":
        update = at(ctx, updates.name, (*q, *d[k:]))
        emit(ctx, node, _combined(ctx, reduction, data.shape, old, match, update, extents))
        return
    last = last_match(ctx, data.shape[:k], match, extents)
    place = fetch(last, d[:k])
    new = at(ctx, updates.name, (*decoded(place, extents), *d[k:]))
    emit(ctx, node, op("where", op("ge", at(ctx, last, d[:k]), const(0, "int64")), new, old))


def infer_tensor_scatter(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the shape of the cache. The update has the same shape, but may be shorter along the axis."""
    past, update = (ctx.tensor(n) for n in node.inputs[:2])
    axis = normalize_axis(node, node.attribute("axis", -2), len(past.shape))
    if axis == 0 or node.attribute("mode", "linear") not in ("linear", "circular"):
        raise refuse(node, f"axis {axis} in mode {node.attribute('mode', 'linear')}")
    for a, (n, m) in enumerate(zip(past.shape, update.shape, strict=True)):
        if a == axis:
            ctx.at_most(m, n, f"axis {a} of {update.name} is no longer than that of {past.name}")
        else:
            ctx.unify(n, m, f"axis {a} of {past.name} and {update.name}")
    return same_as_input(node, ctx)


@operator("TensorScatter", infer=infer_tensor_scatter)
def tensor_scatter(node: OnnxNode, ctx: ExpandContext) -> None:
    """Write each sample's update from its own position on. In circular mode it wraps around at the end."""
    past, update = (ctx.tensor(n) for n in node.inputs[:2])
    axis = normalize_axis(node, node.attribute("axis", -2), len(past.shape))
    d, starts = iterators(len(past.shape)), given(node.inputs, 2)
    start = ZERO
    if starts:
        ctx.bound(starts, past.shape[axis])
        start = fetch(starts, d[:1])
    step = d[axis] - start
    if node.attribute("mode", "linear") == "circular":
        step = step % past.shape[axis]
    new = at(ctx, update.name, (*d[:axis], step, *d[axis + 1 :]))
    emit(ctx, node, op("where", in_range(step, update.shape[axis]), new, at(ctx, past.name, d)))
