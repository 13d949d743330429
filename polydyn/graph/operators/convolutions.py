"""Conv: a guarded view if there is padding (fusion inlines it into its reader), then one sum of products."""

from __future__ import annotations

from collections.abc import Sequence

from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    ReductionIndices,
    Shape,
    all_of,
    at,
    emit,
    given,
    in_range,
    iterators,
    like,
    reduce_to,
    refuse,
    wide,
)
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.operators.windows import Window, fit, windows
from polydyn.schedules.expr import Value, op
from polydyn.schedules.index import ZERO, Index


def windows_of(node: OnnxNode, ctx: Context) -> tuple[Window, ...]:
    """Return the windows of the spatial axes."""
    return windows(node, ctx.tensor(node.inputs[0]).shape[2:], ctx.tensor(node.inputs[1]).shape[2:])


def conv_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, O, spatial...]. The input's channels are the groups times the weight's."""
    x, w = (ctx.tensor(n) for n in node.inputs[:2])
    if not 3 <= len(x.shape) <= 5:
        raise refuse(node, f"{len(x.shape) - 2} spatial axes")
    why = f"Conv {node.name} has {node.attribute('group', 1)} groups"
    groups = node.attribute("group", 1)
    ctx.unify(x.shape[1], w.shape[1] * groups, why)
    ctx.unify(w.shape[0] // groups * groups, w.shape[0], why)
    if bias := given(node.inputs, 2):
        ctx.unify(ctx.tensor(bias).shape[0], w.shape[0], f"Conv {node.name} has one {bias} per output channel")
    axes = windows_of(node, ctx)
    fit(node, ctx, axes)
    return (Inferred(x.dtype, (x.shape[0], w.shape[0], *(a.output for a in axes))),)


def pad_spatial(ctx: ExpandContext, name: str, axes: Sequence[Window], fill: Value | None = None) -> str:
    """Pad the tensor [N, C, spatial...] with zeros or ``fill``. Returns the tensor itself without padding."""
    if not any(a.has_padding for a in axes):
        return name
    t = ctx.tensor(name)
    n, c, *spatial = iterators(len(t.shape))
    index = [i - a.before for i, a in zip(spatial, axes, strict=True)]
    inside = all_of([in_range(i, a.size) for i, a in zip(index, axes, strict=True) if a.has_padding])
    assert inside is not None
    element = at(ctx, name, (n, c, *index))
    shape = (*t.shape[:2], *(a.padded for a in axes))
    return ctx.compute(shape, op("where", inside, element, like(0, element) if fill is None else fill))


def conv_subscripts(node: OnnxNode, ctx: ExpandContext) -> tuple[tuple[Index, ...], tuple[Index, ...], Shape]:
    """Return the subscripts of padded image and weights for ``out[n, o, p...]``, and the extents of the sum."""
    w = ctx.tensor(node.inputs[1])
    axes = windows_of(node, ctx)
    n, o, *position = iterators(2 + len(axes))
    sums = ReductionIndices()
    c = sums.add(w.shape[1])
    taps = [sums.add(a.kernel) for a in axes]
    source = [p * a.stride + k * a.dilation for p, k, a in zip(position, taps, axes, strict=True)]
    channel = _first_channel(o, w.shape[0], w.shape[1], node.attribute("group", 1)) + c
    return (n, channel, *source), (o, c, *taps), tuple(sums.extents)


@operator("Conv", infer=conv_infer)
def conv(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``out[n, o, p...] = sum(x[n, group(o) + c, p*stride + k*dilation...] * w[o, c, k...]) + bias[o]``."""
    image, weight, extents = conv_subscripts(node, ctx)
    padded = pad_spatial(ctx, node.inputs[0], windows_of(node, ctx))
    product = op("mul", wide(at(ctx, padded, image)), wide(at(ctx, node.inputs[1], weight)))
    bias = given(node.inputs, 2)
    add = (lambda total: op("add", total, wide(at(ctx, bias, weight[:1])))) if bias else None
    if extents:
        reduce_to(ctx, node, "sum", product, extents, add)
    else:
        emit(ctx, node, add(product) if add else product)


def _first_channel(o: Index, outputs: Dim, inputs_per_group: Dim, groups: int) -> Index:
    """Return the first input channel of the group of output channel ``o``."""
    if groups == 1:
        return ZERO
    per_group = outputs // groups
    return (o if per_group == 1 else o // per_group) * inputs_per_group
