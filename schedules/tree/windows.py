"""The schedule of a window on the CPU: depthwise convolutions and poolings, by register tiles of neighbouring outputs.

A window reads every input for several outputs. The tile of a task is vectors of one axis (t, the lane) by a few
outputs of another one (u), and each stage runs all outputs of the tile before the next stage begins. Then the loads of
a stage stand together, and what they have in common is loaded once (codegen/passes/taps.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from polydyn.schedules.model import Group
from polydyn.schedules.tiling import stages
from polydyn.schedules.tree.limits import assign, clip, mark, unmark
from polydyn.schedules.tree.loops import Launch, Size, begins, distribute, interchange, sequence_phases, tile
from polydyn.schedules.tree.names import MarkName, b, it
from polydyn.schedules.tree.scheduled import Scheduled

LANES, OUTPUTS, PLANES = "t", "u", "p"
"""Axes: vectors run along the first, register tiles along the second; planes of the third one share their masks."""


def window(
    group: Group,
    band: Seq[str],
    phases: dict[str, int],
    across: str,
    outputs: int,
    order: Seq[str],
    planes: str | None = None,
) -> Scheduled:
    """A reduction over a window and what is computed of its result, in register tiles.

    ``band``, ``phases``: of the solved matrix, the lane last; ``across``: the iterator whose ``outputs`` neighbours are
    a tile; ``order``: the window's iterators; ``planes``: an iterator of which a task has several, which run inside the
    lanes, so that what a vector of lanes needs for its edges is made once for all of them. Tasks are (the other
    iterators, b_p, b_u, b_t); the points of a tile are lanes. Before: band n, c, h, w: INIT; band kh, kw: ACC; DONE.
    After, with c as planes::

        band n, b_p, b_u, b_t, t, p
          sequence
          - band u: INIT
          - band kh, kw, u: ACC
          - band u: DONE

    Refuses: nothing; what is wrong is found by the proof.
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
