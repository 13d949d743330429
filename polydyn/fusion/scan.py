"""Running sums: reductions over all elements up to the current one, or from it on.

In ``out[d] = reduce over r <= d of g(r)``, each element combines the previous element with one new term. This is linear
and keeps the order of the terms. Computing every element separately would be quadratic (docs/adr/0009-fusion.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.scatter import conditions_of
from polydyn.graph.ir import Compute, dim_name, reduction_name
from polydyn.schedules.expr import Op, Value, indices, neutral
from polydyn.schedules.index import ONE, Index

FORMS = {("<=", 0): (False, False), ("<=", -1): (False, True), (">=", 0): (True, False), (">=", 1): (True, True)}
"""Maps (relation, distance) of a term and an element to (backwards, exclusive)."""


@dataclass(frozen=True)
class Scan:
    """A reduction in which ``out[..., axis, ...]`` combines the terms up to its position.

    ``backwards``: from its position on. ``exclusive``: without the term of its position. ``term`` is the value over
    ``number``, the iterator of the reduction.
    """

    axis: str
    number: str
    term: Value
    backwards: bool
    exclusive: bool


def scan_of(body: Value, reduce: str | None, outer: Mapping[str, Index], inner: Mapping[str, Index]) -> Scan | None:
    """Match a reduction as a scan. ``outer`` and ``inner`` are the extents of the iterators of output and reduction."""
    if reduce is None or len(inner) != 1 or not isinstance(body, Op) or body.name not in ("where", "select"):
        return None
    condition, term, rest = body.args
    ((number, extent),) = inner.items()
    comparisons = list(conditions_of(condition))
    if rest != neutral(reduce, body.dtype) or len(comparisons) != 1 or comparisons[0] is None:
        return None
    relation, left, right = comparisons[0]
    axis = next((x for x, e in outer.items() if e == extent and (right - left).split(x)[0] == ONE), None)
    if axis is None or axis in {s for i in indices(term) for s in i.symbols()}:
        return None
    distance = (right - left - axis + number).constant
    if distance is None or (relation, distance) not in FORMS:
        return None
    backwards, exclusive = FORMS[relation, distance]
    return Scan(axis, number, term, backwards, exclusive)


def node_scan(plan: FusionPlan, n: Compute) -> Scan | None:
    """Match a node as a scan over its iterators of more than one element."""
    outer = {dim_name(a): e for a, e in enumerate(plan.graph.tensors[n.output].shape) if e != ONE}
    inner = {reduction_name(j): e for j, e in enumerate(n.reduction) if e != ONE}
    return scan_of(n.body, n.reduce, outer, inner)


def mark_scans(plan: FusionPlan) -> FusionPlan:
    """Mark groups of kind ``scan``. Nothing joins them, because they must keep the order of the terms."""
    return replace(plan, groups=tuple(_marked(plan, g) for g in plan.groups))


def _marked(plan: FusionPlan, g: FusedGroup) -> FusedGroup:
    if g.kind != "nest" or len(g.nodes) > 1 or node_scan(plan, g.nodes[0]) is None:
        return g
    return replace(g, kind="scan", reasons=(f"{g.nodes[0].output}: goes on from the element before",))
