"""Resize with exact integer source positions, in all modes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce

import numpy as np

from polydyn.errors import ModelError
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
)
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.subscripts import data_sizes
from polydyn.schedules.expr import INTEGERS, ITEMSIZE, FromIndex, Value, cast, const, op
from polydyn.schedules.index import ONE, Index, maximum, minimum, product

WHOLE_AXIS = (Fraction(0), Fraction(1))
"""A whole axis, as fractions of it."""


@dataclass(frozen=True)
class Axis:
    """One resized axis: from ``size`` to ``output`` elements, with scale ``numerator / denominator``.

    ``roi``: the part of the axis that tf_crop_and_resize reads, as fractions of it.
    """

    axis: int
    size: Dim
    output: Dim
    numerator: Dim
    denominator: Dim
    roi: tuple[Fraction, Fraction] = WHOLE_AXIS

    def position(self, mode: str, x: Index) -> tuple[Index, Index]:
        """Return the source position of output ``x`` as an exact fraction with a positive denominator.

        ``align_corners`` and ``pytorch_half_pixel`` put a single output element at position 0.
        """
        if mode == "asymmetric":
            return x * self.denominator, self.numerator
        if mode == "align_corners":
            return x * (self.size - 1), maximum(self.output - 1, 1)
        if mode == "tf_crop_and_resize":
            return self._cropped(x)
        if mode == "tf_half_pixel_for_nn":
            return (2 * x + 1) * self.denominator, 2 * self.numerator
        half = (2 * x + 1) * self.denominator - self.numerator
        if mode == "half_pixel_symmetric":
            half = half + self.size * self.numerator - self.output * self.denominator
        if mode == "pytorch_half_pixel":
            half = half * minimum(self.output - 1, 1)
        return half, 2 * self.numerator

    def _cropped(self, x: Index) -> tuple[Index, Index]:
        """Return the position from the start to the end of the part. A single output element is in its middle."""
        start, end = self.roi
        last, steps = self.size - 1, int(self.output.constant or 0) - 1
        parts = start.denominator * end.denominator
        first, reach = int(start * parts), int((end - start) * parts)
        if steps < 1:
            return last * (2 * first + reach), Index.of(2 * parts)
        return last * (first * steps) + x * last * reach, Index.of(parts * steps)

    def clamp(self, i: Index) -> Index:
        """Return the nearest existing subscript."""
        return minimum(maximum(i, 0), self.size - 1)


MODES = (
    "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)  # fmt: skip
CROP = "tf_crop_and_resize"


def _check(node: OnnxNode) -> tuple[str, str]:
    """Return (mode, coordinate mode). Raises UnsupportedError that names an unsupported mode."""
    mode = node.attribute("mode", "nearest")
    coordinates = node.attribute("coordinate_transformation_mode", "half_pixel" if node.opset > 10 else "asymmetric")
    if mode not in ("nearest", "linear", "cubic"):
        raise refuse(node, f"mode {mode}")
    if coordinates not in MODES:
        raise refuse(node, f"coordinate_transformation_mode {coordinates}", f"use one of {', '.join(MODES)}")
    return mode, coordinates


def resized_axes(node: OnnxNode, ctx: Context) -> tuple[Axis, ...]:
    """Return the axes whose size changes, or of which only a part is read."""
    shape = ctx.tensor(node.inputs[0]).shape
    axes = [normalize_axis(node, a, len(shape)) for a in node.attribute("axes") or range(len(shape))]
    sizes, scales = given(node.inputs, 3), given(node.inputs, 2 if node.opset > 10 else 1)
    if sizes:
        dims = ctx.value(sizes)
        given_sizes = data_sizes(node, ctx, sizes, "sizes") if dims is None else tuple(map(Index.of, dims))
        out = _sized(node, shape, axes, list(given_sizes))
    elif scales:
        out = _scaled(node, ctx, shape, axes, scales)
    else:
        raise refuse(node, "neither scales nor sizes")
    if _check(node)[1] == CROP:
        out = _with_parts(node, ctx, out)
    return tuple(a for a in out if a.output != a.size or a.numerator != a.denominator or a.roi != WHOLE_AXIS)


def _sized(node: OnnxNode, shape: Shape, axes: list[int], dims: list[Dim]) -> list[Axis]:
    """Return axes of given sizes, or of sizes that keep the aspect ratio and are nowhere larger (or smaller)."""
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return [Axis(a, shape[a], d, d, shape[a]) for a, d in zip(axes, dims, strict=True)]
    if policy not in ("not_larger", "not_smaller"):
        raise refuse(node, f"keep_aspect_ratio_policy {policy}")
    top, bottom = dims[0], shape[axes[0]]
    for d, a in zip(dims[1:], axes[1:], strict=True):
        less = d * bottom - top * shape[a]  # negative: the scale d / shape[a] is smaller
        other = minimum(1, maximum(0, -less if policy == "not_larger" else less))
        top, bottom = top + other * (d - top), bottom + other * (shape[a] - bottom)
    return [Axis(a, shape[a], (2 * shape[a] * top + bottom) // (2 * bottom), top, bottom) for a in axes]


def _scaled(node: OnnxNode, ctx: Context, shape: Shape, axes: list[int], name: str) -> list[Axis]:
    """Return axes of given scales: constants, quotients of sizes, or data, which the host converts to fractions.

    Sizes and positions follow from the fraction that a float32 represents, such as 7/10, as in torch. ONNX Runtime
    rounds positions to float32, which seldom differs. ONNX's reference divides positions by the float32's exact value:
    ``nearest`` then reads other elements. If the last elements are aligned, the size is that of the result, as in
    torch and ONNX Runtime. ONNX's reference uses the size before rounding.
    """
    known, quotients = ctx.constant(name), ctx.elements(name)
    if (count := product(ctx.tensor(name).shape).constant) != len(axes):
        raise ModelError(f"{count} scales for {len(axes)} axes", node=node.name, tensor=name)
    if known is None and quotients is None:
        names = [f"{what}{a}" for a in axes for what in ("scaled", "numerator", "denominator")]
        data = ctx.ask("scales", (name,), names, [shape[a] for a in axes])
        parts = [data[3 * k : 3 * k + 3] for k in range(len(axes))]
        return [Axis(a, shape[a], size, top, low) for a, (size, top, low) in zip(axes, parts, strict=True)]
    out = []
    for k, a in enumerate(axes):
        if known is not None:
            scale = simplest(float(known.reshape(-1)[k]))
            top, bottom = Index.of(scale.numerator), Index.of(scale.denominator)
        else:
            q = quotients.reshape(-1)[k]  # type: ignore[union-attr]
            top, bottom = (q, ONE) if isinstance(q, Index) else (q.top, Index.of(q.bottom))
        out.append(Axis(a, shape[a], shape[a] * top // bottom, top, bottom))
    return out


def simplest(x: float) -> Fraction:
    """Return the fraction that a float32 represents: the first convergent to which it is the nearest float32.

    ``size_steps.c`` computes the same. Raises ValueError if it is not a positive number.
    """
    if not 0 < x < float("inf"):
        raise ValueError(f"the scale {x} is not positive")
    n, d = Fraction(x).as_integer_ratio()
    (p, q), before = (1, 0), (0, 1)
    while True:
        a, rest = divmod(n, d)
        (p, q), before = (a * p + before[0], a * q + before[1]), (p, q)
        if not rest or (p and float(np.float32(p / q)) == x):
            return Fraction(p, q)
        n, d = d, rest


def _with_parts(node: OnnxNode, ctx: Context, axes: list[Axis]) -> list[Axis]:
    name = given(node.inputs, 1)
    roi = ctx.constant(name) if name else None
    if roi is None or roi.size != 2 * len(axes):
        raise refuse(node, "a roi that is not constant", "make the roi an initializer")
    ends = [Fraction(float(x)) for x in roi.reshape(-1)]
    out = [replace(a, roi=(ends[k], ends[k + len(axes)])) for k, a in enumerate(axes)]
    if any(a.output.constant is None for a in out if a.output != a.size or a.roi != WHOLE_AXIS):
        raise refuse(
            node, f"{CROP} to a size that is not constant", "give sizes as an initializer, or export with constant axes"
        )
    return out


def resize_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape with the resized axes replaced."""
    _check(node)
    t = ctx.tensor(node.inputs[0])
    shape = list(t.shape)
    for a in resized_axes(node, ctx):
        shape[a.axis] = a.output
        if given(node.inputs, 3):  # scaling nothing gives nothing
            why = f"axis {a.axis} of {t.name} is resized from {a.size} to {a.output}"
            ctx.at_most(minimum(a.output, 1), a.size, why)
    return (Inferred(t.dtype, tuple(shape)),)


