"""Tuning for a CUDA device: measured on the device if it is present, otherwise ranked by a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from polydyn.backends import Options
from polydyn.backends.cuda import Cuda
from polydyn.codegen.kernel import UNIT
from polydyn.errors import BuildError, Declined
from polydyn.gpu.compiler import compiler_version
from polydyn.gpu.errors import DriverMissingError
from polydyn.gpu.hardware import Hardware as Device
from polydyn.gpu.hardware import device_of, existing
from polydyn.gpu.targets import EMULATED, named, newest, single
from polydyn.graph.ir import Graph
from polydyn.lowering.group import LoweredGroup
from polydyn.measure.cuda_bench import DeviceBench, ModelBench, TileKernels, image_of
from polydyn.measure.cuda_timing import CUDA_TIMER
from polydyn.measure.family_bench import FamilyDevice, FamilyModel
from polydyn.measure.placed import PlacedTask
from polydyn.measure.tuning_backend import SearchSettings, TuningBackend
from polydyn.runtime.cuda.images import is_emulated
from polydyn.runtime.cuda.program import MULTIPROCESSORS
from polydyn.runtime.cuda.session import open_session
from polydyn.schedules.decision import Decision
from polydyn.search.backbone import Problem, Tile
from polydyn.search.bench import RecordedBench
from polydyn.search.dispatch.build import build_dispatch
from polydyn.search.finals import MAX_TOTAL_LAUNCHES, ROUNDS, sizes_to_measure
from polydyn.search.outcomes import Search
from polydyn.search.records import Record
from polydyn.search.sized import search_sizes
from polydyn.search.strategies import MEASURED_SECONDS, Tuned
from polydyn.search.tasks.cpu import placed_task
from polydyn.search.tasks.cuda import CudaTask, cuda_task_of, hardware_of
from polydyn.search.tasks.families import FamilyTask, family_task_of


def find_device(target: str) -> tuple[Device, bool]:
    """Return the device to tune for, and whether it is present. If not, return the default device of the target.

    UnsupportedError: the target is not a single architecture.
    """
    arch, usual = single(target), device_of(target)
    try:
        driver = open_session().driver
    except DriverMissingError:
        return usual, False
    if arch != (EMULATED if is_emulated(driver) else named(driver.arch)):
        return usual, False
    return existing(target, driver.device_name, driver.attribute(MULTIPROCESSORS)), True


NO_ATTENTION = Declined("it is not an attention")
MAX_FAMILY_TILES = 8
"""Maximum number of tiles kept per family: each one is a kernel to compile for both index widths."""


class CudaTuningBackend(TuningBackend[Any]):
    """Tunes for the device of a target. UnsupportedError: the target is not a single architecture."""

    def __init__(self, target: str, threads: int = 1) -> None:
        """``threads`` is unused; the other tuning backends need it."""
        self.target = target
        self.device, there = find_device(target)
        super().__init__(hardware_of(self.device), CUDA_TIMER if there else None)

    def tasks(self, graph: Graph, options: Options) -> list[PlacedTask[Any]]:
        """Implement ``TuningBackend.tasks``. A product has its tiles as one task, and on sm_90a one task per kernel
        family."""
        backend = Cuda(self.target, options)
        builder = backend.builder(backend.fuse(backend.rewrite(graph)))
        out: dict[tuple[str, str], PlacedTask[Any]] = {}
        for group in builder.plan.groups:
            attention = builder.attention_kernel(group) if group.kind == "attention" else NO_ATTENTION
            if isinstance(attention, tuple) and newest(self.target) == "sm_90a" and attention[2].family.tiles():
                lowered, key, kernel = attention
                one = family_task_of(key, kernel.group, kernel.family, self.target)
                if (key, "") not in out and (p := _placed(f"attention {group.outputs[0]}", one, lowered)):
                    out[key, ""] = p
            for key, fused, form in builder.products(group):
                label, task = f"{fused.kind} {fused.outputs[0]}", cuda_task_of(key, form, self.target, options.tf32)
                if (key, "") in out or isinstance(task, Declined):  # the notes of a compilation report declined groups
                    continue
                every: dict[str, CudaTask | FamilyTask | Declined] = {"": task}
                family = task.kernel.family
                if newest(self.target) == "sm_90a" and family.tiles():
                    every[family.name] = family_task_of(key, form, family, self.target, options.tf32)
                places = {(key, n): _placed(f"{label} {n}".strip(), t, form.lowered) for n, t in every.items()}
                out |= {x: p for x, p in places.items() if p}
        return list(out.values())

    def search(
        self, task: CudaTask | FamilyTask, problem: Problem, settings: SearchSettings
    ) -> tuple[Search, int, int]:
        """Implement ``TuningBackend.search``."""
        if isinstance(task, FamilyTask):
            return self._search_family(task, problem, settings)
        problem = replace(problem, rule=task.refusal, first=task.defaults)
        model = ModelBench(TileKernels(task), self.device, self.hardware)
        if self.workers is None:
            tuned = _modelled(problem, settings, model, lambda p: settings.tuned(p, self.hardware, model))
            return self._outcome(tuned, (UNIT,) * len(tuned.kernels), "model", None), tuned.binaries, 0
        bench = DeviceBench(model, self.workers)
        tuned = settings.tuned(problem, self.hardware, bench)
        recorded = RecordedBench(bench, settings.records, problem.key, self.hardware)
        decision = build_dispatch(tuned)
        search = self._outcome(tuned, _factors(tuned, recorded, model), bench.source, decision)
        return search, tuned.binaries, bench.measured

    def _search_family(self, task: FamilyTask, problem: Problem, settings: SearchSettings) -> tuple[Search, int, int]:
        model = FamilyModel(task, self.device, self.hardware)
        bench = FamilyDevice(model, self.workers) if self.workers else model

        def search(problem: Problem) -> Tuned:
            tiles = [t for t in task.every if not problem.rule(t)]
            return search_sizes(
                task, problem, self.hardware, bench, settings.records, settings.strategy.name, tiles, settings.trials,
                settings.seed, binaries=MAX_FAMILY_TILES, everywhere=False,
            )  # fmt: skip

        if isinstance(bench, FamilyModel):
            tuned = _modelled(problem, settings, model, search)
            factors, measured = (UNIT,) * len(tuned.kernels), 0
        else:
            tuned = search(problem)
            recorded = RecordedBench(bench, settings.records, problem.key, self.hardware)
            factors, measured = _factors(tuned, recorded, model), bench.measured
        return self._outcome(tuned, factors, bench.source, None), tuned.binaries, measured

    def _outcome(self, tuned: Tuned, factors: tuple[int, ...], source: str, decision: Decision | None) -> Search:
        """Build the search result. ``decision``: the dispatch from measured times; the estimates of a model need
        none."""
        tiles = tuple(k.tile for k in tuned.kernels)
        return Search(tuned.strategy, tiles, len(tuned.trials), self.hardware, decision, factors, source)


def _placed(label: str, task: CudaTask | FamilyTask | Declined, lowered: LoweredGroup) -> PlacedTask[Any] | None:
    """Return a task at its site, or None if it is not tuned."""
    if not isinstance(task, Declined):
        task = placed_task(task, lowered.params)
    if isinstance(task, Declined):
        return None
    return PlacedTask(label, task, {n: e.subs(lowered.params) for n, e in task.extents.items()})


def _modelled(
    problem: Problem, settings: SearchSettings, model: ModelBench | FamilyModel, search: Callable[[Problem], Tuned]
) -> Tuned:
    """Run a search by the model, and repeat it while the compiler rejects selected tiles because they spill.

    Rejected tiles are recorded. Without a compiler no tile is rejected.
    """
    failed = settings.records.rows(group=problem.key, hardware=model.hardware, kind="failed")
    refused = {r.tile: r.note for r in failed if r.source == model.source}
    rule = problem.rule
    problem = replace(problem, rule=lambda tile: rule(tile) or refused.get(tile))
    while True:
        tuned = search(problem)
        new = {k.tile: reason for k in tuned.kernels if (reason := compiler_refusal(model, k.tile))}
        if not new:
            return tuned
        refused |= new
        settings.records.put(
            Record(problem.key, model.hardware, t, "failed", (), source=model.source, note=reason)
            for t, reason in new.items()
        )


def compiler_refusal(model: ModelBench | FamilyModel, tile: Tile) -> str | None:
    """Return why the compiler report rejects a tile: its widest version spills registers. Return None without a
    report."""
    if model.arch == EMULATED:
        return None
    try:
        compiler_version()
    except BuildError:
        return None
    try:
        image_of(model.first(tile), model.arch)
    except BuildError as e:
        return str(e).partition("\n")[0]
    return None


def _factors(tuned: Tuned, bench: RecordedBench, model: ModelBench | FamilyModel) -> tuple[int, ...]:
    """Return a factor per kernel, measured over estimated time: a weighted geometric mean over sampled sizes.

    The sizes are drawn as for the finals. Sizes at which a kernel failed do not count. A kernel that ran at no size
    keeps its estimates.
    """
    tiles, shapes = [k.tile for k in tuned.kernels], tuned.instances
    estimates = np.array([model.seconds(tiles, s) for s in shapes]).T
    longest = MAX_TOTAL_LAUNCHES * MEASURED_SECONDS / len(tiles)
    sampled = sizes_to_measure(list(estimates.min(0)), tuned.weights, MEASURED_SECONDS, longest)
    times = np.array([bench.seconds(tiles, shapes[i], ROUNDS) for i in sampled]).reshape(len(sampled), len(tiles)).T
    weights, factors = np.array([tuned.weights[i] for i in sampled]), []
    for spent, estimated in zip(times, estimates[:, sampled], strict=True):
        ran = np.isfinite(spent) & (spent > 0) & np.isfinite(estimated)
        mean = np.average(np.log(spent[ran] / estimated[ran]), weights=weights[ran]) if ran.any() else 0.0
        factors.append(max(1, round(UNIT * math.exp(mean))))
    return tuple(factors)
