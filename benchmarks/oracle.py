"""The oracle of a group: the best of a pool of tiles at every length, by a protocol that excludes lucky measurements.

All tiles of the pool are timed at some lengths, the *anchors*, spaced by ratio. Between two anchors the best tiles of
both are timed, and every tile that a strategy chose there. The best tiles and all chosen ones are timed again,
alternating. The oracle is selected on one half of these measurements and scored on the other, like everything that is
compared with it.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polydyn.measure.cpu_bench import CpuBench
from polydyn.search.backbone import Tile
from polydyn.search.explorers.explore import aligned_order
from polydyn.search.spaces.loop_model import loop_model

RANDOM = 100
"""Number of random valid tiles in the pool."""
ANCHORS, NEIGHBOUR_TILES, REPEATED_TILES, TURNS = 16, 16, 8, 6
"""Lengths at which the whole pool is timed; number of an anchor's best tiles that are tried near it; number of a
length's best tiles that are timed again; rounds after the first.
"""


def pool_of(bench: CpuBench, tiles: Iterable[Tile], count: int) -> list[Tile]:
    """Return the tiles that strategies selected, random valid tiles, and aligned ones up to ``count`` in all."""
    space = loop_model(bench.task.backbone, bench.hardware)
    pool = list(dict.fromkeys(tiles))
    pool += random.Random(1).sample(space.tiles, min(RANDOM, count, len(space)))
    ordered = aligned_order(space, bench.task.backbone, bench.hardware)
    return list(dict.fromkeys([*pool, *ordered]))[: max(len(set(pool)), count)]


def anchors_of(count: int) -> list[int]:
    """Return positions in a list of ``count`` lengths, spaced by ratio, both ends included."""
    if count <= ANCHORS:
        return list(range(count))
    return sorted({round(v) - 1 for v in np.geomspace(1, count, ANCHORS)})


def neighbours(anchors: Sequence[int], number: int) -> list[int]:
    """Return the anchors on both sides of a position, or the position itself if it is an anchor."""
    at = bisect_left(anchors, number)
    return [anchors[at]] if anchors[at] == number else [anchors[at - 1], anchors[at]]


@dataclass
class Oracle:
    """Timed kernels of one task. ``seconds`` maps (tile, position of the length) to the seconds of every round."""

    bench: CpuBench
    shapes: Sequence[dict[str, int]]
    seconds: dict[tuple[Tile, int], list[float]] = field(default_factory=dict)

    def run(self, tiles: Iterable[Tile], number: int) -> None:
        """Time each tile once more at a length."""
        tiles = list(tiles)
        spent = self.bench.run([(t, self.shapes[number]) for t in tiles])
        for t, s in zip(tiles, spent, strict=True):
            self.seconds.setdefault((t, number), []).append(s)

    def best(self, tiles: Iterable[Tile], number: int, count: int) -> list[Tile]:
        """Return the ``count`` fastest tiles of the first round."""
        return sorted(tiles, key=lambda t: (self.seconds[t, number][0], t))[:count]

    def half(self, tile: Tile, number: int, odd: bool) -> float:
        """Return the minimum seconds over every other round after the first."""
        return min(self.seconds[tile, number][2 - odd :: 2])

    def measure(self, pool: Sequence[Tile], picks: Sequence[Sequence[Tile]]) -> list[float]:
        """Time the pool and ``picks`` (a list of tiles for every length); return the oracle's seconds at every length.
        """
        anchors = anchors_of(len(self.shapes))
        for a in anchors:
            self.run(pool, a)
        for number in range(len(self.shapes)):
            near = neighbours(anchors, number)
            tried = dict.fromkeys([*(t for a in near for t in self.best(pool, a, NEIGHBOUR_TILES)), *picks[number]])
            self.run([t for t in tried if (t, number) not in self.seconds], number)
            again = dict.fromkeys([*self.best(tried, number, REPEATED_TILES), *picks[number]])
            for _ in range(TURNS):
                self.run(again, number)
        return [self.half(self._first(number), number, True) for number in range(len(self.shapes))]

    def _first(self, number: int) -> Tile:
        """Return the best tile of a length by the half that is not scored."""
        turned = [t for (t, n), spent in self.seconds.items() if n == number and len(spent) > 1]
        return min(turned, key=lambda t: (self.half(t, number, False), t))
