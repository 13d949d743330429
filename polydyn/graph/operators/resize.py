"""Resize with exact integer source positions, DepthToSpace and SpaceToDepth."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce

from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import at, emit, given, in_range, iterators, like, normalize_axis, refuse
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import FromIndex, Value, cast, const, op
from polydyn.schedules.index import Index, maximum, minimum


@dataclass(frozen=True)
class Axis:
    """One resized axis: from ``size`` to ``output`` elements, ``numerator / denominator`` being the scale."""

    axis: int
    size: Dim
    output: Dim
    numerator: Dim
    denominator: Dim

    def position(self, mode: str, x: Index) -> tuple[Index, Index]:
        """The source position of output ``x`` as an exact fraction with a positive denominator.

        ``align_corners`` and ``pytorch_half_pixel`` put a single output element at position 0.
        """
        if mode == "asymmetric":
            return x * self.denominator, self.numerator
        if mode == "align_corners":
            return x * (self.size - 1), maximum(self.output - 1, 1)
        half = (2 * x + 1) * self.denominator - self.numerator
        if mode == "pytorch_half_pixel":
            half = half * minimum(self.output - 1, 1)
        return half, 2 * self.numerator

    def clamp(self, i: Index) -> Index:
        """The nearest subscript that exists."""
        return minimum(maximum(i, 0), self.size - 1)


MODES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


def _check(node: OnnxNode) -> tuple[str, str]:
    """(mode, coordinate mode). UnsupportedError names what is not built."""
    mode = node.attribute("mode", "nearest")
    coordinates = node.attribute("coordinate_transformation_mode", "half_pixel" if node.opset > 10 else "asymmetric")
    if mode not in ("nearest", "linear", "cubic"):
        raise refuse(node, f"mode {mode}")
    if coordinates not in MODES:
        raise refuse(node, f"coordinate_transformation_mode {coordinates}", f"use one of {', '.join(MODES)}")
    if node.attribute("antialias", 0):
        raise refuse(node, "antialias")
    if node.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise refuse(node, "keep_aspect_ratio_policy")
    return mode, coordinates


def resized_axes(node: OnnxNode, ctx: InferContext | ExpandContext) -> tuple[Axis, ...]:
    """The axes whose size changes."""
    shape = ctx.tensor(node.inputs[0]).shape
    axes = [normalize_axis(node, a, len(shape)) for a in node.attribute("axes") or range(len(shape))]
    sizes, scales = given(node.inputs, 3), given(node.inputs, 2 if node.opset > 10 else 1)
    if sizes:
        dims = ctx.value(sizes)
        if dims is None:
            raise refuse(node, f"sizes {sizes} that do not follow from the sizes of the inputs")
        out = [Axis(a, shape[a], d, d, shape[a]) for a, d in zip(axes, map(Index.of, dims), strict=True)]
    else:
        numbers = ctx.constant(scales) if scales else None
        if numbers is None:
            raise refuse(node, "scales that are not constant", "give sizes, or make the scales an initializer")
        out = [_scaled(a, shape[a], Fraction(float(s))) for a, s in zip(axes, numbers.reshape(-1), strict=True)]
    return tuple(a for a in out if a.output != a.size or a.numerator != a.denominator)


def _scaled(axis: int, size: Dim, scale: Fraction) -> Axis:
    output = size * scale.numerator // scale.denominator
    return Axis(axis, size, output, Index.of(scale.numerator), Index.of(scale.denominator))


def resize_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """The input's shape with the resized axes replaced."""
    _check(node)
    t = ctx.tensor(node.inputs[0])
    shape = list(t.shape)
    for a in resized_axes(node, ctx):
        shape[a.axis] = a.output
        if given(node.inputs, 3):  # scaled, nothing stays nothing
            why = f"axis {a.axis} of {t.name} is resized from {a.size} to {a.output}"
            ctx.at_most(minimum(a.output, 1), a.size, why)
    return (Inferred(t.dtype, tuple(shape)),)


@operator("Resize", infer=resize_infer)
def resize(node: OnnxNode, ctx: ExpandContext) -> None:
    """Nearest is a view; linear and cubic weigh 2 or 4 neighbours, one axis after another."""
    mode, coordinates = _check(node)
    axes = resized_axes(node, ctx)
    source = ctx.tensor(node.inputs[0])
    if mode == "nearest" or not axes:
        index = list(iterators(len(source.shape)))
        for a in axes:
            index[a.axis] = a.clamp(_nearest(node, *a.position(coordinates, index[a.axis])))
        emit(ctx, node, at(ctx, source.name, index))
        return
    name, shape = source.name, list(source.shape)
    for a in axes:
        shape[a.axis] = a.output
        body = _weighted(node, ctx, name, a, coordinates)
        if a is axes[-1]:
            emit(ctx, node, body)
        else:
            name = ctx.compute(tuple(shape), body)


def _nearest(node: OnnxNode, n: Index, d: Index) -> Index:
    """``n / d`` rounded as ``nearest_mode`` says."""
    mode = node.attribute("nearest_mode", "round_prefer_floor" if node.opset > 10 else "floor")
    if mode == "floor":
        return n // d
    if mode == "ceil":
        return n.ceildiv(d)
    return (2 * n - d).ceildiv(2 * d) if mode == "round_prefer_floor" else (2 * n + d) // (2 * d)


