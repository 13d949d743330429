"""RotaryEmbedding: pairs of elements rotated by angles whose cosines and sines are tables."""

from __future__ import annotations

from polydyn.errors import ModelError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import at, emit, given, iterators, like, refuse, same_as_input, wide
from polydyn.graph.operators.gather_ops import element
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import FromIndex, Value, cast, const, op
from polydyn.schedules.index import ZERO, Index


def _geometry(node: OnnxNode, ctx: Context) -> tuple[Dim, int]:
    """Return (head size, number of its elements that are rotated). Raises UnsupportedError if it is not constant."""
    x, cos = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    heads = node.attribute("num_heads", 0)
    if len(x.shape) not in (3, 4):
        raise ModelError(f"{x.name} has {len(x.shape)} axes", node=node.name, rule="RotaryEmbedding takes 3 or 4")
    if len(x.shape) == 3 and not heads:
        raise refuse(node, "an input of three axes without num_heads")
    size = x.shape[-1] // heads if len(x.shape) == 3 else x.shape[-1]
    turned = node.attribute("rotary_embedding_dim", 0) or (cos.shape[-1] * 2).constant or size.constant
    if turned is None:
        raise refuse(node, f"a head size of {size} with caches of {cos.shape[-1]}")
    return size, int(turned)


def infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the input's shape. Caches are [positions, rotated / 2], or [B, L, rotated / 2] without positions."""
    x, turned = ctx.tensor(node.inputs[0]), _geometry(node, ctx)[1]
    length = x.shape[1] if len(x.shape) == 3 else x.shape[2]
    places = given(node.inputs, 3)
    for name in node.inputs[1:3]:
        t = ctx.tensor(name)
        if len(t.shape) != (2 if places else 3):
            raise ModelError(f"{name} has {len(t.shape)} axes", node=node.name, tensor=name)
        ctx.unify(t.shape[-1], Index.of(turned // 2), f"{name} has half as many columns as elements are turned")
    table = ctx.tensor(places or node.inputs[1]).shape
    ctx.unify(table[0], x.shape[0], f"RotaryEmbedding {node.name} has positions for each sample")
    ctx.unify(table[1], length, f"RotaryEmbedding {node.name} has a position for each token")
    return same_as_input(node, ctx)


@operator("RotaryEmbedding", infer=infer)
def rotary_embedding(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``x * cos - y * sin`` and ``x * sin + y * cos`` for a pair (x, y): halves of a head, or neighbours in
    it.
    """
    x = ctx.tensor(node.inputs[0])
    size, turned = _geometry(node, ctx)
    half, d = turned // 2, list(iterators(len(x.shape)))
    sample, token = d[0], d[1] if len(x.shape) == 3 else d[2]
    start = d[2] // size * size if len(x.shape) == 3 else ZERO
    inner = d[-1] - start
    column = inner // 2 if node.attribute("interleaved", 0) else inner % half
    places = given(node.inputs, 3)
    table = ctx.tensor(node.inputs[1])
    row = (element(ctx, places, (sample, token), table.shape[0]),) if places else (sample, token)
    cos, sin = (wide(at(ctx, name, (*row, column))) for name in node.inputs[1:3])
    if node.attribute("interleaved", 0):
        first = op("eq", _number(inner % 2), const(0, "int64"))
        partner = start + inner + 1 - (inner % 2) * 2
    else:
        first = op("lt", _number(inner), const(half, "int64"))
        partner = start + (inner + half) % turned
    mine, other = wide(at(ctx, x.name, d)), wide(at(ctx, x.name, (*d[:-1], partner)))
    cos, sin = cast(cos, mine.dtype), cast(sin, mine.dtype)
    signed = op("where", first, op("sub", like(0, sin), sin), sin)
    body: Value = op("add", op("mul", mine, cos), op("mul", other, signed))
    if size != turned:
        body = op("where", op("lt", _number(inner), const(turned, "int64")), body, mine)
    emit(ctx, node, body)


def _number(i: Index) -> Value:
    return FromIndex("int64", i)
