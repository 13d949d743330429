"""The schedule of a product whose instructions read shared memory and are issued by warpgroups (wgmma, TMA)."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.schedules.index import Index, product
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.buffers import accumulate, keep, promote
from polydyn.schedules.tree.gpu import COPY_A, COPY_B, STAGE, STAGED, add_parts, send_boxes, senders, stage_sums
from polydyn.schedules.tree.limits import assign, clip, mark, pad
from polydyn.schedules.tree.loops import Launch, Size, distribute, interchange, pull_out, regroup, rename, tile
from polydyn.schedules.tree.names import MarkName, b, c, e, f, g, h, p, q, s, w
from polydyn.schedules.tree.parts import start_in_parts
from polydyn.schedules.tree.rewrites import CLEAR, PART, PARTS, POINT, SUM
from polydyn.schedules.tree.scheduled import Scheduled, refuse
from polydyn.schedules.tree.strategies import ACC, INIT, in_shares, loop_of, operand, row_operand, start_product

V = Index.of
COLUMNS = 8
"""Columns of a fragment of sums, as warps store them."""
CLUSTER = 2
"""Blocks of a cluster, if clusters are used."""


@dataclass(frozen=True)
class WarpgroupTile:
    """Sizes of a product of warpgroups.

    ``groups``: warpgroups of a tile; ``rows``: instruction rows of a warpgroup; ``warps``: warps of a warpgroup, each
    with 16 rows of an instruction. ``panels``: boxes that load the columns, with ``fragments`` of 8 columns each.
    ``steps``: instructions of a tile of the reduction, and K steps of an instruction. ``box``: columns of results that
    are sent to memory at once; 0 means that epilogues store them. ``cluster``: the axis along which tiles of a
    cluster's blocks are adjacent; empty without clusters. ``parts``: blocks of a cluster that split K of one tile.
    """

    groups: Size
    rows: Size
    warps: Size
    panels: Size
    fragments: Size
    steps: tuple[Size, Size]
    box: int = 0
    cluster: str = ""
    parts: int = 1


def warpgroup_product(group: Group, roles: Roles, sizes: WarpgroupTile, split: bool = False) -> Scheduled:
    """Schedule a product for sm_90a: one thread copies boxes of both operands, warpgroups multiply from shared memory.

    An instance of the accumulation is a whole step of a warpgroup: its rows contain the warp as a digit. Warps
    initialise, stage and store sums, as in ``gpu.gpu_product``. Blocks of a cluster are the innermost digit of the
    tasks, so there are only whole clusters: a block whose tile is past the last row does everything except store.
    ``split`` as there.
    """
    if roles.inner:
        raise refuse(f"a tensor map has one reduction, not {(roles.block, *roles.inner)}")
    group, roles = in_shares(group, roles) if split else (group, roles)
    i, j, k = "i", "j", "k"
    clusters = {x: [(c, CLUSTER)] if x == sizes.cluster else [] for x in (i, j)}
    inside = (level(x) for x in (i, j) for level, _ in clusters[x])
    block = (*map(loop_of, roles.batch), b(i), b(j), *inside)
    done = [x.name for x in group.epilogues]
    t = start_product(group, roles)
    t = tile(t, i, (b, f"B_{i}"), *clusters[i], (g, sizes.groups), (f, sizes.rows), (h, sizes.warps), (p, STAGED))
    t = tile(t, j, (b, f"B_{j}"), *clusters[j], (s, sizes.panels), (f, sizes.fragments), (p, COLUMNS))
    t = tile(t, k, (b, f"B_{k}"), (f, sizes.steps[0]), (p, sizes.steps[1]))
    t = interchange(t, *block, b(k), g(i), f(k), f(i), h(i), p(i), s(j), f(j), p(j), p(k))
    t = pull_out(t, b(k), f(k), p(k), together=True)  # out of the whole reduction
    t = accumulate(t, block[-1])
    (array, along), steps = row_operand(group, roles), (f(k), p(k))
    t = promote(t, operand(group, roles.col), j, COPY_B, "tile_b", b(k), [ACC], {s(j): [s(j)]},
                (f(j), p(j), *steps))  # fmt: skip
    t = promote(t, array, along, COPY_A, "tile_a", b(k), [ACC], {}, (g(i), f(i), h(i), p(i), *steps), over=(i,))
    t = regroup(t, [ACC], [h(i), p(i)], {q(i): [h(i), p(i)]})
    t = regroup(t, [ACC], [s(j), f(j), p(j)], {q(j): [s(j), f(j), p(j)]})
    t = regroup(t, [INIT, *done], [g(i), h(i)], {w(i): [g(i), h(i)]})
    t = regroup(t, [INIT], [s(j), f(j)], {f(j): [s(j), f(j)]})
    t = interchange(t, w(i), f(i), f(j), p(i), p(j))
    t = stage_sums(t, (w(i),), (w(i), f(i)), (s(j), f(j)), group.backbone.array, whole=True)
    if sizes.box:
        t = mark(send_boxes(t, (w(i),), sizes.box), MarkName.START, e("g"), STAGE)
        done += [n for n, _ in senders(group)]
    t = assign(assign(assign(t, "task", *block), "unit", w(i)), "unit", g(i))
    t = pad(t, INIT, ACC)  # boxes are filled with zeros; epilogues are guarded
    t = clip(clip(t, i, *done), j, *done)
    t = mark(mark(t, MarkName.TASK, block[0], ACC), MarkName.ROLES, block[-1], ACC, under=True)
    t = mark(mark(t, MarkName.MULTIPLY, g(i), ACC), MarkName.INSTRUCTION, f(k), ACC)
    t = mark(mark(t, MarkName.EPILOGUE, w(i), done[0]), MarkName.STORE, e(i), *(x.name for x in group.epilogues))
    return mark(t, MarkName.INSTRUCTION, p(i), INIT, STAGE)


def warpgroup_parts(group: Group, roles: Roles, sizes: WarpgroupTile) -> Scheduled:
    """Schedule a product whose K is split over N blocks of a cluster: block n has every N-th step, from step n on.
    A cluster is a task, its blocks are units (``c_k``). Partial sums stay in the shared memory of all of them.
    """
    if roles.inner:
        raise refuse(f"a tensor map has one reduction, not {(roles.block, *roles.inner)}")
    i, j, k = "i", "j", "k"
    block, done = (*map(loop_of, roles.batch), b(i), b(j)), [x.name for x in group.epilogues]
    steps = [V(n) for n in sizes.steps if not isinstance(n, Launch)]
    t = start_in_parts(group, roles, sizes.parts, int(product(steps)))
    t = tile(t, i, (b, f"B_{i}"), (g, sizes.groups), (f, sizes.rows), (h, sizes.warps), (p, STAGED))
    t = tile(t, j, (b, f"B_{j}"), (s, sizes.panels), (f, sizes.fragments), (p, COLUMNS))
    inside = (g(i), f(i), h(i), p(i), s(j), f(j), p(j))
    t = distribute(interchange(t, *block, *inside), g(i), ACC)
    t = tile(tile(t, PART, (c, sizes.parts)), POINT, (f, sizes.steps[0]), (p, sizes.steps[1]))
    t = rename(t, [INIT, ACC], {c(PART): c(k)})
    t = pull_out(interchange(t, c(k), b(k), *inside, p(k)), b(k), p(k))
    own, (whole, point) = (c(k),), (f(POINT), p(POINT))
    t = regroup(t, [ACC], [p(k)], {f(k): [whole], p(k): [point]})
    t = interchange(t, b(k), g(i), f(k), f(i), h(i), p(i), s(j), f(j), p(j), p(k))
    t = keep(keep(t, PARTS, "acc", block[-1]), group.backbone.array, "sums", block[-1])
    array, along = row_operand(group, roles, POINT)
    t = promote(t, operand(group, roles.col), j, COPY_B, "tile_b", b(k), [ACC], {s(j): [s(j)]},
                (f(j), p(j), whole, point), own)  # fmt: skip
    t = promote(t, array, along, COPY_A, "tile_a", b(k), [ACC], {}, (g(i), f(i), h(i), p(i), whole, point), own, (i,))
    t = regroup(t, [ACC], [h(i), p(i)], {q(i): [h(i), p(i)]})
    t = regroup(t, [ACC], [s(j), f(j), p(j)], {q(j): [s(j), f(j), p(j)]})
    t = regroup(t, [INIT, CLEAR, SUM, *done], [g(i), h(i)], {w(i): [g(i), h(i)]})
    t = regroup(t, [INIT], [p(i), s(j), f(j), p(j)], {f(j): [s(j), f(j)], p(i): [p(i)], p(j): [p(j)]})
    t = add_parts(t, block[-1], sizes.parts, {w(i): e("w")}, f(i), (s(j), f(j)))
    t = assign(assign(assign(t, "task", *block), "unit", c(k), w(i)), "unit", c(k), g(i))
    t = pad(t, INIT, ACC)  # boxes are filled with zeros; epilogues are guarded
    for axis in (i, j):
        t = clip(t, axis, CLEAR, SUM, *done)
    t = mark(mark(t, MarkName.TASK, block[0], ACC), MarkName.ROLES, block[-1], ACC, under=True)
    t = mark(mark(t, MarkName.MULTIPLY, g(i), ACC), MarkName.INSTRUCTION, f(k), ACC)
    t = mark(mark(t, MarkName.COMBINE, e("w"), SUM), MarkName.EPILOGUE, w(i), STAGE)
    return mark(mark(t, MarkName.STORE, e(i), *done), MarkName.INSTRUCTION, p(i), INIT, STAGE)
