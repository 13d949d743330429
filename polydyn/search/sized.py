"""The search of a group whose space is small: every tuple is launched whole at the sizes that count."""

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
from polydyn.search.finals import LONG, TURNS, sizes_to_measure
from polydyn.search.hardware import Hardware
from polydyn.search.records import Records
from polydyn.search.select import Instance
from polydyn.search.strategies import MEASURED_SECONDS, Tuned

BINARIES = 3
"""Different compile-time parts that a CPU keeps: what they differ by is little, and each is a kernel to compile."""
LEAST_SHARE = 1e3
"""A tuple that does not run at a size counts as so many times slower than the best there."""


class SmallTask(Protocol):
    """A task whose tuples can be listed: ``SizedTask``, ``FamilyTask``."""

    @property
    def key(self) -> GroupKey:
        """As ``Task``."""

    @property
    def backbone(self) -> Backbone:
        """As ``Task``."""

    def launched(self, shape: Shape) -> dict[str, int]:
        """As ``Task``."""

    def moved(self, shape: Shape) -> int:
        """As ``Task``."""


def search_sizes(
    task: SmallTask, problem: Problem, hardware: Hardware, bench: Bench, records: Records, strategy: str,
    tiles: Sequence[Tile], binaries: int = BINARIES, everywhere: bool = True,
) -> Tuned:  # fmt: skip
    """The kernels that are kept, under a strategy's name: its space and its cost model are for products.

    ``problem``: without shapes, sizes are spaced by ratio. ``tiles``: the tuples that are tried; ``binaries``: how many
    are kept at most; ``everywhere``: they must run at all sizes; else at one, and sizes at which none does say nothing.
    BuildError: no tuple did.
    """
    shapes, weights = problem.shapes, problem.weights
    if not shapes:
        limit = MEASURED_SECONDS * hardware.memory_bandwidth / 4
        shapes, weights = select.sample_free_shapes(task.backbone, flops=limit)
    together: dict[Instance, float] = {}
    for shape, weight in zip(shapes, weights, strict=True):
        launch = tuple(task.launched(task.backbone.sizes(dict(shape))).items())
        together[launch] = together.get(launch, 0.0) + weight
    instances, weights = list(map(dict, together)), tuple(together.values())
    least = [task.moved(s) / hardware.memory_bandwidth for s in instances]
    peak = hardware.peak("float32" if hardware.kind == "cpu" else task.key.dtype)
    least = [max(t, task.backbone.flops(s) / peak) for t, s in zip(least, instances, strict=True)]
    chosen = sizes_to_measure(least, weights, MEASURED_SECONDS, LONG * MEASURED_SECONDS / len(tiles))
    chosen = chosen or [least.index(min(least))]
    instances, weights = [instances[i] for i in chosen], tuple(weights[i] for i in chosen)
    recorded = RecordedBench(bench, records, problem.key, hardware)
    seconds = np.array([recorded.seconds(tiles, s, TURNS) for s in instances]).T
    if not everywhere:
        met = [i for i, times in enumerate(seconds.T) if np.isfinite(times).any()]
        instances, weights, seconds = [instances[i] for i in met], tuple(weights[i] for i in met), seconds[:, met]
    finite = np.isfinite(seconds) & (seconds > 0)
    ran = [k for k, row in enumerate(finite) if (row.all() if everywhere else row.any())]
    if not ran:
        raise BuildError(f"none of {len(tiles)} tuples ran", rule=f"group {task.key.structure} is launched whole")
    tiles, seconds = [tiles[k] for k in ran], seconds[ran]
    table = np.array([task.backbone.flops(s) for s in instances], float) / seconds
    selection = select.cover(table, weights, tiles, binaries)
    with np.errstate(invalid="ignore"):
        shares = np.log(np.minimum(seconds / seconds.min(0), LEAST_SHARE))  # of a tuple that did not run, too
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
