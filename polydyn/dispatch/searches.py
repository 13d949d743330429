"""Searches: what was tuned, as records, and the tuned kernels that they give without measuring again.

A search is determined by its group, machine, strategy, trials, seed, and instances with weights; its measurements are
in the same file. So a compilation with records repeats the search, answered by records alone, and gives the same
kernels whenever and wherever it runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from polydyn.codegen.cpu_contract import ContractKernel
from polydyn.codegen.kernel import CpuTarget
from polydyn.dispatch.build import build_dispatch
from polydyn.errors import InputError, UnsupportedError
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.kernels import TunedBuilders
from polydyn.schedules.decision import map_indices
from polydyn.schedules.index import Index
from polydyn.tuning.backbone import Problem, Shape, Tile, canonical
from polydyn.tuning.bench import RecordedBench
from polydyn.tuning.cost import Kernel
from polydyn.tuning.hardware import Hardware
from polydyn.tuning.records import Record, Records
from polydyn.tuning.strategy import Tuned, strategy, tune
from polydyn.tuning.task import Task, task_of

KIND = "search"


@dataclass(frozen=True)
class Search:
    """What to tune, all but the group and the machine."""

    strategy: str
    trials: int
    seed: int
    shapes: tuple[tuple[tuple[str, int], ...], ...] = ()
    weights: tuple[float, ...] = ()

    def problem(self, task: Task) -> Problem:
        """The tuning problem of a task."""
        return Problem(task.key, task.backbone, self.shapes, self.weights)

    def record(self, task: Task, hardware: Hardware) -> Record:
        """The record that says that this search was completed."""
        text = canonical({"shapes": self.shapes, "weights": self.weights})
        values = (("trials", float(self.trials)), ("seed", float(self.seed)))
        note = canonical({"strategy": self.strategy, "instances": text})
        return Record(task.key, hardware, Tile(()), KIND, values, note=note)


def searches(records: Records, task: Task, threads: int) -> list[tuple[Search, Hardware]]:
    """The completed searches of a task: those for so many threads first, then the longest first."""
    found = []
    for r in records.rows(group=task.key, kind=KIND):
        note = json.loads(r.note)
        instances = json.loads(note["instances"])
        shapes = tuple(tuple((n, int(v)) for n, v in s) for s in instances["shapes"])
        weights = tuple(map(float, instances["weights"]))
        search = Search(note["strategy"], int(r.value("trials")), int(r.value("seed")), shapes, weights)
        found.append((search, r.hardware))
    return sorted(found, key=lambda f: (f[1].units != threads, -f[0].trials, f[0].seed, repr(f)))


class Pinned:
    """A bench without a machine: what no record answers is an error."""

    source = "measured"

    def per_operation(self, tiles: Sequence[Tile]) -> Sequence[float]:
        """InputError."""
        raise self._missing(tiles[0])

    def kernel(self, tile: Tile) -> Kernel:
        """InputError."""
        raise self._missing(tile)

    def seconds(self, tile: Tile, shape: Shape) -> float:
        """InputError."""
        raise self._missing(tile)

    def _missing(self, tile: Tile) -> InputError:
        return InputError(
            f"the records of a completed search lack tuple {tile}",
            rule="a search is repeated from records alone",
            remedy="tune again with this version of polydyn and its libraries",
        )


def run_search(search: Search, task: Task, hardware: Hardware, records: Records) -> Tuned:
    """Repeats a completed search from its records. InputError: they are incomplete."""
    bench = RecordedBench(Pinned(), records, task.key, hardware)
    problem = search.problem(task)
    return tune(strategy(search.strategy), problem, hardware, bench, trials=search.trials, seed=search.seed)


class ChosenByRecords:
    """``lowering.kernels.Tuner``: the kernels of the searches in a record file."""

    def __init__(self, records: Records, name: str, target: CpuTarget, build: str, threads: int) -> None:
        """``name``: of the strategy. ``threads``: searches for so many threads are preferred."""
        self.records, self.name, self.target, self.build, self.threads = records, name, target, build, threads
        self.notes: list[str] = []

    def builders(self, key: str, form: ContractGroup) -> TunedBuilders | None:
        """As ``Tuner``; None when the group cannot be tuned or was not."""
        try:
            task = task_of(key, form, self.target, self.build)
        except UnsupportedError as e:
            self.notes.append(str(e).partition("\n")[0])
            return None
        known = [f for f in searches(self.records, task, self.threads) if f[0].strategy == self.name]
        if not known:
            self.notes.append(f"group {key} is not tuned: {self.records.path.name} has no search by {self.name} for it")
            return None
        search, hardware = known[0]
        return builders(task, run_search(search, task, hardware, self.records), hardware)


def builders(task: Task, tuned: Tuned, hardware: Hardware) -> TunedBuilders:
    """A tuned group as what lowering proves and builds: launches over the group's parameters, binaries by name.

    A launch of two kernels (FTuner's combination) is left out here: on a CPU tiles are exact, so nothing is padded.
    """
    dispatch = build_dispatch(tuned, pairs=False)
    parts = list(dict.fromkeys(k.tile.compile for k in tuned.kernels))
    options: list[tuple[ContractKernel, dict[str, Index]]] = []
    for program in dispatch.programs:
        tile = tuned.kernels[program.kernels[0]].tile
        builder = task.builder(tile, f"contract_{task.key.digest[:12]}_{parts.index(tile.compile)}")
        options.append((builder, task.shares(builder, tile)))
    decision = map_indices(dispatch.decision, lambda i: i.subs(task.extents))
    reasons = (
        f"tuned by {tuned.strategy} for {hardware.name}: {len(tuned.trials)} tuples explored, {len(options)} kept in "
        f"{len(parts)} binaries",
        *(f"kernel {k}: {tuned.kernels[p.kernels[0]].tile}" for k, p in enumerate(dispatch.programs)),
    )
    return TunedBuilders(tuple(options), decision, reasons)
