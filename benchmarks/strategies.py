"""The five papers' systems and polydyn's own beside the oracle, on the same kernels of this machine.

usage: python -m benchmarks.strategies [--threads N] [--trials N] [--pool N] [--only NAME ...] [--quick]

Every workload is one group with dynamic sizes and a list of lengths. Each strategy tunes it from nothing (time
counted); what its dispatcher launches at each length is compared with the oracle. The oracle is the best of a pool:
everything any strategy kept, 100 random valid tuples, and aligned ones up to ``--pool``. All of the pool is timed once
at every length; the best 12 there, and all that strategies chose, are timed again in turns. The oracle is taken from
one half of the turns, all is scored on the other. Times are of the kernel with warm caches, in C, thread pool included.
Beside it: the share of the machine's bound, and the ratio to ONNX Runtime's whole call. Papers' batches are cut to 1.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import record
from benchmarks.limits import Limits, measure
from benchmarks.ops import models
from benchmarks.protocol import Contestant
from benchmarks.selection import nanoseconds
from polydyn.compiler import cpu_target
from polydyn.dispatch.build import build_dispatch
from polydyn.schedules.decision import choose
from polydyn.tuner import PlacedTask, tasks_of
from polydyn.tuner.bench import CpuBench
from polydyn.tuner.calibrate import machine
from polydyn.tuner.timing import TIMER
from polydyn.tuning.backbone import Problem, Tile
from polydyn.tuning.explore import aligned_order
from polydyn.tuning.hardware import Hardware
from polydyn.tuning.loop_model import loop_model
from polydyn.tuning.measure import Workers
from polydyn.tuning.strategy import STRATEGIES, Tuned, tune

SAMPLED = ("dietcode", "bladedisc", "ftuner")
"""Strategies that are given the lengths beforehand, as their papers do; the others are free of samples."""
BEST, TURNS, RIVAL_LENGTHS = 12, 6, 8


@dataclass(frozen=True)
class Workload:
    """A model of one group, and the shapes of its symbols to run."""

    name: str
    model: Callable[[], onnx.ModelProto]
    shapes: tuple[dict[str, int], ...]


def spaced(low: int, high: int, count: int, **fixed: int) -> tuple[dict[str, int], ...]:
    """``count`` values of M, evenly spaced."""
    return tuple({"M": round(m), **fixed} for m in np.linspace(low, high, count))


LENGTHS = (5, 24, 43, 62, 81, 100, 119, 128)
"""FTuner's eight lengths."""
WORKLOADS = (
    Workload("BERT-large Dense (L,1024)x(1024,3072)", lambda: models.gemm(3072, 1024), spaced(1, 512, 62)),
    Workload("BERT-large Dense (L,4096)x(4096,1024)", lambda: models.gemm(1024, 4096), spaced(1, 512, 62)),
    Workload("DietCode Dense (T,768)x(768,2304)", lambda: models.gemm(2304, 768), spaced(1, 128, 128)),
    Workload("FTuner Dense (L,768)x(768,768)", lambda: models.gemm(768, 768), tuple({"M": m} for m in LENGTHS)),
    Workload(
        "FTuner BatchMatMul (12,L,64)x(12,64,L)",
        models.batched_gemm,
        tuple({"B": 12, "M": m, "N": m, "K": 64} for m in LENGTHS),
    ),
    Workload("Vortex Table 6 (M,2304)x(2304,768)", lambda: models.gemm(768, 2304), spaced(1, 384, 96)),
)


@dataclass
class Timed:
    """Kernels of one task, timed: (tile, shape number) -> seconds of every turn."""

    bench: CpuBench
    shapes: Sequence[dict[str, int]]
    seconds: dict[tuple[Tile, int], list[float]] = field(default_factory=dict)

    def run(self, tiles: Sequence[Tile], number: int) -> None:
        """One more turn of each tile at a shape."""
        spent = self.bench.run([(t, self.shapes[number]) for t in tiles])
        for t, s in zip(tiles, spent, strict=True):
            self.seconds.setdefault((t, number), []).append(s)

    def half(self, tile: Tile, number: int, odd: bool) -> float:
        """Least seconds of every other turn after the first."""
        return min(self.seconds[tile, number][2 - odd :: 2])