@operator("Resize", "Upsample", infer=resize_infer)
def resize(node: OnnxNode, ctx: ExpandContext) -> None:
    """Resize: nearest is a view; linear and cubic weight 2 or 4 neighbours, one axis after another."""
    mode, coordinates = _check(node)
    axes = resized_axes(node, ctx)
    source = ctx.tensor(node.inputs[0])
    if mode == "nearest" or not axes:
        index = list(iterators(len(source.shape)))
        for a in axes:
            index[a.axis] = a.clamp(_nearest(node, a, *a.position(coordinates, index[a.axis])))
        emit(ctx, node, _inside_crop(node, axes, coordinates, at(ctx, source.name, index)))
        return
    name, shape = source.name, list(source.shape)
    for a in axes:
        shape[a.axis] = a.output
        if node.attribute("antialias", 0):
            name = _smoothed(node, ctx, name, tuple(shape), a, coordinates)
            body = at(ctx, name, iterators(len(shape)))
        else:
            body = _weighted(node, ctx, name, a, coordinates)
        if a is axes[-1]:
            _store(node, ctx, _inside_crop(node, axes, coordinates, body))
        elif not node.attribute("antialias", 0):
            name = ctx.compute(tuple(shape), body)


def _arithmetic(node: OnnxNode, ctx: ExpandContext) -> str:
    """Return the dtype of positions, weights and sums."""
    dtype = ctx.tensor(node.inputs[0]).dtype
    return "float64" if dtype == "float64" or (dtype in INTEGERS and ITEMSIZE[dtype] > 2) else "float32"


