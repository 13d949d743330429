"""Everything about a plan that is decided again once it is made."""

from __future__ import annotations

from polydyn.testing.foreign.aliasing import check_copies, check_slots, check_windows
from polydyn.testing.foreign.order import check_groups, check_waves
from polydyn.testing.plan.planned import Planned


def check_planned_again(made: Planned) -> None:
    """Checks groups and windows, and for a CPU waves, copies that were left out and the arena.

    ForeignError: a claim does not hold.
    """
    fused, placed, host = made.kernels.plan, made.kernels.placed, made.plan
    check_groups(fused)
    check_windows(made.later[1], fused)
    if not host.on_device:
        check_waves(host, placed)
        check_copies(fused, placed, host)
        check_slots(host, placed, made.slots)
