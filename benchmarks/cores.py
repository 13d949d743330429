"""Simulates the launches of a program on more cores than this machine has.

usage: python -m benchmarks.cores MODEL.onnx ... [--shapes B=1,L=128 ...] [--cores 1 2 4 16 64] [--top 6]

For every number of cores, the launches, tasks and waves are those that the program plans for n threads, split into
pieces as the run time splits them. A task takes its part of max(operations / FLOPS_PER_NS, bytes / BYTES_PER_NS) of its
launch; a thread without work takes the next piece; a wave on several threads costs POST_NS for each worker and JOIN_NS.
``idle`` is the share of idle time of all cores, split into the cost of barriers and the cost of uneven or too few
tasks. Not modelled: shared memory bandwidth, caches, clock rates. So times are not forecasts: they show which launches
would limit the scaling of a program.
"""

from __future__ import annotations

import argparse
import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import polydyn
from benchmarks import record
from benchmarks.arguments import parse_shape
from polydyn.runtime.c import sources
from polydyn.runtime.explain import ExplainedLaunch, explain
from polydyn.testing.inputs import shapes

FLOPS_PER_NS, BYTES_PER_NS = 115.0, 16.0
"""Rates of one core: docs/measurements.md, and the bandwidth of one core from its caches."""
POST_NS, JOIN_NS = 60.0, 250.0
"""A compare-and-swap on a cache line that another core holds; the measured cost of a join on two threads (docs/cpu.md).
"""
CORES = (1, 2, 4, 16, 64)
DEFAULTS = {"bert_base": "B=1,L=128", "resnet50": "N=1,H=224,W=224"}


def constant(name: str) -> int:
    """Return a number that the run time defines."""
    match = re.search(rf"^#define {name} (\d+)$", sources()["internal.h"], re.M)
    assert match, name
    return int(match.group(1))


@dataclass(frozen=True)
class Wave:
    """One wave on some cores, in nanoseconds: ``time`` until all is done, ``work`` of all tasks, ``barrier`` in it."""

    launches: tuple[ExplainedLaunch, ...]
    threads: int
    time: float
    work: float
    barrier: float

    def idle(self, cores: int) -> float:
        """Return the idle time summed over all cores, in nanoseconds."""
        return cores * self.time - self.work


def launch_ns(x: ExplainedLaunch) -> float:
    """Return the nanoseconds that one core takes for a launch."""
    return max(x.flops / FLOPS_PER_NS, touched(x) / BYTES_PER_NS)


def touched(x: ExplainedLaunch) -> int:
    """Return the bytes that a launch can touch, of the buffers that it names: a lookup reads little of its table."""
    return min(x.bytes, constant("PD_BYTES_PER_FLOP") * x.flops)


