"""Tuning real kernels: the bench of this machine, its calibration, and ``polydyn.tune``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polydyn.build.features import available_cores
from polydyn.compiler import Options, cpu_target, place_kernels
from polydyn.dispatch.searches import Search
from polydyn.errors import UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.lowering.contract import ContractGroup
from polydyn.tuner.bench import CpuBench
from polydyn.tuner.calibrate import machine
from polydyn.tuner.timing import TIMER
from polydyn.tuning.measure import Workers
from polydyn.tuning.records import Records
from polydyn.tuning.strategy import strategy as strategy_of
from polydyn.tuning.strategy import tune as tune_task
from polydyn.tuning.task import Task, task_of

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


def tasks_of(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Mapping[str, tuple[int, int | None]] | None = None,
    options: Options | None = None,
) -> dict[str, Task]:
    """The groups of a model that can be tuned, by the label of their first place."""
    _, builder, placed = place_kernels(import_model(model, dims), target=target, options=options)
    labels: dict[str, str] = {}
    for p in placed:
        labels.setdefault(p.key, f"{p.fused.kind} {p.fused.outputs[0]}")
    out = {}
    for key, form in builder.forms.items():
        if isinstance(form, ContractGroup):
            try:
                out[labels[key]] = task_of(key, form, cpu_target(target), target)
            except UnsupportedError:
                continue  # a compilation with records says so in its notes
    return out


def tune(
    model: ModelLike,
    records: str | os.PathLike[str],
    *,
    target: str = "cpu",
    dims: Mapping[str, tuple[int, int | None]] | None = None,
    threads: int | None = None,
    options: Options | None = None,
    trials: int = TRIALS,
    seed: int = 0,
    report: Callable[[Progress], None] | None = None,
) -> list[TunedGroup]:
    """Tunes every matmul-like group of a model on this machine and adds what it measures to a record file.

    Stopped at any moment, even killed, it loses no finished measurement: called again it goes on from there. Then
    ``polydyn.compile(model, records=...)`` compiles the kernels chosen. ``options.strategy`` names the strategy. Raises
    PolydynError, see ``polydyn.errors``.
    """
    options = options or Options()
    row = strategy_of(options.strategy)
    tasks = tasks_of(model, target=target, dims=dims, options=options)
    hardware = machine(cpu_target(target), target, threads or available_cores())
    start = time.monotonic()
    done = []
    with Records.open(records) as opened, Workers(TIMER, timeout=TIMEOUT) as workers:
        for number, (label, task) in enumerate(tasks.items(), 1):
            begin = time.monotonic()
            search, bench = Search(row.name, trials, seed), CpuBench(task, hardware, workers)

            def tell(tried: int, cost: float, number: int = number) -> None:
                if report is not None:
                    spent = time.monotonic() - start
                    report(Progress(number, len(tasks), tried, trials, 1 / cost if cost else 0.0, spent))

            tuned = tune_task(
                row, search.problem(task), hardware, bench, trials=trials, seed=seed, records=opened, report=tell
            )
            opened.put([search.record(task, hardware)])
            seconds = time.monotonic() - begin
            done.append(TunedGroup(label, len(tuned.kernels), tuned.binaries, bench.measured, seconds))
    return done
