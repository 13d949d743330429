"""Operators of the domain ``polydyn``: functions that ONNX lacks and torch has (``polydyn/torch_backend``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from polydyn.graph.operators.common import at, broadcast_infer, emit, iterators, like, normalize_axis, wide
from polydyn.graph.operators.elementwise import operands, predicate_infer
from polydyn.graph.operators.fill_ops import infer_cum_sum
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.graph.subscripts import ints
from polydyn.schedules.expr import WIDENED, FromIndex, Value, bitcast, const, load, neutral, op
from polydyn.schedules.index import Index


def _scalar(name: str, node: OnnxNode, ctx: ExpandContext) -> None:
    emit(ctx, node, op(name, *operands(node, ctx)))


for _name in ("expm1", "log1p", "erfc", "atan2"):
    operator(f"polydyn::{_name.capitalize()}", infer=broadcast_infer)(partial(_scalar, _name))


@operator("polydyn::SignBit", infer=predicate_infer)
def sign_bit(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute whether a float's sign bit is set, also for zeros and NaN."""
    (x,) = operands(node, ctx)
    integer = "int64" if x.dtype == "float64" else "int32"
    emit(ctx, node, op("lt", bitcast(x, integer), const(0, integer)))


def infer_from_bits(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer float64 of the shape of the int64 input."""
    return (Inferred("float64", ctx.tensor(node.inputs[0]).shape),)


@operator("polydyn::FromBits", infer=infer_from_bits)
def from_bits(node: OnnxNode, ctx: ExpandContext) -> None:
    """Reinterpret the bits of int64 elements as float64."""
    (x,) = operands(node, ctx)
    emit(ctx, node, bitcast(x, "float64"))


def _prefix(node: OnnxNode, ctx: ExpandContext, kind: str, term: Callable[[Value], Value], output: str | None) -> str:
    """Add a reduction over all positions up to each one (``polydyn/fusion/scan.py``). 16-bit floats reduce in float32.

    ``term``: the function of an element that is reduced.
    """
    x = ctx.tensor(node.inputs[0])
    axis = normalize_axis(node, (ints(node, ctx, 1, "axis") or (0,))[0], len(x.shape))
    here = iterators(len(x.shape))
    value = term(wide(load(x.name, tuple(Index.of("r0") if a == axis else i for a, i in enumerate(here)), x.dtype)))
    inside = op("le", FromIndex("int64", Index.of("r0")), FromIndex("int64", here[axis]))
    body = op("where", inside, value, neutral(kind, value.dtype))
    return ctx.compute(x.shape, body, output=output, reduction=(x.shape[axis],), reduce=kind)


def _running_extreme(kind: str, node: OnnxNode, ctx: ExpandContext) -> None:
    out = ctx.tensor(node.outputs[0])
    direct = out.dtype not in WIDENED
    found = _prefix(node, ctx, kind, lambda x: x, out.name if direct else None)
    if not direct:
        emit(ctx, node, at(ctx, found, iterators(len(out.shape))))


for _name, _kind in (("CumMax", "max"), ("CumMin", "min")):
    operator(f"polydyn::{_name}", infer=infer_cum_sum)(partial(_running_extreme, _kind))


@operator("polydyn::CumLogSumExp", infer=infer_cum_sum)
def running_log_sum_exp(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``m + log1p(n - 1 + sum(exp(x - m)))`` over the elements up to each one.

    m is their maximum, and n the number of elements equal to it. The sum has only smaller elements, so that its digits
    are not lost next to 1. An infinite m is the result.
    """
    here = iterators(len(ctx.tensor(node.outputs[0]).shape))
    greatest = at(ctx, _prefix(node, ctx, "max", lambda x: x, None), here)

    def smaller(x: Value) -> Value:
        return op("where", op("lt", x, greatest), op("exp", op("sub", x, greatest)), like(0, x))

    def equal(x: Value) -> Value:
        return op("where", op("eq", x, greatest), like(1, x), like(0, x))

    rest, count = (at(ctx, _prefix(node, ctx, "sum", term, None), here) for term in (smaller, equal))
    total = op("add", greatest, op("log1p", op("add", rest, op("sub", count, like(1, count)))))
    emit(ctx, node, op("where", op("isinf", greatest), greatest, total))
