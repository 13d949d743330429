"""Compares the five papers' systems and polydyn's own with the oracle, on the same kernels of this machine.

usage: python -m benchmarks.strategies [--threads N] [--trials N] [--pool N] [--only PART ...] [--quick]

Every workload is one group with dynamic sizes and a list of lengths. Each strategy tunes it from nothing, with an empty
compiler cache (the time is counted); the kernels that its dispatcher launches at each length are compared with the
oracle (``oracle.py``). Strategies whose papers use samples receive up to 16 of the lengths. One more row gives polydyn
only a part of the range: the table's last columns show lengths outside it. Times are of the kernel with warm caches, in
C, thread pool included. Further columns: the share of the machine's bound, and the ratio to whole calls of the
baselines; an oracle below 0.9 of the best baseline makes the workload void. Batches of the papers are cut to 1. Each
workload is stored when it is done. The bound includes second- and third-level caches: a product that fits the first
level can exceed it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import record
from benchmarks.limits import Limits, measure
from benchmarks.oracle import Oracle, pool_of
from benchmarks.protocol import Contestant
from benchmarks.selection import nanoseconds
from polydyn.backends.cpu import cpu_target
from polydyn.build.cache import cache_dir
from polydyn.build.eviction import BLOCKS
from polydyn.measure import PlacedTask, tasks_of
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.schedules.decision import Decision, Leaf, choose
from polydyn.search.backbone import Problem, Tile
from polydyn.search.dispatch.build import build_dispatch
from polydyn.search.hardware import Hardware
from polydyn.search.strategies import STRATEGIES, Tuned, tune
from polydyn.search.tasks.cpu import DEFAULT
from polydyn.testing import models

SAMPLING_STRATEGIES, SAMPLES = ("dietcode", "bladedisc", "ftuner"), 16
"""Strategies that receive lengths in advance, as in their papers, and the number of lengths; others use no samples."""
RIVALS, RIVAL_LENGTHS, VOID = ("onnxruntime", "torch", "openvino"), 8, 0.9
NAME = "strategies"
Shapes = Sequence[dict[str, int]]


@dataclass(frozen=True)
class Workload:
    """A model of one group, and the shapes of its symbols to run. ``tuned_range``: the part of M's range that a
    separate row is tuned for (empty for no such row).
    """

    name: str
    model: Callable[[], onnx.ModelProto]
    shapes: tuple[dict[str, int], ...]
    tuned_range: tuple[int, ...] = ()

    @property
    def range(self) -> str:
        """The tuned part of the range, as text."""
        return f"{self.tuned_range[0]}..{self.tuned_range[1]}"

    def inside(self, shape: dict[str, int]) -> bool:
        """Return whether a shape is in the tuned part of the range."""
        return not self.tuned_range or self.tuned_range[0] <= shape["M"] <= self.tuned_range[1]


def spaced(low: int, high: int, count: int) -> tuple[dict[str, int], ...]:
    """Return ``count`` values of M, evenly spaced."""
    return tuple({"M": round(m)} for m in np.linspace(low, high, count))


LENGTHS = (5, 24, 43, 62, 81, 100, 119, 128)
"""FTuner's eight lengths."""
WORKLOADS = (
    Workload("BERT-large Dense (L,1024)x(1024,3072)", lambda: models.gemm(3072, 1024), spaced(1, 512, 62), (1, 128)),
    Workload("BERT-large Dense (L,4096)x(4096,1024)", lambda: models.gemm(1024, 4096), spaced(1, 512, 62), (1, 128)),
    Workload("DietCode Dense (T,768)x(768,2304)", lambda: models.gemm(2304, 768), spaced(1, 128, 128)),
    Workload("FTuner Dense (L,768)x(768,768)", lambda: models.gemm(768, 768), tuple({"M": m} for m in LENGTHS)),
    Workload(
        "FTuner BatchMatMul (12,L,64)x(12,64,L)",
        models.batched_gemm,
        tuple({"B": 12, "M": m, "N": m, "K": 64} for m in LENGTHS),
    ),
    Workload("Vortex Table 6 (M,2304)x(2304,768)", lambda: models.gemm(768, 2304), spaced(1, 384, 96), (128, 256)),
)


@dataclass(frozen=True)
class Row:
    """A line of the table: the tuned kernels of a strategy, its decision, and its tuning seconds (None: from another
    row).
    """

    tuned: Tuned
    decision: Decision
    seconds: float | None

    def tiles(self, shapes: Shapes) -> list[Tile]:
        """Return the tile that each shape launches."""
        return [self.tuned.kernels[choose(self.decision, s)].tile for s in shapes]

    def selection(self, shapes: Shapes) -> float:
        """Return the nanoseconds of one selection that is not cached."""
        symbols = [x.name for x in self.tuned.backbone.loops if x.extent is None]
        return nanoseconds(self.decision, symbols, shapes)


