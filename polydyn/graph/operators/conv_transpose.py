"""ConvTranspose: one convolution per remainder of the output position modulo the stride, then interleaving.

With ``y + before = stride * q + r``, the taps that reach output ``y`` are ``k = r + stride * t``, and the element is
``q - t``. For a fixed ``r``, a *phase*, this is an ordinary convolution with every ``stride``-th tap. It has no
products with the zeros that the textbook form inserts between the input's elements. Phases of the last axis with
equally many taps are columns of one product, next to the channels, so that neighbours in an output row are adjacent in
the sums. Phases of other axes are separate products over the same rows. Without strides there is one phase and no
interleaving.

No tap is filled up with zeros: an infinite element would make NaN of outputs that do not read it. If taps are
``dilation`` apart, let ``g = gcd(dilation, stride)``. A phase that ``g`` does not divide has no taps. The taps of the
others are ``stride / g`` apart, and their elements ``dilation / g``. The first tap is ``k0``, with
``k0 * dilation = r`` modulo ``stride``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from polydyn.errors import ModelError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    ReductionIndices,
    all_of,
    at,
    emit,
    given,
    in_range,
    iterators,
    like,
    refuse,
    wide,
)
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.windows import moves
from polydyn.schedules.expr import Value, op
from polydyn.schedules.index import ZERO, Index, maximum


@dataclass(frozen=True)
class Spread:
    """One spatial axis: ``size`` elements, ``stride`` apart, each spread over ``kernel`` taps ``dilation`` apart.

    ``before`` positions are cut off at the front; ``output`` positions remain. ``phases``: the first phase that a
    convolution computes, and their number. ``shift``: the position at which the result begins, if that depends on
    sizes; ``result`` positions remain then.
    """

    size: Dim
    kernel: Dim
    dilation: int
    stride: int
    before: int
    output: Dim
    phases: tuple[int, int]
    result: Dim
    shift: Dim = ZERO

    @property
    def common(self) -> int:
        """The greatest common divisor of stride and dilation."""
        return gcd(self.stride, self.dilation)

    @property
    def first_tap(self) -> int:
        """The first tap of the first phase."""
        step = self.stride // self.common
        return self.phases[0] // self.common * pow(self.dilation // self.common, -1, step) % step

    @property
    def taps(self) -> Dim:
        """The number of taps of each phase."""
        if self.phases[0] % self.common:
            return ZERO
        count = (self.kernel - self.first_tap).ceildiv(self.stride // self.common)
        return maximum(0, count) if self.first_tap else count

    def alike(self) -> tuple[Spread, ...]:
        """Split the axis into ranges of phases with equal numbers of taps, that begin at adjacent taps."""
        kernel, ends = self.kernel.constant, list(range(self.stride + 1))
        if kernel is not None and self.dilation == 1:
            ends = sorted({0, kernel % self.stride, self.stride})
        return tuple(replace(self, phases=(a, b - a)) for a, b in pairwise(ends))

    @property
    def step(self) -> int:
        """Distance of the elements of adjacent taps of a phase."""
        return self.dilation // self.common

    @property
    def start(self) -> int:
        """Phase of the first output position."""
        return self.before % self.stride

    @property
    def blocks(self) -> Dim:
        """Number of values of ``q``, counted from the first output position's."""
        return (self.output + (self.start - 1)) // self.stride + 1

    @property
    def room(self) -> tuple[Dim, Dim]:
        """Zeros before the elements that taps may read (elements are cut off if negative), and the length with all
        zeros.
        """
        room = (maximum(1, self.taps) - 1) * self.step if self.first_tap else (self.taps - 1) * self.step
        behind = (self.first_tap * self.dilation - self.phases[0]) // self.stride
        return room + (behind - self.before // self.stride), self.blocks + room


def _spreads(node: OnnxNode, ctx: Context) -> tuple[Spread, ...]:
    """Read the axes from the attributes. Raises ModelError for a wrong rank, UnsupportedError for negative padding."""
    sizes, kernel = (ctx.tensor(n).shape[2:] for n in node.inputs[:2])
    rank = len(sizes)
    (strides, dilations, pads), extra = moves(node, rank), node.attribute("output_padding") or [0] * rank
    if not len(kernel) == len(extra) == rank:
        raise ModelError("kernel and output_padding do not fit the rank", node=node.name)
    if any(p < 0 for p in pads):
        raise refuse(node, "negative padding")
    mode, output_shape = node.attribute("auto_pad", "NOTSET"), node.attribute("output_shape")
    out = []
    for a in range(rank):
        reach = (kernel[a] - 1) * dilations[a] + 1
        full = (sizes[a] - 1) * strides[a] + reach + extra[a]
        if mode in ("SAME_UPPER", "SAME_LOWER") or output_shape:
            length = Index.of(output_shape[a]) if output_shape else sizes[a] * strides[a]
            cut = full - length
            if (cut.constant or 0) < 0:
                raise refuse(node, f"an output of {length} elements on spatial axis {a}", "give pads instead")
            front = cut // 2 if mode == "SAME_UPPER" else cut - cut // 2
            before = front.constant
            shift, output = (front, full) if before is None else (ZERO, length)
            before = before or 0
        else:
            before, after = (0, 0) if mode == "VALID" else (int(pads[a]), int(pads[rank + a]))
            length, shift = full - before - after, ZERO
            output = length
        step, phases = int(strides[a]), (0, int(strides[a]))
        out.append(Spread(sizes[a], kernel[a], int(dilations[a]), step, before, output, phases, length, shift))
    return tuple(out)


def infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, O, spatial...]. The weight is [C, O / groups, taps...]."""
    x, w = (ctx.tensor(n) for n in node.inputs[:2])
    if not 3 <= len(x.shape) <= 5:
        raise refuse(node, f"{len(x.shape) - 2} spatial axes")
    groups = node.attribute("group", 1)
    ctx.unify(x.shape[1], w.shape[0], f"ConvTranspose {node.name} sums over {node.inputs[0]}'s channels")
    ctx.unify(w.shape[0] // groups * groups, w.shape[0], f"ConvTranspose {node.name} has {groups} groups")
    channels = w.shape[1] * groups
    if bias := given(node.inputs, 2):
        ctx.unify(ctx.tensor(bias).shape[0], channels, f"ConvTranspose {node.name} has one {bias} per output channel")
    axes = _spreads(node, ctx)
    for number, a in enumerate(axes, 2):
        why = f"axis {number} of the output of {node.name} has no negative size"
        ctx.at_most(Index.of(a.before), a.output + a.before, why)
        why = f"{node.name}: the input reaches every position of output_shape along axis {number}"
        ctx.at_most(a.result, a.output, why)
    return (Inferred(x.dtype, (x.shape[0], channels, *(a.result for a in axes))),)


@operator("ConvTranspose", infer=infer)
def conv_transpose(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute
    ``out[n, o, y...] = bias[o] + sum(x[n, group(o) + c, q - t...] * w[group(o) + c, o, r + t*stride...])``.
    """
    axes, bias = _spreads(node, ctx), given(node.inputs, 2)
    sums, place = (_phases if any(a.stride > 1 for a in axes) else _one_phase)(node, ctx, axes)
    total = at(ctx, sums, place)
    emit(ctx, node, op("add", total, wide(at(ctx, bias, iterators(2)[1:]))) if bias else total)


