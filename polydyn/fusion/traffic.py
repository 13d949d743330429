"""Count the bytes that a group moves to and from memory. Fusion must not raise them (BladeDISC 4.1).

A kernel reads every distinct element that its loads name once, and writes its outputs once. Sizes stay symbolic: a
rewrite is accepted if the added bytes are proven to be at most the removed bytes, under the ranges that the program
guards. If this is undecided, the groups stay separate. Both plans are correct, and the choice does not depend on
run-time sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from polydyn.fusion.facts import facts_of
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Compute, Graph, iterators
from polydyn.schedules.expr import ITEMSIZE, loads
from polydyn.schedules.index import ONE, ZERO, Index, product

Term = tuple[str, str]
"""(``read`` or ``write``, tensor)."""


def terms(plan: FusionPlan, group: FusedGroup) -> set[Term]:
    """Return the reads and writes of a group. Scales and other one-element constants do not count."""
    outputs = {n.output for n in group.nodes}
    read = {t for n in group.nodes for t in plan.inputs[n.output] if not _is_number(plan.graph, t)} - outputs
    return {*(("read", t) for t in read), *(("write", t) for t in group.outputs)}


def _is_number(graph: Graph, tensor: str) -> bool:
    constant = graph.constants.get(tensor)
    return constant is not None and constant.size == 1


def size_of(graph: Graph, tensor: str) -> Index:
    """Return the bytes of a whole tensor."""
    t = graph.tensors[tensor]
    return product(t.shape) * ITEMSIZE[t.dtype]


def may_rise(
    plan: FusionPlan, before: Sequence[FusedGroup], after: Sequence[FusedGroup], rewritten: FusionPlan | None = None
) -> str | None:
    """Return the reason if ``after`` may move more bytes than ``before``, or None if it is proven not to.

    ``rewritten`` is the plan of ``after`` if nodes have changed. A join without recomputation only removes terms, which
    needs no arithmetic: two separate reads become one. Otherwise, whole tensors count as added, and only the bytes that
    loads certainly touch count as removed.
    """
    old: Counter[Term] = Counter(k for g in before for k in terms(plan, g))
    new: Counter[Term] = Counter(k for g in after for k in terms(rewritten or plan, g))
    added, removed = new - old, old - new
    if not added:
        return None
    more = sum((size_of(plan.graph, t) * n for (_, t), n in added.items()), ZERO)
    less = sum((_least(plan, before, k) * n for k, n in removed.items()), ZERO)
    if facts_of(plan.graph.facts).nonnegative(less - more):
        return None
    names = ", ".join(t for _, t in sorted(added))
    return f"off-chip traffic may rise: {more} more bytes ({names}), {less} fewer"


def _least(plan: FusionPlan, groups: Sequence[FusedGroup], key: Term) -> Index:
    """Return a lower bound of the bytes of a term. A read counts only if each group has a load that visits every
    element.
    """
    kind, tensor = key
    reading = [g for g in groups if key in terms(plan, g)]
    complete = all(any(_visits_all(plan.graph, n, tensor) for n in g.nodes) for g in reading)
    return size_of(plan.graph, tensor) if kind == "write" or complete else ZERO


def _visits_all(graph: Graph, n: Compute, tensor: str) -> bool:
    """Check whether a load of the tensor runs over all of it: plain iterators of the same extents, each once."""
    extents = dict(iterators(graph, n))
    shape = graph.tensors[tensor].shape
    for x in loads(n.body):
        if x.buffer == tensor:
            moving = [(str(i), e) for i, e in zip(x.index, shape, strict=True) if e != ONE]
            if all(extents.get(i) == e for i, e in moving) and len(dict(moving)) == len(moving):
                return True
    return False
