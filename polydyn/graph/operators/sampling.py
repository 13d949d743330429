"""Operators that sample between pixels: GridSample, RoiAlign, DeformConv; and AffineGrid, which computes positions.

Coordinates are float tensors. The positions of their neighbours are integer tensors, through which the weighted sum
reads. Subscripts are clamped in the kernel, so that no coordinate, NaN included, reads outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from itertools import product as combinations

from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    ReductionIndices,
    Shape,
    all_of,
    at,
    emit,
    given,
    in_range,
    is_float,
    iterators,
    like,
    refuse,
    wide,
)
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.resize import cubic_weights
from polydyn.graph.operators.windows import windows
from polydyn.graph.subscripts import sizes
from polydyn.schedules.expr import FromIndex, Value, cast, op
from polydyn.schedules.index import ONE, Index, fetch, maximum, minimum


@dataclass(frozen=True)
class InterpolationNeighbours:
    """The neighbours of coordinates along one axis of ``size``. ``first`` names the integer tensor of the lowest one.

    ``weights``: one value per neighbour. ``where``: subscripts of the coordinates. ``zeros``: elements outside are
    0.
    """

    first: str
    where: tuple[Index, ...]
    size: Dim
    weights: tuple[Value, ...]
    zeros: bool

    def place(self, k: int) -> Index:
        """Return the subscript of neighbour k, clamped to the axis."""
        return minimum(maximum(fetch(self.first, self.where) + k, 0), self.size - 1)

    def inside(self, k: int) -> Value | None:
        """Return the condition that neighbour k exists."""
        return in_range(fetch(self.first, self.where) + k, self.size) if self.zeros else None


def weighted(
    ctx: ExpandContext, source: str, outer: tuple[Index, ...], axes: tuple[InterpolationNeighbours, ...]
) -> Value:
    """Return the sum over all combinations of neighbours, each times its weights. Booleans are summed in float32."""
    terms, several = [], any(len(a.weights) > 1 for a in axes)
    for choice in combinations(*(range(len(a.weights)) for a in axes)):
        pixel = wide(at(ctx, source, (*outer, *(a.place(k) for a, k in zip(axes, choice, strict=True)))))
        pixel = cast(pixel, "float32") if several and pixel.dtype == "bool" else pixel
        tests = [t for a, k in zip(axes, choice, strict=True) if (t := a.inside(k)) is not None]
        inside = all_of(tests)
        pixel = pixel if inside is None else op("where", inside, pixel, like(0, pixel))
        factors = [cast(a.weights[k], pixel.dtype) for a, k in zip(axes, choice, strict=True) if len(a.weights) > 1]
        terms.append(reduce(partial(op, "mul"), factors, pixel))
    return reduce(partial(op, "add"), terms)


def floor_of(ctx: ExpandContext, shape: Shape, x: Value) -> str:
    """Compute ``floor(x)`` as int64 and return its name. Far coordinates stay far, but fit in an integer."""
    near = op("max", op("min", op("floor", x), like(2.0**31, x)), like(-(2.0**31), x))
    return ctx.compute(shape, cast(op("where", op("isnan", x), like(-(2.0**31), x), near), "int64"))


def fraction(x: Value) -> Value:
    """Return the part above the floor."""
    return op("sub", x, op("floor", x))


# -- GridSample ------------------------------------------------------------------------------------------------------

KINDS = {"bilinear": "linear", "bicubic": "cubic"}
"""Names of modes before opset 20."""


def infer_grid_sample(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C, positions...]. The grid is [N, positions..., k] for k spatial axes."""
    x, grid = (ctx.tensor(n) for n in node.inputs)
    k = len(x.shape) - 2
    if k not in (1, 2, 3) or len(grid.shape) != len(x.shape):
        raise refuse(node, f"an input of {len(x.shape)} axes with a grid of {len(grid.shape)}")
    ctx.unify(grid.shape[-1], Index.of(k), f"{grid.name} has a coordinate for each of {k} axes")
    ctx.unify(x.shape[0], grid.shape[0], f"the samples of {x.name} and {grid.name}")
    for a, n in enumerate(x.shape[2:], 2):
        ctx.at_most(ONE, n, f"axis {a} of {x.name} has an element to sample")
    if node.attribute("padding_mode", "zeros") not in ("zeros", "border", "reflection"):
        raise refuse(node, f"padding_mode {node.attribute('padding_mode')}")
    return (Inferred(x.dtype, (*x.shape[:2], *grid.shape[1:-1])),)


