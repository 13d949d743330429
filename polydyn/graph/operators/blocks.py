"""DepthToSpace and SpaceToDepth: blocks of pixels as channels."""

from __future__ import annotations

from polydyn.graph.operators.common import at, emit, iterators
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator


def depth_to_space_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C / b², H * b, W * b]."""
    t = ctx.tensor(node.inputs[0])
    n, c, h, w = t.shape
    b = node.attribute("blocksize")
    ctx.unify(c // (b * b) * (b * b), c, f"the channels of {t.name} are cut into blocks of {b} x {b}")
    return (Inferred(t.dtype, (n, c // (b * b), h * b, w * b)),)


@operator("DepthToSpace", infer=depth_to_space_infer)
def depth_to_space(node: OnnxNode, ctx: ExpandContext) -> None:
    """Turn channels into b x b blocks. ``mode``: the position in the block is the outer (DCR) or inner part of a
    channel.
    """
    b = node.attribute("blocksize")
    channels = ctx.tensor(node.outputs[0]).shape[1]
    n, c, h, w = iterators(4)
    place = (h % b) * b + w % b
    depth = place * channels + c if node.attribute("mode", "DCR") == "DCR" else c * (b * b) + place
    emit(ctx, node, at(ctx, node.inputs[0], (n, depth, h // b, w // b)))


def space_to_depth_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [N, C * b², H / b, W / b]."""
    t = ctx.tensor(node.inputs[0])
    n, c, h, w = t.shape
    b = node.attribute("blocksize")
    for size, axis in ((h, "height"), (w, "width")):
        ctx.unify(size // b * b, size, f"the {axis} of {t.name} is cut into blocks of {b}")
    return (Inferred(t.dtype, (n, c * (b * b), h // b, w // b)),)


@operator("SpaceToDepth", infer=space_to_depth_infer)
def space_to_depth(node: OnnxNode, ctx: ExpandContext) -> None:
    """Turn blocks of b x b elements into channels. ``mode``: see DepthToSpace."""
    b = node.attribute("blocksize")
    channels = ctx.tensor(node.inputs[0]).shape[1]
    n, c, h, w = iterators(4)
    if node.attribute("mode", "DCR") == "DCR":
        channel, place = c % channels, c // channels
    else:
        channel, place = c // (b * b), c % (b * b)
    emit(ctx, node, at(ctx, node.inputs[0], (n, channel, h * b + place // b, w * b + place % b)))
