"""Fully recorded search spaces: every tile of three products on this machine, for replaying explorers anywhere.

    python -m benchmarks.spaces spaces.db       # about 5 minutes; an interrupted run resumes when called again

All measurements stay in the record file. The minimum cost of every tile is written to a table of about 50 kB
(``benchmarks/results/spaces_1t.json.gz``), which ``benchmarks.explorers`` replays.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from benchmarks import record
from polydyn.backends.cpu import cpu_target
from polydyn.measure import tasks_of
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.search.backbone import Tile
from polydyn.search.explorers.explore import aligned_order
from polydyn.search.records import Record, Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.space import Space
from polydyn.search.tasks.cpu import CpuTask
from polydyn.testing import models
from polydyn.testing.simulated import recorded_costs

PRODUCTS = ((3072, 1024), (1024, 4096), (768, 768))
"""(N, K) of the groups y[M, N] = x[M, K] @ constant."""
PASSES = 3
"""Number of measurements of every tile, a whole pass apart; the minimum counts."""
BINARIES = 16
"""Number of binaries compiled together."""


@dataclass(frozen=True)
class Recorded:
    """A group's space with the cost of every tile (seconds per operation, inf: failed), aligned tiles first."""

    name: str
    order: tuple[Tile, ...]
    costs: dict[Tile, float]

    @property
    def space(self) -> Space:
        """The tiles as a space."""
        return Space(self.name, tuple(sorted(self.order)))


def measure(name: str, task: CpuTask, hardware: Any, space: Space, records: Records, workers: Workers) -> None:
    """Add missing records: ``PASSES`` measurements of every tile."""
    bench = CpuBench(task, hardware, workers)
    rows = [r for r in records.rows(group=task.key, hardware=hardware) if not r.shape]
    counts = Counter(r.tile for r in rows if r.kind == "throughput")
    failed = {r.tile for r in rows if r.kind == "failed"}
    parts = sorted({t.compile for t in space.tiles})
    batches = [set(parts[i : i + BINARIES]) for i in range(0, len(parts), BINARIES)]
    steps = [(n, b) for n in range(1, PASSES + 1) for b in batches]
    for turn, batch in track(steps, description=name):
        tiles = [t for t in space.tiles if t.compile in batch and counts[t] < turn and t not in failed]
        costs = bench.per_operation(tiles)
        records.put(_record(task, hardware, t, c) for t, c in zip(tiles, costs, strict=True))
        failed |= {t for t, c in zip(tiles, costs, strict=True) if math.isinf(c)}


def _record(task: CpuTask, hardware: Any, tile: Tile, cost: float) -> Record:
    failed = math.isinf(cost)
    return Record(task.key, hardware, tile, "failed" if failed else "throughput", () if failed else (("cost", cost),))


def record_spaces(path: str, threads: int) -> Iterator[Recorded]:
    """Yield the measured groups."""
    target = cpu_target("cpu")
    hardware = machine(target, "cpu", threads)
    with Records.open(path) as records, Workers(TIMER) as workers:
        for n, k in PRODUCTS:
            (placed,) = tasks_of(models.gemm(n, k))
            task = placed.task
            space = loop_model(task.backbone, hardware)
            name = f"N={n} K={k}"
            measure(name, task, hardware, space, records, workers)
            costs = recorded_costs(records, task.key, hardware, space)
            yield Recorded(name, aligned_order(space, task.backbone, hardware), costs)


def save(path: Path, groups: Sequence[Recorded], **fields: Any) -> None:
    """Write the table, compressed: each tile's numbers and its cost in picoseconds. Equal tables give equal bytes."""
    tables = []
    for g in groups:
        first = g.order[0]
        rows = [" ".join(map(str, [*(v for _, v in t.compile + t.launch), _picoseconds(g.costs[t])])) for t in g.order]
        names = {"compile": [n for n, _ in first.compile], "launch": [n for n, _ in first.launch]}
        tables.append({"name": g.name, **names, "rows": rows})
    text = json.dumps({**fields, "groups": tables}, indent=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _picoseconds(cost: float) -> str:
    return "failed" if math.isinf(cost) else f"{cost * 1e12:.5g}"


def load(path: Path) -> list[Recorded]:
    """Read a table."""
    return [_group(g) for g in json.loads(gzip.decompress(path.read_bytes()))["groups"]]


def _group(data: dict[str, Any]) -> Recorded:
    names, cut = [*data["compile"], *data["launch"]], len(data["compile"])
    costs: dict[Tile, float] = {}
    for row in data["rows"]:
        *sizes, cost = row.split()
        pairs = tuple(zip(names, map(int, sizes), strict=True))
        costs[Tile(pairs[:cut], pairs[cut:])] = math.inf if cost == "failed" else float(cost) * 1e-12
    return Recorded(data["name"], tuple(costs), costs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("records", help="the record file to add to")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="the table; default benchmarks/results/spaces_<threads>t.json.gz")
    options = parser.parse_args()
    begin = time.monotonic()
    groups = list(record_spaces(options.records, options.threads))
    path = options.output or record.RESULTS / f"spaces_{options.threads}t.json.gz"
    save(path, groups, **record.header())
    sizes = ", ".join(f"{g.name}: {len(g.order)} tuples" for g in groups)
    print(f"{sizes}; {time.monotonic() - begin:.0f} s; {path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