@operator("GridSample", infer=infer_grid_sample)
def grid_sample(node: OnnxNode, ctx: ExpandContext) -> None:
    """Sample pixels around coordinates in [-1, 1]. The grid stores the coordinate of the last axis first."""
    x, grid = (ctx.tensor(n) for n in node.inputs)
    mode = node.attribute("mode", "linear")
    mode, padding = KINDS.get(mode, mode), node.attribute("padding_mode", "zeros")
    if mode != "nearest" and not is_float(x.dtype) and x.dtype != "bool":
        raise refuse(node, f"mode {mode} of {x.dtype}", "cast to float32 before it and back behind it")
    k, shape = len(x.shape) - 2, grid.shape[:-1]
    here, y = iterators(len(shape)), iterators(len(x.shape))
    axes = []
    for a, size in enumerate(x.shape[2:]):
        raw = wide(at(ctx, grid.name, (*here, Index.of(k - 1 - a))))
        position = _position(raw, size, bool(node.attribute("align_corners", 0)))
        if mode == "nearest":
            position = op("rint", position)
        if mode != "cubic":  # cubic neighbours are moved inside one by one
            position = _padded(node, position, size, padding)
        name = ctx.compute(shape, position)
        axes.append(_neighbours(node, ctx, name, size, mode, padding, (y[0], *y[2:])))
    emit(ctx, node, weighted(ctx, x.name, y[:2], tuple(axes)))


def _position(x: Value, size: Dim, corners: bool) -> Value:
    """Convert a coordinate: -1 and 1 are the centres of the first and the last pixel, or their outer edges."""
    n, half = FromIndex(x.dtype, size), like(0.5, x)
    moved = op("add", x, like(1, x))
    if corners:
        return op("mul", op("mul", moved, half), FromIndex(x.dtype, size - 1))
    return op("mul", op("sub", op("mul", moved, n), like(1, x)), half)


def _padded(node: OnnxNode, x: Value, size: Dim, padding: str) -> Value:
    if padding == "zeros":
        return x
    low, high = _borders(x, size, bool(node.attribute("align_corners", 0)))
    if padding == "reflection":
        return _reflected(x, low, high)
    inside = op("and", op("ge", x, low), op("le", x, high))
    return op("where", inside, x, op("max", op("min", x, FromIndex(x.dtype, size - 1)), like(0, x)))


def _borders(x: Value, size: Dim, corners: bool) -> tuple[Value, Value]:
    if corners:
        return like(0, x), FromIndex(x.dtype, size - 1)
    return like(-0.5, x), op("sub", FromIndex(x.dtype, size), like(0.5, x))


def _reflected(x: Value, low: Value, high: Value) -> Value:
    """Reflect a coordinate at both borders until it is between them."""
    span = op("sub", high, low)
    twice = op("mul", like(2, x), span)
    distance = op("fmod", op("abs", op("sub", x, low)), twice)
    folded = op("add", low, op("where", op("gt", distance, span), op("sub", twice, distance), distance))
    inside = op("and", op("ge", x, low), op("le", x, high))
    return op("where", inside, x, op("where", op("gt", span, like(0, x)), folded, low))


