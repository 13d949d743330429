"""The schedules of a window on the CPU (depthwise convolutions, poolings), in register tiles of neighbouring outputs.

A window reads every input for several outputs. The tile of a task has vectors along one axis (t, the lane) and a few
outputs along another (u), and each stage runs all outputs of the tile before the next stage begins. Then the loads of a
stage are adjacent, and common inputs are loaded once (codegen/passes/taps.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from polydyn.schedules.model import Group
from polydyn.schedules.tiling import stages
from polydyn.schedules.tree.buffers import keep
from polydyn.schedules.tree.limits import assign, clip, mark, unmark
from polydyn.schedules.tree.loops import (
    Launch,
    Size,
    begins,
    distribute,
    interchange,
    join_parts,
    sequence_phases,
    tile,
)
from polydyn.schedules.tree.names import MarkName, b, it
from polydyn.schedules.tree.scheduled import Scheduled

LANES, OUTPUTS, PLANES, LINES = "t", "u", "p", "v"
"""Axes: vectors run along the first, register tiles along the second. Planes of the third share their masks. In
two-dimensional register tiles the fourth axis is the other side."""


def window(
    group: Group,
    band: Seq[str],
    phases: dict[str, int],
    across: str,
    outputs: int,
    order: Seq[str],
    planes: str | None = None,
) -> Scheduled:
    """Schedule a reduction over a window, and the maps of its result, in register tiles.

    ``band``, ``phases``: those of the solved matrix, the lane last. ``across``: the iterator along which ``outputs``
    neighbours form a tile. ``order``: the window's iterators. ``planes``: an iterator of which a task has several; it
    runs inside the lanes, so that edge masks of a vector are computed once for all of them. Tasks are (the other
    iterators, b_p, b_u, b_t); the points of a tile are lanes.
    Before: band n, c, h, w: INIT; band kh, kw: ACC; DONE. After, with c as planes::

        band n, b_p, b_u, b_t, t, p
          sequence
          - band u: INIT
          - band kh, kw, u: ACC
          - band u: DONE

    Refuses: nothing; the proof finds errors.
    """
    backbone, first = group.backbone.name, group.statements[0].name
    axes = {band[-1]: LANES, across: OUTPUTS, **({planes: PLANES} if planes else {})}
    t = sequence_phases(group, band, [[s.name for s in x] for x in stages(group, tuple(band), phases)], axes)
    t = unmark(t, MarkName.STAGE)
    sizes: dict[str, Size] = {LANES: Launch(f"P_{LANES}"), OUTPUTS: outputs, PLANES: Launch(f"P_{PLANES}")}
    for x in axes.values():
        t = begins(tile(t, x, (b, f"B_{x}"), (it, sizes[x])), x, b(x), f"o_{x}")
        t = clip(t, x, *t.map.views)
    task = [it(x) if x not in axes else b(PLANES) for x in band if x not in (band[-1], across)]
    task += [b(OUTPUTS), b(LANES)]
    points = [it(LANES), *([it(PLANES)] if planes else [])]
    t = distribute(interchange(t, *task, *points, it(OUTPUTS)), it(OUTPUTS), backbone)
    t = interchange(t, *map(it, order), it(OUTPUTS))
    t = assign(assign(t, "task", *task), "lane", *points, it(OUTPUTS))
    return mark(mark(t, MarkName.TILE, it(LANES), first), MarkName.TASK, task[0], first)


def window_tile(
    group: Group, band: Seq[str], phases: dict[str, int], pixels: tuple[str, str], sizes: tuple[int, int],
    order: tuple[str, str],
) -> Scheduled:  # fmt: skip
    """Schedule a window in two-dimensional register tiles.

    ``pixels``: the iterators of image rows and columns; a tile has ``sizes`` of them. ``order``: the window's iterators
    that move along image rows and along columns.
    Before: band n, h, w, c: INIT; band kh, kw: ACC; DONE. After::

        band n, b_v, b_u, b_t, t
          sequence
          - band v, u: INIT
          - band kh, v, kw, u: ACC
          - band v, u: DONE

    Refuses: nothing; the proof finds errors.
    """
    backbone, first = group.backbone.name, group.statements[0].name
    axes = {band[-1]: LANES, pixels[0]: LINES, pixels[1]: OUTPUTS}
    t = sequence_phases(group, band, [[s.name for s in x] for x in stages(group, tuple(band), phases)], axes)
    t = unmark(t, MarkName.STAGE)
    of: dict[str, Size] = {LANES: Launch(f"P_{LANES}"), LINES: sizes[0], OUTPUTS: sizes[1]}
    for x in axes.values():
        t = begins(tile(t, x, (b, f"B_{x}"), (it, of[x])), x, b(x), f"o_{x}")
        t = clip(t, x, *t.map.views)
    task = [*(it(x) for x in band if x not in axes), b(LINES), b(OUTPUTS), b(LANES)]
    points = [it(LANES), it(LINES), it(OUTPUTS)]
    t = distribute(interchange(t, *task, *points), it(LINES), backbone)
    t = interchange(t, it(order[0]), it(LINES), it(order[1]), it(OUTPUTS))
    t = assign(assign(t, "task", *task), "lane", *points)
    return mark(mark(t, MarkName.TILE, it(LANES), first), MarkName.TASK, task[0], first)


TURN, KEEP = "TURN", "KEEP"
"""Statements: the first packs the planes of a task, the second copies the sums of a register tile for the epilogues."""
SUMS = "sums"
"""The buffer of a register tile."""


def blocked_window(group: Group, pixels: tuple[str, str], lanes: int, outputs: int, order: Seq[str]) -> Scheduled:
    """Schedule a window in the blocked layout: vectors run over ``lanes`` planes, between two copies, in one task.

    ``group``: TURN, an initialiser, the reduction, KEEP, the maps of the kept sums. ``pixels``: the iterators of image
    rows and columns; a register tile has ``outputs`` columns. Iterators before them are shared, and the last of these
    counts planes. ``order``: the window's iterators.
    Before: band n, c, y, x: TURN; band n, c, h, w: the others. After::

        band n, b_t
          sequence
          - band y, x, t: TURN
          - band h, b_u, t
              sequence
              - band u: INIT
              - band order, u: ACC
              - band u: KEEP
          - band h, w, t: DONE

    Refuses: nothing; the proof finds errors.
    """
    backbone, names = group.backbone, [s.name for s in group.statements]
    line, column = pixels
    shared = backbone.iterators[: backbone.iterators.index(line)]
    first, last = names.index(TURN), names.index(KEEP)
    parts = [names[: first + 1], names[first + 1 : last + 1], names[last + 1 :]]
    axes = [{}, {column: OUTPUTS}, {line: f"{line}_done", column: f"{column}_done"}]
    made = []
    for own, axis in zip(parts, axes, strict=True):
        part = replace(group, statements=tuple(s for s in group.statements if s.name in own))
        band = group.statement(own[0]).iterators
        stages = [[x] for x in own] if backbone.name in own else [own]
        made.append(sequence_phases(part, band, stages, {shared[-1]: LANES, **axis}))
    t = unmark(join_parts(group, [*map(it, shared[:-1]), it(LANES)], *made), MarkName.STAGE, MarkName.ROW)
    t = tile(t, LANES, (b, f"B_{LANES}"), (it, lanes))
    t = tile(t, OUTPUTS, (b, f"B_{OUTPUTS}"), (it, outputs))
    for x in (LANES, OUTPUTS):
        t = begins(t, x, b(x), f"o_{x}")
        t = clip(t, x, *(n for n, w in t.map.views.items() if any(d.axis == x for d in w.digits)))
    t = distribute(t, it(LANES), TURN)
    places, done = ([x.coord for x in t.view(n).loops[len(shared) + 1 :]] for n in (TURN, names[-1]))
    t = interchange(interchange(t, *places, it(LANES)), *done, it(LANES))
    t = interchange(t, it(line), b(OUTPUTS), it(LANES), it(OUTPUTS))
    t = interchange(distribute(t, it(OUTPUTS), backbone.name), *map(it, order), it(OUTPUTS))
    t = keep(t, backbone.array, SUMS, b(OUTPUTS))
    task = [*map(it, shared[:-1]), b(LANES)]
    t = assign(assign(t, "task", *task), "lane", it(LANES))
    t = mark(mark(t, MarkName.FILL, places[0], TURN), MarkName.STORE, done[0], names[-1])
    t = mark(t, MarkName.TILE, it(LANES), backbone.name)
    return mark(mark(t, MarkName.SHARE, b(LANES), TURN, under=True), MarkName.TASK, task[0], TURN)
