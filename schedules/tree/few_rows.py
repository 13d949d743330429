"""The schedule of GEMV and skinny GEMM on a GPU: lanes split the columns and the reduction."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.buffers import keep
from polydyn.schedules.tree.limits import assign, clip, mark, pad
from polydyn.schedules.tree.loops import distribute, interchange, pull_out, refine, regroup, tile
from polydyn.schedules.tree.names import MarkName, b, c, e, it, lanes, p, w
from polydyn.schedules.tree.parts import start_in_parts
from polydyn.schedules.tree.rewrites import CLEAR, PART, PARTS, POINT, SUM
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT


@dataclass(frozen=True)
class GemvTile:
    """Sizes of a kernel for GEMV or skinny GEMM.

    ``rows``: rows of a block. ``warps`` and ``lanes``: their numbers along the columns and along K. ``points``: columns
    and K steps of a lane. ``blocks``: blocks of a cluster that split K; the partial sums are in the shared memory of
    all of them.
    """

    rows: int
    warps: tuple[int, int]
    lanes: tuple[int, int]
    points: tuple[int, int]
    blocks: int = 1


def gemv_schedule(group: Group, roles: Roles, sizes: GemvTile) -> Scheduled:
    """Schedule a product so that each lane sums its own K steps and columns, and the block adds the lanes' sums.

    ``rewrites.deal_reduction`` splits the reduction. Lanes load 16 bytes of the column operand at a time, each once.
    Warps and lanes along columns are ``w_j``, ``l_j``, those along the reduction ``w_k``, ``l_k``. SUM and the
    epilogues have the block's rows and columns (``e_i``, ``e_j``). Blocks of a cluster are units too (``c_k``), and a
    cluster is a task.
    """
    i, j, k = "i", "j", "k"
    parts = [(w(k), sizes.warps[1]), (lanes(k), sizes.lanes[1])]
    parts = [(c(k), sizes.blocks), *parts] if sizes.blocks > 1 else parts
    several = prod(n for _, n in parts)
    t = start_in_parts(group, roles, several, sizes.points[1])
    done = [x.name for x in group.epilogues]
    batch = tuple(map(it, roles.batch))
    block, unit = (*batch, b(i), b(j)), (w(j), lanes(j), *(x for x, _ in parts))
    t = tile(t, i, (b, f"B_{i}"), (p, sizes.rows))
    t = tile(t, j, (b, f"B_{j}"), (w, sizes.warps[0]), (lanes, sizes.lanes[0]), (p, sizes.points[0]))
    t = distribute(interchange(t, *block, w(j), lanes(j), p(i), p(j)), w(j), ACC)
    t = tile(t, POINT, (p, sizes.points[1]))
    t = refine(t, PART, it(PART), *parts)
    t = regroup(t, [INIT, ACC], [it(PART)], {x: [x] for x, _ in parts})
    t = pull_out(interchange(t, *unit, b(k), p(i), p(j), p(k)), b(k), p(k))
    t = regroup(t, [CLEAR, SUM, *done], [w(j), lanes(j), p(i), p(j)], {e(i): [p(i)], e(j): [w(j), lanes(j), p(j)]})
    t = pull_out(t, it(PART))
    t = keep(keep(t, PARTS, "acc", b(j)), group.backbone.array, "sums", b(j))
    t = assign(assign(t, "task", *block), "unit", *unit)
    t = pad(t, INIT)
    for axis in (i, j):
        t = clip(t, axis, ACC, CLEAR, SUM, *done)
    t = clip(t, k, ACC)
    t = mark(mark(t, MarkName.TASK, block[0], ACC), MarkName.REDUCE, b(k), ACC)
    t = mark(mark(t, MarkName.INSTRUCTION, p(i), ACC), MarkName.COMBINE, e(i), SUM)
    return mark(t, MarkName.STORE, e(i), *done)
