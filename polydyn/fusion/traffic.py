"""Bytes that a group moves to and from memory, and the rule that fusing must not raise them (BladeDISC 4.1).

A kernel reads every distinct element that its loads name once, and writes its outputs once. Sizes stay symbolic: a
rewrite is accepted when what it adds is proven to be no more than what it removes, under the ranges that the program
guards. Where that is not decided the groups stay apart: both ways are right, and the choice does not depend on the run.
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
    """What a group reads and writes. Scales and other constants of one element do not count."""
    outputs = {n.output for n in group.nodes}
    read = {t for n in group.nodes for t in plan.inputs[n.output] if not _is_number(plan.graph, t)} - outputs
    return {*(("read", t) for t in read), *(("write", t) for t in group.outputs)}


def _is_number(graph: Graph, tensor: str) -> bool:
    constant = graph.constants.get(tensor)
    return constant is not None and constant.size == 1


def size_of(graph: Graph, tensor: str) -> Index:
    """Bytes of a whole tensor."""
    t = graph.tensors[tensor]
    return product(t.shape) * ITEMSIZE[t.dtype]


def may_rise(
    plan: FusionPlan, before: Sequence[FusedGroup], after: Sequence[FusedGroup], rewritten: FusionPlan | None = None
) -> str | None:
    """Why ``after`` may move more bytes than ``before``; None when it is proven not to.

    ``rewritten``: the plan that ``after`` belongs to, where nodes have changed. A join without recomputation only loses
    terms, which needs no arithmetic: what two groups read apart they read together. Of other terms
    whole tensors are added, and only what loads surely touch is saved.
    """
    old: Counter[Term] = Counter(k for g in before for k in terms(plan, g))
    new: Counter[Term] = Counter(k for g in after for k in terms(rewritten or plan, g))
    added, removed = new - old, old - new
    if not added:
        return None
    more = sum((size_of(plan.graph, t) * n for (_, t), n in added.items()), ZERO)
    less = sum((_least(plan, before, k) * n for k, n in removed.items()), ZERO)
    if facts_of(plan.graph.guards).nonnegative(less - more):
        return None
    names = ", ".join(t for _, t in sorted(added))
    return f"off-chip traffic may rise: {more} more bytes ({names}), {less} fewer"


def _least(plan: FusionPlan, groups: Sequence[FusedGroup], key: Term) -> Index:
    """A lower bound of the bytes of a term: a read counts where a load of every group visits each element."""
    kind, tensor = key
    reading = [g for g in groups if key in terms(plan, g)]
    complete = all(any(_visits_all(plan.graph, n, tensor) for n in g.nodes) for g in reading)
    return size_of(plan.graph, tensor) if kind == "write" or complete else ZERO


def _visits_all(graph: Graph, n: Compute, tensor: str) -> bool:
    """Whether a load of the tensor runs over all of it: plain iterators of the same extents, each once."""
    extents = dict(iterators(graph, n))
    shape = graph.tensors[tensor].shape
    for x in loads(n.body):
        if x.buffer == tensor:
            moving = [(str(i), e) for i, e in zip(x.index, shape, strict=True) if e != ONE]
            if all(extents.get(i) == e for i, e in moving) and len(dict(moving)) == len(moving):
                return True
    return False