def loops(placed: PlacedTask, shape: dict[str, int]) -> dict[str, int]:
    """A shape of the model as extents of the group's loops."""
    return placed.task.backbone.sizes({n: e.evaluate(shape) for n, e in placed.extents.items()})


def tuned_rows(
    names: Sequence[str], placed: PlacedTask, bench: CpuBench, hardware: Hardware, shapes: Any, trials: int
) -> dict[str, tuple[Tuned, float]]:
    """Each strategy's result and the seconds it took, built and measured anew."""
    out = {}
    instances = placed.instances([(s, 1) for s in shapes])
    for name in names:
        fresh = CpuBench(placed.task, hardware, bench.workers)  # nothing built before counts
        problem = Problem(placed.task.key, placed.task.backbone, *(instances if name in SAMPLED else ((), ())))
        start = time.perf_counter()
        tuned = tune(STRATEGIES[name], problem, hardware, fresh, trials=trials)
        out[name] = tuned, time.perf_counter() - start
    return out


def ablations(vortex: Tuned) -> dict[str, Tuned]:
    """Vortex with one level static (one binary, its best on average; launch tiles free), and with both."""
    means = (vortex.table / vortex.table.max(0)).mean(1)
    parts = {k.tile.compile for k in vortex.kernels}
    share = {p: max(means[i] for i, k in enumerate(vortex.kernels) if k.tile.compile == p) for p in parts}
    binary = max(sorted(parts), key=lambda p: share[p])
    one = [i for i, k in enumerate(vortex.kernels) if k.tile.compile == binary]
    return {"vortex, one level static": _only(vortex, one), "vortex, both static": _only(vortex, [int(means.argmax())])}


def _only(tuned: Tuned, kept: Sequence[int]) -> Tuned:
    table = tuned.table[list(kept)]
    return replace(
        tuned,
        kernels=tuple(tuned.kernels[i] for i in kept),
        costs=tuple(tuned.costs[i] for i in kept) if tuned.costs else (),
        table=table,
        assigned=tuple(int(i) for i in table.argmax(0)),
    )


def chosen(tuned: Tuned, shapes: Sequence[dict[str, int]]) -> tuple[list[Tile], float]:
    """The tile that each shape launches, and nanoseconds of one selection."""
    dispatch = build_dispatch(tuned, pairs=False)
    symbols = [x.name for x in tuned.backbone.loops if x.extent is None]
    picked = [dispatch.programs[choose(dispatch.decision, s)].kernels[0] for s in shapes]
    return [tuned.kernels[k].tile for k in picked], nanoseconds(dispatch.decision, symbols, shapes)


