"""Tuning on this machine's processor."""

from __future__ import annotations

from typing import Any

from polydyn.backends import Options
from polydyn.backends.cpu import Cpu, cpu_target
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.errors import Declined
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Graph
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.order import OrderGroup
from polydyn.lowering.place import Placed
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.lowering.serial import SerialGroup
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench, SizedBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.placed import PlacedTask
from polydyn.measure.side import How, Side
from polydyn.search.backbone import Problem, canonical, digest_of
from polydyn.search.bench import Bench
from polydyn.search.gain import GAIN, gain_over
from polydyn.search.hardware import Hardware
from polydyn.search.outcomes import Search, outcome
from polydyn.search.records import Record
from polydyn.search.sized import search_sizes
from polydyn.search.strategies import Tuned
from polydyn.search.tasks.cpu import DEFAULT, C, CpuTask, Task, placed_task, task_of
from polydyn.search.tasks.sized import SERIAL, SizedTask, sized_task
from polydyn.shapes.sizes import Dims


def tasks_of(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
) -> list[PlacedTask[CpuTask]]:
    """The products of a model that can be tuned for a CPU, each at its first place."""
    found = products(*placed_builder(import_model(model, dims), target, options or Options()), target)
    return [task for task in found.values() if not isinstance(task, Declined)]


def placed_builder(
    graph: Graph, target: str, options: Options, machine: Hardware | None = None
) -> tuple[KernelBuilder, CpuTarget]:
    """What has placed the kernels of a graph of primitives, for a machine that is described."""
    backend = Cpu(target, options)
    backend.calibrate(machine)
    builder = backend.builder(backend.fuse(backend.rewrite(graph)))
    backend.place(builder)
    return builder, backend.processor


def products(builder: KernelBuilder, processor: CpuTarget, target: str) -> dict[str, PlacedTask[CpuTask] | Declined]:
    """The products by label, and why some are not tuned."""
    forms = {key: form for key, form in builder.forms.items() if isinstance(form, ContractGroup)}
    return dict(_placed(task_of(key, form, processor, target), builder.placed[key]) for key, form in forms.items())


def others(builder: KernelBuilder, target: str) -> dict[str, PlacedTask[SizedTask] | Declined]:
    """The other groups by label, and why some are not tuned."""
    tasks = {key: sized_task(key, kernel, target) for key, kernel in builder.sized.items()}
    serial = [key for key, form in builder.forms.items() if isinstance(form, (SerialGroup, OrderGroup))]
    every = tasks | {key: Declined(SERIAL) for key in serial}
    return dict(_placed(task, builder.placed[key]) for key, task in every.items())


def _placed(task: C | Declined, place: Placed) -> tuple[str, PlacedTask[C] | Declined]:
    """A task at its first place, by its label."""
    label = f"{place.fused.kind} {place.fused.outputs[0]}"
    if not isinstance(task, Declined):
        task = placed_task(task, place.lowered.params)
    if isinstance(task, Declined):
        return label, task
    return label, PlacedTask(label, task, {n: e.subs(place.lowered.params) for n, e in task.extents.items()})


class CpuSide(Side[Any]):
    """This machine with so many threads. BuildError: it cannot be calibrated."""

    def __init__(self, target: str, threads: int) -> None:
        super().__init__(machine(cpu_target(target), target, threads), TIMER)
        self.target = target

    def tasks(self, graph: Graph, options: Options) -> list[PlacedTask[Any]]:
        """As ``Side``; products first."""
        builder, processor = placed_builder(graph, self.target, options, self.hardware)
        every: dict[str, PlacedTask[Any] | Declined] = {**products(builder, processor, self.target)}
        every |= others(builder, self.target)
        self.declined = {label: task.reason for label, task in every.items() if isinstance(task, Declined)}
        return [task for task in every.values() if not isinstance(task, Declined)]

    def search(self, task: CpuTask | SizedTask, problem: Problem, how: How) -> tuple[Search, int, int]:
        """As ``Side``."""
        assert self.workers is not None, "enter the side first"
        bench: CpuBench | SizedBench
        if isinstance(task, SizedTask):
            bench = SizedBench(task, self.hardware, self.workers)
            row = how.strategy.name
            tuned = search_sizes(task, problem, self.hardware, bench, how.records, row, task.tiles(how.trials))
        else:
            bench = CpuBench(task, self.hardware, self.workers)
            tuned = how.tuned(problem, self.hardware, bench)
        compared = how.strategy.finals or isinstance(task, SizedTask)
        found = outcome(tuned, self.hardware, self._gain(task, tuned, bench, how) if compared else None)
        return found, len({t.compile for t in found.tiles}), bench.measured

    def _gain(self, task: Task[Any], tuned: Tuned, bench: Bench, how: How) -> float | None:
        """What the selected tiles gain over the default kernel; measured once, then from the records."""
        tiles = [[k.tile.compile, k.tile.launch] for k in tuned.kernels]
        shapes = [sorted(s.items()) for s in tuned.instances]
        note = canonical({"tiles": tiles, "assigned": tuned.assigned, "shapes": digest_of([shapes, tuned.weights])})
        known = [r for r in how.records.rows(group=task.key, hardware=self.hardware, kind=GAIN) if r.note == note]
        if known:
            return known[0].value(GAIN)
        gain = gain_over(DEFAULT, tuned, bench)
        if gain is not None:
            how.records.put([Record(task.key, self.hardware, DEFAULT, GAIN, ((GAIN, gain),), note=note)])
        return gain
