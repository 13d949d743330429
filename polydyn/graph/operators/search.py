"""Operators with data-dependent positions, inverted: TopK counts ranks, scatters and MaxUnpool search all updates.

A primitive defines each element, so the element tests all candidates. If a candidate determines its element, a CPU
kernel visits each candidate once (``polydyn/fusion/scatter.py``). A device tests them all, which is quadratic along the
axis, parallel, and the same on every run.
"""

from __future__ import annotations

from collections.abc import Sequence

from polydyn.errors import ShapeError
from polydyn.graph.dtypes import onnx_dtype
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    Shape,
    all_of,
    at,
    emit,
    given,
    in_range,
    iterators,
    like,
    normalize_axis,
    refuse,
    same_as_input,
    wide,
)
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.windows import moves
from polydyn.graph.subscripts import ints, sizes
from polydyn.schedules.expr import FromIndex, Value, cast, const, neutral, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, fetch, product
from polydyn.schedules.laws.order import before


def integer(i: IndexLike) -> Value:
    """Return a subscript as a number."""
    return FromIndex("int64", Index.of(i))


def wrapped(index: Value, size: Dim) -> Value:
    """Return a subscript that is data. Negative ones count from the end."""
    index = cast(index, "int64")
    return op("where", op("lt", index, const(0, "int64")), op("add", index, integer(size)), index)


def last_match(ctx: ExpandContext, shape: Shape, match: Value, extents: Shape) -> str:
    """Compute the last row-major position over ``extents`` where ``match`` holds. Return the int64 tensor's name.

    The position is negative if there is none.
    """
    place = ZERO
    for j, e in enumerate(extents):
        place = place * e + Index.of(f"r{j}")
    body = op("where", match, integer(place), neutral("max", "int64"))
    return ctx.compute(shape, body, reduction=extents, reduce="max") if extents else ctx.compute(shape, body)


