"""Tuning on this machine's processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polydyn.backends import Options
from polydyn.backends.cpu import Cpu, cpu_target
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.errors import Declined
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Graph
from polydyn.lowering.alternatives import Rows
from polydyn.lowering.argsort import ArgSortGroup
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.cpu_tables import NestForms, ProductForms
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.lowering.serial import SerialGroup
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench, SizedBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.placed import PlacedTask
from polydyn.measure.tuning_backend import SearchSettings, TuningBackend
from polydyn.search.backbone import Problem, canonical, digest_of
from polydyn.search.bench import Bench
from polydyn.search.gain import GAIN, gain_over
from polydyn.search.hardware import Hardware
from polydyn.search.outcomes import Search, outcome
from polydyn.search.records import Record
from polydyn.search.sized import search_sizes
from polydyn.search.strategies import Tuned
from polydyn.search.tasks.cpu import DEFAULT, C, CpuTask, placed_task, task_of
from polydyn.search.tasks.sized import SERIAL, SizedTask, sized_task
from polydyn.shapes.sizes import Dims


def tasks_of(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
) -> list[PlacedTask[CpuTask]]:
    """Return the products of a model that can be tuned for a CPU, each at its first site."""
    tasks = products(*placed_builder(import_model(model, dims), target, options or Options()), target)
    return [task for task in tasks.values() if not isinstance(task, Declined)]


def placed_builder(
    graph: Graph, target: str, options: Options, machine: Hardware | None = None
) -> tuple[KernelBuilder, CpuTarget]:
    """Return the kernel builder that has placed the kernels of a graph, for the described machine."""
    backend = Cpu(target, options)
    backend.calibrate(machine)
    builder = backend.builder(backend.fuse(backend.rewrite(graph)))
    backend.place(builder)
    return builder, backend.processor


def products(builder: KernelBuilder, processor: CpuTarget, target: str) -> dict[str, PlacedTask[CpuTask] | Declined]:
    """Return the products by label, or the reason why a product is not tuned."""
    forms = {key: form for key, form in builder.forms.items() if isinstance(form, ContractGroup)}
    tasks = {key: task_of(key, form, processor, target, _rows(key, form, processor)) for key, form in forms.items()}
    return dict(_placed(task, builder.placed[key]) for key, task in tasks.items())


def _rows(key: str, form: ContractGroup, processor: CpuTarget) -> Rows:
    """Return the rows of a product's table that a search compares with register tiles."""
    return Rows() if form.dot else ProductForms(form, key, f"contract_{key[:12]}", processor, None, {}).alternatives


def other_groups(builder: KernelBuilder, target: str) -> dict[str, PlacedTask[SizedTask] | Declined]:
    """Return the groups that are not products, by label, or the reason why a group is not tuned."""
    every = {
        key: (x.source, x.alternatives) if isinstance(x, NestForms) else (x, Rows()) for key, x in builder.sized.items()
    }
    tasks = {key: sized_task(key, kernel, target, rows) for key, (kernel, rows) in every.items()}
    serial = [key for key, form in builder.forms.items() if isinstance(form, (SerialGroup, ArgSortGroup))]
    others = tasks | {key: Declined(SERIAL) for key in serial}
    return dict(_placed(task, builder.placed[key]) for key, task in others.items())


def _placed(task: C | Declined, place: PlacedGroup) -> tuple[str, PlacedTask[C] | Declined]:
    """Return a task at its first site, with its label."""
    label = f"{place.fused.kind} {place.fused.outputs[0]}"
    if not isinstance(task, Declined):
        task = placed_task(task, place.lowered.params)
    if isinstance(task, Declined):
        return label, task
    return label, PlacedTask(label, task, {n: e.subs(place.lowered.params) for n, e in task.extents.items()})


class CpuTuningBackend(TuningBackend[Any]):
    """Tunes for this machine with the given number of threads. Raises BuildError if the calibration fails."""

    def __init__(self, target: str, threads: int) -> None:
        super().__init__(machine(cpu_target(target), target, threads), TIMER)
        self.target = target

    def tasks(self, graph: Graph, options: Options) -> list[PlacedTask[Any]]:
        """Implement ``TuningBackend.tasks``; products come first."""
        builder, processor = placed_builder(graph, self.target, options, self.hardware)
        every: dict[str, PlacedTask[Any] | Declined] = {**products(builder, processor, self.target)}
        every |= other_groups(builder, self.target)
        self.declined = {label: task.reason for label, task in every.items() if isinstance(task, Declined)}
        return [task for task in every.values() if not isinstance(task, Declined)]

    def search(self, task: CpuTask | SizedTask, problem: Problem, settings: SearchSettings) -> tuple[Search, int, int]:
        """Implement ``TuningBackend.search``."""
        assert self.workers is not None, "enter the context first"
        bench: CpuBench | SizedBench
        if isinstance(task, SizedTask):
            bench = SizedBench(task, self.hardware, self.workers)
            tuned = search_sizes(
                task, problem, self.hardware, bench, settings.records, settings.strategy.name, task.tiles(),
                settings.trials, settings.seed,
            )  # fmt: skip
        else:
            bench = CpuBench(task, self.hardware, self.workers)
            problem = replace(problem, rows=task.row_tiles)
            tuned = settings.tuned(problem, self.hardware, bench)
        rows = task.rows.names if settings.strategy.finals or isinstance(task, SizedTask) else ()
        compared = settings.strategy.finals or isinstance(task, SizedTask)
        gain = self._gain(task, tuned, bench, settings) if compared else None
        search = outcome(tuned, self.hardware, gain, rows)
        return search, len({t.compile for t in search.tiles}), bench.measured

    def _gain(self, task: CpuTask | SizedTask, tuned: Tuned, bench: Bench, settings: SearchSettings) -> float | None:
        """Return the gain of the selected tiles over the default kernel. It is measured once and then recorded."""
        tiles = [[k.tile.compile, k.tile.launch] for k in tuned.kernels]
        shapes = [sorted(s.items()) for s in tuned.instances]
        measured = {"tiles": tiles, "assigned": tuned.assigned, "shapes": digest_of([shapes, tuned.weights])}
        note = canonical(measured | ({"rows": task.rows.names} if task.rows.names else {}))
        recorded = [
            r for r in settings.records.rows(group=task.key, hardware=self.hardware, kind=GAIN) if r.note == note
        ]
        if recorded:
            return recorded[0].value(GAIN)
        gain = gain_over(task.default, tuned, bench)
        if gain is not None:
            settings.records.put([Record(task.key, self.hardware, DEFAULT, GAIN, ((GAIN, gain),), note=note)])
        return gain
