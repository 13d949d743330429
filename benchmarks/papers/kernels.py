"""Figures about the tiles of one product: TSCompiler's Figure 6, DietCode's Figure 12, FTuner's Figure 14."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from benchmarks.papers.report import Grid, Result, Settings, number, row
from benchmarks.protocol import Contestant
from benchmarks.strategies import SAMPLES, tuned_row
from polydyn.backends.cpu import cpu_target
from polydyn.measure import PlacedTask, tasks_of
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.search.backbone import Problem, Tile
from polydyn.search.hardware import Hardware
from polydyn.search.select import Selection, Table, joint, quality, relative_size, shares, vote
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.strategies import STRATEGIES, tune
from polydyn.search.tasks.cpu import DEFAULT
from polydyn.testing import models

Matrix = npt.NDArray[np.float64]
SHOWN = 5
"""Number of the best tiles that a table names."""
NEAR = 0.9
"""Share of the best at which a tile counts as near it (the figure's boxes have no number)."""
GIGA = 1e-9


@dataclass(frozen=True)
class Product:
    """One product with an unknown number of rows, and where its kernels are measured."""

    model: onnx.ModelProto
    placed: PlacedTask[Any]
    hardware: Hardware
    workers: Workers

    def bench(self) -> CpuBench:
        """Return a bench without kernels."""
        return CpuBench(self.placed.task, self.hardware, self.workers)

    def shapes(self, lengths: Sequence[int]) -> list[dict[str, int]]:
        """Return loop extents for numbers of rows."""
        task = self.placed.task
        each = [{n: e.evaluate({"M": m}) for n, e in self.placed.extents.items()} for m in lengths]
        return [task.backbone.sizes(s) for s in each]

    def rates(self, tiles: Sequence[Tile], lengths: Sequence[int], rounds: int) -> Matrix:
        """Return GFLOP/s (tiles x lengths) of whole launches: the best of ``rounds`` passes over all lengths."""
        bench, shapes = self.bench(), self.shapes(lengths)
        passes = [[bench.seconds(tiles, s) for s in shapes] for _ in range(rounds)]
        work = [GIGA * self.placed.task.backbone.flops(s) for s in shapes]
        return np.asarray(np.array(work) / np.min(passes, axis=0).T)

    def onnxruntime(self, lengths: Sequence[int]) -> list[float]:
        """Return GFLOP/s of whole calls of ONNX Runtime."""
        rates = []
        with tempfile.TemporaryDirectory() as folder:
            path = models.save(self.model, Path(folder))
            with Contestant("onnxruntime", path, self.hardware.units) as player:
                for m, s in zip(lengths, self.shapes(lengths), strict=True):
                    player.run({"M": m}, 3)
                    rates.append(GIGA * self.placed.task.backbone.flops(s) / min(player.run({"M": m}, 20)))
        return rates


@contextmanager
def product(columns: int, depth: int, threads: int) -> Iterator[Product]:
    """Open a product ``x[M, depth] @ w[depth, columns]``, ready for measuring."""
    model = models.gemm(columns, depth)
    (placed,) = tasks_of(model)
    with Workers(TIMER, timeout=30.0) as workers:
        yield Product(model, placed, machine(cpu_target("cpu"), "cpu", threads), workers)


def name_of(tile: Tile) -> str:
    """Return a tile's numbers: of the register tile (w), of the task and of the reduction's block (b)."""
    sizes = [f"{n} {v}" for n, v in (*tile.compile, *tile.launch) if not n.startswith("v.")]
    return "default, untuned" if tile == DEFAULT else ", ".join(sizes)


# -- TSCompiler, Figure 6 --------------------------------------------------------------------------------------------


def smoothness(settings: Settings) -> Result:
    """TSCompiler Fig. 6: throughput of tiles at sampled lengths of BERT-large's Dense; some tiles are good at all."""
    columns, depth, longest = (128, 64, 64) if settings.quick else (3072, 1024, 512)
    count = settings.points or (3 if settings.quick else 10)
    trials = settings.trials or (6 if settings.quick else 64)
    draw = random.Random(settings.seed)
    lengths = sorted(draw.sample(range(1, longest + 1), count))
    with product(columns, depth, settings.threads) as p:
        space = loop_model(p.placed.task.backbone, p.hardware)
        tiles = draw.sample(space.tiles, min(trials, len(space)))
        rates = p.rates([*tiles, DEFAULT], lengths, settings.rounds)
        ort = p.onnxruntime(lengths)
    ran = np.isfinite(rates[:-1]).all(1) & (rates[:-1] > 0).all(1)
    tiles, drawn = [t for t, ok in zip(tiles, ran, strict=True) if ok], rates[:-1][ran]
    best = drawn.max(0)
    share = drawn / best
    order = np.argsort(-share.mean(1), kind="stable")
    middle = int(order[len(order) // 2])
    shown = [*((f"{n + 1}: {name_of(tiles[i])}", drawn[i]) for n, i in enumerate(order[:SHOWN])),
             (f"median: {name_of(tiles[middle])}", drawn[middle]),
             (f"worst: {name_of(tiles[order[-1]])}", drawn[order[-1]]),
             (name_of(DEFAULT), rates[-1]), ("ONNX Runtime (whole calls)", np.array(ort))]  # fmt: skip
    table = [row(n, [*(float(x) for x in r), float((r / best).mean()), float((r / best).min())]) for n, r in shown]
    columns_of = ("tile", *(f"L={m}" for m in lengths), "mean share", "least share")
    points = space.points[[space.position[t] for t in tiles]]
    setup = (
        f"X: [L, {depth}], W: [{columns}, {depth}]: the batch is 1, because 32 L rows take a core seconds. {count} "
        f"lengths and {len(tiles)} of {len(space)} tiles of the loop model are drawn by seed {settings.seed}; "
        f"{settings.threads} threads; the best of {settings.rounds} passes over all lengths."
    )
    grids = (
        Grid("GFLOP/s. Shares are of the best drawn tile at each length.", columns_of, tuple(table)),
        Grid("Smoothness of the drawn tiles.", ("quantity", "value"), tuple(_smooth(share, drawn, points))),
    )
    return Result("tscompiler-6", setup, grids)


def _smooth(share: Matrix, drawn: Matrix, points: Matrix) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the summary: tiles near the best, correlation of lengths, distance of costs of neighbours."""
    best = int(share.min(1).argmax())
    yield "largest share that one tile reaches at all lengths", number(float(share[best].min()))
    yield f"tiles above {NEAR:.0%} of the best at all lengths", f"{int((share >= NEAR).all(1).sum())} of {len(share)}"
    yield f"tiles above {NEAR:.0%} of the best at some length", f"{int((share >= NEAR).any(1).sum())} of {len(share)}"
    ranks = np.argsort(np.argsort(drawn, axis=0, kind="stable"), axis=0, kind="stable").astype(float)
    correlation = np.corrcoef(ranks.T)[np.triu_indices(drawn.shape[1], 1)]
    yield "rank correlation of two lengths, mean", number(float(correlation.mean()))
    yield "rank correlation of two lengths, least", number(float(correlation.min()))
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    logs = np.log(drawn)
    nearest = np.abs(logs - logs[distance.argmin(1)]).mean()
    pairs = np.abs(logs[:, None] - logs[None]).mean(2)[np.triu_indices(len(logs), 1)].mean()
    yield "difference of a tile to its nearest drawn neighbour (mean absolute logarithm)", number(float(nearest))
    yield "difference of two drawn tiles (mean absolute logarithm)", number(float(pairs))


# -- DietCode, Figure 12 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """The table from which DietCode's strategy selects, and the tiles of its rows."""

    table: Table
    weights: tuple[float, ...]
    tiles: tuple[Tile, ...]


def explored(p: Product, lengths: Sequence[int], trials: int, seed: int) -> Explored:
    """Run DietCode's strategy and return what it selects from."""
    seen: list[Explored] = []
    own = STRATEGIES["dietcode"]

    def choose(table: Table, weights: Sequence[float], tiles: Sequence[Tile]) -> Selection:
        seen.append(Explored(table, tuple(weights), tuple(tiles)))
        return own.choose(table, weights, tiles)

    task = p.placed.task
    problem = Problem(task.key, task.backbone, *p.placed.instances([({"M": m}, 1) for m in lengths]))
    tune(replace(own, choose=choose), problem, p.hardware, p.bench(), trials=trials, seed=seed)
    return seen[0]


def votes(settings: Settings) -> Result:
    """DietCode Fig. 12: throughput and size of the binary when every instance votes for k micro-kernels."""
    columns, depth, longest = (128, 64, 16) if settings.quick else (2304, 768, 128)
    trials = settings.trials or (12 if settings.quick else 64)
    count = settings.points or (4 if settings.quick else 16)
    lengths = sorted({round(m) for m in np.linspace(1, longest, count)})
    with product(columns, depth, settings.threads) as p:
        explored_tiles = explored(p, lengths, trials, settings.seed)
        later = p.rates(explored_tiles.tiles, lengths, settings.rounds)
        rows, free = _voted(p, explored_tiles, later, lengths, settings.rounds)
        default = p.rates([DEFAULT], lengths, settings.rounds)[0]
        ort = np.array(p.onnxruntime(lengths))
    best = later.max(0)
    rows += [row("default, untuned", ["1", "1", "", *_reached(default, best), ""]),
             row("ONNX Runtime (whole calls)", ["", "", "", *_reached(ort, best), ""])]  # fmt: skip
    one = ("every shape's own choice (k = 1) over one micro-kernel for all, mean of throughputs; printed 1.11",
           number(float((free / later[_single(explored_tiles)]).mean())))  # fmt: skip
    head = ("k", "micro-kernels", "binaries", "library, kB", "GFLOP/s", "mean share", "least share", "G")
    setup = (
        f"[T, {depth}] x [{columns}, {depth}], batch 1, {len(lengths)} lengths from 1 to {longest}; strategy dietcode "
        f"(`polydyn.search.strategies`), {trials} trials, seed {settings.seed}, {settings.threads} threads. Selection "
        f"uses the search's measurements, all columns the best of {settings.rounds} later passes. A library has the "
        "code of its kernels and of the launcher. G is `select.relative_size` of the later passes."
    )
    grids = (
        Grid("Rows with equal selections are joined; * marks the k of the strategy.", head, tuple(rows)),
        Grid("The price of one category.", ("quantity", "value"), (one,)),
    )
    return Result("dietcode-12", setup, grids)


def _reached(rates: Matrix, best: Matrix) -> list[float]:
    """Return mean GFLOP/s, mean and least share of the best."""
    return [float(rates.mean()), float((rates / best).mean()), float((rates / best).min())]


def _single(explored_tiles: Explored) -> int:
    """Return the micro-kernel that is best on average."""
    return int((shares(explored_tiles.table) @ np.asarray(explored_tiles.weights)).argmax())


def _voted(
    p: Product, explored_tiles: Explored, later: Matrix, lengths: Sequence[int], rounds: int
) -> tuple[list[tuple[str, ...]], Matrix]:
    """Return a row for each k with its own selection, and the rates of k = 1."""
    chosen = joint(explored_tiles.table, explored_tiles.weights)[1]
    selections: dict[Selection, list[int]] = {}
    for k in range(1, len(explored_tiles.table) + 1):
        selections.setdefault(vote(explored_tiles.table, explored_tiles.weights, k), []).append(k)
    rows, free = [], np.empty(0)
    for selection, ks in selections.items():
        rates = later[list(selection.assigned), range(len(lengths))]
        free = free if free.size else rates
        tiles = [explored_tiles.tiles[m] for m in selection.kernels]
        mean, _ = quality(later, selection, explored_tiles.weights)
        name = (f"{ks[0]}..{ks[-1]}" if len(ks) > 1 else str(ks[0])) + " *" * (chosen in ks)
        size = f"{_library(p, tiles) / 1000:.0f}"
        counts = [str(len(tiles)), str(len({t.compile for t in tiles})), size]
        rows.append(row(name, [*counts, *_reached(rates, later.max(0)), relative_size(mean, len(tiles))]))
    return rows, free


def _library(p: Product, tiles: Sequence[Tile]) -> int:
    """Return the bytes of the library with the kernels of tiles."""
    bench = p.bench()
    bench.build(tiles)
    return sum(Path(x).stat().st_size for x in {b.library for b in bench.kernels.values()})


# -- FTuner, Figure 14 -----------------------------------------------------------------------------------------------

GROWN = ("ftuner", "dietcode", "polydyn")
"""Strategies whose time is measured over the number of shapes."""


def growth(settings: Settings) -> Result:
    """FTuner Fig. 14: seconds of tuning over the number of shapes, for one product."""
    columns, depth, longest = (128, 64, 8) if settings.quick else (2304, 768, 128)
    trials = settings.trials or (2 if settings.quick else 32)
    counts = [n for n in ((1, 2) if settings.quick else (1, 8, 32, 128)) if n <= (settings.points or longest)]
    lengths = {n: [round(m) for m in np.linspace(1, longest, n + 1)[1:]] for n in counts}
    rows = []
    with product(columns, depth, settings.threads) as p:
        for name in filter(settings.asks, GROWN):
            spent = []
            for n in counts:
                given = [{"M": m} for m in lengths[n]]
                result = tuned_row(name, p.placed, p.workers, p.hardware, given, trials, samples=max(SAMPLES, n))
                spent.append(float(result.seconds or 0.0))
            rows.append(row(name, spent))
        if settings.asks("static"):
            rows.append(row("a search per shape (static)", _per_shape(p, columns, depth, lengths, trials)))
    setup = (
        f"[T, {depth}] x [{columns}, {depth}], T spaced evenly up to {longest}; {trials} trials for every search, seed "
        f"0, {settings.threads} threads for kernels, empty compiler caches. The last row tunes a static product for "
        f"each shape in the order of alignment (Roller's criterion), {max(1, trials // 8)} tiles each, up to 8 shapes."
    )
    caption = "Seconds of a search: generating, compiling and measuring."
    return Result("ftuner-14", setup, (Grid(caption, ("strategy", *map(str, counts)), tuple(rows)),))


def _per_shape(p: Product, columns: int, depth: int, lengths: dict[int, list[int]], trials: int) -> list[float | str]:
    """Return the seconds of one search for each shape, for every number of shapes up to 8."""
    out: list[float | str] = []
    for n, some in lengths.items():
        if n > 8:
            out.append("not run")
            continue
        spent = 0.0
        for m in some:
            model = models.gemm(columns, depth)
            model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = m
            (placed,) = tasks_of(model)
            spent += tuned_row("bladedisc", placed, p.workers, p.hardware, (), max(1, trials // 8)).seconds or 0.0
        out.append(spent)
    return out
