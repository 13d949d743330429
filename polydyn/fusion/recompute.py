"""Input-inline (BladeDISC 4.2): readers recompute a cheap element-wise producer if this lowers traffic.

The producer joins no reader (they read it along other axes, or there are several), but its result need not go through
memory. The bytes decide: two readers of ``a + b`` read ``a`` and ``b`` twice, but the sum is neither written nor read.
With many readers this costs more. So does a broadcast: every element would be recomputed at each position that reads
it.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.facts import facts_of
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.traffic import may_rise
from polydyn.graph.ir import Compute, Graph, iterators, value_size
from polydyn.graph.rewriting import compose, composed_size
from polydyn.schedules.expr import Op, loads, walk
from polydyn.schedules.index import product

MAX_OPERATIONS = 6
"""Maximum operations of a value that is recomputed."""
MAX_VALUES = 8 * MAX_OPERATIONS
"""Maximum operations and loads of a value that is examined: operations of a few operands have fewer."""
TOO_MUCH = "it costs more than a few simple operations"
CHEAP_OPS = frozenset(
    ("add", "sub", "mul", "max", "min", "neg", "abs", "cast", "where", "select", "and", "or", "xor", "not")
) | {"lt", "le", "eq", "ne", "gt", "ge"}  # fmt: skip


def recompute_producers(plan: FusionPlan) -> FusionPlan:
    """Dissolve each element-wise group that all its readers can recompute with fewer bytes."""
    refused = dict(plan.refused)
    home = {n.output: g for g in plan.groups for n in g.nodes}
    for first in [g.nodes[0].output for g in plan.groups]:
        g = home[first]  # the current group
        if g.kind != "nest" or len(g.outputs) != 1 or g.outputs[0] in plan.stored or not all(n.is_map for n in g.nodes):
            continue
        reading = plan.readers[g.outputs[0]]
        readers = list({id(home[r]): home[r] for r in reading if home[r] is not g}.values())
        smaller = _dissolved(plan, g, readers)
        if isinstance(smaller, FusionPlan):
            plan = smaller
            home = {n.output: x for x in plan.groups for n in x.nodes} | {first: g}
            continue
        for pair in ((g.outputs[0], r) for r in reading if home[r] is not g):
            refused[pair] = "; ".join([*filter(None, [refused.get(pair)]), f"not computed again: {smaller}"])
    return replace(plan, refused=refused)


def _dissolved(plan: FusionPlan, g: FusedGroup, readers: list[FusedGroup]) -> FusionPlan | str:
    """Return the plan with one group dissolved into its readers, or the reason against it."""
    if composed_size(g.nodes[-1], g.nodes[:-1]) > MAX_VALUES:
        return TOO_MUCH
    producer = compose(g.nodes[-1], g.nodes[:-1])
    reason = _too_much(plan, producer, readers)
    if reason:
        return reason
    grown = [_grown(plan.graph, r, producer) for r in readers]
    new = {n.output: n for r in grown for n in r.nodes}
    outputs = {n.output for n in g.nodes}
    nodes = tuple(new.get(n.output, n) for n in plan.graph.nodes if n.output not in outputs)
    swap = {id(r): x for r, x in zip(readers, grown, strict=True)}
    groups = tuple(swap.get(id(r), r) for r in plan.groups if r is not g)
    after = replace(plan, graph=replace(plan.graph, nodes=nodes), groups=groups)
    return may_rise(plan, (g, *readers), grown, after) or after


def _too_much(plan: FusionPlan, producer: Compute, readers: list[FusedGroup]) -> str | None:
    """Return the reason if recomputing a group costs too much, whatever the bytes."""
    operations = [v.name for v in walk(producer.body) if isinstance(v, Op)]
    if value_size(producer.body) > MAX_OPERATIONS or not set(operations) <= CHEAP_OPS:
        return TOO_MUCH
    size = product(plan.graph.tensors[producer.output].shape)
    for r in readers:
        if r.kind != "nest":
            return "a contraction reads it, once for every tile"
        points = 0 * size
        for n in r.nodes:
            extents = dict(iterators(plan.graph, n))
            if any(a.name == producer.output for x in loads(n.body) for i in x.index for a in i.fetches()):
                return "its elements are subscripts"
            places = {x.index for x in loads(n.body) if x.buffer == producer.output}
            points = points + product(extents.values()) * len(places)
        if not facts_of(plan.graph.facts).nonnegative(size - points):
            return f"it would be computed {points} times for {size} elements (a broadcast, or read more than once)"
    return None


def _grown(graph: Graph, r: FusedGroup, producer: Compute) -> FusedGroup:
    """Return a reader with the producer's value in place of its loads."""
    nodes = tuple(compose(n, [producer], dict(iterators(graph, n))) for n in r.nodes)
    return replace(r, nodes=nodes, reasons=(*r.reasons, f"{producer.output}: computed again here (input-inline)"))
