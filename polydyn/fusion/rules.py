"""Rules that decide which reader may join which producer in the passes epilogue, element-wise, stitch and columns.

For two groups, a rule returns a ``Join``, a one-line reason against it, or None if another pass handles the pair.
BladeDISC's terms: *group-dims* are the axes that all nodes of a group share (its ``rows``), *tile-dims* are the others;
reductions and outputs are *dominant*; *locality* holds between two dominants if one reads the other with the same
group-dims. Dims are compared in normal form, so that equalities learned anywhere count.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from polydyn.fusion.facts import same_size
from polydyn.fusion.guards import needs_guard
from polydyn.fusion.partition import Join, join_groups
from polydyn.fusion.plan import FusedGroup, FusionPlan, Rows
from polydyn.fusion.rows import (
    common_rows,
    is_aligned,
    is_reduced,
    lead,
    node_rows,
    reads_of,
    reads_whole_rows,
    tile_dims,
)
from polydyn.graph.ir import Compute, Graph, dim_name
from polydyn.schedules.expr import ITEMSIZE, Load, Op, indices, loads
from polydyn.schedules.index import ONE
from polydyn.schedules.lanes import has_lanes, is_affine_in_lanes

MAX_LANES = 16
"""Lanes of the widest vectors. An address that is affine in them is affine in narrower vectors."""


def is_tileable(graph: Graph, n: Compute, lanes: Collection[str]) -> bool:
    """Check whether a register tile can compute the node in vector lanes of the dtypes ``lanes``, all branches
    evaluated.
    """
    return has_lanes(n.body, lanes) and not needs_guard(graph, n)


# -- the passes ------------------------------------------------------------------------------------------------------


def epilogue(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Join element-wise readers to the contraction whose output they read element by element (TSCompiler 4.2)."""
    if b.kind == "contract":
        if a.kind == "contract":
            return "fusion stops at another backbone's group; its operands come from memory"
        if any(_narrows(n) and n.output in plan.inputs[b.nodes[0].output] for n in a.nodes):
            return "a cast stays with what makes the operand: inside, the product's inputs would be wider in memory"
        return "a backbone begins its group; its operands come from memory"
    if a.kind != "contract":
        return None
    graph, outputs = plan.graph, {m.output for m in a.nodes}
    shape = graph.tensors[a.nodes[0].output].shape
    rows = {**a.rows, **b.rows}
    for n in b.nodes:
        if not n.is_map:
            return "it reduces; only element-wise readers are epilogues of a contraction"
        if graph.tensors[n.output].shape != shape:
            return f"its shape {_dims(graph, n)} is not the contraction's ({', '.join(map(str, shape))})"
        if _fetches(n, outputs) or not all(_same_place(n, x, rows) for x in reads_of(outputs, n)):
            return "it does not read the contraction's output element by element"
        if not is_tileable(graph, n, plan.lanes):
            return "the register tile's vector lanes cannot compute it"
        if (scattered := _scattered(plan, n)) is not None:
            return f"it reads {scattered} at addresses that are not affine along a vector of columns"
    return Join(rows, "element-wise on the contraction's output (epilogue)", "contract")


