"""BladeDISC's figures for choosing a kernel by a decision tree (its 7.4.2), on tables measured on this machine.

    python -m benchmarks.classifier --record tables.db   # measures for about 4 minutes; an interrupted run resumes
    python -m benchmarks.classifier                      # the figures of benchmarks/results/classifier_1t.json.gz

A table has the times of 24 tile configurations at about a hundred shapes, in two halves of interleaved passes. Trees
are grown on 80 per cent of the shapes and on one half, and judged on the other shapes and the other half: accuracy (the
best of the five targets is chosen), mean share of the best of all 24, and the share of shapes above 95 per cent of it.
BladeDISC reports 92 %, 99 % and 95.2 % on a GPU. "Measured again" shows how often the two halves themselves agree on
the best target, and the share that the best of one half reaches in the other; no choice can do better.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from rich.progress import track

from benchmarks import record
from benchmarks.strategies import loops
from polydyn.backends.cpu import cpu_target
from polydyn.measure import PlacedTask, tasks_of
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.schedules.decision import Decision, choose
from polydyn.search.backbone import Tile
from polydyn.search.dispatch.tree import features_of, fit_classifier, fit_tree
from polydyn.search.explorers.explore import aligned_order
from polydyn.search.hardware import Hardware
from polydyn.search.records import Record, Records
from polydyn.search.select import Selection, assign, top_n
from polydyn.search.spaces.loop_model import loop_model
from polydyn.testing import models

TABLE = record.RESULTS / "classifier_1t.json.gz"
PASSES, TARGETS, SPLITS, HELD_OUT = 4, 5, 20, 0.2
SCREENED_TILES, CANDIDATE_TILES, CLASSES = 60, 24, 3
"""Aligned tile configurations measured on a saturating shape, the number of best ones that are candidates, and block
size classes.
"""
RESIDUES = (0, 1, 2, 4, 8, 16, 32)
"""Remainders of a size divided by 64. BladeDISC divides by 256."""
Shape = dict[str, int]
Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measured:
    """``halves[h][k, i]``: minimum seconds of tile k at shape i, over every other pass.

    ``operations[i]``: work of shape i.
    """

    name: str
    tiles: tuple[str, ...]
    shapes: tuple[Shape, ...]
    operations: tuple[int, ...]
    halves: tuple[Table, Table]

    def throughput(self, half: int) -> Table:
        """Return operations per second of every tile at every shape."""
        return np.array(self.operations) / self.halves[half]


def products() -> tuple[Shape, ...]:
    """Return shapes of a batched product: all alignments, at most 2e8 multiply-adds."""
    draw, out = random.Random(0), list[Shape]()
    while len(out) < 300:
        m, n, k = (64 * draw.randrange(12) + draw.choice(RESIDUES) for _ in "mnk")
        b = draw.choice((1, 1, 2, 4, 12))
        if 0 < b * m * n * k <= 2e8:
            out.append({"B": b, "M": m, "N": n, "K": k})
    return tuple(out)


WORKLOADS: Mapping[str, tuple[Callable[[], onnx.ModelProto], Callable[[], tuple[Shape, ...]]]] = {
    "batched product, every size symbolic": (models.batched_gemm, products),
    "(M,768)x(768,768)": (lambda: models.gemm(768, 768), lambda: tuple({"M": m} for m in range(1, 513, 4))),
}


def candidates(placed: PlacedTask, hardware: Hardware, bench: CpuBench) -> list[Tile]:
    """Return the best aligned tiles of each size class."""
    backbone = placed.task.backbone
    space = loop_model(backbone, hardware)
    by_size = sorted(space.tiles, key=lambda t: (math.prod(t[f"b.{x.name}"] for x in backbone.parallel), t))
    order = {t: n for n, t in enumerate(aligned_order(space, backbone, hardware))}
    tiles: list[Tile] = []
    for c in range(CLASSES):
        part = by_size[len(by_size) * c // CLASSES : len(by_size) * (c + 1) // CLASSES]
        tried = sorted(part, key=order.__getitem__)[: SCREENED_TILES // CLASSES]
        costs = zip(bench.per_operation(tried), tried, strict=True)
        tiles += [t for cost, t in sorted(costs)[: CANDIDATE_TILES // CLASSES] if np.isfinite(cost)]
    return tiles


def measure(name: str, path: str, threads: int) -> Measured:
    """Measure a table; entries of the record file are not measured again."""
    model, shapes_of = WORKLOADS[name]
    (placed,) = tasks_of(model())
    task, shapes, hardware = placed.task, shapes_of(), machine(cpu_target("cpu"), "cpu", threads)
    with Records.open(path) as records, Workers(TIMER) as workers:
        bench = CpuBench(task, hardware, workers)
        times: dict[tuple[Tile, Any], list[float]] = defaultdict(list)
        for r in records.rows(group=task.key, hardware=hardware, kind="throughput"):
            if r.shape:
                times[r.tile, r.shape].append(r.value("seconds"))  # from an earlier run, in any order
        tiles = sorted({t for t, _ in times}) or candidates(placed, hardware, bench)
        at = [tuple(sorted(loops(placed, s).items())) for s in shapes]
        for turn, i in track([(n, i) for n in range(1, PASSES + 1) for i in range(len(shapes))], description=name):
            lacking = [t for t in tiles if len(times[t, at[i]]) < turn]
            spent = bench.run([(t, dict(at[i])) for t in lacking])  # all tiles at a shape, one after the other
            records.put(
                Record(task.key, hardware, t, "throughput", (("seconds", s),), at[i])
                for t, s in zip(lacking, spent, strict=True)
                if np.isfinite(s)
            )
            for t, s in zip(lacking, spent, strict=True):
                times[t, at[i]].append(s)
    halves = [np.array([[min(times[t, a][h::2]) for a in at] for t in tiles]) for h in (0, 1)]
    flops = tuple(task.backbone.flops(dict(a)) for a in at)
    return Measured(name, tuple(map(str, tiles)), shapes, flops, (halves[0], halves[1]))


def figures(table: Measured) -> dict[str, dict[str, float]]:
    """Return accuracy, mean share of the best, and share of shapes above 95 per cent, over the splits."""
    rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(len(table.shapes))
        cut = round(HELD_OUT * len(order))
        for name, row in judged(table, order[cut:], order[:cut]):
            rows[name].append(row)
    names = ("accuracy", "mean_share", "within_5_percent")
    return {n: dict(zip(names, map(float, np.mean(r, axis=0)), strict=True)) for n, r in rows.items()}


def judged(table: Measured, train: Any, test: Any) -> Iterator[tuple[str, tuple[float, float, float]]]:
    """Evaluate one split: yield each way of choosing with its three figures on the held-out shapes."""
    learned, scored = table.throughput(0), table.throughput(1)
    shapes = [table.shapes[i] for i in train]
    selection: Selection = top_n(learned[:, train], TARGETS)
    targets = list(selection.kernels)
    again = assign(learned[:, test], targets).assigned
    features = features_of(list(table.shapes[0]))
    labels = [targets.index(m) for m in selection.assigned]
    trees: dict[str, Decision] = {
        "classifier (BladeDISC)": fit_classifier(features, shapes, labels),
        "tree by lost throughput (polydyn)": fit_tree(features, shapes, learned[targets][:, train]),
    }
    picks = {n: [targets[choose(d, table.shapes[i])] for i in test] for n, d in trees.items()}
    single = targets[int(learned[targets][:, train].sum(1).argmax())]
    for name, pick in {**picks, "one kernel for all": [single] * len(test), "measured again": list(again)}.items():
        yield name, _figures(scored[:, test], targets, pick)


def _figures(scored: Table, targets: Sequence[int], picked: Sequence[int]) -> tuple[float, float, float]:
    best = np.array(targets)[scored[list(targets)].argmax(0)]
    share = scored[list(picked), range(len(picked))] / scored.max(0)
    return float((best == picked).mean()), float(share.mean()), float((share >= 0.95).mean())


def save(path: Path, tables: Sequence[Measured], **fields: Any) -> None:
    """Write tables, compressed: nanoseconds of the two halves, a row for each tile."""
    data = [
        {
            "name": t.name, "tiles": t.tiles, "shapes": t.shapes, "operations": t.operations,
            "nanoseconds": [[" ".join(f"{x * 1e9:.5g}" for x in row) for row in half] for half in t.halves],
        } for t in tables
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({**fields, "tables": data}).encode(), mtime=0))


def load(path: Path) -> list[Measured]:
    """Read tables."""
    out = []
    for t in json.loads(gzip.decompress(path.read_bytes()))["tables"]:
        first, second = (np.array([row.split() for row in half], float) * 1e-9 for half in t["nanoseconds"])
        operations = tuple(t["operations"])
        out.append(Measured(t["name"], tuple(t["tiles"]), tuple(t["shapes"]), operations, (first, second)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--record", help="measure into this record file, and write the table")
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.record:
        save(options.table, [measure(n, options.record, options.threads) for n in WORKLOADS], **record.header())
    if not options.table.exists():
        parser.error(f"there is no {options.table.name}: --record FILE measures it")
    results = []
    for table in load(options.table):
        rows = figures(table)
        size = f"{len(table.tiles)} tuples at {len(table.shapes)} shapes"
        print(f"\n{table.name}: {size}, {TARGETS} targets\n{'':36}{'accuracy':>9}{'mean':>8}{'>= 95 %':>9}")
        for name, r in rows.items():
            print(f"{name:36}{r['accuracy']:9.1%}{r['mean_share']:8.1%}{r['within_5_percent']:9.1%}")
        results.append({"table": table.name, "tuples": len(table.tiles), "shapes": len(table.shapes), "figures": rows})
    record.save("classifier", folder=record.RESULTS if options.table == TABLE else record.SCRATCH, results=results)


if __name__ == "__main__":
    main()
