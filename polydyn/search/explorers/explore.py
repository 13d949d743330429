"""Explorers: they choose which tiles of a space to measure, and in which order.

An explorer is a function ``(space, objective, trials, seed) -> trials in order``. It is deterministic in the space, the
seed and the costs. So records are enough to stop and resume: ``bench.RecordedObjective`` returns earlier measurements
from the record file, and a resumed run repeats its steps without measuring and then continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from polydyn.search.backbone import Backbone, Tile
from polydyn.search.cost import blocks_per_unit
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Points, Space, roles, usage

Costs = tuple[float, ...]
"""The costs of a tile, one per size class; lower is better, ``inf`` for a failure."""


@dataclass(frozen=True)
class Objective:
    """Measures a batch of tiles. ``weights``: importance of each size class."""

    measure: Callable[[Sequence[Tile]], Sequence[Costs]]
    weights: tuple[float, ...] = (1.0,)

    @staticmethod
    def single(cost: Callable[[Sequence[Tile]], Sequence[float]]) -> Objective:
        """Return an objective with one class from a function that returns one cost per tile."""
        return Objective(lambda tiles: [(c,) for c in cost(tiles)])

    def __call__(self, tiles: Sequence[Tile]) -> Sequence[Costs]:
        """Return the costs of a batch."""
        return self.measure(tiles)


@dataclass(frozen=True)
class Trial:
    """A measured tile and its costs. ``smoothed``: the costs that a model of all trials predicts for it, if the
    explorer has one. They are less noisy than a single measurement."""

    tile: Tile
    costs: Costs
    smoothed: Costs = ()

    @property
    def cost(self) -> float:
        """The mean over the classes."""
        return sum(self.costs) / len(self.costs)


Explorer = Callable[[Space, Objective, int, int], "tuple[Trial, ...]"]


def best(trials: Iterable[Trial]) -> Trial:
    """Return the trial with minimum mean cost (ties: the first tile). ValueError: there are none."""
    return min(trials, key=lambda t: (t.cost, t.tile))


def in_order(order: Sequence[Tile]) -> Explorer:
    """Return an explorer that measures a given order, such as ``aligned_order`` (Roller: construction, no search)."""

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        return _measure([t for t in order if t in space.position][:trials], objective)

    return explore


def after(first: Sequence[Tile], explorer: Explorer) -> Explorer:
    """Return an explorer that measures some tiles first; they count as trials."""

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        start = _measure(first, objective)
        rest = explorer(space, objective, max(1, trials - len(start)), seed)
        return (*start, *(t for t in rest if t.tile not in first))

    return explore if first else explorer


def _measure(tiles: Sequence[Tile], objective: Objective, batch: int = 8) -> tuple[Trial, ...]:
    out: list[Trial] = []
    for i in range(0, len(tiles), batch):
        part = tiles[i : i + batch]
        out += (Trial(t, c) for t, c in zip(part, objective(part), strict=True))
    return tuple(out)


def aligned_order(space: Space, backbone: Backbone, hardware: Hardware) -> tuple[Tile, ...]:
    """Return all tiles by Roller's criterion: minimum data moved per operation at both memory levels, if saturated.

    TSCompiler 5.1 starts its trust regions from the first ones. Fewer resident threads than a quarter of the unit's
    limit cannot hide latency. Register tiles with more rows than the associativity of a CPU's cache lose rows before
    use (recorded: 24 rows of 4096 bytes ran at an eighth of the best). The score of such tiles is reduced accordingly.
    """

    def score(tile: Tile) -> tuple[float, Tile]:
        block, part = tile.level("b"), tile.level("t") or tile.level("w")
        outer = sum(backbone.bytes_moved(block)) / backbone.flops(block) / (hardware.memory_bandwidth / hardware.units)
        inner = sum(o.footprint(part) for o in backbone.inputs) / backbone.flops(part) / hardware.local_bandwidth
        return (outer + inner) / _saturation(backbone, hardware, tile), tile

    return tuple(sorted(space.tiles, key=score))


def _saturation(backbone: Backbone, hardware: Hardware, tile: Tile) -> float:
    if hardware.kind == "cpu":  # rows at a power-of-two distance compete for the ways of one cache set
        by_role = roles(backbone)
        return min(1.0, hardware.ways / tile.get(f"w.{by_role['m'].name}")) if "m" in by_role else 1.0
    used = usage(backbone, hardware, tile)
    return min(1.0, max(1, blocks_per_unit(used, hardware)) * used.threads / (hardware.unit_threads / 4))


def spread(points: Points, order: Sequence[int], count: int) -> list[int]:
    """Return the first ``count`` rows of an order with a distance between each other. ``points``: coordinates in
    [0, 1] (tiles x axes). The distance shrinks until there are enough rows."""
    distance = 0.5 * math.sqrt(points.shape[1])
    while True:
        rows: list[int] = []
        for row in order:
            if len(rows) == count:
                break
            if all(np.linalg.norm(points[row] - points[r]) >= distance for r in rows):
                rows.append(row)
        if len(rows) == min(count, len(order)):
            return rows
        distance = distance * 0.7 if distance > 1e-3 else -1.0


ROW_BLOCK = 64
"""Iterations of each loop that stand for a block of a kernel without tiles."""
ROW_SHARE = 4
"""Tiles of the analytical order between two tiles of other rows."""


def with_rows(order: Sequence[Tile], rows: Sequence[Tile]) -> tuple[Tile, ...]:
    """Return an order that has the first tile of each other row after the best tile, and their other tiles between
    the following ones.
    """
    first = {t.row: t for t in reversed(rows)}
    heads = [t for t in rows if first[t.row] == t]
    rest, out = [t for t in rows if t not in heads], [*order[:1], *heads]
    for k, tile in enumerate(order[1:], 1):
        out.append(tile)
        if k % ROW_SHARE == 0 and rest:
            out.append(rest.pop(0))
    return (*out, *rest)


def saturating_shape(backbone: Backbone, hardware: Hardware, tile: Tile, waves: int = 2) -> dict[str, int]:
    """Return a static instance that fills the whole machine with full waves of a tile (TSCompiler 5.1).

    The first dynamic parallel loop supplies the missing blocks; a dynamic reduction gets about 1024 iterations.
    """
    if tile.row:  # its blocks follow from the sizes
        tile = Tile(tuple((f"b.{x.name}", min(ROW_BLOCK, x.extent or ROW_BLOCK)) for x in backbone.loops))
    block = tile.level("b")
    sizes = {x.name: x.extent if x.extent is not None else block[x.name] for x in backbone.loops}
    for x in backbone.reduction:
        if x.extent is None:
            sizes[x.name] = block[x.name] * max(1, 1024 // block[x.name])
    used = usage(backbone, hardware, tile)
    blocks = waves * hardware.units * max(1, blocks_per_unit(used, hardware))
    others = math.prod(-(-sizes[x.name] // block[x.name]) for x in backbone.parallel)
    for x in backbone.parallel:
        if x.extent is None:
            sizes[x.name] = block[x.name] * max(1, -(-blocks // max(others, 1)))
            break
    return sizes