def elementwise(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Join element-wise groups to element-wise groups (BladeDISC 4.1)."""
    if not all(n.is_map for g in (a, b) for n in g.nodes) or a.kind != "nest" or b.kind != "nest":
        return None
    rows = _common(plan, a, b)
    if isinstance(rows, str):
        return rows
    if _gives_up(a, rows) or _gives_up(b, rows):
        return f"group-dims differ: {_dims(plan.graph, b.nodes[0])} and {_dims(plan.graph, a.nodes[0])}"
    return Join(rows, "element-wise on shared rows")


def stitch(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Join groups around reductions if locality holds between their dominants (BladeDISC 4.2).

    Their group-dims lead. ``columns`` handles other group-dims, so that rows come first.
    """
    join = _stitched(plan, a, b)
    return None if isinstance(join, Join) and not lead(plan.graph, join.rows) else join


def columns(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Join groups like ``stitch``, but with any shared axes: a softmax over channels shares the axes around them."""
    join = _stitched(plan, a, b)
    return None if isinstance(join, Join) and lead(plan.graph, join.rows) else join


def _stitched(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    if a.kind != "nest" or b.kind != "nest" or all(n.is_map for g in (a, b) for n in g.nodes):
        return None
    if a.prologue or b.prologue:
        return "a prologue stays with its window"
    rows = _common(plan, a, b)
    if isinstance(rows, str):
        return rows
    if any(_gives_up(g, rows) and not all(n.is_map for n in g.nodes) for g in (a, b)):
        return "no locality: a reduction does not keep the rows of the group's results"
    reduces = any(not n.is_map for n in b.nodes)
    if reduces and not any(rows.values()) and not _single(plan.graph, (*a.nodes, *b.nodes)):
        return "no locality: a reduction of all elements has no rows to share"
    producers = list(a.nodes)
    for n in b.nodes:
        reason = _remote(plan.graph, a, n, rows) or _other_tiles(plan.graph, n, producers, rows)
        if reason:
            return reason
        producers.append(n)
    return Join(rows, "reduces rows that the group makes (stitch)" if reduces else "element-wise on shared rows")


def join_columns(plan: FusionPlan) -> FusionPlan:
    """Return the plan after ``columns``. The order of the groups does not change if nothing joins."""
    joined = join_groups(plan, columns)
    return joined if len(joined.groups) < len(plan.groups) else replace(plan, refused=joined.refused)


def _scattered(plan: FusionPlan, n: Compute) -> str | None:
    """Return a tensor that vectors along the node's last axis would have to gather, or None."""
    ranges = {dim_name(a): e for a, e in enumerate(plan.graph.tensors[n.output].shape)}
    column = dim_name(max(node_rows(plan.graph, n.output), default=0))
    for x in loads(n.body):
        _, address = plan.address_of(x.buffer, x.index)
        if not is_affine_in_lanes(address, column, MAX_LANES, ranges):
            return x.buffer
    return None


def _narrows(n: Compute) -> bool:
    """Check whether a node stores its result in fewer bytes than it computes with."""
    return isinstance(n.body, Op) and n.body.name == "cast" and ITEMSIZE[n.body.args[0].dtype] > ITEMSIZE[n.body.dtype]


# -- locality --------------------------------------------------------------------------------------------------------


def _common(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Rows | str:
    """Return the rows that both groups share, or the reason why they share none."""
    outputs = {m.output for m in a.nodes}
    if any(_fetches(n, outputs) for n in b.nodes):
        return "no locality: data decide which of the group's results it reads"
    rows = common_rows(plan.graph, a, b)
    return "no locality: it reads other rows of the group than its own" if rows is None else rows


def _remote(graph: Graph, a: FusedGroup, n: Compute, rows: Rows) -> str | None:
    """Return the reason if a node cannot read the results of ``a`` inside its row."""
    reads = reads_of({m.output for m in a.nodes}, n)
    if not all(reads_whole_rows(graph, n, x, rows) for x in reads):
        return "no locality: it reads a part of its row of the group"
    if n.is_map:
        aligned = all(is_aligned(graph, n, x, rows) for x in reads)
        return None if aligned else "no locality: it does not read its row of the group element by element"
    complete = not _gives_up(a, rows) or all(is_reduced(graph, n, x, rows) for x in reads)
    return None if complete else "group-dims differ: the reduction does not run over whole rows of the group's results"


def _other_tiles(graph: Graph, n: Compute, producers: Sequence[Compute], rows: Rows) -> str | None:
    """Return the reason if a map runs over rows of another length than the nodes ``producers``."""
    inner = tile_dims(graph, n, rows)
    if not n.is_map or inner == ONE:
        return None
    sizes = {tile_dims(graph, m, rows) for m in producers}
    if inner in sizes or any(same_size(graph.facts, inner, e) for e in sizes):
        return None
    return f"tile-dims differ: no node of the group runs over {inner} elements of a row"


def _single(graph: Graph, nodes: Sequence[Compute]) -> bool:
    """Check whether all nodes compute single elements. Each of them is one task, whatever it reduces."""
    return not any(node_rows(graph, n.output) for n in nodes)


def _gives_up(g: FusedGroup, rows: Rows) -> bool:
    """Check whether a group has rows that are not among the common ones."""
    return any(rows[n.output] != g.rows[n.output] for n in g.nodes)


def _fetches(n: Compute, outputs: set[str]) -> bool:
    """Check whether a node takes subscripts from the tensors ``outputs``, or reads them at subscripts taken from
    data.
    """
    decided = any(f.name in outputs for i in indices(n.body) for f in i.fetches())
    return decided or any(i.fetches() for x in reads_of(outputs, n) for i in x.index)


def _same_place(n: Compute, x: Load, rows: Rows) -> bool:
    """Check whether a node of the same shape reads a tensor at its own subscripts."""
    return all(str(x.index[a]) == dim_name(a) for a in rows[n.output])


def _dims(graph: Graph, n: Compute) -> str:
    return f"({', '.join(map(str, graph.tensors[n.output].shape))})"
