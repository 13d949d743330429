"""The schedule of an attention whose products are issued by warpgroups (wgmma, TMA), with online softmax."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.schedules.laws.online_softmax import (
    FINISH,
    INIT,
    LOGIT,
    ROWS,
    SCORE,
    START,
    VALUE,
    WEIGHTS,
    Softmax,
    online,
)
from polydyn.schedules.tiling import AttentionParts
from polydyn.schedules.tree.buffers import promote
from polydyn.schedules.tree.gpu import STAGE, STAGED, stage_sums
from polydyn.schedules.tree.limits import assign, clip, mark, pad, unmark
from polydyn.schedules.tree.loops import distribute, interchange, regroup, tile
from polydyn.schedules.tree.names import MarkName, b, e, f, g, h, it, p, q, s, w
from polydyn.schedules.tree.online import (
    COPY_K,
    COPY_Q,
    COPY_V,
    FRAG_W,
    J1,
    J2,
    K1,
    K2,
    OPERAND_AXES,
    keep_rows,
    start_online,
)
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import operand

RESCALE = ROWS[-1]
"""The statement that scales the accumulator of the second product."""


@dataclass(frozen=True)
class WarpgroupOnlineTile:
    """Sizes of an attention kernel with warpgroups.

    ``groups``: warpgroups of four warps in a block, with 16 rows per warp. ``keys``: keys of a tile. ``depth`` and
    ``width``: head sizes of scores and values, as (panels that one box loads, pieces of a panel). A piece of ``depth``
    has ``step`` K steps of an instruction, a piece of ``width`` has 8 columns.
    """

    groups: int
    keys: int
    depth: tuple[int, int]
    width: tuple[int, int]
    step: int = 16


def online_warpgroups(parts: AttentionParts, softmax: Softmax, sizes: WarpgroupOnlineTile) -> Scheduled:
    """Schedule an attention: a block has rows of queries, a warpgroup 64 of them.

    It loads tiles of keys (``b_l``) as boxes.

    A warpgroup computes both products of a tile, a warp the rows between them. Weights are packed separately from
    scores, so that the second product of a tile may overlap the scores of the next one. ``softmax`` as for
    ``online_attention``.
    """
    group, key = online(parts, softmax, sizes.keys)
    i, r, done = "i", parts.score_roles, [x.name for x in parts.values.epilogues]
    batch, unit, warps, rows = tuple(map(it, r.batch)), (w(i),), [g(i), h(i)], [h(i), p(i)]
    block, head, key_digits, wide = (*batch, b(i)), [s(K1), f(K1), p(K1)], [g(J1), h(J1), p(J1)], [s(J2), f(J2), p(J2)]
    t = start_online(group, parts, key, sizes.keys, (ROWS[:-1], (RESCALE,)))
    t = tile(t, i, (b, "B_i"), (g, sizes.groups), (h, 4), (p, STAGED))
    t = tile(t, K1, (s, sizes.depth[0]), (f, sizes.depth[1]), (p, sizes.step))
    t = tile(t, J1, (g, sizes.keys // 16), (h, 2), (p, 8))
    t = tile(t, J2, (s, sizes.width[0]), (f, sizes.width[1]), (p, 8))
    t = interchange(t, *block, *warps, p(i))
    t = distribute(t, g(i), START[0])
    t = distribute(interchange(t, b("l"), *warps, p(i)), g(i), SCORE)
    t = distribute(unmark(t, MarkName.ROW), g(i), FINISH)
    names = [n for n in t.map.views if n not in (SCORE, VALUE)]
    t = regroup(t, names, warps, {w(i): warps})
    fragments = {f(J1): [g(J1), h(J1)], p(i): [p(i)], p(J1): [p(J1)]}
    for n in (INIT, LOGIT):
        t = regroup(t, [n], [p(i), *key_digits], fragments)
    t = regroup(t, [SCORE], [*rows, *key_digits, *head],
                {f(K1): [s(K1), f(K1)], q(i): rows, q(J1): key_digits, p(K1): [p(K1)]})  # fmt: skip
    t = regroup(t, [VALUE], [*rows, *wide, *key_digits],
                {f(K2): [g(J1)], q(i): rows, q(J2): wide, p(K2): [h(J1), p(J1)]})  # fmt: skip
    t = keep_rows(t, parts, ())
    t = stage_sums(t, unit, unit, (s(J2), f(J2)), parts.values.backbone.array, J2, whole=True)
    first, second = parts.score_roles, parts.value_roles
    array = [operand(x, n) for x, n in ((parts.scores, first.row), (parts.scores, first.col),
                                        (parts.values, second.col))]  # fmt: skip
    # staging has split p_i and f_j2 into several digits
    points, columns = ([d.name for d in t.map.axes[x] if d.name not in (b(i), *warps, s(J2))] for x in (i, J2))
    t = promote(t, WEIGHTS, i, FRAG_W, "a_frag2", g(i), [VALUE], {h(i): [h(i)], f(K2): [g(J1)]},
                [*points, h(J1), p(J1)], (g(i),))  # fmt: skip
    t = promote(t, array[2], J2, COPY_V, "tile_b2", b("l"), [VALUE], {s("j"): [s(J2)]}, [*columns, *key_digits],
                over=OPERAND_AXES[0])  # fmt: skip
    t = promote(t, array[1], J1, COPY_K, "tile_b1", b("l"), [SCORE], {s("k"): [s(K1)]}, [*key_digits, f(K1), p(K1)],
                over=OPERAND_AXES[1])  # fmt: skip
    t = promote(t, array[0], i, COPY_Q, "tile_a1", b(i), [SCORE], {s("k"): [s(K1)]}, [*warps, *points, f(K1), p(K1)],
                over=OPERAND_AXES[2])  # fmt: skip
    t = assign(assign(assign(t, "task", *block), "unit", *unit), "unit", g(i))
    t = pad(t, *(x.name for x in group.statements if x.role != "epilogue"))
    t = clip(clip(t, i, *done), J2, *done)
    t = mark(mark(t, MarkName.TASK, block[0], SCORE), MarkName.ROLES, b(i), SCORE, under=True)
    t = mark(mark(t, MarkName.MULTIPLY, f(K1), SCORE), MarkName.MULTIPLY, f(K2), VALUE)
    t = mark(mark(t, MarkName.START, p(i), START[0]), MarkName.ROWS, p(i), ROWS[0])
    t = mark(mark(t, MarkName.RESCALE, p(i), RESCALE), MarkName.FINISH, p(i), FINISH)
    t = mark(mark(t, MarkName.EPILOGUE, w(i), done[0]), MarkName.STORE, e(i), *done)
    t = mark(mark(t, MarkName.INSTRUCTION, f(K1), SCORE), MarkName.INSTRUCTION, f(K2), VALUE)
    return mark(t, MarkName.INSTRUCTION, p(i), INIT, LOGIT, STAGE)
