"""Join reductions of the same rows of one tensor, such as its minimum and its maximum.

Neither reads a result of the other, so no rule about producers and readers joins them.
"""

from __future__ import annotations

from collections.abc import Hashable

from polydyn.fusion.partition import Join, Partition
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.schedules.expr import Load


def join_siblings(plan: FusionPlan) -> FusionPlan:
    """Join each group of one such reduction to the first group with the same key."""
    p = Partition(plan)
    first: dict[Hashable, int] = {}
    for g in p.order():
        key = _rows(plan, p.groups[g])
        if key is not None and (a := first.setdefault(key, g)) != g:
            p.try_join(a, g, lambda _, x, y: Join({**x.rows, **y.rows}, "reduces the same rows (input fusion)"))
    return p.plan()


def _rows(plan: FusionPlan, g: FusedGroup) -> Hashable | None:
    """Return a key of the elements that a one-reduction group reads and of its extents; None for other groups."""
    n = g.nodes[0]
    if g.kind != "nest" or len(g.nodes) > 1 or n.is_map or not isinstance(n.body, Load):
        return None
    return n.body, n.reduction, plan.graph.tensors[n.output].shape