def score(work: Workload, options: argparse.Namespace, limits: Limits, workers: Workers) -> dict[str, Any]:
    """One workload: a row for each strategy."""
    (placed,) = tasks_of(work.model())
    task = placed.task
    hardware = machine(cpu_target("cpu"), "cpu", options.threads)
    shapes = [loops(placed, s) for s in work.shapes][:: 8 if options.quick else 1]
    bench = CpuBench(task, hardware, workers)
    rows = tuned_rows(list(STRATEGIES), placed, bench, hardware, work.shapes, options.trials)
    tuned = {n: t for n, (t, _) in rows.items()} | ablations(rows["vortex"][0])
    picks = {n: chosen(t, shapes) for n, t in tuned.items()}
    space = loop_model(task.backbone, hardware)
    pool = list(dict.fromkeys(k.tile for t in tuned.values() for k in t.kernels))
    pool += random.Random(1).sample(space.tiles, min(100, len(space)))
    pool = list(dict.fromkeys([*pool, *aligned_order(space, task.backbone, hardware)]))[: max(len(pool), options.pool)]
    bench.build(pool)
    timed = Timed(bench, shapes)
    for number in range(len(shapes)):
        timed.run(pool, number)
        best = sorted(pool, key=lambda t: timed.seconds[t, number][0])[:BEST]
        again = list(dict.fromkeys([*best, *(p[number] for p, _ in picks.values())]))
        for _ in range(TURNS):
            timed.run(again, number)
    oracle = []
    for number in range(len(shapes)):
        turned = [t for t in pool if len(timed.seconds[t, number]) > 1]
        oracle.append(timed.half(min(turned, key=lambda t: timed.half(t, number, False)), number, True))
    flops = [task.backbone.flops(s) for s in shapes]
    result: dict[str, Any] = {"workload": work.name, "pool": len(pool), "lengths": len(shapes), "strategies": {}}
    for name, (tiles, spent) in picks.items():
        share = [o / timed.half(t, i, True) for i, (t, o) in enumerate(zip(tiles, oracle, strict=True))]
        t = tuned[name]
        result["strategies"][name] = {
            "mean": float(np.mean(share)), "worst": float(np.min(share)), "tuples": len(t.kernels),
            "binaries": t.binaries, "offline_s": rows[name][1] if name in rows else None, "selection_ns": spent,
        }  # fmt: skip
    bound = [limits.seconds_again(f, sum(task.backbone.moved(s))) for f, s in zip(flops, shapes, strict=True)]
    result["share_of_bound"] = float(np.mean([b / o for b, o in zip(bound, oracle, strict=True)]))
    result["ratio_to_onnxruntime"] = rival(work, shapes, oracle, options)
    return result


def rival(work: Workload, shapes: Sequence[dict[str, int]], oracle: Sequence[float], options: Any) -> float:
    """Geometric mean of ONNX Runtime's time over the oracle's at some of the shapes."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        player = Contestant("onnxruntime", models.save(work.model(), Path(folder)), options.threads)
    step = max(1, len(shapes) // RIVAL_LENGTHS)
    asked = work.shapes[:: 8 if options.quick else 1]
    for i in range(0, len(shapes), step):
        player.run(asked[i], 3)
        ratios.append(min(player.run(asked[i], 20)) / oracle[i])
    player.close()
    return float(np.exp(np.mean(np.log(ratios))))


def show(result: dict[str, Any]) -> None:
    """Prints a workload's table."""
    oracle = f"{result['share_of_bound']:.2f} of the bound, {result['ratio_to_onnxruntime']:.2f}x ONNX Runtime"
    print(f"\n{result['workload']}: {result['lengths']} lengths, pool of {result['pool']}; oracle: {oracle}")
    print(f"{'strategy':28}{'mean':>7}{'worst':>7}{'tuples':>8}{'binaries':>9}{'offline s':>11}{'select ns':>11}")
    for name, r in result["strategies"].items():
        spent = "" if r["offline_s"] is None else f"{r['offline_s']:.1f}"
        print(f"{name:28}{r['mean']:7.3f}{r['worst']:7.3f}{r['tuples']:8}{r['binaries']:9}{spent:>11}"
              f"{r['selection_ns']:11.0f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--pool", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[], help="parts of workloads' names")
    parser.add_argument("--quick", action="store_true", help="every eighth length, results not kept")
    options = parser.parse_args()
    limits = measure(options.threads, caches=True)
    wanted = [w for w in WORKLOADS if not options.only or any(o in w.name for o in options.only)]
    results = []
    with Workers(TIMER, timeout=30.0) as workers:
        for work in wanted:
            results.append(score(work, options, limits, workers))
            show(results[-1])
    folder = record.SCRATCH if options.quick or options.only else record.RESULTS
    record.save(f"strategies_{options.threads}t", folder=folder, trials=options.trials, results=results)


if __name__ == "__main__":
    main()
