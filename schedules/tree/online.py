"""The schedule of an attention on a GPU: online softmax (``laws.online_softmax``) over tiles of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydyn.schedules.index import Index
from polydyn.schedules.laws.online_softmax import (
    FINISH,
    INIT,
    KEY,
    LEAVE_TOP,
    LEAVE_TOTAL,
    LOGIT,
    LOGITS,
    PEAK,
    ROWS,
    SCALE,
    SCORE,
    START,
    TILE,
    TOP,
    TOTAL,
    VALUE,
    VALUES,
    WEIGHTS,
    Softmax,
    online,
)
from polydyn.schedules.model import SHARE, Group
from polydyn.schedules.tiling import AttentionParts
from polydyn.schedules.tree.buffers import keep, promote
from polydyn.schedules.tree.gpu import STAGE, STAGED, stage_sums
from polydyn.schedules.tree.limits import assign, clip, mark, pad, unmark
from polydyn.schedules.tree.loops import distribute, interchange, join_parts, refine, regroup, sequence_phases, tile
from polydyn.schedules.tree.names import Coord, MarkName, b, e, f, g, h, it, p, s, w
from polydyn.schedules.tree.scheduled import Scheduled, refuse
from polydyn.schedules.tree.strategies import operand

COPY_Q, COPY_K, COPY_V = "COPY_Q", "COPY_K", "COPY_V"
FRAG_Q, FRAG_K, FRAG_W, FRAG_V = "FRAG_Q", "FRAG_K", "FRAG_W", "FRAG_V"
K1, J1, K2, J2, KEYS = "k1", "j1", "k2", "j2", "keys"
"""Axes: K steps and columns of the scores (the keys of a tile), columns of the values, all keys. ``k2`` names the
loops over the values' steps, which are the keys of a tile."""
OPERAND_AXES = (J2, TILE, J1), (J1, TILE, K1), ("i", K1)
"""Axes of the values, keys and queries that copies run over."""


@dataclass(frozen=True)
class OnlineTile:
    """Sizes of an attention kernel.

    ``warps``: warps of a block. ``keys``: keys of a tile. ``depth`` and ``width``: head sizes of scores and values.
    ``step``: K steps of an instruction with 16 rows and 8 columns: 4, 8 or 16. ``fragments``: 16-row fragments of a
    warp. The warp reuses each loaded key and value for all of them.
    """

    warps: int
    keys: int
    depth: int
    width: int
    step: int
    fragments: int = 1


