"""Searches: the results of tuning groups, as records, and the kernels that a compilation builds from them.

A search consists of the kept tiles and the decision among them, for one number of threads; on a GPU also of factors
for their estimates. It is stored in the same file as its measurements. A compilation reads only searches, so equal
records give equal kernels, independent of installed libraries. On a CPU it uses the searches of all numbers of threads,
and the host program decides by its own number. For one GPU architecture it uses one search, and prefers a measured one
to one from an analytical model. A group that cannot be searched has a record with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt, prod
from typing import Any, Generic, TypeAlias, TypeVar

from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.split import SplitKernel, SplitNest
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.cuda.families import Family, FamilyFactors
from polydyn.codegen.cuda.versions import TileFactors
from polydyn.codegen.kernel import UNIT
from polydyn.errors import Declined, ScheduleError
from polydyn.gpu.targets import single
from polydyn.lowering.alternatives import Rows
from polydyn.lowering.contract import ContractGroup
from polydyn.lowering.cpu_tables import SizedKernel, TunedBuilders
from polydyn.lowering.place_cuda import TunedTiles
from polydyn.runtime.expressions import decision_from_json, decision_to_json
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.decision import ArgMin, Decision, Leaf, Split, cheapest, chooses, map_indices, verify_decision
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.model import Group
from polydyn.search.backbone import Tile, canonical
from polydyn.search.dispatch.build import build_dispatch
from polydyn.search.hardware import Hardware
from polydyn.search.records import Record, Records
from polydyn.search.strategies import Tuned
from polydyn.search.tasks.cpu import DEFAULT, CpuTask, Task, task_of
from polydyn.search.tasks.cuda import CudaTask, cuda_task_of
from polydyn.search.tasks.families import FamilyTask, family_task_of
from polydyn.search.tasks.sized import SizedTask, sized_task

KIND, DECLINED = "search", "declined"
"""Kinds of records: a search, and a group that is not tuned."""
MIN_GAIN = 1.01
"""Minimum gain over the default. A smaller gain is within the measurement noise, and the tiles are not kept."""
T = TypeVar("T", bound=Task[Any])
Options: TypeAlias = list[tuple[Any, dict[str, Index]]]
"""A builder and a launch for each tile."""


@dataclass(frozen=True)
class Search:
    """A completed search. ``explored``: number of tried tiles; ``hardware``: the machine; ``source`` as in ``Record``.

    ``decision``: over the group's dynamic loops, it selects positions in ``tiles``; None if all tiles are candidates at
    every size. ``factors``, on a GPU: measured over estimated time of each tile (``Block.factor``). ``gain``: time of
    the kernel without tuning over that of the tiles, or None if they were not compared. ``rows``: the rows of the
    group's table of kernels that the search compared; if there are any, its decision replaces the table.
    """

    strategy: str
    tiles: tuple[Tile, ...]
    explored: int
    hardware: Hardware
    decision: Decision | None = None
    factors: tuple[int, ...] = ()
    source: str = "measured"
    gain: float | None = None
    rows: tuple[str, ...] = ()


def outcome(tuned: Tuned, hardware: Hardware, gain: float | None = None, rows: tuple[str, ...] = ()) -> Search:
    """Return the search of a group tuned on a CPU. ``rows``: the rows of the group's table that were compared.

    If the tiles gain too little, it has the default kernel, and rows are chosen as without a search.
    """
    tiles, decision = tuple(k.tile for k in tuned.kernels), build_dispatch(tuned)
    if gain is not None and gain < MIN_GAIN:
        tiles, decision, rows = (DEFAULT,), Leaf(0), ()
    return Search(tuned.strategy, tiles, len(tuned.trials), hardware, decision, gain=gain, rows=rows)


def search_record(search: Search, task: Task[Any]) -> Record:
    """Return the record of a search."""
    note: dict[str, Any] = {
        "strategy": search.strategy,
        "tiles": [[t.compile, t.launch] for t in search.tiles],
    }
    note |= {} if search.decision is None else {"decision": decision_to_json(search.decision)}
    note |= {"rows": search.rows} if search.rows else {}
    note |= {"factors": search.factors} if search.factors or search.decision is None else {}
    values = (("explored", float(search.explored)), *((("gain", search.gain),) if search.gain is not None else ()))
    return Record(task.key, search.hardware, Tile(()), KIND, values, source=search.source, note=canonical(note))


def declined_record(refused: Declined, task: Task[Any], hardware: Hardware, strategy: str) -> Record:
    """Return the record of a group that a strategy cannot search."""
    note = canonical({"strategy": strategy, "reason": refused.reason})
    return Record(task.key, hardware, Tile(()), DECLINED, (), source="model", note=note)


def _read(records: Records, task: Task[Any], strategy: str) -> Iterator[Search]:
    """Yield a strategy's searches of a task. ScheduleError: a search is inconsistent."""
    symbols = frozenset(x.name for x in task.backbone.loops if x.extent is None)
    for r in records.rows(group=task.key, kind=KIND):
        note = json.loads(r.note)
        if note["strategy"] != strategy:
            continue
        tiles = tuple(Tile(_pairs(c), _pairs(t)) for c, t in note["tiles"])
        decision, factors = None, tuple(map(int, note.get("factors", ())))
        if "decision" in note:
            decision = decision_from_json(note["decision"])
            verify_decision(decision, len(tiles), symbols)
        if (factors or decision is None) and (not tiles or len(factors) != len(tiles) or min(factors) < 1):
            raise ScheduleError(
                f"a search of group {task.key.structure} has {len(tiles)} tiles and {len(factors)} factors",
                rule="every tile has a factor above 0",
                remedy="tune the group again",
            )
        explored, gain = int(r.value("explored")), dict(r.values).get("gain")
        rows = tuple(map(str, note.get("rows", ())))
        yield Search(strategy, tiles, explored, r.hardware, decision, factors, r.source, gain, rows)


