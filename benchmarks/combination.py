"""FTuner's two-kernel combination (Algorithm 2) at prime lengths: work and estimated time on a GPU, time on this CPU.

usage: python -m benchmarks.combination [--threads N] [--quick]

In the padded binding of a GPU every block is executed whole. The first table counts executed rows and their padding at
every prime length up to 512 (rows times N * K are multiply-adds), for several sets of block heights with the costs of a
saturated machine. It compares the one kernel of minimum cost over all these lengths, the kernel of minimum cost at each
length, and the cheapest cover with at most two kernels. The sets are the kernels that the strategy "ftuner" selects for
two products on a simulated V100, the two uKernels of the paper's Figure 8, and the blocks of polydyn's CUDA generator.

For a GPU, the estimates by which programs choose kernels give the time of the best kernel at a prime length, and the
time of the best two kernels on any two parts of it, one after the other.

On the CPU tiles are exact, and one kernel serves every length. There the two launches of a cover alternate with the one
kernel that is fastest at the length.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from benchmarks import record
from benchmarks.gpu.choice import layer
from polydyn.backends.cpu import cpu_target
from polydyn.codegen.cuda.versions import FMA_TILES
from polydyn.gpu import hardware
from polydyn.measure import tasks_of
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu_bench import CpuBench
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.runtime.symbols import THREADS
from polydyn.search.backbone import GroupKey, Problem, Tile
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.strategies import STRATEGIES, tune
from polydyn.testing import models
from polydyn.testing.choice import choose, estimates
from polydyn.testing.covers import Cover, combine
from polydyn.testing.machines import V100
from polydyn.testing.simulated import Simulated, gemm

MAX_LENGTH = 512
LENGTHS = {"FTuner's lengths": (5, 24, 43, 62, 81, 100, 119, 128), "16 lengths to 512": tuple(range(32, 513, 32))}
HEIGHTS = (4, 5, 6, 7, 8, 9)
"""Register tiles of the CPU's kernels."""
TURNS = 6


def primes(limit: int) -> list[int]:
    """Return the prime numbers up to ``limit``."""
    return [p for p in range(2, limit + 1) if all(p % q for q in range(2, math.isqrt(p) + 1))]


