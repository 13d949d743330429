"""The gain of each fusion pass: launches, products and bytes of a plan, pass by pass. Nothing is compiled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from polydyn.fusion.pipeline import FUSION, PASSES, fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.traffic import size_of
from polydyn.graph.ir import Compute, Graph, iterators
from polydyn.schedules.expr import ITEMSIZE, indices, loads
from polydyn.schedules.index import ONE, ZERO, Index, product

LAYER = re.compile(r"/[^/]*\.(\d+)/")
"""A module in a list of them, as exporters write it into names of nodes: ``/encoder/layer.3/dense``."""

ON_PLANS = [p for p in PASSES if (p.graph or p.groups or p.join) and not p.cuda and not p.bf16]
ADD_ORDER = tuple(p.name for p in sorted(ON_PLANS, key=lambda p: not (p in FUSION and p.graph)))


@dataclass(frozen=True)
class Row:
    """One line: the last pass, launches, kernels around sums of products, bytes moved."""

    after: str
    kernels: int
    gemms: int
    bytes: int


def plan_without(graph: Graph, off: Collection[str]) -> FusionPlan:
    """Return the fusion plan of an imported graph without some passes."""
    return fusion_plan(rewrite_graph(graph, off), off)


def table(graph: Graph, shape: Mapping[str, int]) -> list[Row]:
    """Return a row for no pass at all, then one for each pass added in order."""
    return [row_without(graph, ADD_ORDER[k:], shape, after) for k, after in enumerate(("nothing", *ADD_ORDER))]


def row_without(graph: Graph, off: Collection[str], shape: Mapping[str, int], after: str = "") -> Row:
    """Return the row of a pipeline without some passes."""
    plan = plan_without(graph, off)
    return Row(after, len(plan.groups), gemms(plan), sum(bytes_at(plan, g, shape) for g in plan.groups))


def gemms(plan: FusionPlan) -> int:
    """Count kernels around a sum of products; an attention has two."""
    return sum({"contract": 1, "attention": 2}.get(g.kind, 0) for g in plan.groups)


def layers(plan: FusionPlan) -> tuple[int, int] | None:
    """Return (kernels of a layer, kernels outside of layers) of a transformer, by the exporters' names of nodes.

    Return None if the names do not distinguish layers (layers that share their weights share their names too).
    """
    if not any(g.kind == "attention" for g in plan.groups):
        return None
    where: Counter[str] = Counter()
    for g in plan.groups:
        names = [m.group(1) for n in g.nodes for m in [LAYER.search(n.origin)] if m]
        where[names[0] if names else ""] += 1
    inside = [count for layer, count in where.items() if layer]
    return (min(inside), len(plan.groups) - min(inside) * len(inside)) if len(inside) > 1 else None


def bytes_at(plan: FusionPlan, group: FusedGroup, sizes: Mapping[str, int]) -> int:
    """Return the bytes that a group moves at a shape, of each tensor no more than its loads can touch."""
    outputs = {n.output for n in group.nodes}
    touched: Counter[str] = Counter()
    for n in group.nodes:
        for t, points in _touched(plan.graph, n).items():
            if t not in outputs:
                touched[t] += points.evaluate(sizes)
    total = sum(size_of(plan.graph, t).evaluate(sizes) for t in group.outputs)
    for t, points_at in touched.items():
        tensor = plan.graph.tensors[t]
        total += min(points_at, product(tensor.shape).evaluate(sizes)) * ITEMSIZE[tensor.dtype]
    return total


def _touched(graph: Graph, n: Compute) -> dict[str, Index]:
    """Return, for every tensor that a node reads, the maximum number of different subscripts."""
    extents = dict(iterators(graph, n))
    seen: dict[str, set[tuple[Index, ...]]] = {}
    for x in loads(n.body):
        seen.setdefault(x.buffer, set()).add(x.index)
    for i in indices(n.body):
        for a in i.fetches():
            seen.setdefault(a.name, set()).add(a.args)

    def points(index: tuple[Index, ...]) -> Index:
        used = {s for i in index for s in i.symbols()}
        return product([ONE, *(e for x, e in extents.items() if x in used)])

    return {t: sum((points(i) for i in at), ZERO) for t, at in seen.items()}