def _one_phase(node: OnnxNode, ctx: ExpandContext, axes: Sequence[Spread]) -> tuple[str, tuple[Index, ...]]:
    """Return the sums of products in the output's order, and the subscripts of an output element's sum."""
    groups, outputs = _groups(node, ctx)
    n, o, *blocks = iterators(2 + len(axes))
    group = ZERO if groups == 1 else o // outputs
    shape = (outputs * groups, *(a.blocks for a in axes))
    return _sums(node, ctx, axes, shape, (group, (ZERO,) * (len(axes) - 1), blocks, o - group * outputs)), (
        n, o, *(y + a.shift for y, a in zip(blocks, axes, strict=True))
    )  # fmt: skip


def _phases(node: OnnxNode, ctx: ExpandContext, axes: Sequence[Spread]) -> tuple[str, tuple[Index, ...]]:
    """Return the sums of all phases (see ``_some_phases``), and the subscripts of an output element's sum."""
    groups, outputs = _groups(node, ctx)
    n, o, *position = iterators(2 + len(axes))
    moved = [y + a.shift + a.start for y, a in zip(position, axes, strict=True)]
    remainders = [y % a.stride for y, a in zip(moved, axes, strict=True)]
    of_group = (o // outputs,) * (groups > 1)
    channel = o - of_group[0] * outputs if of_group else o
    quotients = (y // a.stride for y, a in zip(moved, axes, strict=True))
    place = (n, *of_group, *remainders[:-1], *quotients, remainders[-1] * outputs + channel)
    return _joined(node, ctx, tuple(axes), 0), place


def _joined(node: OnnxNode, ctx: ExpandContext, axes: tuple[Spread, ...], first: int) -> str:
    """Join ``_some_phases`` over the ranges of equally many taps, from axis ``first`` on."""
    if first == len(axes):
        return _some_phases(node, ctx, axes)
    parts = [_joined(node, ctx, (*axes[:first], a, *axes[first + 1 :]), first + 1) for a in axes[first].alike()]
    axis = first if first < len(axes) - 1 else 2 * len(axes) - 1
    return ctx.concat(tuple(parts), 1 + axis + (_groups(node, ctx)[0] > 1)) if len(parts) > 1 else parts[0]


def _some_phases(node: OnnxNode, ctx: ExpandContext, axes: Sequence[Spread]) -> str:
    """Return ``sums[n, group, r.., q.., (r_last, o)]``; a single group has no axis."""
    groups, outputs = _groups(node, ctx)
    _, *rest, column = iterators(1 + (groups > 1) + 2 * len(axes))
    group = rest.pop(0) if groups > 1 else ZERO
    lead = len(axes) - 1
    several = (Index.of(groups),) * (groups > 1)
    counts = (Index.of(a.phases[1]) for a in axes[:-1])
    shape = (*several, *counts, *(a.blocks for a in axes), outputs * axes[-1].phases[1])
    return _sums(node, ctx, axes, shape, (group, rest[:lead], rest[lead:], column))


def _groups(node: OnnxNode, ctx: ExpandContext) -> tuple[int, Dim]:
    """Return the number of groups, and the output channels of one."""
    return node.attribute("group", 1), ctx.tensor(node.inputs[1]).shape[1]


def _sums(
    node: OnnxNode, ctx: ExpandContext, axes: Sequence[Spread], shape: tuple[Dim, ...],
    element: tuple[Index, Sequence[Index], Sequence[Index], Index],
) -> str:  # fmt: skip
    """Return a tensor [N, shape] of sums of products. ``element``: its group, phases, blocks and column."""
    group, phases, blocks, column = element
    if any(a.taps == 0 for a in axes):
        given_x = ctx.tensor(node.inputs[0])
        none = like(0, wide(at(ctx, given_x.name, (ZERO,) * len(given_x.shape))))
        return ctx.compute((given_x.shape[0], *shape), none)
    x, weight = _with_room(node, ctx, axes), ctx.tensor(node.inputs[1])
    inputs = weight.shape[0] // node.attribute("group", 1)
    sums = ReductionIndices()
    c = group * inputs + sums.add(inputs)
    taps = [sums.add(a.taps) for a in axes]
    source = [q + t * a.step for q, t, a in zip(blocks, taps, axes, strict=True)]
    kernel = _kernel_of_phases(ctx, axes, weight.name)
    product = op("mul", wide(at(ctx, x, ("d0", c, *source))), wide(at(ctx, kernel, (c, *phases, *taps, column))))
    shape = (ctx.tensor(x).shape[0], *shape)
    if not sums.extents:
        return ctx.compute(shape, product)
    return ctx.compute(shape, product, reduction=tuple(sums.extents), reduce="sum")


def _with_room(node: OnnxNode, ctx: ExpandContext, axes: Sequence[Spread]) -> str:
    """Pad the input with zeros so that every tap of every block reads an element."""
    t = ctx.tensor(node.inputs[0])
    room = [a.room for a in axes]
    if all(before == 0 and length == a.size for (before, length), a in zip(room, axes, strict=True)):
        return t.name
    n, c, *place = iterators(len(t.shape))
    source = [i - before for i, (before, _) in zip(place, room, strict=True)]
    inside = all_of([in_range(i, a.size) for i, a in zip(source, axes, strict=True)])
    return _where(ctx, (*t.shape[:2], *(length for _, length in room)), inside, at(ctx, t.name, (n, c, *source)))


def _kernel_of_phases(ctx: ExpandContext, axes: Sequence[Spread], name: str) -> str:
    """Return the weight as [c, r.., t.., (r_last, o)]: the last tap of every phase first."""
    channels, outputs, *_ = ctx.tensor(name).shape
    lead = len(axes) - 1
    c, *rest, column = iterators(1 + 2 * len(axes))
    phases = [*rest[:lead], column // outputs]
    source = [
        a.first_tap + r + (a.taps - 1 - t) * (a.stride // a.common)
        for a, r, t in zip(axes, phases, rest[lead:], strict=True)
    ]
    counts = (Index.of(a.phases[1]) for a in axes[:-1])
    shape = (channels, *counts, *(a.taps for a in axes), outputs * axes[-1].phases[1])
    return ctx.compute(shape, at(ctx, name, (c, column % outputs, *source)))


def _where(ctx: ExpandContext, shape: tuple[Dim, ...], inside: Value | None, element: Value) -> str:
    return ctx.compute(shape, op("where", inside, element, like(0, element)) if inside else element)