def loops(placed: PlacedTask, shape: dict[str, int]) -> dict[str, int]:
    """Return a shape of the model as extents of the group's loops."""
    return placed.task.backbone.sizes({n: e.evaluate(shape) for n, e in placed.extents.items()})


@contextmanager
def empty_cache() -> Iterator[None]:
    """Use an empty compiler cache inside the block; afterwards the usual cache has the new entries."""
    usual = cache_dir("objects").parent
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get("POLYDYN_CACHE")
        os.environ["POLYDYN_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("POLYDYN_CACHE")
            if before is not None:
                os.environ["POLYDYN_CACHE"] = before
            shutil.copytree(folder, usual, dirs_exist_ok=True)
            (usual / BLOCKS).unlink(missing_ok=True)  # forces the usual cache to count again


def tuned_row(
    name: str, placed: PlacedTask, workers: Workers, hardware: Hardware, shapes: Shapes, trials: int,
    samples: int = SAMPLES,
) -> Row:  # fmt: skip
    """Tune a strategy from nothing and return its row. ``shapes``: shapes of the model, of which up to ``samples`` are
    given to the strategy.
    """
    task = placed.task
    given = shapes[:: -(-len(shapes) // samples)] if shapes else ()
    instances = placed.instances([(s, 1) for s in given]) if given else ((), ())
    with empty_cache():
        start = time.perf_counter()
        bench = CpuBench(task, hardware, workers)
        problem = Problem(task.key, task.backbone, *instances)
        tuned = tune(STRATEGIES[name], problem, hardware, bench, trials=trials)
        decision = build_dispatch(tuned)
        return Row(tuned, decision, time.perf_counter() - start)


def ablations(vortex: Tuned) -> dict[str, Row]:
    """Return Vortex with one level static (one binary, its best on average; launch tiles free), and with both static.
    """
    means = (vortex.table / vortex.table.max(0)).mean(1)
    parts = {k.tile.compile for k in vortex.kernels}
    share = {p: max(means[i] for i, k in enumerate(vortex.kernels) if k.tile.compile == p) for p in parts}
    binary = max(sorted(parts), key=lambda p: share[p])
    one = [i for i, k in enumerate(vortex.kernels) if k.tile.compile == binary]
    rows = {"vortex, one level static": one, "vortex, both static": [int(means.argmax())]}
    return {name: _only(vortex, selected_rows) for name, selected_rows in rows.items()}


def _only(tuned: Tuned, kernels: Sequence[int]) -> Row:
    table = tuned.table[list(kernels)]
    part = replace(
        tuned,
        kernels=tuple(tuned.kernels[i] for i in kernels),
        costs=tuple(tuned.costs[i] for i in kernels) if tuned.costs else (),
        table=table,
        assigned=tuple(int(i) for i in table.argmax(0)),
    )
    return Row(part, build_dispatch(part), None)


def _default(tuned: Tuned) -> Row:
    """Return the kernel that the group has without tuning."""
    only = replace(tuned.kernels[0], tile=DEFAULT)
    part = replace(tuned, kernels=(only,), costs=(), table=tuned.table[:1], assigned=(0,) * len(tuned.instances))
    return Row(part, Leaf(0), None)


def rows_of(work: Workload, placed: PlacedTask, workers: Workers, hardware: Hardware, trials: int) -> dict[str, Row]:
    """Return every row of a workload's table."""

    def row(name: str, shapes: Shapes) -> Row:
        result = tuned_row(name, placed, workers, hardware, shapes, trials)
        print(f"  {name}: {result.seconds:.0f} s", flush=True)
        return result

    rows = {name: row(name, work.shapes if name in SAMPLING_STRATEGIES else ()) for name in STRATEGIES}
    rows |= ablations(rows["vortex"].tuned)
    rows["default, untuned"] = _default(rows["polydyn"].tuned)
    part = [s for s in work.shapes if work.inside(s)]
    for name in ("polydyn", "dietcode") if work.tuned_range else ():
        rows[f"{name}, told {work.range}"] = row(name, part)
    return rows


def score(work: Workload, options: argparse.Namespace, limits: Limits, workers: Workers) -> dict[str, Any]:
    """Score one workload: return its table and the columns next to it."""
    begin = time.perf_counter()
    (placed,) = tasks_of(work.model())
    backbone = placed.task.backbone
    hardware = machine(cpu_target("cpu"), "cpu", options.threads)
    rows = rows_of(work, placed, workers, hardware, options.trials)
    asked = work.shapes[:: max(1, len(work.shapes) // 8) if options.quick else 1]
    shapes = [loops(placed, s) for s in asked]
    bench = CpuBench(placed.task, hardware, workers)
    pool = pool_of(bench, (k.tile for r in rows.values() for k in r.tuned.kernels), options.pool)
    bench.build(pool)
    picks = {name: r.tiles(shapes) for name, r in rows.items()}
    timed = Oracle(bench, shapes)
    oracle = timed.measure(pool, list(zip(*picks.values(), strict=True)))
    table = {}
    for name, r in rows.items():
        spent = [timed.half(t, i, True) for i, t in enumerate(picks[name])]
        share = [o / s for o, s in zip(oracle, spent, strict=True)]
        table[name] = _row(r, shapes, share, [work.inside(s) for s in asked] if "told" in name else [])
    least = [limits.seconds_again(backbone.flops(s), sum(backbone.bytes_moved(s))) for s in shapes]
    ratios = rivals(work, asked, oracle, options.threads)
    return {
        "workload": work.name, "threads": options.threads, "trials": options.trials, "lengths": len(shapes),
        "pool": len(pool), "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "share_of_bound": float(np.mean([b / o for b, o in zip(least, oracle, strict=True)])),
        "rivals": ratios, "void": min(ratios.values()) < VOID, "seconds": time.perf_counter() - begin,
        "strategies": table,
    }  # fmt: skip


def _row(r: Row, shapes: Shapes, share: Sequence[float], inside: Sequence[bool]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "mean": float(np.mean(share)), "worst": float(np.min(share)), "binaries": r.tuned.binaries,
        "tuples": len(r.tuned.kernels), "offline_s": r.seconds, "selection_ns": r.selection(shapes),
        "shares": [round(x, 3) for x in share],
    }  # fmt: skip
    outside = [x for x, is_inside in zip(share, inside, strict=False) if not is_inside]
    return row | ({"outside_mean": float(np.mean(outside)), "outside_worst": min(outside)} if outside else {})


def rivals(work: Workload, shapes: Shapes, oracle: Sequence[float], threads: int) -> dict[str, float]:
    """Return the geometric mean of each baseline's time over the oracle's at some of the shapes."""
    times = {}
    for kind in RIVALS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                player = Contestant(kind, models.save(work.model(), Path(folder)), threads)
            except RuntimeError:
                continue  # not installed
        ratios = []
        with player:
            for i in range(0, len(shapes), max(1, len(shapes) // RIVAL_LENGTHS)):
                player.run(shapes[i], 3)
                ratios.append(min(player.run(shapes[i], 20)) / oracle[i])
        times[kind] = float(np.exp(np.mean(np.log(ratios))))
    return times


def show(result: dict[str, Any]) -> None:
    """Print a workload's table."""
    others = ", ".join(f"{x:.2f}x {n}" for n, x in result["rivals"].items())
    print(f"\n{result['workload']}: {result['lengths']} lengths, pool of {result['pool']}, {result['seconds']:.0f} s")
    print(f"oracle: {result['share_of_bound']:.2f} of the bound; {others}{'; VOID' * result['void']}")
    print(f"{'strategy':28}{'mean':>7}{'worst':>7}{'tuples':>8}{'binaries':>9}{'offline s':>11}{'select ns':>11}"
          f"{'outside':>9}{'worst':>7}")  # fmt: skip
    for name, r in result["strategies"].items():
        spent = "" if r["offline_s"] is None else f"{r['offline_s']:.1f}"
        out = f"{r['outside_mean']:9.3f}{r['outside_worst']:7.3f}" if "outside_mean" in r else ""
        print(f"{name:28}{r['mean']:7.3f}{r['worst']:7.3f}{r['tuples']:8}{r['binaries']:9}{spent:>11}"
              f"{r['selection_ns']:11.0f}{out}", flush=True)  # fmt: skip


def store(result: dict[str, Any], folder: Path) -> None:
    """Add a workload to the results, in place of its previous result."""
    path = folder / f"{NAME}.json"
    rows = json.loads(path.read_text())["results"] if path.exists() else []
    same = (result["workload"], result["threads"])
    others = [r for r in rows if (r["workload"], r["threads"]) != same]
    order = [w.name for w in WORKLOADS]
    results = sorted([*others, result], key=lambda r: (r["threads"], order.index(r["workload"])))
    record.save(NAME, folder=folder, results=results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--pool", type=int, default=300)
    parser.add_argument("--only", nargs="*", default=[], help="parts of workloads' names")
    parser.add_argument("--quick", action="store_true", help="about eight lengths, results not kept")
    options = parser.parse_args()
    limits = measure(options.threads, caches=True)
    with Workers(TIMER, timeout=30.0) as workers:
        for work in WORKLOADS:
            if not options.only or any(o in work.name for o in options.only):
                result = score(work, options, limits, workers)
                show(result)
                store(result, record.SCRATCH if options.quick else record.RESULTS)


if __name__ == "__main__":
    main()
