"""Benches of CUDA products: an analytical model of the launch, and launches on a device.

Both use the version of a tile that the host program would launch: the one with the widest copies that the sizes allow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from polydyn.build.cache import digest, stored_file
from polydyn.build.features import available_cores
from polydyn.codegen.cuda.product import TiledProduct
from polydyn.codegen.kernel import Kernel, TensorMapOf
from polydyn.errors import BuildError, ScheduleError
from polydyn.gpu.compiler import compile_cuda
from polydyn.gpu.emulator import compile_emulated
from polydyn.gpu.hardware import Hardware as Device
from polydyn.gpu.targets import EMULATED, single
from polydyn.measure.launches import LaunchBench
from polydyn.measure.workers import Workers
from polydyn.program.estimates import ends_time, launch_time, resident_blocks, step_time
from polydyn.runtime.cuda.tensormap import PixelBox, TensorMap, element_type
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.evaluator import Evaluator, evaluator
from polydyn.schedules.index import Index, product
from polydyn.search.backbone import Shape, Tile
from polydyn.search.cost import MacroKernel
from polydyn.search.explorers.explore import saturating_shape
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Usage
from polydyn.search.tasks.cuda import CudaTask

NANOSECONDS, PICOSECONDS = 1e9, 1e12
REGISTERS = 8
"""Allocation granularity of registers per thread."""


def image_of(kernel: Kernel, arch: str) -> tuple[Path, int | None]:
    """Return a file that the driver loads, and the registers per thread (None if unknown). BuildError: it spills."""
    if arch == EMULATED:
        return compile_emulated(kernel.text), None
    compiled = compile_cuda(kernel.text, arch)
    use = compiled.kernels[kernel.name]
    if spilled := use.spill_stores + use.spill_loads:
        raise BuildError(f"{kernel.version} spills {spilled} bytes of registers", rule="tuned kernels do not spill")
    if use.serialised:
        raise BuildError(f"{kernel.version} waits for each of its products (C75xx)", rule="products overlap")
    return stored_file("cuda", f"{digest(compiled.image)}.cubin", compiled.image), use.registers


def launch_arguments(
    k: Kernel,
    image: Path,
    arrays: Mapping[str, tuple[str, int]],
    values: Mapping[str, int],
    max_blocks: int | None = None,
) -> dict[str, object]:
    """Return the arguments of ``time_kernel``. ``arrays``: dtype and bytes; ``max_blocks`` limits the grid."""
    grid = k.tasks.evaluate(values)
    return {
        "image": str(image),
        "name": k.name,
        "buffers": [arrays[a] for a in k.buffers],
        "symbols": [values[s] for s in k.symbols],
        "grid": grid if max_blocks is None else min(grid, max_blocks),
        "threads": k.device.threads,
        "smem": k.scratch.evaluate(values),
        "maps": [_map_at(m, k.buffers.index(m.buffer), values) for m in k.device.maps],
    }


def _map_at(m: TensorMapOf, place: int, values: Mapping[str, int]) -> tuple[int, int, dict[str, object]]:
    """Return the buffer index of a tensor map, its offset in bytes, and its fields as plain data."""
    _, item = element_type(m.dtype)
    dims, strides = (tuple(i.evaluate(values) for i in x) for x in (m.dims, m.strides))
    pixels = None
    if of := m.pixels:
        lower, upper = (tuple(i.evaluate(values) for i in x) for x in (of.lower, of.upper))
        pixels = PixelBox(lower, upper, of.steps)
    described = TensorMap(m.dtype, dims, tuple(s * item for s in strides), m.box, pixels=pixels)
    return place, m.offset.evaluate(values) * item, asdict(described)


class TileKernels:
    """The versions of each tile: the builders, the generated texts, the compiled images."""

    def __init__(self, task: CudaTask) -> None:
        self.task, self.arch = task, single(task.key.target)
        self._forms: dict[Tile, list[TiledProduct]] = {}
        self._texts: dict[tuple[Tile, int], tuple[Kernel, ...]] = {}

    def forms(self, tile: Tile) -> list[TiledProduct]:
        """Return the versions of a tile, widest copies first. ScheduleError: it breaks a rule."""
        if tile not in self._forms:
            self._forms[tile] = list(self.task.kernel.forms(self.task.tile(tile)))
        return self._forms[tile]

    def form(self, tile: Tile, shape: Shape) -> int:
        """Return the index of the first version that may be launched at a shape."""
        params = self.task.params(shape)
        required = [[m for c in x.copies for m in c.multiples] for x in self.forms(tile)]
        return next(k for k, ms in enumerate(required) if all(i.evaluate(params) % n == 0 for i, n in ms))

    def fitting(self, tile: Tile, shape: Shape, device: Device) -> Kernel:
        """Return the kernel that is launched at a shape. BuildError: no version may be launched."""
        params = self.task.params(shape)
        for number in range(len(self.forms(tile))):
            for k in self.texts(tile, number):
                if k.fits(params, device.smem_per_block, device.multiprocessors):
                    return k
        raise BuildError(f"no version of {tile} may be launched at {dict(shape)}")

    def texts(self, tile: Tile, number: int) -> tuple[Kernel, ...]:
        """Return the two kernels of a version, one per index width."""
        if (tile, number) not in self._texts:
            self._texts[tile, number] = self.forms(tile)[number].build()
        return self._texts[tile, number]

    def image(self, kernel: Kernel) -> tuple[Path, int | None]:
        """Return ``image_of`` the kernel for this architecture."""
        return image_of(kernel, self.arch)


class ModelBench:
    """``Bench`` without a device: ``launch_time`` estimates times. It uses the registers of a kernel if known."""

    source = "model"
    measured = 0

    def __init__(self, kernels: TileKernels, device: Device, hardware: Hardware) -> None:
        """``hardware``: the device as described to cost models."""
        self.kernels, self.task, self.device, self.hardware = kernels, kernels.task, device, hardware
        self.registers: dict[Tile, int] = {}
        self._times: dict[tuple[Tile, int, int | None], Evaluator] = {}

    @property
    def arch(self) -> str:
        """The architecture that the kernels are compiled for."""
        return self.kernels.arch

    def first(self, tile: Tile) -> Kernel:
        """Return the kernel of a tile with the widest copies."""
        return self.kernels.texts(tile, 0)[0]

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Implement ``Bench.per_operation``."""
        backbone = self.task.backbone
        shapes = [saturating_shape(backbone, self.hardware, t) for t in tiles]
        return [self.estimate(t, s) / max(1, backbone.flops(s)) for t, s in zip(tiles, shapes, strict=True)]

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Implement ``Bench.seconds``; every round gives the same estimate."""
        return [self.estimate(t, shape) for t in tiles]

    def estimate(self, tile: Tile, shape: Shape) -> float:
        """Return the estimated seconds of a launch, as the host program computes them."""
        number, registers = self.kernels.form(tile, shape), self.registers.get(tile)
        key = tile, number, registers
        if key not in self._times:
            self._times[key] = evaluator(self._form(tile, number, registers))
        return self._times[key](self.task.params(shape) | {THREADS: self.device.multiprocessors}) / NANOSECONDS

    def _form(self, tile: Tile, number: int, registers: int | None) -> Index:
        task, x = self.task, self.kernels.forms(tile)[number]
        t, extents = x.tile, task.extents
        batch = product(extents[n] for n in task.form.roles.batch)
        grid = batch * x.of.M.ceildiv(t.bm) * x.of.N.ceildiv(t.bn)
        moved = Index.of(0)
        for o in task.backbone.operands:
            moved = moved + product(extents[n] for dim in o.dims for n, _ in dim) * o.bytes
        return launch_time(x.work, t.threads, grid, Index.of(task.shared(t)), moved, self.device, registers)

    def resident(self, tile: Tile) -> tuple[Usage, int]:
        """Return the resources of a block, and the number of blocks per SM."""
        x = self.kernels.forms(tile)[0]
        registers, smem = self.registers.get(tile, x.work.registers), self.task.shared(x.tile)
        blocks = resident_blocks(x.tile.threads, registers, Index.of(smem), self.device)
        used = Usage(smem + self.device.smem_reserved_per_block, -(-registers // REGISTERS) * REGISTERS, x.tile.threads)
        return used, int(blocks)

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel`` with the terms of ``launch_time``."""
        x = self.kernels.forms(tile)[0]
        used, resident = self.resident(tile)
        full, alone = (p / PICOSECONDS for p in step_time(x.work, x.tile.threads, self.device))
        ends = ends_time(x.work, x.tile.threads, self.device)[1] / PICOSECONDS
        return MacroKernel(tile, used, ends, full * resident, ends, alone)


