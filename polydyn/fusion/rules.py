"""Which reader may join which producer: the rules of the epilogue, element-wise, stitch and columns passes.

A rule answers for two groups: a ``Join``, the reason against it in one line, or None when the pair is another pass's.
BladeDISC's words: *group-dims* are the axes that all nodes of a group share (its ``rows``), *tile-dims* the others;
reductions and outputs are *dominant*; *locality* holds between two of them when what one reads of the other has
the same group-dims. Equality is that of dims in normal form, so that equalities learned anywhere count.
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

WIDEST = 16
"""Lanes of the widest vectors: what is affine in them is so in narrower ones."""


def is_tileable(graph: Graph, n: Compute, lanes: Collection[str]) -> bool:
    """Whether a register tile can compute the node: in vector lanes (of which dtypes), which evaluate all branches."""
    return has_lanes(n.body, lanes) and not needs_guard(graph, n)


# -- the passes ------------------------------------------------------------------------------------------------------


def epilogue(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Element-wise readers join the contraction whose output they read element by element (TSCompiler 4.2)."""
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
        if _fetches(n, outputs) or not all(_same_place(graph, n, x, rows) for x in reads_of(outputs, n)):
            return "it does not read the contraction's output element by element"
        if not is_tileable(graph, n, plan.lanes):
            return "it has no form in the register tile's vector lanes"
        if (scattered := _scattered(plan, n)) is not None:
            return f"it reads {scattered} at addresses that are not affine along a vector of columns"
    return Join(rows, "element-wise on the contraction's output (epilogue)", "contract")


def elementwise(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Element-wise groups join element-wise groups (BladeDISC 4.1)."""
    if not all(n.is_map for g in (a, b) for n in g.nodes) or a.kind != "nest" or b.kind != "nest":
        return None
    rows = _common(plan, a, b)
    if isinstance(rows, str):
        return rows
    if _gives_up(a, rows) or _gives_up(b, rows):
        return f"group-dims differ: {_dims(plan.graph, b.nodes[0])} and {_dims(plan.graph, a.nodes[0])}"
    return Join(rows, "element-wise on shared rows")


def stitch(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Groups around reductions become one where locality holds between their dominants (BladeDISC 4.2).

    Their group-dims lead. Other group-dims are left to ``columns``, so that rows come first.
    """
    join = _stitched(plan, a, b)
    return None if isinstance(join, Join) and not lead(plan.graph, join.rows) else join


def columns(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """``stitch`` whichever axes are shared: a softmax over the channels of an image shares those around them."""
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
        return "no locality: a reduction does not keep the rows of what the group makes"
    reduces = any(not n.is_map for n in b.nodes)
    if reduces and not any(rows.values()) and not _single(plan.graph, (*a.nodes, *b.nodes)):
        return "no locality: what reduces everything has no rows to share"
    producers = list(a.nodes)
    for n in b.nodes:
        why = _remote(plan.graph, a, n, rows) or _other_tiles(plan.graph, n, producers, rows)
        if why:
            return why
        producers.append(n)
    return Join(rows, "reduces rows that the group makes (stitch)" if reduces else "element-wise on shared rows")


def join_columns(plan: FusionPlan) -> FusionPlan:
    """The plan after ``columns``; its order is as it was where nothing joins."""
    joined = join_groups(plan, columns)
    return joined if len(joined.groups) < len(plan.groups) else replace(plan, refused=joined.refused)


def _scattered(plan: FusionPlan, n: Compute) -> str | None:
    """A tensor that vectors along the node's last axis would have to gather."""
    ranges = {dim_name(a): e for a, e in enumerate(plan.graph.tensors[n.output].shape)}
    column = dim_name(max(node_rows(plan.graph, n.output), default=0))
    for x in loads(n.body):
        _, address = plan.address_of(x.buffer, x.index)
        if not is_affine_in_lanes(address, column, WIDEST, ranges):
            return x.buffer
    return None


def _narrows(n: Compute) -> bool:
    """Whether a node stores its result in fewer bytes than it computes with."""
    return isinstance(n.body, Op) and n.body.name == "cast" and ITEMSIZE[n.body.args[0].dtype] > ITEMSIZE[n.body.dtype]


# -- locality --------------------------------------------------------------------------------------------------------


def _common(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Rows | str:
    """The rows of both groups, or why they have none in common."""
    outputs = {m.output for m in a.nodes}
    if any(_fetches(n, outputs) for n in b.nodes):
        return "no locality: data decide which of the group's results it reads"
    rows = common_rows(plan.graph, a, b)
    return "no locality: it reads other rows of the group than its own" if rows is None else rows


def _remote(graph: Graph, a: FusedGroup, n: Compute, rows: Rows) -> str | None:
    """Why a node cannot read the results of ``a`` inside its row."""
    reads = reads_of({m.output for m in a.nodes}, n)
    if not all(reads_whole_rows(graph, n, x, rows) for x in reads):
        return "no locality: it reads a part of its row of the group"
    if n.is_map:
        aligned = all(is_aligned(graph, n, x, rows) for x in reads)
        return None if aligned else "no locality: it does not read its row of the group element by element"
    complete = not _gives_up(a, rows) or all(is_reduced(graph, n, x, rows) for x in reads)
    return None if complete else "group-dims differ: the reduction does not run over whole rows of what the group makes"


def _other_tiles(graph: Graph, n: Compute, producers: Sequence[Compute], rows: Rows) -> str | None:
    """Why a map runs over rows of another length than the nodes ``producers``."""
    inner = tile_dims(graph, n, rows)
    if not n.is_map or inner == ONE:
        return None
    sizes = {tile_dims(graph, m, rows) for m in producers}
    if inner in sizes or any(same_size(graph.guards, inner, e) for e in sizes):
        return None
    return f"tile-dims differ: no node of the group runs over {inner} elements of a row"


def _single(graph: Graph, nodes: Sequence[Compute]) -> bool:
    """Whether all nodes compute single elements: each is one task, whatever it reduces."""
    return not any(node_rows(graph, n.output) for n in nodes)


def _gives_up(g: FusedGroup, rows: Rows) -> bool:
    """Whether a group has rows that are not among the common ones."""
    return any(rows[n.output] != g.rows[n.output] for n in g.nodes)


def _fetches(n: Compute, outputs: set[str]) -> bool:
    """Whether a node reads at positions that are among the tensors ``outputs``, or reads these at positions in data."""
    decided = any(f.name in outputs for i in indices(n.body) for f in i.fetches())
    return decided or any(i.fetches() for x in reads_of(outputs, n) for i in x.index)


def _same_place(graph: Graph, n: Compute, x: Load, rows: Rows) -> bool:
    """Whether a node of the same shape reads a tensor at its own subscripts."""
    return all(str(x.index[a]) == dim_name(a) for a in rows[n.output])


def _dims(graph: Graph, n: Compute) -> str:
    return f"({', '.join(map(str, graph.tensors[n.output].shape))})"
