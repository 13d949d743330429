"""Argsort and top-k: a kernel finds the positions of a line's first elements by sorting.

``rank[d] = number of elements before d`` and ``place[j] = the r whose rank is j`` are quadratic as loop nests. Loops
cannot sort, so a leaf function sorts line by line (``pd_order.h``). Lines are tasks (docs/adr/0009-fusion.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.scatter import scatter_of
from polydyn.graph.ir import Compute, Dim, dim_name, reduction_name
from polydyn.schedules.expr import INTEGERS, FromIndex, Load, Op, Value
from polydyn.schedules.index import Index, fetch
from polydyn.schedules.laws.order import counts_before

TERM = reduction_name(0)


@dataclass(frozen=True)
class ArgSort:
    """An argsort of lines of ``count`` elements along ``axis``. ``element`` loads one, with iterator ``r0`` for
    ``axis``.
    """

    element: Load
    axis: int
    count: Dim
    largest: bool


def match_argsort(plan: FusionPlan, rank: Compute, place: Compute) -> ArgSort | None:
    """Match two nodes as an argsort: ranks, and the positions of the first elements. Returns None if they are not
    one.
    """
    shape = plan.graph.tensors[rank.output].shape
    if rank.reduce != "sum" or place.reduce != "sum" or len(place.reduction) != 1:
        return None
    # axes of one position are iterators here, too
    results = {dim_name(a): e for a, e in enumerate(plan.graph.tensors[place.output].shape)}
    scatter = scatter_of(place.body, place.reduce, results, {TERM: place.reduction[0]})
    if scatter is None or len(scatter.places) != 1:
        return None
    ((name, where),) = scatter.places.items()
    axis = next(a for a in range(len(shape) + 1) if dim_name(a) == name)
    here = tuple(Index.of(TERM if a == axis else dim_name(a)) for a in range(len(shape)))
    if where != fetch(rank.output, here) or scatter.update != FromIndex("int64", Index.of(TERM)):
        return None
    if rank.reduction != (shape[axis],) or place.reduction != rank.reduction:
        return None
    counted = counts_before(rank.body, name, TERM)
    element = _read(counted[0]) if counted else None
    if counted is None or element is None or any(i.fetches() for i in element.index):
        return None
    steady = all(TERM not in part.symbols() for i in element.index for part in i.split(TERM))
    return ArgSort(element, axis, shape[axis], counted[1]) if steady else None


def _read(v: Value) -> Load | None:
    """Return the load inside a value. It may be widened to float32, which keeps the order."""
    if isinstance(v, Op) and v.name == "cast" and v.dtype == "float32":
        v = v.args[0]
    return v if isinstance(v, Load) and v.dtype in SORTABLE_DTYPES else None


SORTABLE_DTYPES = ("float32", "float64", "float16", "bfloat16", *INTEGERS)
"""Dtypes that the sorting leaf functions support."""


def mark_argsorts(plan: FusionPlan) -> FusionPlan:
    """Mark each pair of ranks and positions as a group of kind ``order`` if the ranks have no other reader."""
    groups: list[FusedGroup] = []
    nodes = {n.output: n for g in plan.groups for n in g.nodes}
    ranks: dict[str, Compute] = {}
    for g in plan.groups:
        (n,) = g.nodes
        readers = plan.readers.get(n.output, ())
        last = nodes.get(readers[0]) if len(readers) == 1 and n.output not in plan.stored else None
        if last is not None and match_argsort(plan, n, last) is not None:
            ranks[last.output] = n
            continue
        if n.output in ranks:
            first = ranks[n.output]
            rows: dict[str, tuple[int, ...]] = {first.output: (), n.output: ()}
            g = FusedGroup("order", (first, n), g.outputs, rows, (f"{n.output}: the places of sorted elements",))
        groups.append(g)
    return replace(plan, groups=tuple(groups))
