"""What benches of machines share: launches at shapes, and the line through the times of short and long reductions."""

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

SHORT, BLOCKS = 128, 9
"""A dynamic reduction is run with so many steps and with so many blocks, to tell the fixed part of a wave from that of
each block: what a short product spends on its tasks and accumulators is in the former.
"""

Part = tuple[tuple[str, int], ...]
T = TypeVar("T", bound=Task[Any])


class LaunchBench(ABC, Generic[T]):
    """Measures kernels of one task by launching them. ``failures``: why a compile-time part did not build or run;
    ``measured``: how many launches were timed.
    """

    source = "measured"

    def __init__(self, task: T, hardware: Hardware, workers: Workers) -> None:
        self.task, self.hardware, self.workers = task, hardware, workers
        self.failures: dict[Part, str] = {}
        self.measured = 0

    @abstractmethod
    def run(self, launches: Sequence[tuple[Tile, Shape]], tasks: int | None = None) -> list[float]:
        """Seconds of launches, ``tasks`` (blocks, on a GPU) of them only if given; ``inf`` where one failed."""

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """As ``Bench``."""
        shapes = [saturating_shape(self.task.backbone, self.hardware, t) for t in tiles]
        spent = self.run([(t, s) for t, s in zip(tiles, shapes, strict=True)])
        return [x / max(1, self.task.backbone.flops(s)) for x, s in zip(spent, shapes, strict=True)]

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """As ``Bench``; ``inf`` where it failed."""
        rounds = [self.run([(t, shape) for t in tiles]) for _ in range(turns)]
        return [max(row) if math.inf in row else min(row) for row in zip(*rounds, strict=True)]

    def waves(self, tile: Tile, counts: Sequence[int]) -> list[tuple[float, float]]:
        """(fixed, per step of the reduction) of the time of so many tasks. BuildError: the tuple does not run."""
        backbone = self.task.backbone
        block = tile.level("b")
        reductions = [x for x in backbone.reduction if x.extent is None]
        times: list[list[float]] = []
        for tasks in counts:
            row = []
            for d in (SHORT, None) if reductions else (None,):
                shape = {n: v * tasks if n == self.task.form.roles.row else v for n, v in block.items()}
                shape |= {x.name: d or BLOCKS * block[x.name] for x in reductions}
                row += self.ran(tile, [backbone.sizes(shape)], tasks)
            times.append(row)
        return [self._line(tile, row) for row in times]

    def ran(self, tile: Tile, shapes: Sequence[Shape], tasks: int) -> list[float]:
        """Seconds of a tuple's launches. BuildError: one of them failed."""
        spent = self.run([(tile, s) for s in shapes], tasks)
        if not all(map(math.isfinite, spent)):
            raise BuildError(f"tuple {tile} does not run: {self.failures[tile.compile]}")
        return spent

    def _line(self, tile: Tile, times: Sequence[float]) -> tuple[float, float]:
        """(fixed, per step) of the time of a wave."""
        backbone = self.task.backbone
        if len(times) == 1:
            sizes = backbone.sizes({x.name: 1 for x in backbone.loops})
            steps = math.prod(-(-sizes[x.name] // tile[f"b.{x.name}"]) for x in backbone.reduction)
            return 0.0, times[0] / max(1, steps)
        blocks = [tile[f"b.{x.name}"] for x in backbone.reduction if x.extent is None]
        first, last = math.prod(SHORT / b for b in blocks), BLOCKS ** len(blocks)  # in block steps
        step = max(0.0, (times[1] - times[0]) / max(1.0, last - first))
        return max(0.0, times[0] - first * step), step
