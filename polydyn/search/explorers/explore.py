"""Explorers: they choose which tiles of a space to measure, and in which order.

An explorer is a function ``(space, objective, trials, seed) -> trials in order``. It is deterministic in the space, the
seed and the costs. So records are enough to stop and resume: ``bench.RecordedObjective`` returns earlier measurements
from the record file, and a resumed run repeats its steps without measuring and then continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from polydyn.search.backbone import Backbone, Tile
from polydyn.search.cost import blocks_per_unit
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Space, roles, usage

Objective = Callable[[Sequence[Tile]], Sequence[float]]
"""Measures a batch: returns one cost per tile, lower is better, ``inf`` for a failure."""


@dataclass(frozen=True)
class Trial:
    """A measured tile and its cost."""

    tile: Tile
    cost: float


Explorer = Callable[[Space, Objective, int, int], "tuple[Trial, ...]"]


def best(trials: Iterable[Trial]) -> Trial:
    """Return the trial with minimum cost (ties: the first tile). ValueError: there are none."""
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


def by_size(explorer: Explorer, backbone: Backbone, classes: int) -> Explorer:
    """Return an explorer that explores size classes separately. Classes have equal counts and are ordered by the size
    of the block over the parallel loops."""

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        def area(t: Tile) -> tuple[int, Tile]:
            block = t.level("b")
            return math.prod(block[x.name] for x in backbone.parallel), t

        ordered = sorted(space.tiles, key=area)
        cuts = [len(ordered) * c // classes for c in range(classes + 1)]
        parts = [ordered[a:b] for a, b in pairwise(cuts) if b > a]
        out: list[Trial] = []
        for n, part in enumerate(parts):
            share = trials * (n + 1) // len(parts) - trials * n // len(parts)
            out += explorer(Space(f"{space.name}/{n}", tuple(sorted(part))), objective, share, seed)
        return tuple(out)

    return explore


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


def spread(space: Space, order: Sequence[Tile], count: int) -> tuple[Tile, ...]:
    """Return the first ``count`` of an order with a distance between each other, so that each starts a new region."""
    distance = 0.5 * math.sqrt(space.points.shape[1]) if space.names else 0.0
    while True:
        tiles: list[Tile] = []
        for tile in order:
            if len(tiles) == count:
                break
            x = space.points[space.position[tile]]
            if all(np.linalg.norm(x - space.points[space.position[c]]) >= distance for c in tiles):
                tiles.append(tile)
        if len(tiles) == min(count, len(order)):
            return tuple(tiles)
        distance = distance * 0.7 if distance > 1e-3 else -1.0


def saturating_shape(backbone: Backbone, hardware: Hardware, tile: Tile, waves: int = 2) -> dict[str, int]:
    """Return a static instance that fills the whole machine with full waves of a tile (TSCompiler 5.1).

    The first dynamic parallel loop supplies the missing blocks; a dynamic reduction gets about 1024 iterations.
    """
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