def online_attention(
    parts: AttentionParts, softmax: Softmax, sizes: OnlineTile, shares: bool = False
) -> Scheduled:
    """Schedule an attention: a block has rows of queries, a warp one or more 16-row fragments of them.

    ``b_l`` is the loop over tiles of keys. Scores, logits and weights reuse the same registers one after another, and
    so do values. Loops of the scores end in 1, those of the values in 2. ``softmax``: its logit over the scores'
    accumulator. ``shares`` (split-KV): each block has a slice of the tiles (``b_s``). The kernel selects the tiles of a
    slice; here each slice has all.
    """
    if sizes.step not in (4, 8, 16):
        raise refuse(f"an instruction of {sizes.step} steps")
    group, key = online(parts, softmax, sizes.keys, shares)
    i, r, done = "i", parts.score_roles, [x.name for x in parts.values.epilogues]
    left = [LEAVE_TOP, LEAVE_TOTAL] if shares else []
    unit, block = (w(i),), (*([b("s")] if shares else []), *map(it, r.batch), b(i))
    t = start_online(group, parts, key, sizes.keys)
    rows = (f(i), p(i))
    t = tile(t, i, (b, "B_i"), (w, sizes.warps), (f, sizes.fragments), (p, STAGED))
    t = tile(t, K1, (f, sizes.depth // sizes.step), (p, sizes.step))
    t = tile(t, J1, (g, sizes.keys // 16), (h, 2), (p, 8))
    t = tile(t, J2, (g, sizes.width // 16), (h, 2), (p, 8))
    steps: list[str] = [g(J1)]
    within: list[str] = [h(J1), p(J1)]
    if sizes.step == 8:
        steps, within = [g(J1), h(J1)], [p(J1)]
    elif sizes.step == 4:
        t = refine(t, J1, p(J1), ("x_j1", 2), ("y_j1", 4))
        steps, within = [g(J1), h(J1), "x_j1"], ["y_j1"]
    points = [d.name for d in t.map.axes[J1] if d.name not in (g(J1), h(J1))]
    t = interchange(t, *block, w(i), *rows)
    t = distribute(t, w(i), START[0])
    t = distribute(interchange(t, b("l"), w(i), *rows), f(i), SCORE)
    t = distribute(unmark(t, MarkName.ROW), f(i), FINISH)
    scores: dict[Coord, list[str]] = {f(i): [f(i)], f(J1): [g(J1), h(J1)], p(i): [p(i)], p(J1): points}
    for n in (INIT, LOGIT):
        t = regroup(t, [n], [*rows, g(J1), h(J1), p(J1)], scores)
    head = [f(K1), p(K1)]
    t = regroup(t, [SCORE], [*rows, g(J1), h(J1), p(J1), *head],
                {f(K1): [f(K1)], **scores, p(K1): [p(K1)]})  # fmt: skip
    t = regroup(t, [VALUE], [*rows, g(J2), h(J2), p(J2), g(J1), h(J1), p(J1)],
                {f(K2): steps, f(i): [f(i)], f(J2): [g(J2), h(J2)], p(i): [p(i)], p(J2): [p(J2)],
                 p(K2): within})  # fmt: skip
    t = keep_rows(t, parts, unit)
    t = stage_sums(t, unit, (f(i),), (g(J2), h(J2)), parts.values.backbone.array, J2)
    t = _operands(t, parts, (steps, within, points))
    t = assign(assign(t, "task", *block), "unit", *unit)
    t = pad(t, *(x.name for x in group.statements if x.role != "epilogue" and x.name not in left))
    t = clip(clip(t, i, *left, *done), J2, *done)
    return _marks(t, block[0], left, done)


def start_online(
    group: Group, parts: AttentionParts, key: Index, keys: int, phases: Sequence[Sequence[str]] = (ROWS,)
) -> Scheduled:
    """Return the group in its original order, with a loop over tiles of ``keys`` keys around the statements of a tile.

    ``key``: the key as a function of the group's iterators; ``phases``: statements between the two products, in parts.
    """
    r, q = parts.score_roles, parts.value_roles
    left = [x for x in (LEAVE_TOP, LEAVE_TOTAL) if x in {y.name for y in group.statements}]
    rows = (*([SHARE] if left else []), *r.batch, r.row)
    axes = {r.row: "i", r.block: K1, KEY: J1, q.col: J2}
    loops = {TILE: b("l"), SHARE: b("s")}
    shared = [*([b("s")] if left else []), *map(it, r.batch), it("i")]

    def part(names: Sequence[str], *band: str) -> Scheduled:
        kept = replace(group, statements=tuple(map(group.statement, names)))
        return unmark(sequence_phases(kept, (*rows, *band), [[n] for n in names], axes, loops), MarkName.STAGE)

    inside = [part(x, TILE) for x in ((INIT,), (SCORE,), (LOGIT,), *phases, (VALUE,))]
    middle = join_parts(group, [*shared, b("l")], *inside)
    done = part([x.name for x in parts.values.epilogues], q.col)
    last = join_parts(group, shared, *([part(left)] if left else []), part([FINISH]), done)
    t = join_parts(group, shared, part(START), middle, last)
    count, derived = dict(parts.scores.backbone.iters)[r.col], {r.col: key, q.block: key}
    extents, joined = {**t.map.extents, TILE: count.ceildiv(keys), KEYS: count}, {KEYS: key.subs({KEY: J1})}
    return replace(t, map=replace(t.map, derived=derived, joined=joined, open=frozenset({KEYS}), extents=extents))


def keep_rows(t: Scheduled, parts: AttentionParts, unit: tuple[Coord, ...]) -> Scheduled:
    """Assign storage to the data of a warp.

    A tile has scores, then logits, then weights, and the values of its rows. The rows keep maxima and sums; the
    weighted values become the result. ``unit``: the loops of units that have a storage each; empty if instructions of
    several warps access it.
    """
    for array, name, storage in ((parts.scores.backbone.array, "acc1", "acc1"), (LOGITS, LOGITS, "acc1"),
                                 (WEIGHTS, WEIGHTS, "acc1"), (PEAK, PEAK, ""), (SCALE, SCALE, "")):  # fmt: skip
        t = keep(t, array, name, b("l"), unit, storage)
    for array, name, storage in ((VALUES, "acc2", "acc2"), (parts.values.backbone.array, "values", "acc2"),
                                 (TOP, TOP, ""), (TOTAL, TOTAL, "")):  # fmt: skip
        t = keep(t, array, name, b("i"), unit, storage)
    return t


def _operands(t: Scheduled, parts: AttentionParts, keys: tuple[list[str], list[str], list[str]]) -> Scheduled:
    """Copy operands to shared memory, a tile at a time, and from there to registers, an instruction's step at a time.

    All copies run over both axes of their tiles, even if an operand is the same along one of them.
    """
    i, unit, (steps, within, points), head = "i", (w("i"),), keys, [f(K1), p(K1)]
    rows, wide = [d.name for d in t.map.axes[i] if d.name not in (b(i), w(i), f(i))], [d.name for d in t.map.axes[J2]]
    first, second = parts.score_roles, parts.value_roles
    q, k, v = (operand(x, n) for x, n in ((parts.scores, first.row), (parts.scores, first.col),
                                          (parts.values, second.col)))  # fmt: skip
    tile_keys = [*steps, *within]
    of_v, of_k, of_q = OPERAND_AXES
    t = promote(t, v, J2, COPY_V, "tile_b2", b("l"), [VALUE], {s("j"): wide, s("k"): tile_keys}, over=of_v)
    keys_of_tile: dict[Coord, list[str]] = {s("j"): [g(J1), h(J1), *points], s("k"): [*head]}
    t = promote(t, k, J1, COPY_K, "tile_b1", b("l"), [SCORE], keys_of_tile, over=of_k)
    t = promote(t, q, i, COPY_Q, "tile_a1", b(i), [SCORE], {s(i): [w(i), f(i), *rows], s("k"): head}, over=of_q)
    t = promote(t, k, J1, FRAG_K, "b_frag1", f(K1), [SCORE], {g(J1): [g(J1)]}, [h(J1), *points, p(K1)], unit, of_k)
    t = promote(t, q, i, FRAG_Q, "a_frag1", f(K1), [SCORE], {f(i): [f(i)]}, [*rows, p(K1)], unit, of_q)
    loads = [x for x in wide if x not in (h(J2), p(J2))]
    t = promote(t, v, J2, FRAG_V, "b_frag2", f(K2), [VALUE], {g(J2): loads}, [h(J2), p(J2), *within], unit, of_v)
    return promote(t, WEIGHTS, i, FRAG_W, "a_frag2", f(K2), [VALUE], {f(i): [f(i)]}, [*rows, *within], unit)


def _marks(t: Scheduled, outermost: Coord, left: list[str], done: list[str]) -> Scheduled:
    i = "i"
    t = mark(mark(t, MarkName.TASK, outermost, SCORE), MarkName.PIPELINE, b("l"), SCORE)
    t = mark(mark(t, MarkName.COPY, s(i), COPY_Q), MarkName.COPY, s("j"), COPY_K, COPY_V)
    t = mark(mark(t, MarkName.MULTIPLY, w(i), SCORE), MarkName.EPILOGUE, w(i), FINISH)
    t = mark(mark(t, MarkName.START, f(i), START[0]), MarkName.ROWS, f(i), ROWS[0])
    t = mark(mark(t, MarkName.FINISH, f(i), *left, FINISH), MarkName.STORE, e(i), *done)
    return mark(t, MarkName.INSTRUCTION, p(i), INIT, SCORE, LOGIT, VALUE, STAGE)
