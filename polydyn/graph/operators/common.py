"""What the operators' rules and expansions share: broadcasting, aligned loads, wide arithmetic, reductions."""

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
    """The optional input or output at a position, None when it is absent."""
    return names[position] if position < len(names) and names[position] else None


def normalize_axis(node: OnnxNode, axis: int, rank: int) -> int:
    """The axis counted from the front. ModelError when it is not an axis."""
    if not -rank <= axis < max(rank, 1):
        raise ModelError(f"axis {axis} of a tensor with {rank} axes", node=node.name)
    return axis % rank if rank else 0


def iterators(rank: int) -> tuple[Index, ...]:
    """The output iterators ``d0, d1, ...``."""
    return tuple(Index.of(dim_name(a)) for a in range(rank))


def refuse(node: OnnxNode, what: str, remedy: str | None = None) -> UnsupportedError:
    """The error for a part of an operator that is not built."""
    return UnsupportedError(f"{node.op}: {what} is not supported", node=node.name, remedy=remedy)


# -- shape rules -----------------------------------------------------------------------------------------------------


def same_as_input(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """One output, with the type and shape of the first input."""
    t = ctx.tensor(node.inputs[0])
    return (Inferred(t.dtype, t.shape),)


def broadcast_all(node: OnnxNode, ctx: InferContext, shapes: Sequence[Shape]) -> Shape:
    """The common shape of several by numpy's rule."""
    rank = max(map(len, shapes))
    out = [ONE] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            out[axis] = ctx.broadcast(out[axis], dim, f"{node.op} {node.name} broadcasts axis {axis}")
    return tuple(out)


def fits(node: OnnxNode, ctx: InferContext, name: str, shape: Shape) -> None:
    """A parameter broadcasts to ``shape`` and no further: each of its dims is 1 or that of the shape."""
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
    """One output: the inputs' broadcast, with the last input's dtype (which leaves out the condition of Where)."""
    tensors = [ctx.tensor(x) for x in node.inputs if x]
    return (Inferred(tensors[-1].dtype, broadcast_all(node, ctx, [t.shape for t in tensors])),)


# -- bodies ----------------------------------------------------------------------------------------------------------


def at(ctx: ExpandContext, name: str, index: Sequence[IndexLike]) -> Value:
    """A load of a tensor at the given subscripts."""
    return load(name, tuple(index), ctx.tensor(name).dtype)


def single(ctx: ExpandContext, name: str) -> Value:
    """The only element of a tensor."""
    return at(ctx, name, (ZERO,) * len(ctx.tensor(name).shape))


def aligned(ctx: ExpandContext, name: str, index: Sequence[IndexLike]) -> Value:
    """A load aligned to the last axes of an output whose element is ``index``; axes of constant size 1 broadcast."""
    shape = ctx.tensor(name).shape
    tail = index[len(index) - len(shape) :]
    return at(ctx, name, [ZERO if dim == 1 else i for dim, i in zip(shape, tail, strict=True)])


def wide(x: Value) -> Value:
    """An element of a type of memory only, in the type that arithmetic on it is done in."""
    return cast(x, WIDENED.get(x.dtype, x.dtype))


def like(number: float | int, x: Value) -> Const:
    """A literal of the dtype of ``x``."""
    return const(number, x.dtype)


def scalar(ctx: ExpandContext, name: str) -> float | None:
    """The value of a constant with one element, else None."""
    array = ctx.constant(name)
    return None if array is None or array.size != 1 else array.reshape(-1)[0].item()


def square(x: Value) -> Value:
    """``x * x``."""
    return op("mul", x, x)


def in_range(index: IndexLike, extent: IndexLike) -> Value:
    """The condition ``0 <= index < extent``."""
    value = FromIndex("int64", Index.of(index))
    low = op("ge", value, const(0, "int64"))
    return op("and", low, op("lt", value, FromIndex("int64", Index.of(extent))))


def all_of(conditions: Sequence[Value]) -> Value | None:
    """The conjunction, None for none."""
    out: Value | None = None
    for c in conditions:
        out = c if out is None else op("and", out, c)
    return out


# -- writing ---------------------------------------------------------------------------------------------------------


def emit(ctx: ExpandContext, node: OnnxNode, body: Value, position: int = 0) -> None:
    """Writes a node's output: the body cast to the output's dtype, for every element."""
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
    """Writes a node's first output as a reduction, followed by ``finish`` on the result where there is one."""
    t = ctx.tensor(node.outputs[0])
    if finish is None and body.dtype == t.dtype:
        ctx.compute(t.shape, body, output=t.name, reduction=reduction, reduce=reduce)
        return
    total = at(ctx, ctx.compute(t.shape, body, reduction=reduction, reduce=reduce), iterators(len(t.shape)))
    emit(ctx, node, finish(total) if finish else total)


def mean_of(total: Value, extents: Sequence[Dim]) -> Value:
    """A sum divided by the number of its terms."""
    count = ONE
    for e in extents:
        count = count * e
    return op("div", total, FromIndex(total.dtype, count))


class ReductionIndices:
    """Hands out reduction iterators; an extent that is constant 1 needs none."""

    def __init__(self) -> None:
        self.extents: list[Dim] = []

    def add(self, extent: Dim) -> Index:
        """The subscript that runs over ``extent``."""
        if extent == 1:
            return ZERO
        self.extents.append(extent)
        return Index.of(reduction_name(len(self.extents) - 1))


def is_float(dtype: str) -> bool:
    """True for the floating point dtypes."""
    return dtype in FLOATS
