"""Base class of the benches: launches at shapes, and a linear fit to the times of short and long reductions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from polydyn.errors import BuildError
from polydyn.measure.workers import Workers
from polydyn.search.backbone import Shape, Tile
from polydyn.search.explorers.explore import saturating_shape
from polydyn.search.hardware import Hardware
from polydyn.search.tasks.cpu import Task

SHORT_STEPS, LONG_BLOCKS = 128, 9
"""Steps of the short reduction, and blocks of the long one. A dynamic reduction is run with both, to separate the fixed
part of a wave from the part per block. The fixed part contains the time for tasks and accumulators.
"""

Part = tuple[tuple[str, int], ...]
T = TypeVar("T", bound=Task[Any])


class LaunchBench(ABC, Generic[T]):
    """Measures kernels of one task by launching them. ``failures``: the reason why a compile-time part did not build
    or run; ``measured``: number of timed launches.
    """

    source = "measured"

    def __init__(self, task: T, hardware: Hardware, workers: Workers) -> None:
        self.task, self.hardware, self.workers = task, hardware, workers
        self.failures: dict[Part, str] = {}
        self.measured = 0

    @abstractmethod
    def run(self, launches: Sequence[tuple[Tile, Shape]], tasks: int | None = None) -> list[float]:
        """Return the seconds of each launch, ``inf`` if it failed. ``tasks`` limits the tasks (blocks on a GPU)."""

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Implement ``Bench.per_operation``."""
        shapes = [saturating_shape(self.task.backbone, self.hardware, t) for t in tiles]
        spent = self.run([(t, s) for t, s in zip(tiles, shapes, strict=True)])
        return [x / max(1, self.task.backbone.flops(s)) for x, s in zip(spent, shapes, strict=True)]

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Implement ``Bench.seconds``: ``inf`` if the tile failed."""
        rounds = [self.run([(t, shape) for t in tiles]) for _ in range(turns)]
        return [max(row) if math.inf in row else min(row) for row in zip(*rounds, strict=True)]

    def waves(self, tile: Tile, counts: Sequence[int]) -> list[tuple[float, float]]:
        """Return (fixed, per step) seconds for each number of tasks. BuildError: the tile does not run."""
        backbone = self.task.backbone
        block = tile.level("b")
        reductions = [x for x in backbone.reduction if x.extent is None]
        times: list[list[float]] = []
        for tasks in counts:
            row = []
            for d in (SHORT_STEPS, None) if reductions else (None,):
                shape = {n: v * tasks if n == self.task.form.roles.row else v for n, v in block.items()}
                shape |= {x.name: d or LONG_BLOCKS * block[x.name] for x in reductions}
                row += self.ran(tile, [backbone.sizes(shape)], tasks)
            times.append(row)
        return [self._line(tile, row) for row in times]

    def ran(self, tile: Tile, shapes: Sequence[Shape], tasks: int) -> list[float]:
        """Return the seconds of a tile at each shape. BuildError: a launch failed."""
        spent = self.run([(tile, s) for s in shapes], tasks)
        if not all(map(math.isfinite, spent)):
            raise BuildError(f"tile {tile} does not run: {self.failures[tile.compile]}")
        return spent

    def _line(self, tile: Tile, times: Sequence[float]) -> tuple[float, float]:
        """Return (fixed, per step of the reduction) of the time of a wave."""
        backbone = self.task.backbone
        if len(times) == 1:
            sizes = backbone.sizes({x.name: 1 for x in backbone.loops})
            steps = math.prod(-(-sizes[x.name] // tile[f"b.{x.name}"]) for x in backbone.reduction)
            return 0.0, times[0] / max(1, steps)
        blocks = [tile[f"b.{x.name}"] for x in backbone.reduction if x.extent is None]
        first, last = math.prod(SHORT_STEPS / b for b in blocks), LONG_BLOCKS ** len(blocks)  # in block steps
        step = max(0.0, (times[1] - times[0]) / max(1.0, last - first))
        return max(0.0, times[0] - first * step), step
