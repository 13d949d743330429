"""Orders: the places of a line's first elements, which a kernel finds by sorting.

``rank[d] = how many elements come before d`` and ``place[j] = the r whose rank is j`` are quadratic as they stand. No
tree of loops sorts, so a leaf does (``pd_order.h``), line by line: lines are tasks (docs/adr/0009-fusion.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.scatter import node_scatter
from polydyn.graph.ir import Compute, Dim, dim_name, reduction_name
from polydyn.schedules.expr import INTEGERS, FromIndex, Load, Op, Value
from polydyn.schedules.index import Index, fetch
from polydyn.schedules.laws.order import counts_before

TERM = reduction_name(0)


@dataclass(frozen=True)
class Order:
    """``element``: of the line along ``axis``, over ``r0`` instead of that iterator, of ``count``."""

    element: Load
    axis: int
    count: Dim
    largest: bool


def order_of(plan: FusionPlan, rank: Compute, place: Compute) -> Order | None:
    """Two nodes as an order: ranks, and the places of the first ones."""
    shape = plan.graph.tensors[rank.output].shape
    found = node_scatter(plan, place)
    if rank.reduce != "sum" or place.reduce != "sum" or found is None or len(found.places) != 1:
        return None
    ((name, where),) = found.places.items()
    axis = next(a for a in range(len(shape) + 1) if dim_name(a) == name)
    here = tuple(Index.of(TERM if a == axis else dim_name(a)) for a in range(len(shape)))
    if where != fetch(rank.output, here) or found.update != FromIndex("int64", Index.of(TERM)):
        return None
    if rank.reduction != (shape[axis],) or place.reduction != rank.reduction:
        return None
    counted = counts_before(rank.body, name, TERM)
    element = _read(counted[0]) if counted else None
    if counted is None or element is None or any(i.fetches() for i in element.index):
        return None
    steady = all(TERM not in part.symbols() for i in element.index for part in i.split(TERM))
    return Order(element, axis, shape[axis], counted[1]) if steady else None


def _read(v: Value) -> Load | None:
    """A load, perhaps widened: that keeps the order."""
    if isinstance(v, Op) and v.name == "cast" and v.dtype == "float32":
        v = v.args[0]
    return v if isinstance(v, Load) and v.dtype in SORTED else None


SORTED = ("float32", "float64", "float16", "bfloat16", *INTEGERS)
"""What leaves sort."""


def mark_orders(plan: FusionPlan) -> FusionPlan:
    """The plan with ranks and places that nobody else reads as groups of kind ``order``."""
    groups: list[FusedGroup] = []
    nodes = {n.output: n for g in plan.groups for n in g.nodes}
    ranks: dict[str, Compute] = {}
    for g in plan.groups:
        (n,) = g.nodes
        readers = plan.readers.get(n.output, ())
        last = nodes.get(readers[0]) if len(readers) == 1 and n.output not in plan.stored else None
        if last is not None and order_of(plan, n, last) is not None:
            ranks[last.output] = n
            continue
        if n.output in ranks:
            first = ranks[n.output]
            rows: dict[str, tuple[int, ...]] = {first.output: (), n.output: ()}
            g = FusedGroup("order", (first, n), g.outputs, rows, (f"{n.output}: the places of sorted elements",))
        groups.append(g)
    return replace(plan, groups=tuple(groups))
