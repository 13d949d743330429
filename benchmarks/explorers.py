"""Regret curves of the explorers, replayed on fully recorded spaces.

    python -m benchmarks.explorers --seeds 100                      # three simulated groups
    python -m benchmarks.explorers --records file.db --seeds 100    # three groups of this machine, recorded in the file

Prints, per group and explorer, the mean regret (best so far over the optimum, minus 1) after some numbers of trials,
and the share of seeds within 1 % of the optimum at the last.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.ops import models
from polydyn.compiler import cpu_target
from polydyn.tuner import tasks_of
from polydyn.tuner.bench import CpuBench
from polydyn.tuner.calibrate import machine
from polydyn.tuner.timing import TIMER
from polydyn.tuning.backbone import Backbone, Tile, gemm
from polydyn.tuning.bench import RecordedBench
from polydyn.tuning.explore import Explorer, aligned_order, in_order, random_search
from polydyn.tuning.hardware import A100, T4, Hardware, cpu
from polydyn.tuning.loop_model import loop_model
from polydyn.tuning.measure import Workers
from polydyn.tuning.records import Records
from polydyn.tuning.replay import Simulated, regret
from polydyn.tuning.space import Space
from polydyn.tuning.trust_region import trust_region

AT = (8, 16, 32, 50, 75, 100)
BATCH = 64
Group = tuple[str, Space, Mapping[Tile, float], Mapping[str, Explorer]]


def simulated(noise: float) -> Iterator[Group]:
    groups: list[tuple[Backbone, Hardware]] = [
        (gemm(None, 3072, 1024, dtype="float16", item=2), A100),
        (gemm(None, 2304, 768), T4),
        (gemm(None, 768, 768), cpu(2)),
    ]
    for backbone, hardware in groups:
        space = loop_model(backbone, hardware)
        costs = Simulated(backbone, hardware, noise).per_operation(space.tiles)
        order = aligned_order(space, backbone, hardware)
        yield hardware.name, space, dict(zip(space.tiles, costs, strict=True)), explorers_of(order)


def measured(path: str, threads: int) -> Iterator[Group]:
    """Three products on this machine. What the records lack is measured and added first; killed, it goes on later."""
    target = cpu_target("cpu")
    hardware = machine(target, "cpu", threads)
    with Records.open(path) as records, Workers(TIMER) as workers:
        for n, k in ((3072, 1024), (1024, 4096), (768, 768)):
            (placed,) = tasks_of(models.gemm(n, k))
            task = placed.task
            space = loop_model(task.backbone, hardware)
            bench = RecordedBench(CpuBench(task, hardware, workers), records, task.key, hardware)
            for start in range(0, len(space), BATCH):
                bench.per_operation(space.tiles[start : start + BATCH])
            costs = dict(zip(space.tiles, bench.per_operation(space.tiles), strict=True))
            order = aligned_order(space, task.backbone, hardware)
            yield f"N={n} K={k} on {hardware.name}", space, costs, explorers_of(order)


def explorers_of(order: Sequence[Tile]) -> dict[str, Explorer]:
    """Who plays; ``order``: aligned tuples first."""
    return {
        "random": random_search,
        "aligned only": in_order(order),
        "trust region": trust_region(order),
        "trust region, random starts": trust_region(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--records")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--noise", type=float, default=0.03, help="share of a tuple's speed that no model knows")
    options = parser.parse_args()
    groups = measured(options.records, options.threads) if options.records else simulated(options.noise)
    for name, space, costs, explorers in groups:
        optimum = min(costs.values())
        print(f"\n{name}: {len(space)} tuples\n{'explorer':30}" + "".join(f"{n:>9}" for n in AT) + "   <1 %    s/run")
        for label, explorer in explorers.items():
            start = time.perf_counter()
            seeds = 1 if label == "aligned only" else options.seeds
            curves = [
                regret(explorer(space, lambda ts, c=costs: [c[t] for t in ts], max(AT), seed), optimum)  # type: ignore[misc]
                for seed in range(seeds)
            ]
            table = np.array(curves)
            spent = (time.perf_counter() - start) / seeds
            figures = "".join(f"{table[:, n - 1].mean():9.2%}" for n in AT)
            print(f"{label:30}{figures}{(table[:, -1] < 0.01).mean():7.0%}{spent:9.2f}", flush=True)


if __name__ == "__main__":
    main()