def searches(records: Records, task: Task[Any], strategy: str) -> list[Search]:
    """Return a strategy's searches of a task, by number of threads. Per number, the one with the most trials counts."""
    candidates = [s for s in _read(records, task, strategy) if s.decision is not None]
    ordered = sorted(candidates, key=lambda s: (s.hardware.units, -s.explored, repr(s)))
    return [s for k, s in enumerate(ordered) if k == 0 or s.hardware.units != ordered[k - 1].hardware.units]


def first_machine(records: Records, target: str) -> Hardware | None:
    """Return the machine with the fewest threads in the searches for a processor, or None if there are none."""
    machines = {r.hardware for r in records.rows(kind=KIND) if r.group.target == target}
    return min(machines, key=lambda m: (m.units, m.digest), default=None)


def _pairs(data: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple((n, int(v)) for n, v in data)


class _FromRecords(Generic[T]):
    """The access of a compilation to a record file. ``notes``: groups without a search, with the reason."""

    def __init__(self, records: Records, strategy: str, target: str) -> None:
        """``target``: name of the compiler target."""
        self.records, self.strategy, self.target = records, strategy, target
        self.notes: list[str] = []

    def known(self, task: T | Declined, key: str, search: Callable[[T], Sequence[Search]]) -> Sequence[Search]:
        """Return the searches of a task; none, with a note, if the group cannot be tuned or was not tuned."""
        searches = () if isinstance(task, Declined) else search(task)
        if not searches:
            self.untuned(key, task.reason if isinstance(task, Declined) else self._missing(key, task))
        return searches

    def untuned(self, key: str, reason: str) -> None:
        """Note that the kernel of a group has no tuned sizes."""
        self.notes.append(f"group {key} is not tuned: {reason}")

    def _missing(self, key: str, task: T) -> str:
        for r in self.records.rows(group=task.key, kind=DECLINED):
            note = json.loads(r.note)
            if note["strategy"] == self.strategy:
                return str(note["reason"])
        similar = (r.group for r in self.records.rows(kind=KIND) if r.group.structure == key and r.group != task.key)
        others = sorted({f"{g.target} ({g.compiler or 'no compiler'})" for g in similar})
        text = f"{self.records.path.name} has no search by {self.strategy} for it on {self.target}"
        return text + (f", but for {', '.join(others)}" if others else "")


class ChosenByRecords(_FromRecords["CpuTask | SizedTask"]):
    """A ``lowering.kernels.Tuner`` that builds the kernels of the searches in a record file."""

    def __init__(self, records: Records, strategy: str, target: CpuTarget, build: str) -> None:
        """``build``: the name of the compiler target."""
        super().__init__(records, strategy, build)
        self.processor = target

    def builders(self, key: str, form: ContractGroup, rows: Rows) -> TunedBuilders[ContractKernel] | None:
        """Implement ``Tuner.builders``; None if the group cannot be tuned or was not tuned."""
        return self._tuned(key, task_of(key, form, self.processor, self.target, rows), "contract")

    def sized(self, key: str, kernel: SizedKernel, rows: Rows) -> TunedBuilders[SizedKernel] | None:
        """Implement ``Tuner.sized``; None if the group cannot be tuned or was not tuned."""
        return self._tuned(key, sized_task(key, kernel, self.target, rows), kernel.name.partition("_")[0])

    def _tuned(self, key: str, task: CpuTask | SizedTask | Declined, kind: str) -> TunedBuilders[Any] | None:
        known = self.known(task, key, lambda t: searches(self.records, t, self.strategy))
        return builders(task, known, kind) if known and not isinstance(task, Declined) else None


def builders(task: CpuTask | SizedTask, known: Sequence[Search], kind: str = "contract") -> TunedBuilders[Any]:
    """Return searches in the form that lowering proves and builds: launches over the group's parameters, and binaries
    by name.

    ``known``: ordered by number of threads; a number between two uses the nearer one by ratio. ``kind``: prefix of the
    kernel names. ScheduleError: a tile is of a row, or has a size, that the group's table does not offer.
    """
    known, left_out = _one_order_of_sums(known)
    tiles = list(dict.fromkeys(t for s in known for t in s.tiles))
    parts = list(dict.fromkeys(t.compile for t in tiles))
    options: list[tuple[Any, dict[str, Index]]] = []
    groups: dict[str, Group] = {}
    for tile in tiles:
        choice = task.row_choice(tile) if tile.row else None
        prefix = choice.prefix if choice else kind
        builder: Any = task.builder(tile, f"{prefix}_{task.key.digest[:12]}_{parts.index(tile.compile)}")
        options.append((builder, task.shares(builder, tile)))
        groups |= {builder.name: choice.group} if choice and choice.group != task.group else {}
    pairs = [(s.decision, s.tiles) for s in known if s.decision is not None]
    decisions = [_placed(map_indices(d, lambda i: i.subs(task.extents)), t, tiles) for d, t in pairs]
    decision = decisions[-1]
    for (fewer, more), low in reversed(list(zip(pairwise(s.hardware.units for s in known), decisions, strict=False))):
        decision = Split(Index.of(THREADS), isqrt(fewer * more), low, decision)
    rows = all(s.rows for s in known)
    reasons = (
        *(f"tuned by {s.strategy} for {s.hardware.name}: {s.explored} tiles explored{_gained(s)}" for s in known),
        *left_out,
        *([f"it chose among the rows {', '.join(known[0].rows)}"] if rows else []),
        f"{len(tiles)} kept in {len(parts)} binaries",
        *(f"kernel {k}: {'the default' if t == DEFAULT else t}" for k, t in enumerate(tiles)),
    )
    options, decision = _one_split(options, decision)
    return TunedBuilders(tuple(options), decision, reasons, groups, rows)


def _one_order_of_sums(known: Sequence[Search]) -> tuple[Sequence[Search], list[str]]:
    """Return the searches that a program uses, and a line for ``explain`` about the others.

    Rows add in different orders. If searches for several numbers of threads chose rows, only that of the fewest threads
    is used, so that results do not depend on the number of threads.
    """
    if len(known) == 1 or not any(t.row for s in known for t in s.tiles):
        return known, []
    others = ", ".join(str(s.hardware.units) for s in known[1:])
    return known[:1], [f"searches for {others} threads are not used: sums must not depend on the number of threads"]


def _one_split(options: Options, decision: Decision) -> tuple[Options, Decision]:
    """Return options with at most one launch of a split reduction, whose number of slices follows from the decision:
    the launch that adds the slices serves one kernel.
    """
    splits = [k for k, (builder, _) in enumerate(options) if isinstance(builder, SplitKernel | SplitNest)]
    if len(splits) < 2:
        return options, decision
    first, *others = splits
    builder, launch = options[first]
    decision = _one_of_each_comparison(decision, splits)
    merged = {n: sum((options[k][1][n] * chooses(decision, k) for k in splits), ZERO) for n in launch}
    kept = [k for k in range(len(options)) if k not in others]
    targets = [kept.index(first if k in others else k) for k in range(len(options))]
    options = [(builder, merged) if k == first else options[k] for k in kept]
    return options, _placed(decision, targets, range(len(kept)))


def _one_of_each_comparison(decision: Decision, kernels: Sequence[int]) -> Decision:
    """Return a decision whose comparisons have at most one of ``kernels``, the first."""
    if isinstance(decision, Split):
        low, high = (_one_of_each_comparison(x, kernels) for x in (decision.low, decision.high))
        return replace(decision, low=low, high=high)
    if isinstance(decision, Leaf):
        return decision
    several = [e.kernel for e in decision.entries if e.kernel in kernels][1:]
    entries = tuple(e for e in decision.entries if e.kernel not in several)
    return ArgMin(entries) if len(entries) > 1 else Leaf(entries[0].kernel)


def _gained(s: Search) -> str:
    return "" if s.gain is None else f", the best take {1 / s.gain:.2f} of the default's time"


def _placed(decision: Decision, old: Sequence[object], tiles: Sequence[object]) -> Decision:
    """Convert a decision over positions in ``old`` to one over positions in ``tiles``."""
    if isinstance(decision, Split):
        return replace(decision, low=_placed(decision.low, old, tiles), high=_placed(decision.high, old, tiles))
    if isinstance(decision, Leaf):
        return Leaf(tiles.index(old[decision.kernel]))
    return ArgMin(tuple(replace(e, kernel=tiles.index(old[e.kernel])) for e in decision.entries))


# -- on a GPU ----------------------------------------------------------------------------------------------------------


class ChosenTiles(_FromRecords[CudaTask]):
    """A ``place_cuda.CudaTuner`` that uses the tiles of the searches in a record file."""

    def __init__(self, records: Records, strategy: str, target: str, tf32: bool) -> None:
        """UnsupportedError: the target is not a single architecture."""
        single(target)
        super().__init__(records, strategy, target)
        self.tf32 = tf32

    def tiles(self, key: str, form: ContractGroup) -> TunedTiles | None:
        """Implement ``CudaTuner.tiles``; None, with a note, if the group cannot be tuned or was not tuned."""
        task = cuda_task_of(key, form, self.target, self.tf32)
        known = self.known(task, key, lambda t: best_searches(self.records, t, self.strategy))
        return tuned_tiles(task, known[0]) if known and not isinstance(task, Declined) else None

    def family(self, key: str, form: ContractGroup | Group, family: Family) -> FamilyFactors | None:
        """Implement ``CudaTuner.family``; None if the family was not tuned for this group."""
        task = family_task_of(key, form, family, self.target, self.tf32)
        known = [] if isinstance(task, Declined) else best_searches(self.records, task, self.strategy)
        return family_factors(task, known[0]) if known and not isinstance(task, Declined) else None


def tuned_tiles(task: CudaTask, search: Search) -> TunedTiles:
    """Return a search in the form that lowering builds. ScheduleError: a tile breaks a rule of the generator."""
    factors = tile_factors(task, search)
    decision = map_indices(search.decision or cheapest(len(search.tiles)), lambda i: i.subs(task.extents))
    placed = _placed(decision, list(map(task.tile, search.tiles)), [t for t, _ in factors.tiles])
    return TunedTiles(factors, placed, _reasons(task, search))


def family_factors(task: FamilyTask, search: Search) -> FamilyFactors:
    """Return a search of a family in the form that the generator builds."""
    tiles = tuple((t.compile, f) for t, f in zip(search.tiles, search.factors, strict=True))
    lines = [f"{task.family.name} {t}" + _measured(search, f) for t, (_, f) in zip(search.tiles, tiles, strict=True)]
    return FamilyFactors(tiles, mean_factor(search.factors), (_source_note(task, search), *lines))


def mean_factor(factors: Sequence[int]) -> int:
    """Return the geometric mean."""
    return max(1, round(UNIT * prod(f / UNIT for f in factors) ** (1 / len(factors))))


def best_searches(records: Records, task: CudaTask | FamilyTask, strategy: str) -> list[Search]:
    """Return a strategy's searches of a task, best first: measured before modelled, the target's default device before
    others, then by number of trials.
    """

    def rank(s: Search) -> tuple[bool, bool, int, str]:
        return s.source != "measured", s.hardware.name != task.device.name, -s.explored, repr(s)

    return sorted((s for s in _read(records, task, strategy) if s.factors), key=rank)


def tile_factors(task: CudaTask, search: Search) -> TileFactors:
    """Return a search in the form that the generator builds. Versions with other tiles get the mean factor (geometric).

    ScheduleError: a tile breaks a rule of the generator, which is named.
    """
    tiles = dict(zip((task.tile(t) for t in search.tiles), search.factors, strict=True))
    return TileFactors(tuple(tiles.items()), mean_factor(search.factors))


def _reasons(task: CudaTask, s: Search) -> tuple[str, ...]:
    lines = []
    for t, f in zip(map(task.tile, s.tiles), s.factors, strict=True):
        size = f"{t.instruction} {t.bm}x{t.bn}x{t.bk} of {t.wm}x{t.wn}, {t.stages} stages, {t.blocks} resident blocks"
        lines.append(f"tile {size}" + _measured(s, f))
    return _source_note(task, s), f"{len(lines)} tiles kept", *lines


def _source_note(task: CudaTask | FamilyTask, s: Search) -> str:
    family = f"{task.family.name} " if isinstance(task, FamilyTask) else ""
    source = "measured" if s.source == "measured" else "ranked by an analytical model without a device"
    return f"{family}tuned by {s.strategy} for {s.hardware.name}: {s.explored} tiles explored, {source}"


def _measured(s: Search, factor: int) -> str:
    return f", {factor / UNIT:.2f} of its estimate" if s.source == "measured" else ""
