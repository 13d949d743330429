"""Tuning real kernels: benches of this machine and of GPUs, the calibration, and ``polydyn.tune``.

Names are imported at first use: a process that only measures (``workers``) imports this package without the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polydyn.measure.tuning import TRIALS, PlacedTask, Progress, Seen, TunedGroup, tasks_of, tune

__all__ = ["TRIALS", "PlacedTask", "Progress", "Seen", "TunedGroup", "tasks_of", "tune"]

if not TYPE_CHECKING:  # a type checker reports names that this package does not have

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from polydyn.measure import tuning

        return getattr(tuning, name)
