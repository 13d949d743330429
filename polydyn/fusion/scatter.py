"""Scatters: reductions in which each term affects one element, at a position that depends on data.

``out[d] = reduce over r of where(d == f(r), g(r), neutral)`` tests every term for every element. All instances with
another ``d`` combine with the neutral element, which changes nothing, so they need not run. A loop over ``r`` that
updates ``out[f(r)]`` remains, which is linear. Updates run in the order of ``r``, so updates of the same element keep
their order (docs/adr/0009-fusion.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Compute, Dim, dim_name, reduction_name
from polydyn.schedules.expr import (
    INTEGERS,
    REDUCTIONS,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    indices,
    loads,
    map_index,
    neutral,
    substitute,
)
from polydyn.schedules.index import ONE, ZERO, Index, fetch, maximum, minimum, product

MIN_SCATTER_TERMS = 8
"""With at most this many terms, every element tests them all: the node stays a map, and fuses."""
RELATIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}

Condition = tuple[str, Index, Index]
"""(relation, left, right)."""


@dataclass(frozen=True)
class Scatter:
    """A reduction in which ``update`` is combined into ``out[..., places, ...]`` if all ``conditions`` hold.

    Conditions are tested in order. ``places`` maps an output iterator to the position along its axis, an Index over the
    other iterators and fetched values. The position is inside its axis if the conditions hold.
    """

    places: Mapping[str, Index]
    conditions: tuple[Condition, ...]
    update: Value


def scatter_of(
    body: Value, reduce: str | None, outer: Mapping[str, Index], inner: Mapping[str, Index]
) -> Scatter | None:
    """Match a reduction as a scatter. ``outer`` and ``inner`` are the extents of the iterators of output and
    reduction.
    """
    if reduce is None or not isinstance(body, Op) or body.name not in ("where", "select"):
        return None
    matches, update, rest = body.args
    comparisons = list(conditions_of(matches))
    if rest != neutral(reduce, body.dtype) or None in comparisons:
        return None
    places: dict[str, Index] = {}
    others: list[Condition] = []
    for c in comparisons:
        assert c is not None
        axis, place = _place(c, outer)
        if axis and axis not in places and any(x in place.symbols() for x in inner) and place.fetches():
            places[axis] = place
        else:
            others.append(c)
    moved = [(r, a.subs(places), b.subs(places)) for r, a, b in others]
    update = substitute(update, places)
    left = [*places.values(), *(i for _, a, b in moved for i in (a, b)), *indices(update)]
    if not places or any(x in places for i in left for x in i.symbols()):
        return None
    inside = [c for x, i in places.items() for c in (("<=", ZERO, i), ("<", i, outer[x]))]
    return Scatter(places, (*sorted(moved, key=_fetches), *inside), update)


def _fetches(c: Condition) -> bool:
    """Sort key: conditions that fetch follow those that keep these fetches in range."""
    return bool(c[1].fetches() or c[2].fetches())


def conditions_of(v: Value) -> Iterator[Condition | None]:
    """Yield the integer comparisons that all must hold, and None for any other condition."""
    if isinstance(v, Op) and (v.name == "and" or (v.name in ("where", "select") and v.args[2] == Const("bool", False))):
        yield from conditions_of(v.args[0])
        yield from conditions_of(v.args[1])
        return
    if not isinstance(v, Op) or v.name not in RELATIONS:
        yield None
        return
    left, right = map(_integer, v.args)
    yield None if left is None or right is None else (RELATIONS[v.name], left, right)


def _integer(v: Value) -> Index | None:
    """Return a value as a subscript. ``where(x < 0, x + n, x)``, which counts from the end, becomes branch-free."""
    if isinstance(v, FromIndex):
        return v.index
    if isinstance(v, Const) and v.dtype in INTEGERS:
        return Index.of(int(v.value))
    if isinstance(v, Load) and v.dtype in INTEGERS:
        return fetch(v.buffer, v.index)
    if not isinstance(v, Op) or v.dtype != "int64":
        return None
    if v.name == "cast":
        return _integer(v.args[0])
    parts = [_integer(x) for x in v.args[-2:]]
    if None in parts:
        return None
    first, second = parts
    assert first is not None and second is not None
    if v.name in ("add", "sub"):
        return first + second if v.name == "add" else first - second
    if v.name in ("where", "select") and v.args[0] == Op("bool", "lt", (v.args[2], Const("int64", 0))):
        return second - (first - second) * maximum(minimum(second, 0), -1)
    return None


def _place(c: Condition, outer: Mapping[str, Index]) -> tuple[str, Index]:
    """Return (iterator, position that it must equal), or ("", 0) if the condition has another form."""
    relation, a, b = c
    for x, y in ((a, b), (b, a)):
        if relation == "==" and x.is_symbol and str(x) in outer and str(x) not in y.symbols():
            return str(x), y
    return "", ZERO


def node_scatter(plan: FusionPlan, n: Compute) -> Scatter | None:
    """Match a node as a scatter over its iterators of more than one element."""
    outer = {dim_name(a): e for a, e in enumerate(plan.graph.tensors[n.output].shape) if e != ONE}
    inner = {reduction_name(j): e for j, e in enumerate(n.reduction) if e != ONE}
    return scatter_of(n.body, n.reduce, outer, inner)


def mark_scatters(plan: FusionPlan) -> FusionPlan:
    """Mark groups of kind ``scatter``. Nothing joins them except a map of the result (``finished``)."""
    groups: list[FusedGroup] = []
    finishing: dict[str, Compute] = {}
    for g in plan.groups:
        n = g.nodes[0]
        if g.kind == "nest" and _is_scatter(plan, n):
            readers = plan.readers.get(n.output, ())
            last = next((m for m in plan.graph.nodes if readers == (m.output,)), None)
            if isinstance(last, Compute) and n.output not in plan.stored and finished(n, last) is not None:
                finishing[last.output] = n
                continue
            g = replace(g, kind="scatter", reasons=(_reason(n),))
        elif n.output in finishing:
            first = finishing[n.output]
            rows: dict[str, tuple[int, ...]] = {first.output: (), n.output: ()}
            g = FusedGroup("scatter", (first, n), g.outputs, rows, (_reason(n),))
        groups.append(g)
    return replace(plan, groups=tuple(groups))


def _reason(n: Compute) -> str:
    return f"{n.output}: updates elements at places that data decide"


def _is_scatter(plan: FusionPlan, n: Compute) -> bool:
    terms = product(n.reduction).constant
    return (terms is None or terms > MIN_SCATTER_TERMS) and node_scatter(plan, n) is not None


@dataclass(frozen=True)
class Finished:
    """A scatter together with the map of its result: elements begin as ``start``, then ``terms`` are applied in order.

    ``terms`` is a reduction that is a scatter. ``overwrites``: each term replaces the element instead of being
    combined.
    """

    start: Value
    terms: Compute
    overwrites: bool


def finished(scatter: Compute, last: Compute) -> Finished | None:
    """Combine a scatter with the only reader of its result. Returns None unless the reader has one of two forms.

    ``a + total``, and the same for products and extremes: combining begins with ``a``, in the order that ONNX
    describes, and rounds in this order. ``where(total >= 0, f(total), a)``, where total is the greatest term number:
    the last term wins, so each term overwrites the element with ``f`` of its number.
    """
    body = last.body
    if last.reduce is not None or not isinstance(body, Op) or scatter.reduce is None:
        return None
    reads = [x for x in loads(body) if x.buffer == scatter.output]
    places = [x.index for x in reads] + [f.args for i in indices(body) for f in i.fetches() if f.name == scatter.output]
    if len(reads) != 1 or any(p != places[0] for p in places):
        return None
    (total,) = reads
    if body.name == REDUCTIONS[scatter.reduce] and total in body.args and len(places) == 1:
        same = all(str(i) == dim_name(k) for k, i in enumerate(total.index))
        start = body.args[1 - body.args.index(total)]
        return Finished(start, replace(scatter, output=last.output), False) if same else None
    chosen = Op("bool", "ge", (total, Const("int64", 0)))
    if body.name != "where" or body.args[0] != chosen or not all(i.is_symbol for i in total.index):
        return None
    term = scatter.body.args[1] if isinstance(scatter.body, Op) and scatter.reduce == "max" else None
    if term != FromIndex("int64", _number(scatter.reduction)):
        return None
    new = map_index(body.args[1], lambda i: _with(i, scatter.output, _number(scatter.reduction)))
    here = {dim_name(k): i for k, i in enumerate(total.index)}
    match = substitute(scatter.body.args[0], here)  # type: ignore[attr-defined]
    terms = Op(new.dtype, "where", (match, new, neutral("max", new.dtype)))
    return Finished(body.args[2], Compute(last.output, terms, scatter.reduction, "max", last.origin), True)


def _number(reduction: tuple[Dim, ...]) -> Index:
    """Return the number of a term in the order of the reduction."""
    place = ZERO
    for j, e in enumerate(reduction):
        place = place * e + Index.of(reduction_name(j))
    return place


def _with(i: Index, tensor: str, number: Index) -> Index:
    """Replace the elements that a subscript fetches from a tensor."""
    return i.rebuild(lambda a: number if a.kind == "fetch" and a.name == tensor else Index({(a,): 1}))
