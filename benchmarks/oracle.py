"""The oracle of a group: the best of a pool of tile tuples at every length, by a protocol that nobody can win by luck.

All of the pool is timed at some lengths, the *anchors*, spaced by ratio. Between two of them the best of both are
timed, and everything that strategies chose there. The best few and all that was chosen are timed again in turns. The
oracle is taken from one half of the turns and scored on the other, like everything that is compared with it.
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
"""Random valid tuples of the pool."""
ANCHORS, SHORT, BEST, TURNS = 16, 16, 8, 6
"""Lengths at which all of the pool is timed; how many of an anchor's best are tried near it; how many of a length's
best take turns; turns after the first."""


def pool_of(bench: CpuBench, tiles: Iterable[Tile], count: int) -> list[Tile]:
    """What strategies kept, random valid tuples, and aligned ones up to ``count`` in all."""
    space = loop_model(bench.task.backbone, bench.hardware)
    pool = list(dict.fromkeys(tiles))
    pool += random.Random(1).sample(space.tiles, min(RANDOM, count, len(space)))
    ordered = aligned_order(space, bench.task.backbone, bench.hardware)
    return list(dict.fromkeys([*pool, *ordered]))[: max(len(set(pool)), count)]


def anchors_of(count: int) -> list[int]:
    """Positions in a list of ``count`` lengths, spaced by ratio, both ends among them."""
    if count <= ANCHORS:
        return list(range(count))
    return sorted({round(v) - 1 for v in np.geomspace(1, count, ANCHORS)})


def neighbours(anchors: Sequence[int], number: int) -> list[int]:
    """The anchors on both sides of a position; itself when it is one."""
    at = bisect_left(anchors, number)
    return [anchors[at]] if anchors[at] == number else [anchors[at - 1], anchors[at]]


@dataclass
class Oracle:
    """Kernels of one task, timed: ``seconds``: (tile, position of the length) -> seconds of every turn."""

    bench: CpuBench
    shapes: Sequence[dict[str, int]]
    seconds: dict[tuple[Tile, int], list[float]] = field(default_factory=dict)

    def run(self, tiles: Iterable[Tile], number: int) -> None:
        """One more turn of each tile at a length."""
        tiles = list(tiles)
        spent = self.bench.run([(t, self.shapes[number]) for t in tiles])
        for t, s in zip(tiles, spent, strict=True):
            self.seconds.setdefault((t, number), []).append(s)

    def best(self, tiles: Iterable[Tile], number: int, count: int) -> list[Tile]:
        """The fastest of the first turn."""
        return sorted(tiles, key=lambda t: (self.seconds[t, number][0], t))[:count]

    def half(self, tile: Tile, number: int, odd: bool) -> float:
        """Least seconds of every other turn after the first."""
        return min(self.seconds[tile, number][2 - odd :: 2])

    def measure(self, pool: Sequence[Tile], picks: Sequence[Sequence[Tile]]) -> list[float]:
        """Times the pool and ``picks`` (a list of tiles for every length); the oracle's seconds at every length."""
        anchors = anchors_of(len(self.shapes))
        for a in anchors:
            self.run(pool, a)
        for number in range(len(self.shapes)):
            near = neighbours(anchors, number)
            tried = dict.fromkeys([*(t for a in near for t in self.best(pool, a, SHORT)), *picks[number]])
            self.run([t for t in tried if (t, number) not in self.seconds], number)
            again = dict.fromkeys([*self.best(tried, number, BEST), *picks[number]])
            for _ in range(TURNS):
                self.run(again, number)
        return [self.half(self._first(number), number, True) for number in range(len(self.shapes))]

    def _first(self, number: int) -> Tile:
        """The best of a length by the half that is not scored."""
        turned = [t for (t, n), spent in self.seconds.items() if n == number and len(spent) > 1]
        return min(turned, key=lambda t: (self.half(t, number, False), t))
