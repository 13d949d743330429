"""The plan without fusion: every primitive is a kernel, and every part of a concatenation is copied to its offset."""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.append import find_appends, free_strides, part_name
from polydyn.fusion.plan import FusedGroup, FusionPlan, Window
from polydyn.fusion.products import has_column, is_contraction, is_windowed
from polydyn.fusion.rows import node_rows
from polydyn.fusion.rules import is_tileable
from polydyn.graph.ir import Compute, Graph, Tensor, dim_name
from polydyn.graph.rewriting import live_nodes
from polydyn.schedules.expr import load
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.lanes import VECTOR_DTYPES


def separate(graph: Graph, lanes: tuple[str, ...] = VECTOR_DTYPES) -> FusionPlan:
    """Build one group per node. A concatenation becomes one copy per part, into a window of the result.

    ``lanes``: see ``FusionPlan``.
    """
    tensors = dict(graph.tensors)
    windows: dict[str, Window] = {}
    nodes: list[Compute] = []
    for n in live_nodes(graph.nodes, graph.outputs):
        if isinstance(n, Compute):
            nodes.append(n)
            continue
        offset = ZERO
        for k, part in enumerate(n.parts):
            name = part_name(graph, n.output, k)
            t = tensors[part]
            tensors[name] = Tensor(name, t.dtype, t.shape)
            index = tuple(Index.of(dim_name(a)) for a in range(len(t.shape)))
            nodes.append(Compute(name, load(part, index, t.dtype), origin=n.origin))
            windows[name] = Window(n.output, n.axis, offset)
            offset = offset + t.shape[n.axis]
    appends = find_appends(graph)
    graph = replace(graph, tensors=tensors, nodes=tuple(nodes))
    groups = tuple(_alone(graph, n, lanes) for n in nodes)
    return FusionPlan(graph, groups, windows, appends, free_strides(appends), lanes=lanes)


def _alone(graph: Graph, n: Compute, lanes: tuple[str, ...]) -> FusedGroup:
    product = is_contraction(n) and is_tileable(graph, n, lanes)
    if product and is_windowed(n) and not has_column(n):  # depthwise: vectors along the last axis, as in any nest
        product = False
    kind = "contract" if product else "nest"
    rows = {n.output: node_rows(graph, n.output)}
    return FusedGroup(kind, (n,), (n.output,), rows, (f"{n.output}: starts a {kind} group",))


def write_in_place(plan: FusionPlan) -> FusionPlan:
    """Write a tensor that only a concatenation reads directly into its part of the result, and drop the copy."""
    outputs = {n.output for n in plan.graph.nodes}
    windows, written = dict(plan.windows), set[str]()
    refused = dict(plan.refused)
    copies = [n for n in plan.graph.nodes if n.output in plan.windows]
    for n in copies:
        (part,) = n.inputs
        reason = _reason_apart(plan, part, outputs)
        if part in windows or reason:
            refused[part, n.output] = reason or "it is a part of another concatenation too"
            continue
        windows = {(part if t == n.output else t): w for t, w in windows.items()}  # parts stay in order
        written.add(n.output)
    graph = replace(plan.graph, nodes=tuple(n for n in plan.graph.nodes if n.output not in written))
    groups = tuple(g for g in plan.groups if g.nodes[0].output not in written)
    return replace(plan, graph=graph, groups=groups, windows=windows, refused=refused)


def _reason_apart(plan: FusionPlan, part: str, outputs: set[str]) -> str | None:
    if part not in outputs:
        return "no kernel computes it, so it is copied into the concatenation"
    if part in plan.graph.outputs:
        return "it is an output of the model too, so it is copied into the concatenation"
    if len(plan.readers[part]) > 1:
        return "others read it too, so it is copied into the concatenation"
    return None
