"""Benches of CUDA kernel families: full launches, estimated or measured on a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from polydyn.codegen.kernel import WORKSPACE, Kernel
from polydyn.errors import BuildError, ScheduleError
from polydyn.gpu.hardware import Hardware as Device
from polydyn.gpu.targets import BASE, EMULATED, single
from polydyn.measure.cuda_bench import NANOSECONDS, image_of, launch_arguments
from polydyn.measure.workers import Workers
from polydyn.program.estimates import launch_time
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.index import ZERO, Index
from polydyn.search.backbone import Shape, Tile
from polydyn.search.cost import MacroKernel
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Usage
from polydyn.search.tasks.families import FamilyTask

V = Index.of


class FamilyModel:
    """``Bench`` without a device: each launch takes the time that the host program would estimate."""

    source = "model"

    def __init__(self, task: FamilyTask, device: Device, hardware: Hardware) -> None:
        """``hardware``: the device as described to cost models."""
        self.task, self.device, self.hardware, self.arch = task, device, hardware, single(task.key.target)
        self.registers: dict[str, int] = {}
        self._versions: dict[Tile, tuple[Kernel, ...]] = {}

    def versions(self, tile: Tile) -> tuple[Kernel, ...]:
        """Return the kernels of a tile. ScheduleError: it breaks a rule."""
        if tile not in self._versions:
            self._versions[tile] = self.task.versions(tile)
        return self._versions[tile]

    def fitting(self, tile: Tile, shape: Shape) -> Kernel | None:
        """Return the kernel of a tile that is launched at a shape, or None."""
        params, d = self.task.params(shape), self.device
        arch = "sm_90a" if self.arch == EMULATED else self.arch or BASE
        may = (k for k in self.versions(tile) if k.fits(params, d.smem_per_block, d.multiprocessors, arch))
        return next(may, None)

    def estimate(self, kernel: Kernel, shape: Shape) -> float:
        """Return the estimated seconds of a kernel and of the launches that follow it."""
        params = self.task.params(shape)
        env = kernel.values(params, self.device.multiprocessors) | {THREADS: self.device.multiprocessors}
        total, moved = 0, V(self.task.moved(shape))
        for k in (kernel, *kernel.after):
            if k.device.work is None or k.tasks.evaluate(env) <= 0:
                continue
            form = launch_time(k.device.work, k.device.threads, k.tasks, k.scratch, moved, self.device,
                               self.registers.get(k.name), kernel.workspace)  # fmt: skip
            total, moved = total + form.evaluate(env), ZERO
        return total / NANOSECONDS

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Unused by this bench."""
        raise NotImplementedError

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Implement ``Bench.seconds``: ``inf`` if a tile has no kernel for the shape. Every round is the same."""
        kernels = [self.fitting(t, shape) for t in tiles]
        return [self.estimate(k, shape) if k else math.inf for k in kernels]

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel``. Resources and waves are placeholders, because they are not used."""
        return MacroKernel(tile, Usage(0, 0, 1), 0.0, 0.0, 0.0, 0.0)

    def first(self, tile: Tile) -> Kernel:
        """Return the first kernel of a tile: if any kernel spills, this one does."""
        return self.versions(tile)[0]


class FamilyDevice:
    """``Bench`` on a device. ``model`` provides the kernels; ``workers``: one process that runs ``CUDA_TIMER``.

    ``failures``: the reason why a tile did not run; ``measured``: number of timed launches.
    """

    source = "measured"

    def __init__(self, model: FamilyModel, workers: Workers) -> None:
        self.model, self.workers = model, workers
        self.failures: dict[Tile, str] = {}
        self.measured = 0

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Unused by this bench."""
        raise NotImplementedError

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel``."""
        return self.model.kernel(tile)

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Implement ``Bench.seconds``: ``inf`` if a tile has no kernel for the shape, or failed. Each launch is timed
        on its own."""
        rounds = [[self._once(t, shape) for t in tiles] for _ in range(turns)]
        return [max(row) if math.inf in row else min(row) for row in zip(*rounds, strict=True)]

    def _once(self, tile: Tile, shape: Shape) -> float:
        if tile in self.failures:
            return math.inf
        try:
            first = self.model.fitting(tile, shape)
            return sum(self._time(tile, first, k, shape) for k in (first, *first.after)) if first else math.inf
        except (BuildError, ScheduleError) as e:
            self.failures[tile] = str(e)
            return math.inf

    def _time(self, tile: Tile, first: Kernel, k: Kernel, shape: Shape) -> float:
        """Return the seconds of one launch of a tile. BuildError: it fails."""
        model, task = self.model, self.model.task
        params = task.params(shape)
        values = first.values(params, model.device.multiprocessors)
        if k.tasks.evaluate(values) <= 0:
            return 0.0
        path, registers = image_of(k, model.arch)
        if registers is not None:
            model.registers.setdefault(k.name, registers)
        group = task.group.arrays
        arrays = {n: (group[n].dtype, task.bytes(n, params)) for n in k.buffers if n != WORKSPACE}
        arrays[WORKSPACE] = "float32", max(1, first.workspace.evaluate(values))
        (answer,) = self.workers.map([launch_arguments(k, path, arrays, values)])
        self.measured += 1
        if answer.failure:
            raise BuildError(f"tile {tile} does not run: {answer.failure}")
        return float(answer.value)