def _store(node: OnnxNode, ctx: ExpandContext, body: Value) -> None:
    """Write the output. Integers are rounded to nearest, ties to even, and saturate, as in ONNX's reference."""
    dtype = ctx.tensor(node.outputs[0]).dtype
    if dtype in INTEGERS:
        low, high = (float(x) for x in (np.iinfo(dtype).min, np.iinfo(dtype).max))
        high = high if high < 2**53 else float(np.nextafter(high, 0))
        body = op("min", op("max", op("rint", body), like(low, body)), like(high, body))
        body = cast(body, "int32" if ITEMSIZE[dtype] < 4 else dtype)
    emit(ctx, node, body)


def _inside_crop(node: OnnxNode, axes: tuple[Axis, ...], coordinates: str, body: Value) -> Value:
    """Return the body, or the extrapolation value outside the tensor, which only tf_crop_and_resize reaches."""
    tests = []
    for a in axes if coordinates == CROP else ():
        n, d = a.position(coordinates, Index.of(f"d{a.axis}"))
        tests += [in_range(n, d * (a.size - 1) + 1)]
    inside = all_of(tests)
    return body if inside is None else op("where", inside, body, like(node.attribute("extrapolation_value", 0.0), body))


def _smoothed(node: OnnxNode, ctx: ExpandContext, name: str, shape: Shape, axis: Axis, coordinates: str) -> str:
    """Resize along one axis by a kernel as wide as the step between positions. Return the tensor's name.

    If the tensor grows, this is plain interpolation; else the kernel is stretched by the inverse of the scale.
    """
    dtype = _arithmetic(node, ctx)
    cubic = node.attribute("mode") == "cubic"
    top = minimum(axis.numerator, axis.denominator)
    taps = (axis.denominator * (2 if cubic else 1)).ceildiv(top) * 2
    here, tap = Index.of("d0"), Index.of("d1")
    n, d = axis.position(coordinates, here)
    place = n // d + 1 - taps // 2 + tap
    distance = op("abs", op("div", FromIndex(dtype, place * d - n), FromIndex(dtype, d)))
    distance = op("mul", distance, op("div", FromIndex(dtype, top), FromIndex(dtype, axis.denominator)))
    spread = at(ctx, ctx.compute((axis.output, taps), distance), (here, tap))
    weight = _keys(spread, node.attribute("cubic_coeff_a", -0.75)) if cubic else _triangle(spread)
    if node.attribute("exclude_outside", 0):
        weight = op("where", in_range(place, axis.size), weight, const(0, dtype))
    weights = ctx.compute((axis.output, taps), weight)
    row = at(ctx, weights, (here, Index.of("r0")))
    total = ctx.compute((axis.output,), row, reduction=(taps,), reduce="sum")

    index, r = list(iterators(len(shape))), Index.of("r0")
    position = index[axis.axis]
    n, d = axis.position(coordinates, position)
    index[axis.axis] = axis.clamp(n // d + 1 - taps // 2 + r)
    share = op("div", at(ctx, weights, (position, r)), at(ctx, total, (position,)))
    body = op("mul", cast(at(ctx, name, index), dtype), share)
    return ctx.compute(shape, body, reduction=(taps,), reduce="sum")


def _triangle(x: Value) -> Value:
    return op("max", op("sub", like(1, x), x), like(0, x))


def _keys(x: Value, a: float) -> Value:
    """Return Keys' cubic convolution at a distance x >= 0."""
    beyond = op("where", op("lt", x, like(2, x)), _far(x, a), like(0, x))
    return op("where", op("le", x, like(1, x)), _near(x, a), beyond)


def _nearest(node: OnnxNode, axis: Axis, n: Index, d: Index) -> Index:
    """Round ``n / d`` by ``nearest_mode``; up to opset 10 round down if the axis grows, else up."""
    if node.opset <= 10:
        shrinks = minimum(1, maximum(0, axis.denominator - axis.numerator))
        return (n + shrinks * (d - 1)) // d
    mode = node.attribute("nearest_mode", "round_prefer_floor")
    if mode == "floor":
        return n // d
    if mode == "ceil":
        return n.ceildiv(d)
    return (2 * n - d).ceildiv(2 * d) if mode == "round_prefer_floor" else (2 * n + d) // (2 * d)


def _weighted(node: OnnxNode, ctx: ExpandContext, name: str, axis: Axis, coordinates: str) -> Value:
    """Return the weighted sum of the neighbours along one axis. Neighbours outside repeat the edge."""
    index = list(iterators(len(ctx.tensor(name).shape)))
    here = index[axis.axis]
    dtype = _arithmetic(node, ctx)
    n, d = axis.position(coordinates, here)
    weights = _weights(node, ctx, axis, coordinates, dtype)
    first = n // d - (len(weights) // 2 - 1)
    terms = []
    for i, weight in enumerate(weights):
        index[axis.axis] = axis.clamp(first + i)
        terms.append(op("mul", cast(at(ctx, name, index), dtype), at(ctx, weight, (here,))))
    return reduce(partial(op, "add"), terms)


def _weights(node: OnnxNode, ctx: ExpandContext, axis: Axis, coordinates: str, dtype: str) -> list[str]:
    """Return one tensor of the output's size per neighbour. With ``exclude_outside``, neighbours outside have weight
    0.
    """
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
    inside_weights = [op("where", ok, w, const(0, dtype)) for ok, w in zip(inside, weights, strict=True)]
    loads = [at(ctx, ctx.compute((axis.output,), w), (here,)) for w in inside_weights]
    total = at(ctx, ctx.compute((axis.output,), reduce(partial(op, "add"), loads)), (here,))
    return [ctx.compute((axis.output,), op("div", w, total)) for w in loads]


def _near(x: Value, a: float) -> Value:
    inner = op("sub", op("mul", like(a + 2, x), x), like(a + 3, x))
    return op("add", op("mul", op("mul", inner, x), x), like(1, x))


def _far(x: Value, a: float) -> Value:
    inner = op("mul", op("sub", op("mul", like(a, x), x), like(5 * a, x)), x)
    return op("sub", op("mul", op("add", inner, like(8 * a, x)), x), like(4 * a, x))


def cubic_weights(t: Value, a: float) -> list[Value]:
    """Return Keys' cubic convolution with coefficient ``a``, for the neighbours at distances 1+t, t, 1-t, 2-t."""
    one, two = like(1, t), like(2, t)
    return [_far(op("add", t, one), a), _near(t, a), _near(op("sub", one, t), a), _far(op("sub", two, t), a)]
