"""ScatterND at positions that are formulas: how exporters write ``x[:, 1:] = y``.

Every kernel of polydyn computes elements where they lie, so a scatter has to be turned round: an element asks whether
and from where it is written. That is possible when each index of the updates moves along one axis of the data by 1;
then no element is written twice. Indices that are data would need a kernel that writes in an order; they are refused.
"""

from __future__ import annotations

from polydyn.errors import ShapeError
from polydyn.graph.operators.common import all_of, at, emit, in_range, iterators, refuse, same_as_input
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import Value, op
from polydyn.schedules.index import ONE, ZERO, Index

REDUCTIONS = {"add": "add", "mul": "mul", "max": "max", "min": "min"}
"""ONNX's name of what combines old and new elements -> the operation."""


def infer_scatter_nd(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """ScatterND: the shape of the data; the updates have one slice for every index tuple."""
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    k = indices.shape[-1].constant if indices.shape else None
    if k is None:
        raise refuse(node, "a tuple length that is not constant")
    if k > len(data.shape):
        raise ShapeError(f"index tuples of length {k} for rank {len(data.shape)}", tensor=indices.name)
    wanted = indices.shape[:-1] + data.shape[int(k) :]
    if len(updates.shape) != len(wanted):
        raise ShapeError(f"{len(updates.shape)} axes of updates, not {len(wanted)}", tensor=updates.name)
    for a, (have, want) in enumerate(zip(updates.shape, wanted, strict=True)):
        ctx.unify(have, want, f"ScatterND {node.name}: axis {a} of {updates.name} fits the indices and the data")
    return same_as_input(node, ctx)


@operator("ScatterND", infer=infer_scatter_nd)
def expand_scatter_nd(node: OnnxNode, ctx: ExpandContext) -> None:
    """``out[d...] = updates[where d was written from] if it was written, else data[d...]``."""
    data, indices, updates = (ctx.tensor(n) for n in node.inputs)
    k, outer = int(indices.shape[-1].constant or 0), len(indices.shape) - 1
    d = iterators(len(data.shape))
    source, inside = _turned_round(node, ctx, k)
    place = (*source, *d[k:])
    assert len(place) == outer + len(d) - k
    old, new = at(ctx, data.name, d), at(ctx, updates.name, place)
    reduction = node.attribute("reduction", "none")
    if reduction != "none":
        if reduction not in REDUCTIONS:
            raise refuse(node, f"reduction {reduction}")
        new = op(REDUCTIONS[reduction], old, new)
    condition = all_of(inside)
    emit(ctx, node, new if condition is None else op("where", condition, new, old))


def _turned_round(node: OnnxNode, ctx: ExpandContext, k: int) -> tuple[list[Index], list[Value]]:
    """The subscripts of the updates' outer axes over the data's iterators, and the conditions that there is one."""
    data, indices = ctx.tensor(node.inputs[0]), ctx.tensor(node.inputs[1])
    sizes = indices.shape[:-1]
    names = [f"s{a}" for a in range(len(sizes))]
    ranges = {n: e for n, e in zip(names, sizes, strict=True) if e != ONE}
    where = tuple(Index.of(n) if n in ranges else ZERO for n in names)
    left: dict[int, Index] = {}
    for j in range(k):
        found = ctx.position(indices.name, (*where, Index.of(j)), data.shape[j], ranges)
        if found is None:
            raise refuse(node, f"index {j} of the tuples in {indices.name}, which is data,", "compute it from shapes")
        left[j] = found
    d, source, inside = iterators(len(data.shape)), [], []
    for n, e in zip(names, sizes, strict=True):
        if n not in ranges:
            source.append(ZERO)
            continue
        moving = [j for j, f in left.items() if n in f.symbols()]
        step, rest = left[moving[0]].split(n) if len(moving) == 1 else (ZERO, ZERO)
        if step != ONE or rest.symbols() & ranges.keys():
            raise refuse(node, f"a place of {indices.name} that does not move by 1 along one axis")
        source.append(d[moving[0]] - rest)
        inside.append(in_range(source[-1], e))
        del left[moving[0]]
    return source, inside + [in_range(d[j] - f, ONE) for j, f in left.items()]
