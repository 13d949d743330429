"""ConvTranspose: one sum of products for each remainder of the output position by the stride, then their interleaving.

With ``y + before = stride * q + r`` the taps that meet an input element at ``y`` are ``k = r + stride * t``, and the
element is ``q - t``: for a fixed ``r`` an ordinary convolution with every ``stride``-th tap, and no product is with one
of the zeros that the textbook form puts between the input's elements. Taps ``dilation`` apart are a longer kernel with
zeros among its taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import Value, op
from polydyn.schedules.index import ONE, ZERO, Index


@dataclass(frozen=True)
class Spread:
    """One spatial axis: ``size`` elements put ``stride`` apart, each spread over ``kernel`` positions.

    ``before`` positions are cut off at the front; ``output`` positions remain. ``reach``: of the kernel with dilation.
    """

    size: Dim
    reach: Dim
    dilation: int
    stride: int
    before: int
    output: Dim

    @property
    def taps(self) -> Dim:
        """How many taps can meet an element at one output position."""
        return self.reach.ceildiv(self.stride)

    @property
    def blocks(self) -> Dim:
        """How many values ``q`` takes."""
        return (self.output + (self.before - 1)) // self.stride + 1


def _spreads(node: OnnxNode, ctx: InferContext | ExpandContext) -> tuple[Spread, ...]:
    """The axes from the attributes. ModelError: attributes of another rank; UnsupportedError: negative padding."""
    sizes, kernel = (ctx.tensor(n).shape[2:] for n in node.inputs[:2])
    rank = len(sizes)
    strides, dilations, extra = (
        node.attribute(name) or [default] * rank
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    pads = node.attribute("pads") or [0] * (2 * rank)
    if not len(kernel) == len(strides) == len(dilations) == len(extra) == len(pads) // 2 == rank:
        raise ModelError("kernel, strides, dilations, pads and output_padding do not fit the rank", node=node.name)
    if any(p < 0 for p in pads):
        raise refuse(node, "negative padding")
    mode, wanted = node.attribute("auto_pad", "NOTSET"), node.attribute("output_shape")
    out = []
    for a in range(rank):
        reach = (kernel[a] - 1) * dilations[a] + 1
        full = (sizes[a] - 1) * strides[a] + reach + extra[a]
        if mode in ("SAME_UPPER", "SAME_LOWER") or wanted:
            length = Index.of(wanted[a]) if wanted else sizes[a] * strides[a]
            cut = (full - length).constant
            if cut is None or cut < 0:
                raise refuse(node, f"an output of {length} elements on spatial axis {a}", "give pads instead")
            before = cut // 2 if mode == "SAME_UPPER" else cut - cut // 2
        else:
            before, after = (0, 0) if mode == "VALID" else (int(pads[a]), int(pads[rank + a]))
            length = full - before - after
        out.append(Spread(sizes[a], reach, int(dilations[a]), int(strides[a]), before, length))
    return tuple(out)


def infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """[N, O, spatial...]; the weight is [C, O / groups, taps...]."""
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
        ctx.at_most(ONE, a.size, f"axis {number} of {node.inputs[0]} is {a.size}: it must have an element")
        why = f"axis {number} of the output of {node.name} has no negative size"
        ctx.at_most(Index.of(a.before), a.output + a.before, why)
    return (Inferred(x.dtype, (x.shape[0], channels, *(a.output for a in axes))),)


@operator("ConvTranspose", infer=infer)
def conv_transpose(node: OnnxNode, ctx: ExpandContext) -> None:
    """``out[n, o, y...] = bias[o] + sum(x[n, group(o) + c, q - t...] * w[group(o) + c, o, r + t*stride...])``."""
    axes = _spreads(node, ctx)
    weight = ctx.tensor(node.inputs[1])
    groups, per_group = node.attribute("group", 1), weight.shape[1]
    inputs = weight.shape[0] // groups
    padded, kernel = _room_for_taps(ctx, node.inputs[0], axes), _whole_taps(ctx, weight.name, axes)

    strided = [a for a in axes if a.stride > 1]
    n, o, *rest = iterators(2 + len(axes) + len(strided))
    blocks, remainders = rest[: len(axes)], _spread_out(axes, rest[len(axes) :])
    sums = ReductionIndices()
    c = sums.add(inputs)
    taps = [sums.add(a.taps) for a in axes]
    group = ZERO if groups == 1 else o // per_group
    source = [q + (a.taps - 1) - t for q, a, t in zip(blocks, axes, taps, strict=True)]
    steps = [r + t * a.stride for r, a, t in zip(remainders, axes, taps, strict=True)]
    x = at(ctx, padded, (n, group * inputs + c, *source))
    product = op("mul", wide(x), wide(at(ctx, kernel, (group * inputs + c, o - group * per_group, *steps))))
    shape = (ctx.tensor(node.inputs[0]).shape[0], per_group * groups, *(a.blocks for a in axes))
    shape += tuple(Index.of(a.stride) for a in strided)
    name = ctx.compute(shape, product, reduction=tuple(sums.extents), reduce="sum") if sums.extents else None

    n, o, *position = iterators(2 + len(axes))
    moved = [y + a.before for y, a in zip(position, axes, strict=True)]
    where = [y // a.stride for y, a in zip(moved, axes, strict=True)]
    where += [y % a.stride for y, a in zip(moved, axes, strict=True) if a.stride > 1]
    total = at(ctx, name or ctx.compute(shape, product), (n, o, *where))
    bias = given(node.inputs, 2)
    emit(ctx, node, op("add", total, wide(at(ctx, bias, (o,)))) if bias else total)


def _spread_out(axes: Sequence[Spread], of_strided: Sequence[Index]) -> list[Index]:
    """One remainder for every axis; axes of stride 1 have no iterator, their remainder is 0."""
    left = iter(of_strided)
    return [next(left) if a.stride > 1 else ZERO for a in axes]


def _room_for_taps(ctx: ExpandContext, name: str, axes: Sequence[Spread]) -> str:
    """The input with zeros around it, so that every tap of every block reads an element."""
    shape = ctx.tensor(name).shape
    lengths = tuple(a.blocks + a.taps - 1 for a in axes)
    if all(a.taps == 1 and n == size for a, n, size in zip(axes, lengths, shape[2:], strict=True)):
        return name
    n, c, *place = iterators(len(shape))
    source = [i - (a.taps - 1) for i, a in zip(place, axes, strict=True)]
    inside = all_of([in_range(i, a.size) for i, a in zip(source, axes, strict=True)])
    return _where(ctx, (*shape[:2], *lengths), inside, at(ctx, name, (n, c, *source)))


def _whole_taps(ctx: ExpandContext, name: str, axes: Sequence[Spread]) -> str:
    """The weight with zeros among and behind its taps: dilated, and a whole multiple of the strides."""
    shape = ctx.tensor(name).shape
    lengths = tuple(a.taps * a.stride for a in axes)
    if lengths == shape[2:]:
        return name
    c, o, *place = iterators(len(shape))
    source = [i // a.dilation for i, a in zip(place, axes, strict=True)]
    inside = [in_range(i, k) for i, k in zip(source, shape[2:], strict=True)]
    inside += [in_range(i % a.dilation, 1) for i, a in zip(place, axes, strict=True) if a.dilation > 1]
    return _where(ctx, (*shape[:2], *lengths), all_of(inside), at(ctx, name, (c, o, *source)))


def _where(ctx: ExpandContext, shape: tuple[Dim, ...], inside: Value | None, element: Value) -> str:
    assert inside is not None
    return ctx.compute(shape, op("where", inside, element, like(0, element)))
