"""Helpers that rules and expansions share: broadcasting, aligned loads, wide arithmetic, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polydyn.errors import ModelError, ShapeError, UnsupportedError
from polydyn.graph.ir import Dim, dim_name, reduction_name
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode
from polydyn.schedules.expr import FLOATS, WIDENED, Const, FromIndex, Value, cast, const, load, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike

Shape = tuple[Dim, ...]


# -- reading a node --------------------------------------------------------------------------------------------------


def given(names: Sequence[str], position: int) -> str | None:
    """Return the optional input or output at a position, or None if it is absent."""
    return names[position] if position < len(names) and names[position] else None


def normalize_axis(node: OnnxNode, axis: int, rank: int) -> int:
    """Return the axis counted from the front. Raises ModelError if it is not an axis."""
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"axis {axis} of a tensor with {rank} axes", node=node.name)
    return axis % rank if rank else 0


def iterators(rank: int) -> tuple[Index, ...]:
    """Return the output iterators ``d0, d1, ...``."""
    return tuple(Index.of(dim_name(a)) for a in range(rank))


def refuse(node: OnnxNode, what: str, remedy: str | None = None) -> UnsupportedError:
    """Return the error for an unsupported part of an operator."""
    return UnsupportedError(f"{node.op}: {what} is not supported", node=node.name, remedy=remedy)


# -- shape rules -----------------------------------------------------------------------------------------------------


def same_as_input(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer one output with the type and shape of the first input."""
    t = ctx.tensor(node.inputs[0])
    return (Inferred(t.dtype, t.shape),)


def broadcast_all(node: OnnxNode, ctx: InferContext, shapes: Sequence[Shape]) -> Shape:
    """Return the common shape of several shapes by numpy's rule."""
    rank = max(map(len, shapes))
    out = [ONE] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            out[axis] = ctx.broadcast(out[axis], dim, f"{node.op} {node.name} broadcasts axis {axis}")
    return tuple(out)


def fits(node: OnnxNode, ctx: InferContext, name: str, shape: Shape) -> None:
    """Require that a parameter broadcasts to ``shape`` without enlarging it: each of its dims is 1 or the shape's."""
    given_shape = ctx.tensor(name).shape
    if len(given_shape) > len(shape):
        raise ShapeError(f"{name} has {len(given_shape)} axes, at most {len(shape)} fit", tensor=name, node=node.name)
    for axis, dim in enumerate(given_shape):
        size = shape[len(shape) - len(given_shape) + axis]
        why = f"axis {axis} of {name} fits {list(shape)}"
        if dim.constant is None:
            dim = ctx.broadcast(size, dim, why)
        if dim != 1:
            ctx.unify(dim, size, why)


def broadcast_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the broadcast of all inputs, with the last input's dtype (which ignores the condition of Where)."""
    tensors = [ctx.tensor(x) for x in node.inputs if x]
    return (Inferred(tensors[-1].dtype, broadcast_all(node, ctx, [t.shape for t in tensors])),)


# -- bodies ----------------------------------------------------------------------------------------------------------


def at(ctx: ExpandContext, name: str, index: Sequence[IndexLike]) -> Value:
    """Return a load of a tensor at the given subscripts."""
    return load(name, tuple(index), ctx.tensor(name).dtype)


def single(ctx: ExpandContext, name: str) -> Value:
    """Return the only element of a tensor."""
    return at(ctx, name, (ZERO,) * len(ctx.tensor(name).shape))


def aligned(ctx: ExpandContext, name: str, index: Sequence[IndexLike]) -> Value:
    """Return a load aligned to the last axes of an output with element ``index``. Axes of constant size 1 broadcast."""
    shape = ctx.tensor(name).shape
    tail = index[len(index) - len(shape) :]
    return at(ctx, name, [ZERO if dim == 1 else i for dim, i in zip(shape, tail, strict=True)])


def wide(x: Value) -> Value:
    """Widen an element of a storage-only dtype to the dtype used for arithmetic."""
    return cast(x, WIDENED.get(x.dtype, x.dtype))


def like(number: float | int, x: Value) -> Const:
    """Return a literal of the dtype of ``x``."""
    return const(number, x.dtype)


def scalar(ctx: ExpandContext, name: str) -> float | None:
    """Return the value of a constant with one element, else None."""
    array = ctx.constant(name)
    return None if array is None or array.size != 1 else array.reshape(-1)[0].item()


def square(x: Value) -> Value:
    """Return ``x * x``."""
    return op("mul", x, x)


def in_range(index: IndexLike, extent: IndexLike) -> Value:
    """Return the condition ``0 <= index < extent``."""
    value = FromIndex("int64", Index.of(index))
    low = op("ge", value, const(0, "int64"))
    return op("and", low, op("lt", value, FromIndex("int64", Index.of(extent))))


def all_of(conditions: Sequence[Value]) -> Value | None:
    """Return the conjunction, or None for no conditions."""
    out: Value | None = None
    for c in conditions:
        out = c if out is None else op("and", out, c)
    return out


# -- writing ---------------------------------------------------------------------------------------------------------


def emit(ctx: ExpandContext, node: OnnxNode, body: Value, position: int = 0) -> None:
    """Write a node's output: the body for every element, cast to the output's dtype."""
    name = node.outputs[position]
    t = ctx.tensor(name)
    ctx.compute(t.shape, cast(body, t.dtype), output=name)


def reduce_to(
    ctx: ExpandContext,
    node: OnnxNode,
    reduce: str,
    body: Value,
    reduction: Shape,
    finish: Callable[[Value], Value] | None = None,
) -> None:
    """Write a node's first output as a reduction, followed by ``finish`` on the result if given."""
    t = ctx.tensor(node.outputs[0])
    if finish is None and body.dtype == t.dtype:
        ctx.compute(t.shape, body, output=t.name, reduction=reduction, reduce=reduce)
        return
    total = at(ctx, ctx.compute(t.shape, body, reduction=reduction, reduce=reduce), iterators(len(t.shape)))
    emit(ctx, node, finish(total) if finish else total)


def mean_of(total: Value, extents: Sequence[Dim]) -> Value:
    """Divide a sum by the number of its terms."""
    count = ONE
    for e in extents:
        count = count * e
    return op("div", total, FromIndex(total.dtype, count))


class ReductionIndices:
    """Allocates reduction iterators. An extent of constant 1 needs none."""

    def __init__(self) -> None:
        self.extents: list[Dim] = []

    def add(self, extent: Dim) -> Index:
        """Return a subscript that runs over ``extent``."""
        if extent == 1:
            return ZERO
        self.extents.append(extent)
        return Index.of(reduction_name(len(self.extents) - 1))


def is_float(dtype: str) -> bool:
    """Check for a floating point dtype."""
    return dtype in FLOATS
