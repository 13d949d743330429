"""The CPU bench: generate kernels, compile them in batches, and run them in a worker process with a time limit."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from polydyn.build.cache import digest
from polydyn.build.compiler import Building, build_library
from polydyn.build.eviction import touch
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.target import LEAVES, leaf_headers
from polydyn.codegen.kernel import WORKSPACE, Kernel
from polydyn.errors import BuildError, PolydynError, ScheduleError
from polydyn.lowering.cpu_tables import SizedKernel
from polydyn.measure.launches import LONG_BLOCKS, SHORT_STEPS, LaunchBench, Part
from polydyn.measure.sketch import PARTIAL_ROWS, Sketch
from polydyn.measure.workers import Answer, Workers
from polydyn.runtime.c import sources
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.index import Index
from polydyn.search.backbone import Shape, Tile
from polydyn.search.cost import MacroKernel
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Usage, usage
from polydyn.search.tasks.cpu import DEFAULT, CpuTask
from polydyn.search.tasks.sized import SizedTask

POOL = ("pool.c", "internal.h", "polydyn.h")
Form = tuple[Part, bool]
"""The compile-time part of a tile, and whether its kernel is only a sketch."""


@dataclass(frozen=True)
class Built:
    """A kernel in a library, at index ``which`` of its kernel table. ``after``: the kernels that are launched next."""

    library: str
    which: int
    source: Kernel
    after: tuple[Built, ...] = ()


T = TypeVar("T", bound=CpuTask | SizedTask)


class BuiltBench(LaunchBench[T]):
    """Launches kernels of one task on this machine. ``kernels``: the kernels built so far.

    ``workers``: one process that runs ``TIMER``. The launches use ``hardware.units`` threads.
    """

    def __init__(self, task: T, hardware: Hardware, workers: Workers) -> None:
        super().__init__(task, hardware, workers)
        self.kernels: dict[Form, Built] = {}
        self._rejected: set[Part] = set()

    def build(self, tiles: Sequence[Tile]) -> None:
        """Generate and compile the full kernels that are missing; all units of the batch compile in parallel."""
        self._build([(t, False) for t in tiles])

    def _build(self, requested: Sequence[tuple[Tile, bool]]) -> None:
        missing: dict[Form, Tile] = {}
        for tile, sketched in requested:
            form = tile.compile, sketched
            if form in self.kernels and not touch(Path(self.kernels[form].library)):
                del self.kernels[form]  # it is no longer in the cache
            if form not in self.kernels and tile.compile not in self._rejected:
                missing.setdefault(form, tile)
        if not missing:
            return
        new: dict[Form, Kernel] = {}
        with Building(timing_units((), self.task.target.width)[1], self.task.build) as building:
            for (part, sketched), tile in missing.items():
                try:
                    kernel = self.task.kernel(tile, self._builder(tile, sketched))
                except ScheduleError as e:  # the tile breaks a rule; any other error is a bug
                    self._reject(part, e)
                    continue
                new[part, sketched] = kernel
                if len(missing) > 1:  # compile this kernel while the next ones are generated
                    with suppress(BuildError):  # _compile reports which kernel failed
                        building.request({f"{k.name}.c": unit(k) for k in (kernel, *kernel.after)})
            if new:
                self._compile(new, building)

    def _reject(self, part: Part, reason: PolydynError) -> None:
        """Give up a compile-time part that does not build. One that fails at some size may still run at others."""
        self._rejected.add(part)
        self.failures[part] = str(reason)

    @abstractmethod
    def _builder(self, tile: Tile, sketched: bool) -> Any:
        """Return the kernel builder of a tile."""

    def _name(self, tile: Tile, sketched: bool) -> str:
        return f"tuned_{digest(self.task.key.digest, repr((tile.compile, sketched)))[:12]}"

    def _sketched(self, tile: Tile, shape: Shape) -> bool:
        """Whether a sketch is enough for a launch."""
        return False

    def _compile(self, kernels: Mapping[Form, Kernel], building: Building | None = None) -> None:
        every = [x for k in kernels.values() for x in (k, *k.after)]
        names = [k.name for k in every]
        units, headers = timing_units(every, self.task.target.width)
        try:
            library = building.library(units) if building else build_library(units, headers, self.task.build)
        except BuildError as e:
            if len(kernels) == 1:
                ((part, _),) = kernels
                self._reject(part, e)
                return
            for form, kernel in kernels.items():  # find the kernel that the compiler rejects
                self._compile({form: kernel})
            return
        path = str(library.file())
        for form, kernel in kernels.items():
            after = tuple(Built(path, names.index(k.name), k) for k in kernel.after)
            self.kernels[form] = Built(path, names.index(kernel.name), kernel, after)

    def run(self, launches: Sequence[tuple[Tile, Shape]], tasks: int | None = None) -> list[float]:
        """Return the seconds of each launch, or ``inf`` if it failed. ``tasks`` limits the number of tasks to run."""
        forms = [(t, self._sketched(t, s)) for t, s in launches]
        self._build(forms)
        runs = [
            (i, x)
            for i, form in enumerate((t.compile, sketched) for t, sketched in forms)
            if form in self.kernels
            for x in (self.kernels[form], *self.kernels[form].after)
        ]
        answers = self.workers.map([self._arguments(x, *launches[i], tasks) for i, x in runs])
        started = {i for i, _ in runs}
        self.measured += len(started)
        out = [0.0 if i in started else math.inf for i in range(len(launches))]
        for (i, _), answer in zip(runs, answers, strict=True):
            out[i] += self._seconds(launches[i][0], answer)
        return out

    def _seconds(self, tile: Tile, answer: Answer) -> float:
        if answer.failure:
            self.failures[tile.compile] = answer.failure
            return math.inf
        return float(answer.value)

    def _arguments(self, built: Built, tile: Tile, shape: Shape, tasks: int | None) -> dict[str, object]:
        k, params = built.source, self.task.params(shape)
        env: dict[str, Index] = {n: Index.of(v) for n, v in (params | {THREADS: self.hardware.units}).items()}
        shares = self.task.shares(self._builder(tile, sketched=False), tile)
        env |= {n: v.subs(env) for n, v in shares.items()}
        env |= {n: v.subs(env) for n, v in k.launch.items() if n not in env}  # of a kernel that is launched next
        number = {n: int(env[n]) for n in k.symbols}
        total = k.tasks.evaluate(number)
        group = self.task.row_choice(tile).group if tile.row else None
        partial_sums = (
            self.kernels[tile.compile, False].source.workspace.evaluate(number) if WORKSPACE in k.buffers else 0
        )
        return {
            "library": built.library,
            "which": built.which,
            "buffers": [partial_sums if a == WORKSPACE else self.task.bytes(a, params, group) for a in k.buffers],
            "symbols": [number[n] for n in k.symbols],
            "tasks": total if tasks is None else min(total, tasks),
            "threads": self.hardware.units,
            "scratch": k.scratch.evaluate(number),
        }


class SizedBench(BuiltBench[SizedTask]):
    """Measures kernels that are not products, with full launches."""

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel``. Resources and waves are placeholders, because they are not used."""
        return MacroKernel(tile, Usage(0, 0, 1), 0.0, 0.0, 0.0, 0.0)

    def _builder(self, tile: Tile, sketched: bool) -> SizedKernel:
        return self.task.builder(tile, self._name(tile, sketched))


