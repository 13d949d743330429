"""Estimated L2 bytes of a window's block, and the windows for which a thread has several outputs."""

from __future__ import annotations

import itertools

from polydyn.codegen.cuda.windows import Axes, window_axes
from polydyn.codegen.cuda.work import l2_bytes_per_step, points
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import loads
from tests.support.polyhedral_groups import depthwise

SIZES = {"C": 50, "H": 90, "W": 80, "H2": 92, "W2": 82}


def test_what_outputs_of_a_block_share_is_brought_once() -> None:
    """Compared with the enumerated addresses of all outputs and taps of a box."""
    g = depthwise(last=True)
    box, taps = {"h": 4, "w": 13, "c": 16}, {"j": 3, "k": 3}
    ranges = [range(n) for n in (*box.values(), *taps.values())]
    expected = 0
    for x in loads(g.backbone.value):
        address = g.arrays[x.buffer].address(x.index)
        every = {address.evaluate(SIZES | dict(zip((*box, *taps), p, strict=True))) for p in itertools.product(*ranges)}
        expected += 4 * len(every)
    assert expected / 9 <= l2_bytes_per_step(g, g.backbone, box) < expected / 9 + 1


def test_points_are_neighbours_first() -> None:
    """An axis of known extent has at most all points; an axis of unknown extent has the remaining ones."""
    core = depthwise(last=True).backbone
    assert points(core, ("c", "h", "w"), 64) == {"w": 64, "h": 1, "c": 1}


def test_outputs_of_a_thread_share_lines() -> None:
    """Outputs extend along the outermost iterator whose neighbours read the same; taps along it come last."""
    assert isinstance(window_axes(depthwise(last=True), ("h", "w", "c")), Declined), "its reduction has others"
    assert window_axes(depthwise(last=True), ("c", "h", "w")) == Axes("h", 4, ("k", "j"))
