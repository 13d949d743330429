"""Compute attention masks in the kernel: a (rows x keys) plane made of subscripts, sizes and vectors is not stored.

Every head would read such a plane again, as many bytes as its keys have; computing an element takes a few comparisons.
The kernel also knows the condition that hides a key, so ``schedules.masks`` skips whole tiles. A mask stays in memory
if it is passed as a plane or needs more than cheap arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.fusion.facts import facts_of
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.recompute import CHEAP_OPS
from polydyn.graph.ir import Compute, Node, dim_name, iterators, value_size
from polydyn.graph.rewriting import live_nodes
from polydyn.schedules.expr import Const, Load, Op, Value, indices, loads, map_index, transform, walk
from polydyn.schedules.index import ONE, Atom, Index
from polydyn.schedules.ranges import is_nonnegative, simplify

MAX_OPERATIONS = 40
"""Maximum operations per mask element."""


def compute_masks(plan: FusionPlan) -> FusionPlan:
    """Compute the masks of attentions in the kernels where this needs no plane. Drop the nodes that lose all
    readers.
    """
    masks = _Masks(plan)
    swap = {n.output: masks.rewritten(n) for g in plan.groups if g.kind == "attention" for n in _readers(plan, g)}
    if all(n is swap.get(n.output, n) for g in plan.groups for n in g.nodes):
        return plan
    nodes = live_nodes((swap.get(n.output, n) for n in plan.graph.nodes), plan.stored)
    after = replace(plan, graph=replace(plan.graph, nodes=nodes))
    now = {n.output: n for n in nodes}
    return replace(after, groups=tuple(x for g in plan.groups if (x := _group(after, g, now)) is not None))


def _readers(plan: FusionPlan, g: FusedGroup) -> list[Compute]:
    """Return the element-wise nodes of an attention that run over all its scores."""
    scores, rows, _ = g.parts
    shape = plan.graph.tensors[scores.outputs[0]].shape
    return [n for n in (*scores.nodes, *rows.nodes) if n.is_map and plan.graph.tensors[n.output].shape == shape]


class _Masks:
    def __init__(self, plan: FusionPlan) -> None:
        graph = plan.graph
        self.graph, self.producer, self.facts = graph, graph.producer(), facts_of(graph.facts)
        self.stored = {*graph.inputs, *graph.constants, *(t for g in plan.groups for t in g.outputs)}
        self.stored |= {w.target for w in plan.windows.values()}

    def rewritten(self, n: Compute) -> Compute:
        """Return the node with every mask computed that it reads, or the node itself if nothing changes."""
        rank = len(self.graph.tensors[n.output].shape)
        plane = frozenset((dim_name(rank - 2), dim_name(rank - 1)))
        ranges = dict(iterators(self.graph, n))
        if any(ranges[x] == ONE for x in plane):
            return n

        def value(v: Value) -> Value:
            if not isinstance(v, Load) or not _moves(v, plane):
                return v
            mask = self._computed(v, plane)
            if mask is None or value_size(mask) > MAX_OPERATIONS:
                return v
            mask = map_index(mask, lambda i: simplify(self.facts.simplify(_unmerged(i, ranges), ranges), ranges))
            return v if any(_divided(i, plane) for i in indices(mask)) else mask

        body = transform(n.body, value)
        return n if body == n.body else replace(n, body=body)

    def _computed(self, v: Load, plane: frozenset[str]) -> Value | None:
        """Return the element as an expression over stored tensors other than planes, or None if there is none."""
        n = self.producer.get(v.buffer)
        if not isinstance(n, Compute) or not n.is_map or any(i.fetches() for i in v.index):
            return None
        body = n.at(v.index)
        cheap = all(isinstance(x, Const) or not isinstance(x, Op) or x.name in CHEAP_OPS for x in walk(body))
        if not cheap or any(i.fetches() for i in indices(body)) or value_size(body) > MAX_OPERATIONS:
            return None
        values: dict[Load, Value] = {}
        for x in loads(body):
            if x.buffer not in self.stored or _moves(x, plane):
                inner = self._computed(x, plane)
                if inner is None:
                    return None
                values[x] = inner
        return transform(body, lambda x: values.get(x, x) if isinstance(x, Load) else x)


def _moves(v: Load, plane: frozenset[str]) -> bool:
    """Check whether a load runs over both rows and keys."""
    return plane <= {s for i in v.index for s in i.symbols()}


def _unmerged(i: Index, ranges: Mapping[str, Index]) -> Index:
    """Undo the merging of axes: ``(n*x + r) // n`` is ``x`` if ``0 <= r < n``, also for sums of sizes n.

    ``i`` must not fetch.
    """

    def atom(a: Atom) -> Index:
        if a.kind == "floordiv":
            x, n = a.args
            for s in sorted(x.symbols() & ranges.keys()):
                times, rest = x.split(s)
                if times == n and is_nonnegative(rest, ranges) and is_nonnegative(n - 1 - rest, ranges):
                    return Index.of(s)
        return a.normal()

    return i.rebuild(atom)


def _divided(i: Index, plane: frozenset[str]) -> bool:
    """Check whether every element would cost a division by a size."""
    divisions = (a for a in i.atoms() if isinstance(a, Atom) and a.kind == "floordiv" and a.args[1].constant is None)
    return any(plane & {s for x in a.args for s in x.symbols()} for a in divisions)


def _group(plan: FusionPlan, g: FusedGroup, now: dict[str, Node]) -> FusedGroup | None:
    """Return the group with its current nodes, or None if none is left."""
    nodes = tuple(n for m in g.nodes if isinstance(n := now.get(m.output), Compute))
    if not nodes:
        return None
    parts = tuple(x for p in g.parts if (x := _group(plan, p, now)) is not None)
    before = {m.output: m for m in g.nodes}
    computed = [n.output for n in nodes if n.body != before[n.output].body]
    outputs = g.outputs if g.parts else plan.outputs_of(nodes)
    reasons = tuple(f"{t}: its mask is computed here" for t in computed)
    return replace(g, nodes=nodes, outputs=outputs, parts=parts, reasons=(*g.reasons, *reasons))