class CpuBench(BuiltBench[CpuTask]):
    """Measures products, first as sketches."""

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel``. Raises BuildError if the tile does not run. The values of a tile of another row
        are placeholders: it is measured at sizes only.
        """
        if tile.row:
            return MacroKernel(tile, Usage(0, 0, 1), 0.0, 0.0, 0.0, 0.0)
        full, alone = self.waves(tile, (self.hardware.units, 1))
        used = usage(self.task.backbone, self.hardware, tile)
        return MacroKernel(tile, used, *full, *alone, *self._partial(tile))

    def _partial(self, tile: Tile) -> list[float]:
        """Return times of partial register tiles, relative to a full one: of one and of three rows. If the columns are
        dynamic, then also of all rows by one vector and of one row by one vector, relative to all rows and columns.
        """
        row, col = self.task.form.roles.row, self.task.form.roles.col
        full, wide = tile.get(f"w.{row}"), tile[f"w.{col}"]
        sizes = {x.name: x.extent or (LONG_BLOCKS * tile[f"b.{x.name}"]) for x in self.task.backbone.loops}
        sizes |= {x.name: x.extent or tile[f"b.{x.name}"] for x in self.task.backbone.parallel}
        spent = self.ran(tile, [sizes | {row: m} for m in (PARTIAL_ROWS[0], min(PARTIAL_ROWS[1], full), full)], 1)
        shares = [t / spent[-1] for t in spent[:-1]]
        if next(x for x in self.task.backbone.loops if x.name == col).extent is not None:
            return shares
        lanes = self.task.target.width
        partial = ((full, lanes), (1, lanes), (full, wide))
        # longer reductions would measure the memory bandwidth of the wide tiles
        sizes |= {x.name: SHORT_STEPS for x in self.task.backbone.reduction if x.extent is None}
        narrow = self.ran(tile, [sizes | {row: m, col: n} for m, n in partial], 1)
        return [*shares, *(t / narrow[-1] for t in narrow[:-1])]

    def _builder(self, tile: Tile, sketched: bool) -> Any:
        return self.task.builder(tile, self._name(tile, sketched), Sketch if sketched else ContractKernel)

    def _sketched(self, tile: Tile, shape: Shape) -> bool:
        if tile == DEFAULT or tile.row or (tile.compile, False) in self.kernels:
            return False
        try:
            builder = self.task.builder(tile, "sketch", Sketch)
        except ScheduleError:
            return False  # the full kernel is rejected for the same reason, which is then recorded
        return isinstance(builder, Sketch) and builder.covers(self.task.params(shape))


def unit(kernel: Kernel) -> str:
    """Return the translation unit of a kernel."""
    return f'#include <stdint.h>\n#include "{LEAVES[0]}"\n\n{kernel.text}\n'


def timing_units(kernels: Sequence[Kernel], width: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return the translation units and headers of a measuring library."""
    runtime = sources()
    headers = {n: runtime[n] for n in POOL if n.endswith(".h")} | leaf_headers(width)
    units = {f"{k.name}.c": unit(k) for k in kernels}
    table = "\n".join(
        [
            '#include "internal.h"',
            *(f"pd_kernel {k.name};" for k in kernels),
            f"pd_kernel *const pdt_kernels[] = {{{', '.join(k.name for k in kernels)}}};",
        ]
    )
    timing = (Path(__file__).parent / "runtime" / "timing.c").read_text()
    return units | {"pool.c": runtime["pool.c"], "timing.c": timing, "table.c": table + "\n"}, headers
