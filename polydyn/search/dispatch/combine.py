"""FTuner's combination of two kernels along an axis (Algorithm 2): a length covered without padding.

Used with kernels that always execute full tiles (the padded, GPU binding). On the CPU tiles are exact and one kernel
serves every length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from polydyn.errors import ScheduleError
from polydyn.schedules.index import Index, maximum


@dataclass(frozen=True)
class Cover:
    """``counts``: (tile size, number of tiles) in launch order, at most two, together at least ``extent`` long."""

    extent: int
    counts: tuple[tuple[int, int], ...]

    @property
    def executed(self) -> int:
        """Iterations that are run, padding included."""
        return sum(size * n for size, n in self.counts)

    @property
    def padding(self) -> int:
        """Iterations of padding."""
        return self.executed - self.extent

    def price(self, cost: Mapping[int, float]) -> float:
        """The time of all tiles. ``cost``: tile size -> time of one tile."""
        return sum(n * cost[size] for size, n in self.counts)


def combine(extent: int, cost: Mapping[int, float]) -> Cover:
    """The cheapest cover of a length by one or two tile sizes. ``cost``: tile size -> time of one tile.

    Ties go to less padding, then to fewer launches, then to larger tiles. An empty axis needs no tile.
    """
    _check(cost)
    if extent <= 0:
        return Cover(0, ())
    covers = [Cover(extent, ((size, -(-extent // size)),)) for size in cost]
    for pair in combinations(sorted(cost, reverse=True), 2):
        covers += _mixed(extent, *pair) + _mixed(extent, *reversed(pair))
    return min(covers, key=lambda c: (c.price(cost), c.padding, len(c.counts), tuple(-s for s, _ in c.counts)))


def _mixed(extent: int, a: int, b: int) -> list[Cover]:
    """Covers with 1 .. b-1 tiles of size a (b of them could be replaced by a tiles of b), and b for the rest."""
    out = []
    for n in range(1, min(b, -(-extent // a))):
        rest = extent - n * a
        if rest > 0:
            out.append(Cover(extent, tuple(sorted(((a, n), (b, -(-rest // b))), reverse=True))))
    return out


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
    _check({big: 1.0, small: 1.0})
    g = math.gcd(big, small)
    period = big // g
    inverse = pow(small // g, -1, period) if period > 1 else 0
    smalls = ((extent // g) * inverse) % period
    rest = extent - smalls * small
    return PairForm(big, small, rest // big, smalls, maximum(extent % g, 0 - rest))


def _check(cost: Mapping[int, float]) -> None:
    if not cost or any(size <= 0 for size in cost):
        raise ScheduleError(f"tile sizes must be positive, not {sorted(cost)}", rule="FTuner Algorithm 2")