def single(extent: int, cost: Mapping[int, float]) -> Cover:
    """Return the cheapest cover by tiles of one size; ties go to less padding."""
    size = min(cost, key=lambda s: (-(-extent // s) * cost[s], -(-extent // s) * s))
    return Cover(extent, ((size, -(-extent // size)),))


@dataclass(frozen=True)
class Counts:
    """Rows over all lengths: useful ones, and rows executed by the best fixed kernel, by the best single kernel of each
    length, and by at most two kernels. ``mixed`` counts the lengths that take two kernels.
    """

    useful: int
    fixed: int
    one: int
    two: int
    mixed: int

    def falls(self, baseline: str) -> tuple[float, float]:
        """Return the factors by which two kernels execute fewer rows than ``fixed`` or ``one``: in all, and beyond
        useful ones.
        """
        other: int = getattr(self, baseline)
        padding = self.two - self.useful
        return other / self.two, (other - self.useful) / padding if padding else math.inf


def count(extents: Sequence[int], cost: Mapping[int, float]) -> Counts:
    """Return the counts for a set of block heights with the cost of one block each."""
    fixed = min(cost, key=lambda s: sum(-(-e // s) * cost[s] for e in extents))
    covers = [combine(e, cost) for e in extents]
    return Counts(
        sum(extents),
        sum(-(-e // fixed) * fixed for e in extents),
        sum(single(e, cost).executed for e in extents),
        sum(c.executed for c in covers),
        sum(len(c.counts) > 1 for c in covers),
    )


def heights(n: int, k: int, lengths: Iterable[int]) -> dict[int, float]:
    """Map the block heights of FTuner's uKernels for (L,k)x(k,n) on a simulated V100 to the cost of a block of all
    columns.
    """
    backbone = gemm(None, n, k)
    shapes = tuple((("i", m),) for m in lengths)
    problem = Problem(GroupKey(f"gemm {n} {k}", "float32", "gpu"), backbone, shapes, (1.0,) * len(shapes))
    bench = Simulated(backbone, V100)
    cost: dict[int, float] = {}
    for kernel in tune(STRATEGIES["ftuner"], problem, V100, bench).kernels:
        rows = kernel.tile["b.i"]
        (rate,) = bench.per_operation([kernel.tile])
        cost[rows] = min(cost.get(rows, math.inf), rows * rate)
    return cost


def padded(quick: bool) -> list[dict[str, Any]]:
    """Return the counts of every set of block heights."""
    lengths = dict(list(LENGTHS.items())[: 1 if quick else 2])
    sets = {f"ftuner, (L,768)x(768,768), {n}": heights(768, 768, x) for n, x in lengths.items()}
    if not quick:
        sets["ftuner, (L,1024)x(1024,3072), 16 lengths to 512"] = heights(3072, 1024, LENGTHS["16 lengths to 512"])
    sets["Figure 8: 7 and 8"] = {7: 7.0, 8: 8.0}
    sets["polydyn's CUDA tiles"] = {t.bm: float(t.bm) for t in FMA_TILES}
    rows = []
    for name, cost in sets.items():
        for limit in (128, MAX_LENGTH):
            counts = count(primes(limit), cost)
            rows.append({"kernels": name, "heights": sorted(cost), "primes_to": limit, **asdict(counts)})
            (all_fixed, pad_fixed), (all_one, pad_one) = counts.falls("fixed"), counts.falls("one")
            print(f"{name}, heights {sorted(cost)}, primes to {limit}: two kernels at {counts.mixed} lengths")
            ratios = ", ".join(f"{n} {getattr(counts, n) / counts.useful:.3f}" for n in ("fixed", "one", "two"))
            print(f"  executed / useful: {ratios}; falls {all_fixed:.2f}x and {all_one:.2f}x, its padding"
                  f" {pad_fixed:.1f}x and {pad_one:.1f}x", flush=True)  # fmt: skip
    return rows


def modelled(quick: bool) -> list[dict[str, Any]]:
    """Return estimated times at prime lengths on two devices, relative to the best kernel alone."""
    rows = []
    for arch, dtype in product(("sm_80", "sm_90a"), ("float32", "float16")):
        device, max_length = hardware.load(hardware.DEVICES[arch]), 128 if quick else MAX_LENGTH
        launch = layer(768, 768, dtype, device)
        times, least = estimates(launch), [0]
        for m in range(1, max_length + 1):
            env = {"M": m, THREADS: device.multiprocessors}
            least.append(times[choose(launch, env, device).name].evaluate(env))
        lengths = primes(max_length)[1:]
        ratios = [min(least[m] + least[p - m] for m in range(1, p)) / least[p] for p in lengths]
        faster = [p for p, ratio in zip(lengths, ratios, strict=True) if ratio < 1]
        rows.append({"arch": arch, "dtype": dtype, "ratios": ratios, "faster": faster})
        print(f"{arch}, {dtype} (L,768)x(768,768), estimated: two kernels take {mean(ratios):.3f} of one's time "
              f"(mean), least {min(ratios):.3f}; {mean([min(1, x) for x in ratios]):.3f} where the faster is taken; "
              f"they are faster at {len(faster)} of {len(ratios)} primes: {faster}", flush=True)  # fmt: skip
    return rows


def mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def kernels(bench: CpuBench) -> dict[int, Tile]:
    """Build a kernel for each height: 48 columns of registers, the whole reduction."""
    task = bench.task
    row, col, block = task.form.roles.row, task.form.roles.col, task.form.roles.block
    deep = task.backbone.sizes({row: 1})[block]
    some = loop_model(task.backbone, bench.hardware).tiles[0]

    def build(height: int) -> Tile:
        sizes = {f"w.{row}": height, f"w.{col}": 48, f"b.{block}": deep, f"w.{block}": 1}
        launch = tuple((n, {f"b.{row}": 16 * height, f"b.{col}": 192}.get(n, v)) for n, v in some.launch)
        return Tile(tuple((n, sizes.get(n, v)) for n, v in some.compile), launch)

    return {h: build(h) for h in HEIGHTS}


def exact(threads: int, quick: bool) -> list[dict[str, Any]]:
    """Return times at prime lengths on this CPU: the best single kernel, and the cheapest cover by two kernels."""
    (placed,) = tasks_of(models.gemm(768, 768))
    row, rows = placed.task.form.roles.row, []
    with Workers(TIMER, timeout=30.0) as workers:
        bench = CpuBench(placed.task, machine(cpu_target("cpu"), "cpu", threads), workers)
        tiles = kernels(bench)
        bench.build(list(tiles.values()))

        def run(launches: Sequence[tuple[int, int]]) -> list[float]:
            sizes = [placed.task.backbone.sizes({row: m}) for _, m in launches]
            return bench.run([(tiles[h], s) for (h, _), s in zip(launches, sizes, strict=True)])

        cost = {h: t / 8 for h, t in zip(HEIGHTS, run([(h, 8 * h) for h in HEIGHTS]), strict=True)}
        for p in [p for p in primes(128) if p > min(HEIGHTS)][:: 6 if quick else 1]:
            mixed = [c for h in HEIGHTS for g in HEIGHTS if g < h for c in [combine(p, {h: cost[h], g: cost[g]})]]
            covers = [c for c in mixed if len(c.counts) > 1 and not c.padding]
            if not covers:
                continue
            pair = min(covers, key=lambda c: c.price(cost))
            parts = [(h, h * n) for h, n in pair.counts]
            alone, both = [(h, p) for h in HEIGHTS], [math.inf] * 2
            least = [math.inf] * len(alone)
            for _ in range(TURNS):
                both = list(map(min, both, run(parts)))
                least = list(map(min, least, run(alone)))
            rows.append({"length": p, "cover": pair.counts, "two_s": sum(both), "one_s": min(least)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer sets and lengths, results not kept")
    options = parser.parse_args()
    counts, on_device = padded(options.quick), modelled(options.quick)
    times = exact(options.threads, options.quick)
    ratios = [t["two_s"] / t["one_s"] for t in times]
    print(f"CPU, (L,768)x(768,768), {len(ratios)} primes to 128: two kernels take {mean(ratios):.3f} of one's time "
          f"(mean), least {min(ratios):.3f}, most {max(ratios):.3f}")  # fmt: skip
    folder = record.SCRATCH if options.quick else record.RESULTS
    record.save("combination", folder=folder, threads=options.threads, padded=counts, modelled=on_device, exact=times)


if __name__ == "__main__":
    main()
