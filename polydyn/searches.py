"""Searches: what tuning a group came to, as records, and the kernels that a compilation takes from them.

The outcome of a search is the tuples kept and the decision among them, for one number of threads. It lies in the same
file as the measurements it comes from. A compilation reads outcomes only: equal records give equal kernels, whatever
libraries are installed. It takes the searches of all numbers of threads, and the host program decides by its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt

from polydyn.codegen.cpu_contract import ContractKernel
from polydyn.codegen.kernel import CpuTarget
from polydyn.dispatch.build import build_dispatch
from polydyn.errors import UnsupportedError
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.kernels import TunedBuilders
from polydyn.program.evaluation import THREADS
from polydyn.program.expressions import decision_from_json, decision_to_json
from polydyn.schedules.decision import ArgMin, Decision, Leaf, Split, map_indices, verify_decision
from polydyn.schedules.index import Index
from polydyn.tuning.backbone import Tile, canonical
from polydyn.tuning.hardware import Hardware
from polydyn.tuning.records import Record, Records
from polydyn.tuning.strategy import Tuned
from polydyn.tuning.task import Task, task_of

KIND = "search"


@dataclass(frozen=True)
class Search:
    """A completed search. ``decision``: over the group's dynamic loops, names positions in ``tiles``. ``explored``: how
    many tuples were tried; ``hardware``: where.
    """

    strategy: str
    tiles: tuple[Tile, ...]
    decision: Decision
    explored: int
    hardware: Hardware


def outcome(tuned: Tuned, hardware: Hardware) -> Search:
    """What a tuned group comes to on a CPU.

    A launch of two kernels (FTuner's combination) is left out: on a CPU tiles are exact, so nothing is padded.
    """
    dispatch = build_dispatch(tuned, pairs=False)
    tiles = tuple(tuned.kernels[p.kernels[0]].tile for p in dispatch.programs)
    return Search(tuned.strategy, tiles, dispatch.decision, len(tuned.trials), hardware)


def search_record(search: Search, task: Task) -> Record:
    """The record of a search."""
    note = {
        "strategy": search.strategy,
        "tiles": [[t.compile, t.launch] for t in search.tiles],
        "decision": decision_to_json(search.decision),
    }
    values = (("explored", float(search.explored)),)
    return Record(task.key, search.hardware, Tile(()), KIND, values, note=canonical(note))


def searches(records: Records, task: Task, strategy: str) -> list[Search]:
    """A strategy's searches of a task, by number of threads: of each number the one that tried most."""
    found = []
    symbols = frozenset(x.name for x in task.backbone.loops if x.extent is None)
    for r in records.rows(group=task.key, kind=KIND):
        note = json.loads(r.note)
        if note["strategy"] == strategy:
            tiles = tuple(Tile(_pairs(c), _pairs(t)) for c, t in note["tiles"])
            decision = decision_from_json(note["decision"])
            verify_decision(decision, len(tiles), symbols)
            found.append(Search(strategy, tiles, decision, int(r.value("explored")), r.hardware))
    ordered = sorted(found, key=lambda s: (s.hardware.units, -s.explored, repr(s)))
    return [s for k, s in enumerate(ordered) if k == 0 or s.hardware.units != ordered[k - 1].hardware.units]


def _pairs(data: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((n, int(v)) for n, v in data)


class ChosenByRecords:
    """``lowering.kernels.Tuner``: the kernels of the searches in a record file. ``notes``: groups that have none."""

    def __init__(self, records: Records, strategy: str, target: CpuTarget, build: str) -> None:
        """``build``: name of the compiler target."""
        self.records, self.strategy, self.target, self.build = records, strategy, target, build
        self.notes: list[str] = []

    def builders(self, key: str, form: ContractGroup) -> TunedBuilders | None:
        """As ``Tuner``; None when the group cannot be tuned or was not."""
        try:
            task = task_of(key, form, self.target, self.build)
        except UnsupportedError as e:
            self.notes.append(str(e).partition("\n")[0])
            return None
        known = searches(self.records, task, self.strategy)
        if not known:
            name = self.records.path.name
            self.notes.append(f"group {key} is not tuned: {name} has no search by {self.strategy} for it")
            return None
        return builders(task, known)


def builders(task: Task, known: Sequence[Search]) -> TunedBuilders:
    """Searches as what lowering proves and builds: launches over the group's parameters, binaries by name.

    ``known``: by number of threads; a number between two takes the nearer one by ratio.
    """
    tiles = list(dict.fromkeys(t for s in known for t in s.tiles))
    parts = list(dict.fromkeys(t.compile for t in tiles))
    options: list[tuple[ContractKernel, dict[str, Index]]] = []
    for tile in tiles:
        builder = task.builder(tile, f"contract_{task.key.digest[:12]}_{parts.index(tile.compile)}")
        options.append((builder, task.shares(builder, tile)))
    decisions = [_placed(map_indices(s.decision, lambda i: i.subs(task.extents)), s.tiles, tiles) for s in known]
    decision = decisions[-1]
    for (fewer, more), low in reversed(list(zip(pairwise(s.hardware.units for s in known), decisions, strict=False))):
        decision = Split(Index.of(THREADS), isqrt(fewer * more), low, decision)
    reasons = (
        *(f"tuned by {s.strategy} for {s.hardware.name}: {s.explored} tuples explored" for s in known),
        f"{len(tiles)} kept in {len(parts)} binaries",
        *(f"kernel {k}: {t}" for k, t in enumerate(tiles)),
    )
    return TunedBuilders(tuple(options), decision, reasons)


def _placed(decision: Decision, own: Sequence[Tile], tiles: Sequence[Tile]) -> Decision:
    """A decision over positions in ``own`` as one over positions in ``tiles``."""
    if isinstance(decision, Split):
        return replace(decision, low=_placed(decision.low, own, tiles), high=_placed(decision.high, own, tiles))
    if isinstance(decision, Leaf):
        return Leaf(tiles.index(own[decision.kernel]))
    return ArgMin(tuple(replace(e, kernel=tiles.index(own[e.kernel])) for e in decision.entries))
