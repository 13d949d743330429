"""Tuning real kernels: benches of this machine and of GPUs, the calibration, and ``polydyn.tune``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydyn.backends import Options, target_of
from polydyn.build.features import available_cores
from polydyn.errors import Declined
from polydyn.graph.dynamic import Symbols
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.measure.cpu import CpuSide, tasks_of
from polydyn.measure.cuda import CudaSide
from polydyn.measure.placed import PlacedTask, Seen
from polydyn.measure.side import How, Side
from polydyn.search.backbone import Problem
from polydyn.search.outcomes import declined_record, search_record
from polydyn.search.records import Records
from polydyn.search.spaces.space import EmptySpaceError
from polydyn.search.strategies import strategy as strategy_of
from polydyn.shapes.sizes import Dims

__all__ = ["TRIALS", "PlacedTask", "Progress", "Seen", "TunedGroup", "tasks_of", "tune"]

SIDES: dict[str, Callable[[str, int], Side[Any]]] = {"cpu": CpuSide, "cuda": CudaSide}
"""Where a target's programs run -> what measures its kernels, of a target's name and a number of threads."""

TRIALS = 64
"""Tuples explored for each group by default: about 20 s of building and measuring on two cores."""


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
    measurements made now (the others were in the records), seconds; ``source`` of the numbers, as in ``Record``.
    ``declined``: why it is not tuned; it keeps no tuples then. ``gain``: time without tuning over time with it at the
    sizes tuned for; None where nothing was compared. What does not gain keeps the default kernel.
    """

    label: str
    tuples: int
    binaries: int
    measured: int
    seconds: float
    source: str = "measured"
    declined: str = ""
    gain: float | None = None


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
    symbols: Symbols | None = None,
    report: Callable[[Progress], None] | None = None,
) -> list[TunedGroup]:
    """Tunes every group of a model that has sizes to choose, and adds what it measures to a record file.

    On this machine, or on the device of a CUDA target (``$POLYDYN_LIBCUDA``); where that is not there an analytical
    model ranks tuples, the compiler refuses those that spill, and the records say so.

    Stopped at any moment, even killed, it loses no finished measurement: called again it goes on from there. Then
    ``polydyn.compile(model, records=...)`` compiles the kernels chosen. ``options.strategy`` names the strategy.
    ``seen``: shapes of the model with their counts (``Program.shapes_seen``), which decide what is kept; without them
    the ranges, likely sizes and probabilities in ``dims`` do; without those sizes spaced by ratio. ``threads``: of a
    CPU. ``symbols`` as for ``polydyn.compile``. Raises PolydynError, see ``polydyn.errors``.
    """
    options = options or Options()
    row = strategy_of(options.strategy)
    side = SIDES[target_of(target, options).machine](target, threads or available_cores())
    tasks = side.tasks(import_model(model, dims, symbols), options)
    start = time.monotonic()
    done = []
    with Records.open(records) as opened, side:
        for number, placed in enumerate(tasks, 1):
            begin, task = time.monotonic(), placed.task
            problem = Problem(task.key, task.backbone, *placed.instances(seen or placed.expected(dims)))

            def tell(tried: int, cost: float, number: int = number) -> None:
                if report is not None:
                    spent = time.monotonic() - start
                    report(Progress(number, len(tasks), tried, trials, 1 / cost if cost else 0.0, spent))

            try:
                search, binaries, measured = side.search(task, problem, How(row, trials, seed, opened, tell))
            except EmptySpaceError as e:
                refused = Declined(str(e).replace("\n ", ";"))
                opened.put([declined_record(refused, task, side.hardware, row.name)])
                done.append(TunedGroup(placed.label, 0, 0, 0, time.monotonic() - begin, "", refused.reason))
                continue
            opened.put([search_record(search, task)])
            seconds = time.monotonic() - begin
            found = TunedGroup(placed.label, len(search.tiles), binaries, measured, seconds, search.source)
            done.append(replace(found, gain=search.gain))
    return done + [TunedGroup(label, 0, 0, 0, 0.0, "", reason) for label, reason in side.declined.items()]
