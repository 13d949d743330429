"""The schedule of an attention on the CPU: scores, row stitch and values, one after another on blocks of rows."""

from __future__ import annotations

from dataclasses import replace

from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tiling import AttentionParts, stages
from polydyn.schedules.tree.buffers import keep, promote
from polydyn.schedules.tree.limits import assign, clip, mark
from polydyn.schedules.tree.loops import (
    Launch,
    balance,
    begins,
    distribute,
    fuse,
    interchange,
    join_parts,
    pull_out,
    refine,
    rename,
    sequence_phases,
    tile,
)
from polydyn.schedules.tree.names import LANE, Coord, End, MarkName, a, b, c, it, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import (
    FIRST_ROW,
    PACK,
    PANEL,
    SHARE_ROWS,
    VECTOR,
    CpuTile,
    columns,
    operand,
    statements_along,
)

SCORES, VALUES = "A_", "B_"
"""Prefixes of the names of the statements of both products."""
ROW_STRIDE = "row_stride"
"""The row pitch of scores and weights in scratch, a symbol until they are allocated."""


def cpu_attention(group: Group, parts: AttentionParts, sizes: tuple[CpuTile, CpuTile], pack: bool) -> Scheduled:
    """Schedule an attention: blocks of rows are tasks; the rows of a register tile run scores, stitch and values.
    ``group`` has all statements, over arrays of all rows (``tiling.unfold``); ``parts`` are solved. The keys are one
    axis, j: columns of the scores, loops of the stitch, reduction of the values. ``pack``: PACK copies the keys into
    panels.
    """
    i, j, d, k = "i", "j", "d", "k"
    first = parts.score_roles
    t = _join_parts(group, parts)
    scores, values = (x for x in (part.backbone for part in _products(group)))
    inner, inside = [it(x) for x in first.inner], Coord("l")
    t = tile(t, i, (b, Launch("B_i")), (c, "C_i"), (p, sizes[0].rows))
    t = tile(tile(t, j, (c, "C_j"), (p, columns(sizes[0]))), d, (c, "C_d"), (p, columns(sizes[1])))
    t = refine(t, j, p(j), ("q_j", sizes[0].vectors), (LANE, sizes[0].lanes))
    t = begins(balance(t, i, "r_tile", SHARE_ROWS), i, c(i), FIRST_ROW, even=True)
    t = distribute(t, p(i), scores.name)  # each part runs over the rows of the tile itself
    t = pull_out(interchange(t, c(j), p(k), *inner, p(i), p(j)), p(k), *inner)
    t = pull_out(interchange(t, c(d), inside, p(i), p(d)), inside)
    t = keep(keep(t, scores.array, "acc1", c(j)), values.array, "acc2", c(d))
    for x in _locals(group):  # rows of one register tile, or of one row
        if x not in (scores.array, values.array):
            t = keep(t, x, x, c(i) if _crosses(group, parts, x) else p(i))
    if pack:
        keys = operand(replace(group, statements=(scores,)), first.col)
        steps = {it(x): (_inner(x),) for x in first.inner}
        loops = {VECTOR: (c(j), "q_j"), a(k): (it(k),), **steps, LANE: (LANE,)}
        t = promote(t, keys, j, PACK, PANEL, b(i), [scores.name], loops)
    for axis in (i, j, d):
        t = clip(t, axis, *statements_along(t, axis))
    t = clip(t, j, PACK, whole=1) if pack else t
    tasks = [*map(it, first.batch), b(i)]
    t = mark(assign(t, "task", *tasks), MarkName.TASK, tasks[0], scores.name)
    t = mark(t, MarkName.SHARE, b(i), scores.name, under=True)
    t = mark(t, MarkName.PROMOTE, VECTOR, PACK) if pack else t
    t = mark(mark(t, MarkName.BLOCK, c(i), scores.name, under=True), MarkName.ROWS, p(i), parts.rows.statements[0].name)
    t = mark(mark(t, MarkName.MICRO1, c(j), scores.name, under=True), MarkName.REDUCE, p(k), scores.name)
    t = mark(mark(t, MarkName.MICRO2, c(d), values.name, under=True), MarkName.REDUCE, inside, values.name)
    own = [s.name for s in group.statements if s.name.startswith(VALUES)]
    return rename(t, own, {c(d): c(j), p(d): p(j), inside: p(k)})


def _inner(x: str) -> str:
    """Return the axis of a further reduction of the scores; rows may have iterators of its name."""
    return f"k_{x}"


def _products(group: Group) -> tuple[Group, Group]:
    scores, values = (
        replace(group, statements=tuple(s for s in group.statements if s.name.startswith(x))) for x in (SCORES, VALUES)
    )
    return scores, values


def _join_parts(group: Group, parts: AttentionParts) -> Scheduled:
    """Return the solved matrices of the three parts, in their shared loops over batches and rows."""
    first, second = parts.score_roles, parts.value_roles
    scores, values = _products(group)
    names = {s.name for s in parts.rows.statements}
    stitch = replace(group, statements=tuple(s for s in group.statements if s.name in names))
    band, keys = (*first.batch, first.row), dict(scores.backbone.iters)[first.col]
    along = {x for s in stitch.statements for x, e in s.iters if x not in band and e == keys}
    ends = {n: End(side) for roles in (first, second) for n, side in roles.sunk}
    axes = {first.row: "i", first.col: "j", first.block: "k", **{x: _inner(x) for x in first.inner}}
    loops = {first.block: p("k"), **{x: it(x) for x in first.inner}}
    own = {second.row: "i", second.col: "d", second.block: "j"}
    order = [[s.name for s in x] for x in stages(parts.rows, parts.row_prefix, parts.phases)]
    return join_parts(
        group, [*map(it, first.batch), it("i")],
        fuse(scores, (*band, first.col), (first.block, *first.inner), ends, axes, loops),
        sequence_phases(stitch, band, order, {first.row: "i", **dict.fromkeys(along, "j")}, {x: it(x) for x in along}),
        fuse(values, (*band, second.col), (second.block,), ends, own, {second.block: Coord("l")}),
    )  # fmt: skip


def _locals(group: Group) -> list[str]:
    used = dict.fromkeys(s.array for s in group.statements)
    return [x for x in used if group.arrays[x].role == "local"]


def _accesses(s: Statement, array: str) -> bool:
    return s.array == array or any(x.array == array for x in read_accesses(s))


def _crosses(group: Group, parts: AttentionParts, array: str) -> bool:
    """Whether a product accesses an array of the stitch, or the other way round."""
    rows = {s.name for s in parts.rows.statements}
    return any(_accesses(s, array) and s.name not in rows for s in group.statements)
