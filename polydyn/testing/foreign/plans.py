"""Recheck all decisions of a finished plan."""

from __future__ import annotations

from polydyn.testing.foreign.aliasing import check_copies, check_slots, check_windows
from polydyn.testing.foreign.order import check_groups, check_waves
from polydyn.testing.plan.planned import Planned


def check_planned_again(planned: Planned) -> None:
    """Check groups and windows, and for a CPU waves, omitted copies and the arena.

    ForeignError: a claim does not hold.
    """
    fused, placed, host = planned.kernels.plan, planned.kernels.placed, planned.plan
    check_groups(fused)
    check_windows(planned.later[1], fused)
    if not host.on_device:
        check_waves(host, placed)
        check_copies(fused, placed, host)
        check_slots(host, placed, planned.slots)