def _weighted(node: OnnxNode, ctx: ExpandContext, name: str, axis: Axis, coordinates: str) -> Value:
    """The weighted sum of the neighbours along one axis; neighbours outside repeat the edge."""
    index = list(iterators(len(ctx.tensor(name).shape)))
    here = index[axis.axis]
    dtype = "float64" if ctx.tensor(name).dtype == "float64" else "float32"
    n, d = axis.position(coordinates, here)
    weights = _weights(node, ctx, axis, coordinates, dtype)
    first = n // d - (len(weights) // 2 - 1)
    terms = []
    for i, weight in enumerate(weights):
        index[axis.axis] = axis.clamp(first + i)
        terms.append(op("mul", cast(at(ctx, name, index), dtype), at(ctx, weight, (here,))))
    return reduce(partial(op, "add"), terms)


def _weights(node: OnnxNode, ctx: ExpandContext, axis: Axis, coordinates: str, dtype: str) -> list[str]:
    """One tensor of the output's size for each neighbour; with ``exclude_outside`` those outside weigh nothing."""
    here = Index.of("d0")
    n, d = axis.position(coordinates, here)
    floor = n // d
    fraction = op("div", FromIndex(dtype, n - d * floor), FromIndex(dtype, d))
    if node.attribute("mode") == "linear":
        weights = [op("sub", const(1, dtype), fraction), fraction]
    else:
        part = at(ctx, ctx.compute((axis.output,), fraction), (here,))
        weights = cubic_weights(part, node.attribute("cubic_coeff_a", -0.75))
    if not node.attribute("exclude_outside", 0):
        return [ctx.compute((axis.output,), w) for w in weights]
    first = floor - (len(weights) // 2 - 1)
    inside = [in_range(first + i, axis.size) for i in range(len(weights))]
    kept = [op("where", ok, w, const(0, dtype)) for ok, w in zip(inside, weights, strict=True)]
    loads = [at(ctx, ctx.compute((axis.output,), w), (here,)) for w in kept]
    total = at(ctx, ctx.compute((axis.output,), reduce(partial(op, "add"), loads)), (here,))
    return [ctx.compute((axis.output,), op("div", w, total)) for w in loads]


def cubic_weights(t: Value, a: float) -> list[Value]:
    """Keys' cubic convolution with coefficient ``a``, for the neighbours at distances 1+t, t, 1-t, 2-t."""

    def near(x: Value) -> Value:
        inner = op("sub", op("mul", like(a + 2, x), x), like(a + 3, x))
        return op("add", op("mul", op("mul", inner, x), x), like(1, x))

    def far(x: Value) -> Value:
        inner = op("mul", op("sub", op("mul", like(a, x), x), like(5 * a, x)), x)
        return op("sub", op("mul", op("add", inner, like(8 * a, x)), x), like(4 * a, x))

    one, two = like(1, t), like(2, t)
    return [far(op("add", t, one)), near(t), near(op("sub", one, t)), far(op("sub", two, t))]


# -- depth and space -------------------------------------------------------------------------------------------------


def depth_to_space_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """[N, C / b², H * b, W * b]."""
    t = ctx.tensor(node.inputs[0])
    n, c, h, w = t.shape
    b = node.attribute("blocksize")
    ctx.unify(c // (b * b) * (b * b), c, f"the channels of {t.name} are cut into blocks of {b} x {b}")
    return (Inferred(t.dtype, (n, c // (b * b), h * b, w * b)),)


@operator("DepthToSpace", infer=depth_to_space_infer)
def depth_to_space(node: OnnxNode, ctx: ExpandContext) -> None:
    """Channels become b x b blocks; ``mode`` says whether the block's place is the outer (DCR) or inner part."""
    b = node.attribute("blocksize")
    channels = ctx.tensor(node.outputs[0]).shape[1]
    n, c, h, w = iterators(4)
    place = (h % b) * b + w % b
    depth = place * channels + c if node.attribute("mode", "DCR") == "DCR" else c * (b * b) + place
    emit(ctx, node, at(ctx, node.inputs[0], (n, depth, h // b, w // b)))


def space_to_depth_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """[N, C * b², H / b, W / b]."""
    t = ctx.tensor(node.inputs[0])
    n, c, h, w = t.shape
    b = node.attribute("blocksize")
    for size, axis in ((h, "height"), (w, "width")):
        ctx.unify(size // b * b, size, f"the {axis} of {t.name} is cut into blocks of {b}")
    return (Inferred(t.dtype, (n, c * (b * b), h // b, w // b)),)


@operator("SpaceToDepth", infer=space_to_depth_infer)
def space_to_depth(node: OnnxNode, ctx: ExpandContext) -> None:
    """Blocks of b x b elements become channels; ``mode`` as in DepthToSpace."""
    b = node.attribute("blocksize")
    channels = ctx.tensor(node.inputs[0]).shape[1]
    n, c, h, w = iterators(4)
    if node.attribute("mode", "DCR") == "DCR":
        channel, place = c % channels, c // channels
    else:
        channel, place = c // (b * b), c % (b * b)
    emit(ctx, node, at(ctx, node.inputs[0], (n, channel, h * b + place // b, w * b + place % b)))
