"""Strategies: the five papers' systems and polydyn's own, as rows over the shared parts.

``Options(strategy=...)`` names a row. A row specifies the space, the explorer, the cost model that fills the selection
table, and the dispatcher that chooses among the selected kernels at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polydyn.errors import BuildError, InputError
from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search import cost as model
from polydyn.search import select
from polydyn.search.backbone import Backbone, Problem, Tile
from polydyn.search.bench import Bench, RecordedBench
from polydyn.search.cost import MacroKernel
from polydyn.search.explorers.explore import (
    Costs,
    Explorer,
    Objective,
    Trial,
    after,
    aligned_order,
    best,
    in_order,
    with_rows,
)
from polydyn.search.explorers.trust_region import trust_region
from polydyn.search.finals import SizeClasses, best_explored, corrected, finalists, size_classes
from polydyn.search.hardware import Hardware
from polydyn.search.records import Records
from polydyn.search.select import Selection, Table
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.microkernel import mutations
from polydyn.search.spaces.rkernel import rkernel_space
from polydyn.search.spaces.space import Space, usage
from polydyn.search.spaces.ukernel import ukernel_space

MEASURED_SECONDS = 0.1
"""Maximum seconds of a launch that a strategy measures at shapes that the user did not give. The time is estimated by
its cost model, or at the machine's peak without one.
"""
CostModel = Callable[[Backbone, Hardware, MacroKernel], Index]
Chooser = Callable[[Table, Sequence[float], Sequence[Tile]], Selection]


@dataclass(frozen=True)
class Strategy:
    """A row. ``cost``: None if the table is measured on every instance (BladeDISC). ``gpu_cost``: the cost model is
    used only on a GPU (DietCode: the factors of 5.3 are for GPUs; elsewhere 5.1's direct measurement is used).
    ``seeded``: the space is built around the best tile of a first search on the largest instance (DietCode).
    ``outside``: share of the weight for sizes that are not among the given shapes. ``finals``: tiles are explored at
    several sizes (``finals.size_classes``) instead of a saturating instance, the best ones are measured at more sizes,
    and their closed forms corrected. ``dispatcher``: a key of ``polydyn.search.dispatch.build.DISPATCHERS``.
    """

    name: str
    space: Callable[[Problem, Hardware, Tile | None], Space]
    explorer: Callable[[Space, Problem, Hardware], Explorer]
    cost: CostModel | None
    choose: Chooser
    dispatcher: str
    seeded: bool = False
    gpu_cost: bool = False
    outside: float = 0.0
    finals: bool = False


@dataclass(frozen=True)
class Tuned:
    """The selected kernels of a group and the data of the dispatcher.

    ``costs``: closed forms per selected kernel (empty if the table was measured); ``table[k, i]``: throughput of
    kernel k on ``instances[i]``; ``trials``: everything that was explored, in order.
    """

    strategy: str
    dispatcher: str
    backbone: Backbone
    kernels: tuple[MacroKernel, ...]
    costs: tuple[Index, ...]
    instances: tuple[Mapping[str, int], ...]
    weights: tuple[float, ...]
    table: Table
    assigned: tuple[int, ...]
    trials: tuple[Trial, ...]

    @property
    def binaries(self) -> int:
        """The number of different compile-time parts."""
        return len({k.tile.compile for k in self.kernels})


def tune(
    strategy: Strategy,
    problem: Problem,
    hardware: Hardware,
    bench: Bench,
    *,
    trials: int = 100,
    seed: int = 0,
    records: Records | None = None,
    report: Callable[[int, float], None] | None = None,
) -> Tuned:
    """Run a row: space, exploration, cost model, selection. It resumes from ``records`` without measuring twice.

    ``report(trials so far, best cost so far)`` is called after every batch, for a progress display.

    Every explored tile that ran takes part in the selection, because its binary already exists. With finals it is one
    of the finalists.

    InputError: shapes and weights differ in number. BuildError: no tile could be built and run.
    """
    cost = None if strategy.gpu_cost and hardware.kind == "cpu" else strategy.cost
    limit = MEASURED_SECONDS * hardware.peak(problem.backbone.dtype)
    if not problem.shapes:
        shapes, weights = select.sample_free_shapes(problem.backbone, flops=None if cost else limit)
        problem = replace(problem, shapes=shapes, weights=weights)
    elif len(problem.weights) != len(problem.shapes):
        raise InputError(
            f"{len(problem.shapes)} shapes have {len(problem.weights)} weights", rule="one weight per instance"
        )
    elif strategy.outside:
        problem = _with_others(problem, strategy.outside)
    if records is not None:
        bench = RecordedBench(bench, records, problem.key, hardware)
    if strategy.finals:
        objective = _at_classes(bench, problem, size_classes(problem, hardware, trials))
    else:
        objective = Objective.single(bench.per_operation)
    objective = _reported(objective, report)
    start = _seed_tile(problem, hardware, objective, trials // 4, seed) if strategy.seeded else None
    space = strategy.space(problem, hardware, start).within(problem.rule)
    if strategy.finals:
        space = space.with_rows(problem.rows)
    explore = after([t for t in problem.first if not problem.rule(t)], strategy.explorer(space, problem, hardware))
    log = explore(space, objective, trials, seed)
    if strategy.finals:
        ranked = best_explored(log, objective.weights)
    else:
        ranked = [t.tile for t in sorted(log, key=lambda t: (t.cost, t.tile)) if np.isfinite(t.cost)]
    if not ranked:
        raise BuildError(
            f"none of {len(log)} explored tiles could be built and run",
            rule=f"strategy {strategy.name}",
            remedy="look at the records of kind 'failed', and at the compiler with 'polydyn doctor'",
        )
    kernels = _that_run(bench, ranked)
    costs = [_estimate(cost, problem.backbone, hardware, k) for k in kernels] if cost else []
    table = _table(problem, bench, kernels, costs)
    if strategy.finals:
        rows = finalists(table, problem.weights, [k.tile for k in kernels])
        kernels, costs = [kernels[m] for m in rows], [costs[m] for m in rows]
        kernels, costs, table = corrected(problem, bench, kernels, costs, MEASURED_SECONDS)
    selection = strategy.choose(table, problem.weights, [k.tile for k in kernels])
    return _tuned(strategy, problem, kernels, costs, table, selection, log)


def _estimate(cost: CostModel, backbone: Backbone, hardware: Hardware, kernel: MacroKernel) -> Index:
    """Return the closed form of a kernel. One of another row has no tiles; the finals measure it like the others."""
    return model.by_rates(backbone, hardware) if kernel.tile.row else cost(backbone, hardware, kernel)


def _with_others(problem: Problem, share: float) -> Problem:
    """Return the problem with added sample sizes, which have ``share`` of all weight. This keeps unforeseen sizes from
    becoming slow.
    """
    free = [s for s in select.sample_free_shapes(problem.backbone, 64)[0] if s not in problem.shapes]
    each = sum(problem.weights) * share / (1 - share) / max(1, len(free))
    return replace(problem, shapes=(*problem.shapes, *free), weights=(*problem.weights, *(each for _ in free)))


def _at_classes(bench: Bench, problem: Problem, classes: SizeClasses) -> Objective:
    """Return an objective whose costs are seconds per operation at size classes."""
    work = [problem.backbone.flops(s) for s in classes.shapes]

    def measure(tiles: Sequence[Tile]) -> list[Costs]:
        columns = [[x / w for x in bench.seconds(tiles, s)] for s, w in zip(classes.shapes, work, strict=True)]
        columns += [list(bench.per_operation(tiles))] if classes.saturating else []
        return list(zip(*columns, strict=True))

    return Objective(measure, (*classes.weights, *([classes.saturating] if classes.saturating else [])))


def _reported(objective: Objective, report: Callable[[int, float], None] | None) -> Objective:
    if report is None:
        return objective
    done: list[float] = []

    def measure(tiles: Sequence[Tile]) -> Sequence[Costs]:
        costs = objective(tiles)
        done.extend(Trial(t, c).cost for t, c in zip(tiles, costs, strict=True))
        report(len(done), min(done))
        return costs

    return replace(objective, measure=measure)


def _that_run(bench: Bench, tiles: Sequence[Tile]) -> list[MacroKernel]:
    """Return the kernels of tiles that ran before, without those that fail now (a time limit on a busy machine).

    BuildError: all of them fail.
    """
    kernels: list[MacroKernel] = []
    failed: list[BuildError] = []
    for tile in tiles:
        try:
            kernels.append(bench.kernel(tile))
        except BuildError as e:
            failed.append(e)
    if not kernels:
        raise failed[0]
    return kernels


def _seed_tile(problem: Problem, hardware: Hardware, objective: Objective, trials: int, seed: int) -> Tile:
    """Return DietCode's M_0: the best of a short search in the loop-model space, on saturating (large) instances.

    DietCode uses an existing auto-scheduler, here the trust-region explorer.
    """
    space = loop_model(problem.backbone, hardware).within(problem.rule)
    return best(_regions(space, problem, hardware)(space, objective, max(1, trials), seed)).tile


def _table(problem: Problem, bench: Bench, kernels: Sequence[MacroKernel], costs: Sequence[Index]) -> Table:
    """Return the throughput (operations per unit of cost) of every kernel on every instance."""
    estimates, tiles, columns = [evaluator(c) for c in costs], [k.tile for k in kernels], []
    for shape in problem.instances():
        spent = [e(shape) for e in estimates] if costs else bench.seconds(tiles, shape)
        columns.append([problem.backbone.flops(shape) / s if s > 0 else 0.0 for s in spent])
    table: Table = np.array(columns, float).reshape(-1, len(kernels)).T
    return table


def _tuned(
    strategy: Strategy,
    problem: Problem,
    kernels: Sequence[MacroKernel],
    costs: Sequence[Index],
    table: Table,
    selection: Selection,
    log: tuple[Trial, ...],
) -> Tuned:
    index = {row: k for k, row in enumerate(selection.kernels)}
    return Tuned(
        strategy.name,
        strategy.dispatcher,
        problem.backbone,
        tuple(kernels[row] for row in selection.kernels),
        tuple(costs[row] for row in selection.kernels) if costs else (),
        tuple(problem.instances()),
        problem.weights,
        table[list(selection.kernels)],
        tuple(index[row] for row in selection.assigned),
        log,
    )


def _hybrid(space: Space, problem: Problem, hardware: Hardware) -> Explorer:
    """Return Vortex's hybrid analyzer: measure level 0, then the model's preferred tiles for one size after another.

    The largest block of a level-0 candidate represents it (at most four fifths of the trials). A block is estimated
    with its best parent, as Eq. 1 requires at every level. Vortex keeps all candidates and evaluates its model at run
    time; measuring those that it would ever choose is equivalent.
    """
    backbone = problem.backbone
    shapes = [backbone.sizes(dict(s)) for s in select.sample_free_shapes(backbone, 12)[0]]

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        largest: dict[Part, tuple[int, Tile]] = {}
        for tile in space.tiles:
            low, size = _level_zero(tile), backbone.flops(tile.level("b"))
            largest[low] = max(largest.get(low, (size, tile)), (size, tile))
        step = -(-5 * len(largest) // max(1, 4 * trials))
        first = in_order([t for _, t in largest.values()][::step])(space, objective, trials, seed)
        rates = {_level_zero(t.tile): t.cost for t in first if np.isfinite(t.cost)}
        tile_of: dict[tuple[Part, Part], Tile] = {}
        for tile in space.tiles:
            if _level_zero(tile) in rates:
                key = tuple(tile.level("v").items()), tuple(tile.level("b").items())
                tile_of[key] = min(tile_of.get(key, tile), tile, key=lambda t: (rates[_level_zero(t)], t))
        columns = []
        for tile in tile_of.values():
            spent = backbone.flops(tile.level("b")) * rates[_level_zero(tile)]
            kernel = MacroKernel(tile, usage(backbone, hardware, tile), 0, spent, 0, spent)
            form = model.vortex(backbone, hardware, kernel)
            columns.append(list(map(evaluator(form), shapes)))
        ranks = np.argsort(np.array(columns, float).reshape(len(columns), -1), axis=0, kind="stable")
        tiles, seen = list(tile_of.values()), {t.tile for t in first}
        order = [tiles[i] for i in dict.fromkeys(int(i) for i in ranks.ravel()) if tiles[i] not in seen]
        return first + in_order(order)(space, objective, trials - len(first), seed)

    return explore


Part = tuple[tuple[str, int], ...]


def _level_zero(tile: Tile) -> Part:
    return tuple((n, v) for n, v in tile.compile + tile.launch if n[:2] in ("w.", "v."))


def _sia_order(space: Space, problem: Problem, hardware: Hardware) -> Explorer:
    """Return FTuner's order: uKernels by SIA score, summed over the instances (eight of them, evenly); no search."""
    every = problem.instances()
    some = every[:: -(-len(every) // 8)]

    def score(tile: Tile) -> tuple[float, Tile]:
        kernel = MacroKernel(tile, usage(problem.backbone, hardware, tile), 0.0, 0.0, 0.0, 0.0)
        form = model.ftuner(problem.backbone, hardware, kernel)
        return float(sum(map(evaluator(form), some))), tile

    return in_order(sorted(space.tiles, key=score))


def _aligned(space: Space, problem: Problem, hardware: Hardware) -> Explorer:
    return in_order(aligned_order(space, problem.backbone, hardware))


def _regions(space: Space, problem: Problem, hardware: Hardware) -> Explorer:
    tiles = Space(space.name, tuple(t for t in space.tiles if not t.row)) if problem.rows else space
    return trust_region(with_rows(aligned_order(tiles, problem.backbone, hardware), problem.rows))


def _mutants(problem: Problem, hardware: Hardware, seed: Tile | None) -> Space:
    if seed is None:
        raise InputError("DietCode's space needs the micro-kernel of the largest instance", rule="DietCode 4.3")
    return mutations(problem.backbone, hardware, seed)


STRATEGIES: Mapping[str, Strategy] = {
    s.name: s
    for s in (
        Strategy(
            "tscompiler",
            lambda p, hw, _: loop_model(p.backbone, hw),
            _regions,
            model.tscompiler,
            lambda table, weights, tiles: select.fastest(table),
            "argmin",
        ),
        Strategy(
            "vortex",
            lambda p, hw, _: rkernel_space(p.backbone, hw),
            _hybrid,
            model.vortex,
            lambda table, weights, tiles: select.winners(table),
            "argmin",
        ),
        Strategy(
            "dietcode",
            _mutants,
            _regions,
            model.dietcode,
            lambda table, weights, tiles: select.joint(table, weights)[0],
            "classifier",
            seeded=True,
            gpu_cost=True,
        ),
        Strategy(
            "ftuner",
            lambda p, hw, _: ukernel_space(p.backbone, hw, p.instances(), generator=p.rule),
            _sia_order,
            model.ftuner,
            lambda table, weights, tiles: select.top_ranked(table),
            "argmin",
        ),
        Strategy(
            "bladedisc",
            lambda p, hw, _: loop_model(p.backbone, hw),
            _aligned,
            None,
            lambda table, weights, tiles: select.top_n(table, weights=weights),
            "classifier",
        ),
        Strategy(
            "polydyn",
            lambda p, hw, _: loop_model(p.backbone, hw),
            _regions,
            model.polydyn,
            lambda table, weights, tiles: select.cover(table, weights, tiles),
            "tree",
            outside=0.1,
            finals=True,
        ),
    )
}


def strategy(name: str) -> Strategy:
    """Return the row with this name. InputError: it does not exist."""
    if name not in STRATEGIES:
        raise InputError(
            f"unknown strategy {name!r}",
            rule="Options(strategy=...)",
            remedy=f"use one of {', '.join(sorted(STRATEGIES))}",
        )
    return STRATEGIES[name]
