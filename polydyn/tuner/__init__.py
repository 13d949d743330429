"""Tuning real kernels: the bench of this machine, its calibration, and ``polydyn.tune``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from polydyn.build.features import available_cores
from polydyn.compiler import Options, cpu_target, place_kernels
from polydyn.errors import InputError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.kernels import bind
from polydyn.schedules.index import Index
from polydyn.searches import outcome, search_record
from polydyn.shapes.sizes import Dims, Sizes, sizes_by_name
from polydyn.tuner.bench import CpuBench
from polydyn.tuner.calibrate import machine
from polydyn.tuner.timing import TIMER
from polydyn.tuning.backbone import Problem
from polydyn.tuning.measure import Workers
from polydyn.tuning.records import Records
from polydyn.tuning.select import Instance, expected_shapes
from polydyn.tuning.strategy import strategy as strategy_of
from polydyn.tuning.strategy import tune as tune_task
from polydyn.tuning.task import Task, task_of

Seen = tuple[Mapping[str, int], float]
"""A shape of a model (every symbol's size) and how often it was met, or is expected."""
TRIALS = 64
"""Tuples explored for each group by default: about 20 s of building and measuring on two cores."""
TIMEOUT = 10.0
"""Seconds that one measurement may take."""


@dataclass(frozen=True)
class Progress:
    """Where tuning stands: group ``group`` (from 1) of ``groups``, ``trials`` of ``wanted`` tuples explored for it, the
    best so far in operations per second, and seconds since the beginning."""

    group: int
    groups: int
    trials: int
    wanted: int
    best: float
    elapsed: float


@dataclass(frozen=True)
class TunedGroup:
    """What tuning one group gave: ``label`` of its first place in the model, tuples kept and binaries that hold them,
    measurements made now (the others were in the records), seconds."""

    label: str
    tuples: int
    binaries: int
    measured: int
    seconds: float


@dataclass(frozen=True)
class PlacedTask:
    """A task and its first place in a model: ``extents``: loop -> extent over the model's symbols."""

    label: str
    task: Task
    extents: dict[str, Index]

    def expected(self, dims: Dims | None) -> list[Seen]:
        """Shapes by what the user knows of the sizes that the group depends on; none when that is nothing."""
        used = {s for x in self.task.backbone.loops if x.extent is None for s in self.extents[x.name].symbols()}
        known = sizes_by_name(dims)
        if not used & set(known):
            return []
        return [(s, p) for s, p in expected_shapes({s: known.get(s, Sizes()) for s in sorted(used)})]

    def instances(self, seen: Iterable[Seen]) -> tuple[tuple[Instance, ...], tuple[float, ...]]:
        """What the model's shapes mean for the group's dynamic loops, with weights: count times operations.

        Shapes that leave the group nothing to compute, or never came, say nothing of kernels. InputError: a size is
        missing.
        """
        backbone = self.task.backbone
        dynamic = [x.name for x in self.task.backbone.loops if x.extent is None]
        counts: dict[Instance, float] = {}
        needed = {s for n in dynamic for s in self.extents[n].symbols()}
        for dims, count in seen:
            if needed - set(dims):
                raise InputError(
                    f"the shape {dict(dims)} lacks a size of {min(needed - set(dims))}",
                    rule="a log of shapes gives every symbol of the model",
                    remedy="take Program.save_shapes of this very model",
                )
            at = tuple((n, self.extents[n].evaluate(dims)) for n in dynamic)
            counts[at] = counts.get(at, 0.0) + count
        work = {s: backbone.flops(backbone.sizes(dict(s))) for s in counts}
        found = tuple(s for s in sorted(counts) if work[s] and counts[s] > 0)
        return found, tuple(counts[s] * work[s] for s in found)


def tasks_of(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
) -> list[PlacedTask]:
    """The groups of a model that can be tuned, each at its first place."""
    _, builder, placed = place_kernels(import_model(model, dims), target=target, options=options)
    first = {p.key: p for p in reversed(placed)}
    out = []
    for key, form in builder.forms.items():
        if not isinstance(form, ContractGroup):
            continue
        try:
            task = task_of(key, form, cpu_target(target), target)
        except UnsupportedError:
            continue  # a compilation with records says so in its notes
        place = first[key]
        extents = {n: bind(place.lowered.params, e) for n, e in task.extents.items()}
        out.append(PlacedTask(f"{place.fused.kind} {place.fused.outputs[0]}", task, extents))
    return out


def tune(
    model: ModelLike,
    records: str | os.PathLike[str],
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    threads: int | None = None,
    options: Options | None = None,
    trials: int = TRIALS,
    seed: int = 0,
    seen: Sequence[Seen] = (),
    report: Callable[[Progress], None] | None = None,
) -> list[TunedGroup]:
    """Tunes every matmul-like group of a model on this machine and adds what it measures to a record file.

    Stopped at any moment, even killed, it loses no finished measurement: called again it goes on from there. Then
    ``polydyn.compile(model, records=...)`` compiles the kernels chosen. ``options.strategy`` names the strategy.
    ``seen``: shapes of the model with their counts (``Program.shapes_seen``), which decide what is kept; without them
    the ranges, likely sizes and probabilities in ``dims`` do; without those sizes spaced by ratio. Raises PolydynError,
    see ``polydyn.errors``.
    """
    options = options or Options()
    row = strategy_of(options.strategy)
    tasks = tasks_of(model, target=target, dims=dims, options=options)
    hardware = machine(cpu_target(target), target, threads or available_cores())
    start = time.monotonic()
    done = []
    with Records.open(records) as opened, Workers(TIMER, timeout=TIMEOUT) as workers:
        for number, placed in enumerate(tasks, 1):
            begin, task = time.monotonic(), placed.task
            problem = Problem(task.key, task.backbone, *placed.instances(seen or placed.expected(dims)))
            bench = CpuBench(task, hardware, workers)

            def tell(tried: int, cost: float, number: int = number) -> None:
                if report is not None:
                    spent = time.monotonic() - start
                    report(Progress(number, len(tasks), tried, trials, 1 / cost if cost else 0.0, spent))

            tuned = tune_task(row, problem, hardware, bench, trials=trials, seed=seed, records=opened, report=tell)
            opened.put([search_record(outcome(tuned, hardware), task)])
            seconds = time.monotonic() - begin
            done.append(TunedGroup(placed.label, len(tuned.kernels), tuned.binaries, bench.measured, seconds))
    return done