def wave_threads(launches: Sequence[ExplainedLaunch], cores: int) -> int:
    """Return the number of threads of a wave (``runtime/waves.c``)."""
    work = sum(x.flops for x in launches)
    return max(1, min(cores, sum(x.tasks for x in launches), 1 + work // constant("PD_WORK_PER_THREAD")))


def pieces(x: ExplainedLaunch) -> list[float]:
    """Return the nanoseconds of each piece of a launch (``runtime/cpu.c``, ``pool.c``)."""
    ns, n = launch_ns(x), x.threads
    guess = max(x.flops / constant("PD_FLOPS_PER_NS"), touched(x) / constant("PD_BYTES_PER_NS"))
    count = int(max(1, min(constant("PD_PIECES"), guess / n // constant("PD_PIECE_NS"))))
    times = []
    for t in range(n):
        first, mine = x.tasks * t // n, x.tasks * (t + 1) // n - x.tasks * t // n
        times += [mine * (i + 1) // count - mine * i // count for i in range(count)]
        assert first + mine <= x.tasks
    return [ns * tasks / x.tasks for tasks in times if tasks]


def simulate(launches: Sequence[ExplainedLaunch], cores: int) -> Wave:
    """Simulate one wave: the largest pieces of work first, each piece on the thread that is free first."""
    work = sum(map(launch_ns, launches))
    threads = wave_threads(launches, cores)
    if threads == 1:
        return Wave(tuple(launches), 1, work, work, 0.0)
    free = [0.0] * threads
    for x in sorted(launches, key=lambda x: -x.flops):
        for p in pieces(x):
            heapq.heapreplace(free, free[0] + p)
    barrier = POST_NS * (threads - 1) + JOIN_NS
    return Wave(tuple(launches), threads, max(free) + barrier, work, barrier)


def run(manifest: Mapping[str, Any], dims: Mapping[str, int], cores: int) -> list[Wave]:
    """Simulate all waves of a program at a shape."""
    return [simulate(w, cores) for w in explain(manifest, dims, cores).waves]


def summary(waves: Sequence[Wave], cores: int) -> dict[str, float]:
    """Return milliseconds, and the shares of all cores' time that is idle."""
    time, work = sum(w.time for w in waves), sum(w.work for w in waves)
    barrier = sum(w.barrier for w in waves)
    whole = max(cores * time, 1e-9)
    return {
        "ms": time / 1e6, "barriers": float(sum(w.threads > 1 for w in waves)), "idle": 1 - work / whole,
        "in barriers": cores * barrier / whole, "in shares": 1 - work / whole - cores * barrier / whole,
    }  # fmt: skip


def worst(waves: Iterable[Wave], cores: int, top: int) -> list[tuple[str, int, float, Wave]]:
    """Return kernels by the core time that they leave idle: name, count, milliseconds of all cores, the longest wave.
    """
    by_kernel: dict[str, list[Wave]] = {}
    for w in waves:
        by_kernel.setdefault(" + ".join(dict.fromkeys(x.kernel for x in w.launches)), []).append(w)
    rows = [(k, len(ws), sum(w.idle(cores) for w in ws) / 1e6, max(ws, key=lambda w: w.idle(cores)))
            for k, ws in by_kernel.items()]  # fmt: skip
    return sorted(rows, key=lambda r: -r[2])[:top]


def _print(title: str, waves_by_cores: Mapping[int, Sequence[Wave]], top: int) -> dict[str, Any]:
    table = Table("cores", "ms", "times as fast", "barriers", "idle", "in barriers", "in shares", title=title)
    first = summary(waves_by_cores[min(waves_by_cores)], min(waves_by_cores))["ms"]
    rows = {}
    for n, waves in waves_by_cores.items():
        s = rows[str(n)] = summary(waves, n)
        table.add_row(
            str(n), f"{s['ms']:.2f}", f"{first / s['ms']:.1f}", f"{s['barriers']:.0f}",
            *(f"{100 * s[k]:.1f} %" for k in ("idle", "in barriers", "in shares")),
        )  # fmt: skip
    console = Console()
    console.print(table)
    max_cores = max(waves_by_cores)
    table = Table("kernels of the wave", "waves", "idle core ms", "tasks", "threads", "us", "launch", "choices",
                  title=f"most idle on {max_cores} cores")  # fmt: skip
    for kernels, count, idle, w in worst(waves_by_cores[max_cores], max_cores, top):
        x = max(w.launches, key=lambda x: x.flops)
        chosen = " ".join(f"{k}={v}" for k, v in x.choices.items())
        table.add_row(kernels, str(count), f"{idle:.2f}", str(sum(x.tasks for x in w.launches)), str(w.threads),
                      f"{w.time / 1e3:.1f}", x.label[-40:], chosen)  # fmt: skip
    console.print(table)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--shapes", nargs="*", default=[])
    parser.add_argument("--cores", nargs="+", type=int, default=CORES)
    parser.add_argument("--top", type=int, default=6)
    args = parser.parse_args()
    rows = []
    for path in args.models:
        name = Path(path).stem
        program = polydyn.load(path) if path.endswith(".polydyn") else polydyn.compile(path, threads=1)
        given = args.shapes or ([DEFAULTS[name]] if name in DEFAULTS else [])
        for dims in map(parse_shape, given) if given else shapes(name)[-1:]:
            waves = {n: run(program.manifest, dims, n) for n in sorted(args.cores)}
            text = ", ".join(f"{k}={v}" for k, v in dims.items())
            rows.append({"model": name, "shape": dict(dims), "cores": _print(f"{name} at {text}", waves, args.top)})
    path = record.save("cores", folder=record.SCRATCH, flops_per_ns=FLOPS_PER_NS, bytes_per_ns=BYTES_PER_NS, rows=rows)
    print(f"written: {path.name}")


if __name__ == "__main__":
    main()
