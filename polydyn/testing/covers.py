"""FTuner's combination (Algorithm 2): the cheapest cover of a length by one or two tile sizes, by enumeration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from polydyn.errors import ScheduleError


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
        """Return the time of all tiles. ``cost`` maps a tile size to the time of one tile."""
        return sum(n * cost[size] for size, n in self.counts)


def combine(extent: int, cost: Mapping[int, float]) -> Cover:
    """Return the cheapest cover of a length by one or two tile sizes. ``cost`` maps a tile size to the time of one
    tile.

    Ties go to less padding, then to fewer launches, then to larger tiles. An empty axis needs no tile. ScheduleError:
    no sizes, or one below 1.
    """
    if not cost or min(cost) <= 0:
        raise ScheduleError(f"tile sizes must be positive, not {sorted(cost)}", rule="FTuner Algorithm 2")
    if extent <= 0:
        return Cover(0, ())
    covers = [Cover(extent, ((size, -(-extent // size)),)) for size in cost]
    for pair in combinations(sorted(cost, reverse=True), 2):
        covers += _mixed(extent, *pair) + _mixed(extent, *reversed(pair))
    return min(covers, key=lambda c: (c.price(cost), c.padding, len(c.counts), tuple(-s for s, _ in c.counts)))


def _mixed(extent: int, a: int, b: int) -> list[Cover]:
    """Return covers with 1 .. b-1 tiles of size a (b of them could be replaced by a tiles of b), and b for the rest."""
    out = []
    for n in range(1, min(b, -(-extent // a))):
        rest = extent - n * a
        if rest > 0:
            out.append(Cover(extent, tuple(sorted(((a, n), (b, -(-rest // b))), reverse=True))))
    return out
