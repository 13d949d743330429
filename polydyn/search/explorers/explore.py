"""Explorers: which tuples of a space to measure, in which order.

An explorer is a function ``(space, objective, trials, seed) -> trials in order``. It is deterministic in the space, the
seed and the costs it gets. That makes stopping and resuming a matter of records alone: ``bench.Remembered`` answers
what was measured before from the record file, so a resumed run repeats its steps without measuring and then goes on.
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
"""Measures a batch: one cost per tuple, lower is better, ``inf`` for one that failed."""


@dataclass(frozen=True)
class Trial:
    """A measured tuple and its cost."""

    tile: Tile
    cost: float


Explorer = Callable[[Space, Objective, int, int], "tuple[Trial, ...]"]


def best(trials: Iterable[Trial]) -> Trial:
    """The trial of least cost (the first tile among equals). ValueError: there are none."""
    return min(trials, key=lambda t: (t.cost, t.tile))


def in_order(order: Sequence[Tile]) -> Explorer:
    """An explorer that measures a given order, such as ``aligned_order`` (Roller: construction without search)."""

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        return _measure([t for t in order if t in space.position][:trials], objective)

    return explore


def after(first: Sequence[Tile], explorer: Explorer) -> Explorer:
    """An explorer that measures some tuples first; they count as its trials."""

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        start = _measure(first, objective)
        rest = explorer(space, objective, max(1, trials - len(start)), seed)
        return (*start, *(t for t in rest if t.tile not in first))

    return explore if first else explorer


def by_size(explorer: Explorer, backbone: Backbone, classes: int) -> Explorer:
    """Runs an explorer apart on classes of equal count by the size of the block over the parallel loops."""

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
    """All tuples by Roller's criterion: least data moved per operation at both memory levels, on a saturated unit.

    TSCompiler 5.1 starts its trust regions from the first ones. Resident threads below a quarter of the unit's limit
    cannot hide latency, and register tiles of more rows than a CPU's cache has ways lose rows before they are used
    (recorded: 24 rows of 4096 bytes ran at an eighth of the best), so such tuples count as that much slower.
    """

    def score(tile: Tile) -> tuple[float, Tile]:
        block, part = tile.level("b"), tile.level("t") or tile.level("w")
        outer = sum(backbone.bytes_moved(block)) / backbone.flops(block) / (hardware.memory_bandwidth / hardware.units)
        inner = sum(o.footprint(part) for o in backbone.inputs) / backbone.flops(part) / hardware.local_bandwidth
        return (outer + inner) / _saturation(backbone, hardware, tile), tile

    return tuple(sorted(space.tiles, key=score))


def _saturation(backbone: Backbone, hardware: Hardware, tile: Tile) -> float:
    if hardware.kind == "cpu":  # rows of an operand that lie a power of two apart share the ways of one cache set
        by_role = roles(backbone)
        return min(1.0, hardware.ways / tile.get(f"w.{by_role['m'].name}")) if "m" in by_role else 1.0
    used = usage(backbone, hardware, tile)
    return min(1.0, max(1, blocks_per_unit(used, hardware)) * used.threads / (hardware.unit_threads / 4))


def spread(space: Space, order: Sequence[Tile], count: int) -> tuple[Tile, ...]:
    """The first ``count`` of an order that keep a distance from each other, so that each starts another region."""
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
    """A static instance large enough to fill the whole machine with full waves of a tile (TSCompiler 5.1).

    The first dynamic parallel loop takes what the others leave; a dynamic reduction gets about 1024 iterations.
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
