"""Rewrites of a group before it is scheduled: merged, reordered and split reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import INTEGERS, PRODUCTS, FromIndex, Load, Op, Value, const, op, substitute, transform
from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.index import Index, product
from polydyn.schedules.model import SHARE, SHARES, Group, Statement, row_major
from polydyn.schedules.tree.scheduled import refuse

V = Index.of


def merge(group: Group, iterators: Sequence[str], into: str) -> tuple[Group, dict[str, Index]]:
    """Merge the reductions of a group into one, their mixed radix (the first is the most significant).

    Return the group and each old iterator as a function of ``into``. A product of parameters has no affine form, so
    such an extent becomes the parameter ``steps``.
    isl: none; Halide, TVM: fuse.
    Before: for k, r. After: for step, with k = step // R and r = step % R.
    Refuses: anything except inputs depends on the single iterators.
    """
    acc = group.backbone
    if len(iterators) == 1 and iterators[0] == into:
        return group, {}
    for a in (acc.write, *(a for a in read_accesses(acc) if group.arrays[a.array].role == "local")):
        if any(i.symbols() & set(iterators) for i in a.index):
            raise ScheduleError(f"{acc.name} accesses {a.array} at a reduction step", node=acc.name, tensor=a.array)
    extents = dict(acc.iters)
    size, env, rest = product(extents[x] for x in iterators), dict[str, Index](), V(into)
    for x in reversed(iterators[1:]):
        env[x], rest = rest % extents[x], rest // extents[x]
    env[iterators[0]] = rest
    affine = size.constant is not None or size.is_symbol
    iters = (*(x for x in acc.iters if x[0] not in iterators), (into, size if affine else V("steps")))
    one = replace(acc, iters=iters, value=substitute(acc.value, env))
    statements = tuple(one if s is acc else s for s in group.statements)
    params = group.params if affine else (*group.params, "steps")
    return replace(group, params=params, statements=statements), env


def pad_reduction(group: Group, iterator: str, extent: Index) -> Group:
    """Extend a sum of products to ``extent`` along a reduction; both factors are 0 in the added part.

    isl: none; Halide: align_bounds; TVM: pad_einsum.
    Before: for k < n: D[x] += a(x, k) * b(x, k). After: for k < extent: D[x] += (a(x, k) if k < n else 0) * (b(x, k) if
    k < n else 0).
    Refuses: a reduction that is not a sum of products; an unknown extent.
    """
    acc, (low, high) = group.backbone, (dict(group.backbone.iters)[iterator].constant, extent.constant)
    v = acc.value
    if (
        acc.reduce != "sum"
        or not (isinstance(v, Op) and v.name in PRODUCTS)
        or low is None
        or high is None
        or high < low
    ):
        raise refuse(f"{acc.name} is not a sum of products that {low} steps could extend to {high}")
    exists = op("lt", FromIndex("int64", V(iterator)), const(low, "int64"))

    def factor(x: Value) -> Value:
        if isinstance(x, Op) and x.name == "cast":  # the widening stays outermost
            return replace(x, args=(factor(x.args[0]),))
        zero = const(0 if x.dtype in INTEGERS else 0.0, x.dtype)
        if isinstance(x, Op) and x.name == "where" and x.args[2] == zero:
            return replace(x, args=(op("and", x.args[0], exists), *x.args[1:]))
        return op("where", exists, x, zero)

    iters = tuple((x, extent if x == iterator else e) for x, e in acc.iters)
    longer = replace(acc, iters=iters, value=replace(v, args=tuple(map(factor, v.args))))
    return replace(group, statements=tuple(longer if s is acc else s for s in group.statements))


def permute_reduction(group: Group, order: Sequence[str]) -> Group:
    """Reorder the reduction's iterators, outermost first. isl: a band's partial schedule; Halide, TVM: reorder.

    Before: for j, k: D[x] += f(x, j, k). After: for k, j.
    Refuses: a reduction that may not be reassociated; other iterators than the reduction's.
    """
    acc = group.backbone
    reassociated(acc)
    last = acc.iters[len(acc.iters) - len(order) :]
    if sorted(order) != sorted(x for x, _ in last):
        raise refuse(f"{list(order)} are not the iterators of {acc.name}'s reduction: {[x for x, _ in last]}")
    one = replace(acc, iters=(*acc.iters[: -len(order)], *((x, dict(last)[x]) for x in order)))
    return replace(group, statements=tuple(one if s is acc else s for s in group.statements))


def reassociated(acc: Statement) -> None:
    """Refuse a reduction whose steps may not be reordered."""
    if acc.reduce not in ("sum", "max", "min"):
        raise refuse(f"{acc.reduce} may not be reassociated")


def split_reduction(group: Group, share: str = SHARE, shares: str = SHARES) -> Group:
    """Split a reduction (split-K): every statement runs once per slice, with ``share`` as one more parallel iterator.

    ``shares`` is the number of slices. The kernel selects the steps of a slice (``passes.tiles.balance`` and
    ``share_steps``: consecutive slices that cover all steps); here each slice sums all steps.
    isl: none; Halide, TVM: rfactor.
    Before: D[x] += f(x, k). After: D[x, share] += f(x, k).
    Refuses: a reduction that may not be reassociated.
    """
    acc = group.backbone
    reassociated(acc)
    more, old = (share, V(shares)), group.arrays[acc.array]
    shape = (*old.shape, V(shares))
    arrays = {**group.arrays, acc.array: replace(old, shape=shape, strides=row_major(shape))}

    def value(v: Value) -> Value:
        return replace(v, index=(*v.index, V(share))) if isinstance(v, Load) and v.buffer == acc.array else v

    def in_slices(s: Statement) -> Statement:
        index = (*s.index, V(share)) if s.array == acc.array else s.index
        return replace(s, iters=(more, *s.iters), index=index, value=transform(s.value, value))

    params = group.params if shares in group.params else (*group.params, shares)
    return replace(group, params=params, arrays=arrays, statements=tuple(map(in_slices, group.statements)))


CLEAR, SUM, PARTS = "CLEAR", "SUM", "parts"
"""The statements that add partial sums, and the array of these."""
ROUND, PART, POINT = "round", "part", "point"
"""The iterators of a reduction that is split over lanes: k = (round * lanes + part) * points + point."""


def deal_reduction(group: Group, iterator: str, lanes: int, points: int) -> tuple[Group, dict[str, Index]]:
    """Split a reduction over lanes that sum separately, and add their sums.

    A lane has ``points`` consecutive steps in every round. Return the group and the old iterator as a function of the
    new ones. The schedule cuts the loops after the last step (``TileMap.joined``).
    isl: none; Halide, TVM: rfactor.
    Before: D[x] = 0; D[x] += f(x, k). After: parts[x, part] = 0; parts[x, part] += f(x, k); D[x] = 0; D[x] += parts[x,
    part].
    Refuses: a reduction that may not be reassociated, or has other iterators too.
    """
    acc, init = group.backbone, group.init
    if acc.reduce != "sum":
        raise refuse(f"{acc.reduce} cannot be split over lanes")
    if set(acc.iterators) - set(init.iterators) != {iterator}:
        raise refuse(f"{acc.name} sums over more than {iterator}")
    k = (V(ROUND) * lanes + PART) * points + POINT
    rounds = dict(acc.iters)[iterator].ceildiv(lanes * points)
    affine = rounds.constant is not None
    shares, old = (PART, V(lanes)), group.arrays[acc.array]
    shape = (*old.shape, V(lanes))
    arrays = {**group.arrays, PARTS: replace(old, name=PARTS, shape=shape, strides=row_major(shape))}
    steps = ((ROUND, rounds if affine else V("rounds")), shares, (POINT, V(points)))
    index = (*acc.index, V(PART))
    statements: list[Statement] = []
    for s in group.statements:
        if s is init:
            statements.append(replace(s, iters=(*s.iters, shares), array=PARTS, index=(*s.index, V(PART))))
        elif s is acc:
            value = substitute(s.value, {iterator: k})
            statements += [replace(s, iters=(*init.iters, *steps), array=PARTS, index=index, value=value),
                           replace(init, name=CLEAR),
                           Statement(SUM, (*init.iters, shares), s.array, s.index, Load(old.dtype, PARTS, index), "sum",
                                     "backbone")]  # fmt: skip
        else:
            statements.append(s)
    params = group.params if affine else (*group.params, "rounds")
    return replace(group, params=params, arrays=arrays, statements=tuple(statements)), {iterator: k}
