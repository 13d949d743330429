"""``polydyn.tune``: every group of a model that has sizes to choose is searched and measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polydyn.arguments import checked_report
from polydyn.backends import Options, target_of
from polydyn.build.features import available_cores
from polydyn.errors import Declined
from polydyn.graph.dynamic import Symbols
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.logs import note
from polydyn.measure.cpu import CpuTuningBackend, tasks_of
from polydyn.measure.cuda import CudaTuningBackend
from polydyn.measure.placed import PlacedTask, Seen
from polydyn.measure.tuning_backend import SearchSettings, TuningBackend
from polydyn.runtime.tables import Table
from polydyn.search.backbone import Problem
from polydyn.search.outcomes import declined_record, search_record
from polydyn.search.records import Records
from polydyn.search.spaces.space import EmptySpaceError
from polydyn.search.strategies import strategy as strategy_of
from polydyn.shapes.sizes import Dims

__all__ = ["TRIALS", "PlacedTask", "Progress", "Seen", "TunedGroup", "tasks_of", "tune"]

TUNING_BACKENDS: dict[str, Callable[[str, int], TuningBackend[Any]]] = {
    "cpu": CpuTuningBackend,
    "cuda": CudaTuningBackend,
}
"""Maps the machine kind of a target to its tuning backend, which is built from a target name and a thread count."""

TRIALS = 64
"""Tile configurations explored for each group by default: about 20 s of building and measuring on two cores."""


@dataclass(frozen=True)
class Progress:
    """The progress of tuning. ``group`` counts from 1 to ``groups``. ``trials`` of ``wanted`` tile configurations of
    this group are explored. ``best`` is the best rate so far in operations per second; ``elapsed`` is in seconds."""

    group: int
    groups: int
    trials: int
    wanted: int
    best: float
    elapsed: float


@dataclass(frozen=True)
class TunedGroup:
    """The result of tuning one group. ``label`` is its first site in the model. ``tuples`` counts the tile
    configurations that are kept, ``binaries`` the kernels that implement them. ``measured`` counts new measurements;
    the others were in the records. ``source``: as in ``Record``.

    ``declined``: the reason why the group is not tuned; then no tile is kept. ``gain``: time without tuning divided
    by time with it, at the sizes tuned for; None if they were not compared. A group without a gain keeps the default
    kernel.
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
) -> Table[TunedGroup]:
    """Tune every group of a model that has sizes to choose, and add the measurements to a record file.

    The measurements run on this machine, or on the device of a CUDA target (``$POLYDYN_LIBCUDA``). If there is no such
    device, an analytical model ranks the tiles, the compiler rejects those that spill, and the records note it.

    Tuning can be stopped or killed at any time without loss of finished measurements; the next call continues. Then
    ``polydyn.compile(model, records=...)`` compiles the selected kernels. ``options.strategy`` names the strategy.
    ``seen``: shapes of the model with their counts (``Program.shapes_seen``); they weight the selection. Without
    ``seen``, the ranges, likely sizes and probabilities in ``dims`` are used, and without those, sizes spaced by
    ratio. ``threads``: number of CPU threads. ``symbols``: as for ``polydyn.compile``. Raises PolydynError, see
    ``polydyn.errors``.
    """
    checked_report(report)
    options = options or Options()
    row = strategy_of(options.strategy)
    backend = TUNING_BACKENDS[target_of(target, options).machine](target, threads or available_cores())
    tasks = backend.tasks(import_model(model, dims, symbols), options)
    start = time.monotonic()
    done = []
    with Records.open(records) as opened, backend:
        for number, placed in enumerate(tasks, 1):
            begin, task = time.monotonic(), placed.task
            problem = Problem(task.key, task.backbone, *placed.instances(seen or placed.expected(dims)))

            def tell(tried: int, cost: float, number: int = number) -> None:
                if report is not None:
                    spent = time.monotonic() - start
                    report(Progress(number, len(tasks), tried, trials, 1 / cost if cost else 0.0, spent))

            try:
                search, binaries, measured = backend.search(
                    task, problem, SearchSettings(row, trials, seed, opened, tell)
                )
            except EmptySpaceError as e:
                reason = Declined(str(e).replace("\n ", ";"))
                opened.put([declined_record(reason, task, backend.hardware, row.name)])
                done.append(TunedGroup(placed.label, 0, 0, 0, time.monotonic() - begin, "", reason.reason))
                continue
            opened.put([search_record(search, task)])
            seconds = time.monotonic() - begin
            note("tune", "group %d of %d, %s: %.2f times as fast as without", number, len(tasks), placed.label,
                 search.gain or 1.0)  # fmt: skip
            group = TunedGroup(placed.label, len(search.tiles), binaries, measured, seconds, search.source)
            done.append(replace(group, gain=search.gain))
    declined = [TunedGroup(label, 0, 0, 0, 0.0, "", reason) for label, reason in backend.declined.items()]
    return Table(done + declined, "tuned", "group")
