"""The search of a group whose space is small: every tuple is launched whole at the sizes that count."""

from __future__ import annotations

import math

import numpy as np

from polydyn.errors import BuildError
from polydyn.search import select
from polydyn.search.backbone import Problem
from polydyn.search.bench import Bench, RecordedBench
from polydyn.search.explorers.explore import Trial
from polydyn.search.finals import LONG, TURNS, sizes_to_measure
from polydyn.search.hardware import Hardware
from polydyn.search.records import Records
from polydyn.search.strategies import MEASURED_SECONDS, Tuned
from polydyn.search.tasks.sized import SizedTask

BINARIES = 3
"""Different compile-time parts that are kept: what they differ by is little, and each is a kernel to compile."""


def search_sizes(
    task: SizedTask, problem: Problem, hardware: Hardware, bench: Bench, records: Records, strategy: str, trials: int
) -> Tuned:
    """The kernels that are kept, under a strategy's name: its space and its cost model are for products.

    ``problem``: without shapes, sizes are spaced by ratio. BuildError: no tuple ran at all of them.
    """
    shapes, weights = problem.shapes, problem.weights
    if not shapes:
        limit = MEASURED_SECONDS * hardware.memory_bandwidth / 4
        shapes, weights = select.sample_free_shapes(task.backbone, flops=limit)
    instances, tiles = [task.backbone.sizes(dict(s)) for s in shapes], task.tiles(trials)
    least = [task.moved(s) / hardware.memory_bandwidth for s in instances]
    least = [max(t, task.backbone.flops(s) / hardware.peak("float32")) for t, s in zip(least, instances, strict=True)]
    chosen = sizes_to_measure(least, weights, MEASURED_SECONDS, LONG * MEASURED_SECONDS / len(tiles))
    chosen = chosen or [least.index(min(least))]
    instances, weights = [instances[i] for i in chosen], tuple(weights[i] for i in chosen)
    recorded = RecordedBench(bench, records, problem.key, hardware)
    seconds = np.array([recorded.seconds(tiles, s, TURNS) for s in instances]).T
    ran = [k for k, row in enumerate(seconds) if np.isfinite(row).all() and (row > 0).all()]
    if not ran:
        raise BuildError(f"none of {len(tiles)} tuples ran", rule=f"group {task.key.structure} is launched whole")
    tiles, seconds = [tiles[k] for k in ran], seconds[ran]
    table = np.array([task.backbone.flops(s) for s in instances], float) / seconds
    selection = select.cover(table, weights, tiles, BINARIES)
    logs = np.average(np.log(seconds / seconds.min(0)), axis=1, weights=weights)
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
