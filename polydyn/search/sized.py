"""The search of a group with a small space: every tile is launched in full at the relevant sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from polydyn.errors import BuildError
from polydyn.search import select
from polydyn.search.backbone import Backbone, GroupKey, Problem, Shape, Tile
from polydyn.search.bench import Bench, RecordedBench
from polydyn.search.explorers.explore import Trial
from polydyn.search.finals import MAX_TOTAL_LAUNCHES, ROUNDS, sizes_to_measure
from polydyn.search.hardware import Hardware
from polydyn.search.records import Records
from polydyn.search.select import Instance
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


def search_sizes(
    task: SmallTask, problem: Problem, hardware: Hardware, bench: Bench, records: Records, strategy: str,
    tiles: Sequence[Tile], binaries: int = BINARIES, everywhere: bool = True,
) -> Tuned:  # fmt: skip
    """Return the kernels to keep. ``strategy`` only names the result, because spaces and cost models are for products.

    ``problem``: without shapes, sizes are spaced by ratio. ``tiles``: the tiles to try; ``binaries``: maximum number
    of binaries to keep. ``everywhere``: a tile must run at all sizes; otherwise at one size, and sizes at which no tile
    runs are ignored. BuildError: no tile ran.
    """
    shapes, weights = problem.shapes, problem.weights
    if not shapes:
        limit = MEASURED_SECONDS * hardware.memory_bandwidth / 4
        shapes, weights = select.sample_free_shapes(task.backbone, flops=limit)
    merged: dict[Instance, float] = {}
    for shape, weight in zip(shapes, weights, strict=True):
        launch = tuple(task.launched(task.backbone.sizes(dict(shape))).items())
        merged[launch] = merged.get(launch, 0.0) + weight
    instances, weights = list(map(dict, merged)), tuple(merged.values())
    bounds = [task.moved(s) / hardware.memory_bandwidth for s in instances]
    peak = hardware.peak("float32" if hardware.kind == "cpu" else task.key.dtype)
    bounds = [max(t, task.backbone.flops(s) / peak) for t, s in zip(bounds, instances, strict=True)]
    chosen = sizes_to_measure(bounds, weights, MEASURED_SECONDS, MAX_TOTAL_LAUNCHES * MEASURED_SECONDS / len(tiles))
    chosen = chosen or [bounds.index(min(bounds))]
    instances, weights = [instances[i] for i in chosen], tuple(weights[i] for i in chosen)
    recorded = RecordedBench(bench, records, problem.key, hardware)
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
    with np.errstate(invalid="ignore"):
        shares = np.log(np.minimum(seconds / seconds.min(0), FAILURE_PENALTY))  # includes tiles that did not run
    logs = np.average(shares, axis=1, weights=weights)
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
        tuple(Trial(t, math.exp(x)) for t, x in zip(tiles, logs, strict=True)),
    )