def _neighbours(
    node: OnnxNode, ctx: ExpandContext, name: str, size: Dim, mode: str, padding: str, where: tuple[Index, ...]
) -> InterpolationNeighbours:
    """Return the neighbours of the coordinates in ``name``. Reflected ones are moved inside one by one."""
    shape = ctx.tensor(name).shape
    x = at(ctx, name, iterators(len(shape)))
    first = floor_of(ctx, shape, x)
    if mode == "nearest":
        return InterpolationNeighbours(first, where, size, (like(1, x),), padding == "zeros")
    t = fraction(at(ctx, name, where))
    if mode == "linear":
        weights: list[Value] = [op("sub", like(1, t), t), t]
    elif mode == "cubic":
        part = ctx.compute(shape, fraction(x))
        weights = cubic_weights(at(ctx, part, where), -0.75)
    else:
        raise refuse(node, f"mode {mode}")
    offset = len(weights) // 2 - 1
    if padding != "reflection":
        if offset:
            here = iterators(len(shape))
            first = ctx.compute(shape, FromIndex("int64", fetch(first, here) - offset))
        return InterpolationNeighbours(first, where, size, tuple(weights), padding == "zeros")
    here = iterators(len(shape))
    places = []
    for i in range(len(weights)):
        place = FromIndex(x.dtype, fetch(first, here) + (i - offset))
        folded = _reflected(place, *_borders(x, size, bool(node.attribute("align_corners", 0))))
        places.append(ctx.compute(shape, cast(folded, "int64")))
    return Reflected(first, where, size, tuple(weights), False, tuple(places))


@dataclass(frozen=True)
class Reflected(InterpolationNeighbours):
    """Neighbours that have a separate tensor of subscripts each."""

    places: tuple[str, ...] = ()

    def place(self, k: int) -> Index:
        """Return the subscript of neighbour k, clamped to the axis."""
        return minimum(maximum(fetch(self.places[k], self.where), 0), self.size - 1)


# -- AffineGrid ------------------------------------------------------------------------------------------------------


def infer_affine_grid(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, spatial..., k] for k spatial axes of the size, which is [N, C, spatial...]."""
    theta, size = ctx.tensor(node.inputs[0]), sizes(node, ctx, 1, "size") or ()
    k = len(size) - 2
    if k not in (2, 3) or len(theta.shape) != 3:
        raise refuse(node, f"a size of {len(size)} numbers with transformations of {len(theta.shape)} axes")
    for a, n in enumerate((size[0], Index.of(k), Index.of(k + 1))):
        ctx.unify(theta.shape[a], n, f"axis {a} of {theta.name} fits a grid for {list(size)}")
    return (Inferred(theta.dtype, (theta.shape[0], *size[2:], Index.of(k))),)


@operator("AffineGrid", infer=infer_affine_grid)
def affine_grid(node: OnnxNode, ctx: ExpandContext) -> None:
    """Transform the centres (or corners) of pixels for each sample. The corner of a single pixel is -1."""
    theta, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    n, *place, k = iterators(len(y.shape))
    corners = bool(node.attribute("align_corners", 0))
    total = wide(at(ctx, theta.name, (n, k, Index.of(len(place)))))
    for a, size in enumerate(y.shape[1:-1]):
        steps = maximum(size - 1, 1) if corners else size
        moved = Index.of("d0") * 2 + (-steps if corners else 1 - steps)
        where = op("div", FromIndex(total.dtype, moved), FromIndex(total.dtype, steps))
        line = ctx.compute((size,), where)
        factor = wide(at(ctx, theta.name, (n, k, Index.of(len(place) - 1 - a))))
        total = op("add", op("mul", factor, at(ctx, line, (place[a],))), total)
    emit(ctx, node, total)


# -- RoiAlign --------------------------------------------------------------------------------------------------------


def infer_roi_align(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [regions, C, output_height, output_width]."""
    x, rois, batch = (ctx.tensor(n) for n in node.inputs)
    if node.attribute("sampling_ratio", 0) < 1:
        raise refuse(node, "sampling_ratio 0, a number of samples that depends on data,", "give a sampling_ratio")
    if node.attribute("mode", "avg") not in ("avg", "max"):
        raise refuse(node, f"mode {node.attribute('mode')}")
    ctx.unify(rois.shape[0], batch.shape[0], f"{batch.name} has the sample of each region")
    ctx.unify(rois.shape[1], Index.of(4), f"{rois.name} has four numbers for each region")
    for a in (2, 3):
        ctx.at_most(ONE, x.shape[a], f"axis {a} of {x.name} has an element to sample")
    size = (Index.of(node.attribute("output_height", 1)), Index.of(node.attribute("output_width", 1)))
    return (Inferred(x.dtype, (rois.shape[0], x.shape[1], *size)),)


