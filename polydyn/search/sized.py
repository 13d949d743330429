"""The search of a group whose tiles can be listed: tiles are launched in full at the relevant sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from polydyn.errors import BuildError
from polydyn.search import select
from polydyn.search.backbone import Backbone, GroupKey, Problem, Shape, Tile
from polydyn.search.bench import Bench, RecordedBench
from polydyn.search.explorers.explore import Trial
from polydyn.search.explorers.trust_region import search_rows
from polydyn.search.finals import (
    CLASSES,
    MAX_EXPLORED_SECONDS,
    MAX_TOTAL_LAUNCHES,
    ROUNDS,
    best_explored,
    sizes_to_measure,
    weighted_sizes,
)
from polydyn.search.hardware import Hardware
from polydyn.search.records import Records
from polydyn.search.select import Instance, Table
from polydyn.search.spaces.space import coordinates
from polydyn.search.strategies import MEASURED_SECONDS, Tuned

BINARIES = 3
"""Number of compile-time parts that a CPU keeps. They differ little, and each is a kernel to compile."""
FAILURE_PENALTY = 1e3
"""A tile that does not run at a size counts as this many times slower than the best there."""


class SmallTask(Protocol):
    """A task whose tiles can be listed: ``SizedTask``, ``FamilyTask``."""

    @property
    def key(self) -> GroupKey:
        """See ``Task``."""

    @property
    def backbone(self) -> Backbone:
        """See ``Task``."""

    def launched(self, shape: Shape) -> dict[str, int]:
        """See ``Task``."""

    def moved(self, shape: Shape) -> int:
        """See ``Task``."""

    def parameters(self, tile: Tile) -> dict[str, int]:
        """Return the values of all parameters of a tile."""


@dataclass(frozen=True)
class _Launches:
    """The launches that represent the shapes of a problem, their weights, and a lower bound of their seconds."""

    shapes: list[dict[str, int]]
    weights: list[float]
    seconds: list[float]


def search_sizes(
    task: SmallTask, problem: Problem, hardware: Hardware, bench: Bench, records: Records, strategy: str,
    tiles: Sequence[Tile], trials: int, seed: int = 0, *, binaries: int = BINARIES, everywhere: bool = True,
) -> Tuned:  # fmt: skip
    """Return the kernels to keep. ``strategy`` only names the result, because spaces and cost models are for products.

    ``problem``: without shapes, sizes are spaced by ratio. ``tiles``: the tiles to try, the default first, the most
    promising ones next. Up to ``trials`` tiles, all are launched at up to sixteen sizes. Of more tiles, ``trials`` are
    explored at a few sizes as tiles of products are (``trust_region``), and the best ones are launched at all sizes.
    ``binaries``: maximum number of binaries to keep. ``everywhere``: a tile must run at all sizes; otherwise at one
    size, and sizes at which no tile runs are ignored. BuildError: no tile ran.
    """
    launches = _launches(task, problem, hardware)
    recorded = RecordedBench(bench, records, problem.key, hardware)
    explored: tuple[Trial, ...] = ()
    if len(tiles) > trials:
        explored, class_weights = _explored(task, launches, recorded, tiles, trials, seed)
        tiles = list(dict.fromkeys([tiles[0], *best_explored(explored, class_weights)]))
    total = MAX_TOTAL_LAUNCHES * MEASURED_SECONDS / len(tiles)
    chosen = sizes_to_measure(launches.seconds, launches.weights, MEASURED_SECONDS, total)
    chosen = chosen or [launches.seconds.index(min(launches.seconds))]
    instances, weights = [launches.shapes[i] for i in chosen], tuple(launches.weights[i] for i in chosen)
    seconds = np.array([recorded.seconds(tiles, s, ROUNDS) for s in instances]).T
    if not everywhere:
        usable = [i for i, times in enumerate(seconds.T) if np.isfinite(times).any()]
        instances, weights = [instances[i] for i in usable], tuple(weights[i] for i in usable)
        seconds = seconds[:, usable]
    finite = np.isfinite(seconds) & (seconds > 0)
    ran = [k for k, row in enumerate(finite) if (row.all() if everywhere else row.any())]
    if not ran:
        raise BuildError(f"none of {len(tiles)} tiles ran", rule=f"group {task.key.structure} is launched in full")
    tiles, seconds = [tiles[k] for k in ran], seconds[ran]
    table = np.array([task.backbone.flops(s) for s in instances], float) / seconds
    selection = select.cover(table, weights, tiles, binaries)
    return Tuned(
        strategy,
        "tree",
        task.backbone,
        tuple(bench.kernel(tiles[k]) for k in selection.kernels),
        (),
        tuple(instances),
        weights,
        table[list(selection.kernels)],
        tuple(selection.kernels.index(k) for k in selection.assigned),
        explored or _trials(tiles, seconds, weights),
    )


def _launches(task: SmallTask, problem: Problem, hardware: Hardware) -> _Launches:
    """Return the launches of a problem. Shapes with the same launch are merged."""
    shapes, weights = problem.shapes, problem.weights
    if not shapes:
        limit = MEASURED_SECONDS * hardware.memory_bandwidth / 4
        shapes, weights = select.sample_free_shapes(task.backbone, flops=limit)
    merged: dict[Instance, float] = {}
    for shape, weight in zip(shapes, weights, strict=True):
        launch = tuple(task.launched(task.backbone.sizes(dict(shape))).items())
        merged[launch] = merged.get(launch, 0.0) + weight
    instances = list(map(dict, merged))
    peak = hardware.peak("float32" if hardware.kind == "cpu" else task.key.dtype)
    seconds = [max(task.moved(s) / hardware.memory_bandwidth, task.backbone.flops(s) / peak) for s in instances]
    return _Launches(instances, list(merged.values()), seconds)


def _explored(
    task: SmallTask, launches: _Launches, bench: Bench, tiles: Sequence[Tile], trials: int, seed: int
) -> tuple[tuple[Trial, ...], list[float]]:
    """Explore ``trials`` tiles at a few sizes. Return the trials, with costs in seconds, and the sizes' weights."""
    total = MAX_EXPLORED_SECONDS / trials
    classes = weighted_sizes(launches.seconds, launches.weights, total, total, CLASSES)
    shortest = launches.seconds.index(min(launches.seconds))
    classes = classes or {shortest: launches.weights[shortest]}
    weights = list(classes.values())

    def costs(rows: Sequence[int]) -> Table:
        columns = [bench.seconds([tiles[r] for r in rows], launches.shapes[i]) for i in classes]
        return np.stack([np.array(c, float) for c in columns], axis=1)

    sizes = [list(task.parameters(t).values()) for t in tiles]
    result = search_rows(coordinates(sizes), costs, trials, order=range(len(tiles)), weights=weights, seed=seed)
    measured = zip(result.rows, result.costs, result.smoothed, strict=True)
    return tuple(Trial(tiles[r], tuple(map(float, c)), tuple(map(float, s))) for r, c, s in measured), weights


def _trials(tiles: Sequence[Tile], seconds: Table, weights: Sequence[float]) -> tuple[Trial, ...]:
    """Return the tiles with their costs: the weighted mean of the time over the best of each size."""
    with np.errstate(invalid="ignore"):
        shares = np.log(np.minimum(seconds / seconds.min(0), FAILURE_PENALTY))  # includes tiles that did not run
    logs = np.average(shares, axis=1, weights=weights)
    return tuple(Trial(t, (math.exp(x),)) for t, x in zip(tiles, logs, strict=True))
