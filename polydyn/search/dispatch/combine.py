"""FTuner's combination of two kernels along an axis (Algorithm 2): a length covered without padding.

Used with kernels that always execute full tiles (the padded, GPU binding). On the CPU tiles are exact and one kernel
serves every length.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from polydyn.errors import ScheduleError
from polydyn.schedules.index import Index, maximum


@dataclass(frozen=True)
class PairForm:
    """Counts of two sizes for a length that a call gives. ``guard <= 0`` where they cover it exactly."""

    big: int
    small: int
    bigs: Index
    smalls: Index
    guard: Index


def pair_form(big: int, small: int, extent: Index) -> PairForm:
    """The exact cover with the fewest small tiles, in closed form.

    With g the common divisor, ``smalls = (extent/g) * inverse(small/g) mod (big/g)`` makes the rest a multiple of
    ``big``. It exists where g divides the extent and the rest is not negative, which holds for every multiple of g from
    ``(big/g - 1) * small`` on. Where the guard fails, a single kernel with padding serves.
    """
    check_sizes((big, small))
    g = math.gcd(big, small)
    period = big // g
    inverse = pow(small // g, -1, period) if period > 1 else 0
    smalls = ((extent // g) * inverse) % period
    rest = extent - smalls * small
    return PairForm(big, small, rest // big, smalls, maximum(extent % g, 0 - rest))


def check_sizes(sizes: Collection[int]) -> None:
    """ScheduleError: no sizes of tiles, or one below 1."""
    if not sizes or min(sizes) <= 0:
        raise ScheduleError(f"tile sizes must be positive, not {sorted(sizes)}", rule="FTuner Algorithm 2")