@operator("RoiAlign", infer=infer_roi_align)
def roi_align(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the mean (or the maximum weighted neighbour) of samples in each bin. Samples outside the image are 0."""
    x, y, batch = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0]), node.inputs[2]
    ctx.bound(batch, x.shape[0])
    n, c, ph, pw = iterators(4)
    count = int(node.attribute("sampling_ratio"))
    steps = (Index.of("r0"), Index.of("r1"))
    axes, tests = [], []
    for a, bin_, step in ((0, ph, steps[0]), (1, pw, steps[1])):
        name, size = _samples(node, ctx, a, y.shape[2 + a], count), x.shape[2 + a]
        place = (n, bin_, step)
        raw = at(ctx, name, place)
        tests += [op("ge", raw, like(-1, raw)), op("le", raw, FromIndex(raw.dtype, size))]
        shape = ctx.tensor(name).shape
        last = FromIndex(raw.dtype, size - 1)
        clamped = ctx.compute(shape, op("min", op("max", at(ctx, name, iterators(3)), like(0, raw)), last))
        first = floor_of(ctx, shape, at(ctx, clamped, iterators(3)))
        t = fraction(at(ctx, clamped, place))
        axes.append(InterpolationNeighbours(first, place, size, (op("sub", like(1, t), t), t), False))
    inside = all_of(tests)
    assert inside is not None
    outer = (maximum(minimum(fetch(batch, (n,)), x.shape[0] - 1), 0), c)
    extents = (Index.of(count), Index.of(count))
    if node.attribute("mode", "avg") == "avg":
        value = weighted(ctx, x.name, outer, tuple(axes))
        body = op("where", inside, value, like(0, value))
        total = at(ctx, ctx.compute(y.shape, body, reduction=extents, reduce="sum"), iterators(4))
        emit(ctx, node, op("div", total, like(count * count, total)))
        return
    pixels = []
    for i, j in combinations((0, 1), (0, 1)):
        pixel = wide(at(ctx, x.name, (*outer, axes[0].place(i), axes[1].place(j))))
        pixels.append(op("mul", op("mul", axes[0].weights[i], axes[1].weights[j]), pixel))
    value = reduce(partial(op, "max"), pixels)
    body = op("where", inside, value, like(0, value))
    emit(ctx, node, at(ctx, ctx.compute(y.shape, body, reduction=extents, reduce="max"), iterators(4)))


def _samples(node: OnnxNode, ctx: ExpandContext, axis: int, bins: Dim, count: int) -> str:
    """Compute the coordinates along height (0) or width (1) as [regions, bins, samples]. Return the tensor's name."""
    rois = ctx.tensor(node.inputs[1])
    n, place, step = iterators(3)
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    half = node.attribute("coordinate_transformation_mode", default) == "half_pixel"
    scale = node.attribute("spatial_scale", 1.0)

    def corner(k: int) -> Value:
        raw = wide(at(ctx, rois.name, (n, Index.of(k))))
        scaled = op("mul", raw, like(scale, raw))
        return op("sub", scaled, like(0.5, scaled)) if half else scaled

    start, end = corner(1 - axis), corner(3 - axis)
    length = op("sub", end, start)
    if not half:
        length = op("max", length, like(1, length))
    width = op("div", length, FromIndex(length.dtype, bins))
    middle = op("add", FromIndex(length.dtype, step), like(0.5, length))
    inner = op("div", op("mul", middle, width), like(count, width))
    body = op("add", op("add", start, op("mul", FromIndex(length.dtype, place), width)), inner)
    return ctx.compute((rois.shape[0], bins, Index.of(count)), body)


# -- DeformConv ------------------------------------------------------------------------------------------------------


def infer_deform_conv(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, O, height, width]. Offsets are [N, groups * taps * 2, height, width], masks half of this."""
    x, w, offset = (ctx.tensor(n) for n in node.inputs[:3])
    if len(x.shape) != 4:
        raise refuse(node, f"{len(x.shape) - 2} spatial axes")
    axes = windows(node, x.shape[2:], w.shape[2:])
    group, groups = node.attribute("group", 1), node.attribute("offset_group", 1)
    ctx.unify(x.shape[1], w.shape[1] * group, f"DeformConv {node.name} sums over {x.name}'s channels")
    ctx.unify(x.shape[1] // groups * groups, x.shape[1], f"the channels of {x.name} are {groups} groups of offsets")
    ctx.unify(w.shape[0] // group * group, w.shape[0], f"DeformConv {node.name} has {group} groups")
    taps = w.shape[2] * w.shape[3] * groups
    ctx.unify(offset.shape[1], taps * 2, f"{offset.name} has two offsets for each tap")
    if mask := given(node.inputs, 4):
        ctx.unify(ctx.tensor(mask).shape[1], taps, f"{mask} has a factor for each tap")
    for a, window in enumerate(axes, 2):
        ctx.unify(offset.shape[a], window.output, f"axis {a} of {offset.name} is that of the result")
        ctx.at_most(ONE, x.shape[a], f"axis {a} of {x.name} has an element to sample")
    return (Inferred(x.dtype, (x.shape[0], w.shape[0], *(a.output for a in axes))),)


@operator("DeformConv", infer=infer_deform_conv)
def deform_conv(node: OnnxNode, ctx: ExpandContext) -> None:
    """Sample taps at their offset positions, times their mask, then convolve the samples."""
    x, w, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1]), ctx.tensor(node.outputs[0])
    offset, groups, group = node.inputs[2], int(node.attribute("offset_group", 1)), int(node.attribute("group", 1))
    axes = windows(node, x.shape[2:], w.shape[2:])
    taps = (w.shape[2], w.shape[3])
    coordinates = (x.shape[0], Index.of(groups), *taps, *y.shape[2:])
    n, g, ky, kx, oy, ox = iterators(6)
    tap = (g * taps[0] + ky) * taps[1] + kx
    each = x.shape[1] // groups
    around = []
    for a, (window, position, k) in enumerate(((axes[0], oy, ky), (axes[1], ox, kx))):
        moved = wide(at(ctx, offset, (n, tap * 2 + a, oy, ox)))
        name = ctx.compute(coordinates, op("add", FromIndex(moved.dtype, window.source(position, k)), moved))
        first = floor_of(ctx, coordinates, at(ctx, name, iterators(6)))
        where = (n, g // each if groups > 1 else Index.of(0), ky, kx, oy, ox)
        t = fraction(at(ctx, name, where))
        around.append(InterpolationNeighbours(first, where, window.size, (op("sub", like(1, t), t), t), True))
    value = weighted(ctx, x.name, (n, g), tuple(around))  # d1 runs over channels here
    if mask := given(node.inputs, 4):
        channel = (around[0].where[1] * taps[0] + ky) * taps[1] + kx
        value = op("mul", value, wide(at(ctx, mask, (n, channel, oy, ox))))
    columns = ctx.compute((x.shape[0], x.shape[1], *taps, *y.shape[2:]), value)

    n, o, oy, ox = iterators(4)
    sums = ReductionIndices()
    c, ry, rx = sums.add(w.shape[1]), sums.add(taps[0]), sums.add(taps[1])
    channel = c if group == 1 else o // (w.shape[0] // group) * w.shape[1] + c
    product = op("mul", at(ctx, columns, (n, channel, ry, rx, oy, ox)), wide(at(ctx, w.name, (o, c, ry, rx))))
    extents = tuple(sums.extents)
    name = ctx.compute(y.shape, product, reduction=extents, reduce="sum") if extents else ctx.compute(y.shape, product)
    total = at(ctx, name, iterators(4))
    bias = given(node.inputs, 3)
    emit(ctx, node, op("add", total, wide(at(ctx, bias, (o,)))) if bias else total)
