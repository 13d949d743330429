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
from polydyn.schedules.tree.loops import Launch, begins, distribute, interchange, sequence_phases, tile
from polydyn.schedules.tree.names import MarkName, b, it
from polydyn.schedules.tree.scheduled import Scheduled

LANES, OUTPUTS = "t", "u"
"""Axes: vectors run along the first, register tiles along the second."""


def window(
    group: Group, band: Seq[str], phases: dict[str, int], across: str, outputs: int, order: Seq[str]
) -> Scheduled:
    """A reduction over a window and what is computed of its result, in register tiles.

    ``band``, ``phases``: of the solved matrix, the lane last; ``across``: the iterator whose ``outputs`` neighbours are
    a tile; ``order``: the window's iterators. Tasks are (the other iterators, b_u, b_t); the points of a tile are
    lanes. Before: band n, c, h, w: INIT; band kh, kw: ACC; DONE. After::

        band n, c, b_u, b_t, t
          sequence
          - band u: INIT
          - band kh, kw, u: ACC
          - band u: DONE

    Refuses: nothing; what is wrong is found by the proof.
    """
    backbone, first = group.backbone.name, group.statements[0].name
    axes = {band[-1]: LANES, across: OUTPUTS}
    t = sequence_phases(group, band, [[s.name for s in x] for x in stages(group, tuple(band), phases)], axes)
    t = unmark(t, MarkName.STAGE)
    for x, size in ((LANES, Launch(f"P_{LANES}")), (OUTPUTS, outputs)):
        t = begins(tile(t, x, (b, f"B_{x}"), (it, size)), x, b(x), f"o_{x}")
        t = clip(t, x, *t.map.views)
    task = [*(it(x) for x in band if x not in axes), b(OUTPUTS), b(LANES)]
    lane, output = it(LANES), it(OUTPUTS)
    t = distribute(interchange(t, *task, lane, output), output, backbone)
    t = interchange(t, *map(it, order), output)
    t = assign(assign(t, "task", *task), "lane", lane, output)
    return mark(mark(t, MarkName.TILE, lane, first), MarkName.TASK, task[0], first)