@dataclass(frozen=True)
class Built:
    """A kernel that was compiled to a file."""

    kernel: Kernel
    path: Path


class DeviceBench(LaunchBench[CudaTask]):
    """Measures kernels of one task on a device. ``model`` gives the estimates to compare with.

    ``workers``: one process that runs ``CUDA_TIMER``.
    """

    def __init__(self, model: ModelBench, workers: Workers) -> None:
        super().__init__(model.task, model.hardware, workers)
        self.model, self.kernels, self.device = model, model.kernels, model.device
        self._built: dict[str, Built] = {}

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel``. BuildError: the tile does not run."""
        used, resident = self.model.resident(tile)
        full, alone = self.waves(tile, (resident * self.hardware.units, self.hardware.units))
        return MacroKernel(tile, used, *full, *alone)

    def run(self, launches: Sequence[tuple[Tile, Shape]], tasks: int | None = None) -> list[float]:
        """Return the seconds of each launch, or ``inf`` if it failed. ``tasks`` limits the number of blocks."""
        requested: dict[int, Kernel] = {}
        for i, (tile, shape) in enumerate(launches):
            try:
                requested[i] = self.kernels.fitting(tile, shape, self.device)
            except (BuildError, ScheduleError) as e:  # any other error is a bug
                self.failures[tile.compile] = str(e)
        self._build([(launches[i][0], k) for i, k in requested.items()])
        runs = {i: k for i, k in requested.items() if k.name in self._built}
        answers = self.workers.map([self._arguments(k, launches[i][1], tasks) for i, k in runs.items()])
        self.measured += len(runs)
        out = [math.inf] * len(launches)
        for i, answer in zip(runs, answers, strict=True):
            if answer.failure:
                self.failures[launches[i][0].compile] = answer.failure
            else:
                out[i] = float(answer.value)
        return out

    def _build(self, kernels: Sequence[tuple[Tile, Kernel]]) -> None:
        new = {k.name: (tile, k) for tile, k in kernels if k.name not in self._built}

        def compiled(k: Kernel) -> tuple[Path, int | None] | str:
            try:
                return self.kernels.image(k)
            except BuildError as e:
                return str(e)

        with ThreadPoolExecutor(available_cores()) as pool:
            results = list(pool.map(compiled, (k for _, k in new.values())))
        for (tile, k), result in zip(new.values(), results, strict=True):
            if isinstance(result, str):
                self.failures[tile.compile] = result
                continue
            path, registers = result
            self._built[k.name] = Built(k, path)
            if registers is not None:
                self.model.registers.setdefault(tile, registers)

    def _arguments(self, k: Kernel, shape: Shape, tasks: int | None) -> dict[str, object]:
        params, arrays = self.task.params(shape), self.task.group.arrays
        values = k.values(params, self.device.multiprocessors)
        sizes = {a: (arrays[a].dtype, self.task.bytes(a, params)) for a in k.buffers}
        return launch_arguments(k, self._built[k.name].path, sizes, values, tasks)