def decoded(place: Index, extents: Shape) -> tuple[Index, ...]:
    """Return the subscripts of a row-major position."""
    out = []
    for k, e in enumerate(extents):
        inner = product(extents[k + 1 :])
        out.append(place // inner if k == 0 else place // inner % e)
    return tuple(out)


# -- TopK ------------------------------------------------------------------------------------------------------------


def infer_top_k(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the first k along the axis: values and int64 positions."""
    x = ctx.tensor(node.inputs[0])
    axis = normalize_axis(node, node.attribute("axis", -1), len(x.shape))
    (k,) = sizes(node, ctx, 1, "k") or (ONE,)
    ctx.at_most(k, x.shape[axis], f"axis {axis} of {x.name} has the {k} elements that are asked for")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return (Inferred(x.dtype, shape), Inferred("int64", shape))


@operator("TopK", infer=infer_top_k)
def top_k(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute an element's rank: the number of larger elements, and of equal ones at smaller positions.

    On a CPU they are sorted: ``polydyn/fusion/argsort.py``.
    """
    x = ctx.tensor(node.inputs[0])
    axis = normalize_axis(node, node.attribute("axis", -1), len(x.shape))
    here, r = iterators(len(x.shape)), Index.of("r0")
    there = (*here[:axis], r, *here[axis + 1 :])
    mine, other = wide(at(ctx, x.name, here)), wide(at(ctx, x.name, there))
    sooner = before(other, mine, bool(node.attribute("largest", 1)), op("lt", integer(r), integer(here[axis])))
    rank = ctx.compute(x.shape, cast(sooner, "int32"), reduction=(x.shape[axis],), reduce="sum")
    shape = next(ctx.tensor(o).shape for o in node.outputs if o)
    match = op("eq", cast(at(ctx, rank, there), "int64"), integer(here[axis]))
    body = op("where", match, integer(r), const(0, "int64"))
    place = ctx.compute(shape, body, output=given(node.outputs, 1), reduction=(x.shape[axis],), reduce="sum")
    if given(node.outputs, 0):
        source = (*here[:axis], fetch(place, here), *here[axis + 1 :])
        emit(ctx, node, at(ctx, x.name, source))


# -- others ----------------------------------------------------------------------------------------------------------


def infer_reverse_sequence(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the same shape. There is one length per sample."""
    x = ctx.tensor(node.inputs[0])
    batch, time = node.attribute("batch_axis", 1), node.attribute("time_axis", 0)
    if {batch, time} != {0, 1} or len(x.shape) < 2:
        raise refuse(node, f"batch_axis {batch} with time_axis {time}")
    ctx.unify(ctx.tensor(node.inputs[1]).shape[0], x.shape[batch], f"{node.inputs[1]} has a length for each sample")
    return same_as_input(node, ctx)


@operator("ReverseSequence", infer=infer_reverse_sequence)
def reverse_sequence(node: OnnxNode, ctx: ExpandContext) -> None:
    """Reverse the first elements of each sample, up to its length."""
    x = ctx.tensor(node.inputs[0])
    batch, time = node.attribute("batch_axis", 1), node.attribute("time_axis", 0)
    ctx.bound(node.inputs[1], x.shape[time] + 1, natural=True)
    d = list(iterators(len(x.shape)))
    kept, back = at(ctx, x.name, d), fetch(node.inputs[1], (d[batch],)) - 1 - d[time]
    d[time] = back
    emit(ctx, node, op("where", op("ge", integer(back), const(0, "int64")), at(ctx, x.name, d), kept))


def infer_max_unpool(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C, ...] of the pooling's input, or the requested shape."""
    x = ctx.tensor(node.inputs[0])
    requested = sizes(node, ctx, 2, "output_shape")
    return (Inferred(x.dtype, requested or _unpooled(node, x.shape)),)


def _unpooled(node: OnnxNode, shape: Shape) -> Shape:
    kernel = node.attribute("kernel_shape")
    strides, _, pads = moves(node, len(kernel))
    spatial: Sequence[Dim] = [
        (n - 1) * s + k - pads[i] - pads[len(kernel) + i]
        for i, (n, s, k) in enumerate(zip(shape[2:], strides, kernel, strict=True))
    ]
    return (*shape[:2], *spatial)


@operator("MaxUnpool", infer=infer_max_unpool)
def max_unpool(node: OnnxNode, ctx: ExpandContext) -> None:
    """Write the element whose index (over all axes of the inferred shape) is its own position, else 0."""
    x, y, indices = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0]), node.inputs[1]
    inferred, extents = _unpooled(node, x.shape), x.shape[2:]
    d = iterators(len(y.shape))
    taps = tuple(Index.of(f"r{j}") for j in range(len(extents)))
    flat, image = fetch(indices, (*d[:2], *taps)), product(inferred[2:])
    pairs = [(flat // image, d[0] * inferred[1] + d[1])]  # per axis, so that it is a scatter
    pairs += zip(decoded(flat % image, inferred[2:]), d[2:], strict=True)
    match = all_of([op("eq", integer(a), integer(b)) for a, b in pairs])
    assert match is not None
    last = last_match(ctx, y.shape, match, extents)
    new = at(ctx, x.name, (*d[:2], *decoded(fetch(last, d), extents)))
    is_found = op("ge", at(ctx, last, d), const(0, "int64"))
    outside = [in_range(i, n) for i, n, m in zip(d, inferred, y.shape, strict=True) if n != m]
    emit(ctx, node, op("where", all_of([*outside, is_found]) or is_found, new, like(0, new)))


def infer_eye_like(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a matrix of the input's shape."""
    x = ctx.tensor(node.inputs[0])
    if len(x.shape) != 2:
        raise ShapeError(f"{x.name} has {len(x.shape)} axes", tensor=x.name, rule="EyeLike needs a matrix")
    code = node.attribute("dtype")
    return (Inferred(x.dtype if code is None else onnx_dtype(code), x.shape),)


@operator("EyeLike", infer=infer_eye_like)
def eye_like(node: OnnxNode, ctx: ExpandContext) -> None:
    """Write ones on diagonal k."""
    y = ctx.tensor(node.outputs[0])
    i, j = iterators(2)
    k = max(min(int(node.attribute("k", 0)), 2**62), -(2**62))  # clamped beyond all elements
    on = op("eq", integer(j), integer(i + k))
    emit(ctx, node, op("where", on, const(1, y.dtype), const(0, y.dtype)))


def infer_col_to_im(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C, image...]. The input has C times the block's elements as channels, and one column per block."""
    x = ctx.tensor(node.inputs[0])
    image, block = sizes(node, ctx, 1, "image_shape") or (), ints(node, ctx, 2, "block_shape") or ()
    count = product(map(Index.of, block))
    ctx.unify(x.shape[1] // count * count, x.shape[1], f"axis 1 of {x.name} has {count} channels for each result")
    ctx.unify(x.shape[2], product(_blocks(node, image, block)), f"axis 2 of {x.name} has a column for each block")
    return (Inferred(x.dtype, (x.shape[0], x.shape[1] // count, *image)),)


def _blocks(node: OnnxNode, image: Shape, block: tuple[int, ...]) -> Shape:
    strides, dilations, pads = moves(node, len(block))
    return tuple(
        (n + pads[i] + pads[len(block) + i] - (dilations[i] * (block[i] - 1) + 1)) // strides[i] + 1
        for i, n in enumerate(image)
    )


@operator("Col2Im", infer=infer_col_to_im)
def col_to_im(node: OnnxNode, ctx: ExpandContext) -> None:
    """Sum all elements of blocks that cover a pixel. Booleans are combined by "or"."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    block = ints(node, ctx, 2, "block_shape") or ()
    strides, dilations, pads = moves(node, len(block))
    blocks = _blocks(node, y.shape[2:], block)
    n, c, *pixel = iterators(len(y.shape))
    channel, column = c, ZERO
    tests: list[Value] = []
    for i, p in enumerate(pixel):
        tap = Index.of(f"r{i}")
        moved = p + pads[i] - tap * dilations[i]
        if strides[i] != 1:
            tests.append(op("eq", integer(moved % strides[i]), const(0, "int64")))
        tests.append(in_range(moved // strides[i], blocks[i]))
        channel, column = channel * block[i] + tap, column * blocks[i] + moved // strides[i]
    element = wide(at(ctx, x.name, (n, channel, column)))
    body = op("where", all_of(tests) or const(True, "bool"), element, like(0, element))
    kind = "max" if y.dtype == "bool" else "sum"
    name = ctx.compute(y.shape, body, reduction=tuple(map(Index.of, block)), reduce=kind)
    emit(ctx, node, at(ctx, name, iterators(len(y.shape))))
