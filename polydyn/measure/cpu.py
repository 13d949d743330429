"""Tuning on this machine's processor."""

from __future__ import annotations

from polydyn.backends import Options
from polydyn.backends.cpu import Cpu, cpu_target
from polydyn.errors import Declined
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Graph
from polydyn.lowering.contract import ContractGroup
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.placed import PlacedTask
from polydyn.measure.side import How, Side
from polydyn.search.backbone import Problem, canonical, digest_of
from polydyn.search.gain import GAIN, gain_over
from polydyn.search.outcomes import Search, outcome
from polydyn.search.records import Record
from polydyn.search.strategies import Tuned
from polydyn.search.tasks.cpu import DEFAULT, CpuTask, placed_task, task_of
from polydyn.shapes.sizes import Dims


def tasks_of(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
) -> list[PlacedTask[CpuTask]]:
    """The groups of a model that can be tuned for a CPU, each at its first place."""
    return tasks_of_graph(import_model(model, dims), target, options or Options())


def tasks_of_graph(graph: Graph, target: str, options: Options) -> list[PlacedTask[CpuTask]]:
    """The same of a graph of primitives."""
    backend = Cpu(target, options)
    builder = backend.builder(backend.fuse(backend.rewrite(graph)))
    backend.place(builder)
    out = []
    for key, form in builder.forms.items():
        if not isinstance(form, ContractGroup):
            continue
        task = task_of(key, form, backend.processor, target)
        place = builder.placed[key]
        if not isinstance(task, Declined):
            task = placed_task(task, place.lowered.params)
        if isinstance(task, Declined):  # a compilation with records says so in its notes
            continue
        extents = {n: e.subs(place.lowered.params) for n, e in task.extents.items()}
        out.append(PlacedTask(f"{place.fused.kind} {place.fused.outputs[0]}", task, extents))
    return out


class CpuSide(Side[CpuTask]):
    """This machine with so many threads. BuildError: it cannot be calibrated."""

    def __init__(self, target: str, threads: int) -> None:
        super().__init__(machine(cpu_target(target), target, threads), TIMER)
        self.target = target

    def tasks(self, graph: Graph, options: Options) -> list[PlacedTask[CpuTask]]:
        """As ``Side``."""
        return tasks_of_graph(graph, self.target, options)

    def search(self, task: CpuTask, problem: Problem, how: How) -> tuple[Search, int, int]:
        """As ``Side``."""
        assert self.workers is not None, "enter the side first"
        bench = CpuBench(task, self.hardware, self.workers)
        tuned = how.tuned(problem, self.hardware, bench)
        found = outcome(tuned, self.hardware, self._gain(task, tuned, bench, how) if how.strategy.finals else None)
        return found, len({t.compile for t in found.tiles}), bench.measured

    def _gain(self, task: CpuTask, tuned: Tuned, bench: CpuBench, how: How) -> float | None:
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
