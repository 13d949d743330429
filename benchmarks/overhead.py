"""The cost of one call outside the kernels: programs whose kernels do nothing.

Dynamic dims: both of the input, B and L, drawn from 1..64; ``same`` repeats one shape, ``new`` changes it on every
call, ``bound`` repeats a bound call. ``1 thread`` launches run on the caller, ``2 threads`` pay one join per launch.
Microseconds per call, median and 99th percentile. Run: ``python -m benchmarks.overhead`` from the repository's root.
Model files as arguments replace the built-in program; the bodies of their kernels are removed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from polydyn.codegen.kernel import Kernel
from polydyn.compiler import ModelLike, plan_program
from polydyn.graph.ir import SymbolSource
from polydyn.program.assemble import build_program
from polydyn.program.plan import Buffer, Candidate, HostPlan, Launch
from polydyn.runtime.program import Program
from polydyn.schedules.index import ONE, Index
from polydyn.testing import inputs

CALLS = 4000
B, L = Index.of("B"), Index.of("L")


def stub() -> Kernel:
    text = "void stub(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch) {}\n"
    return Kernel("stub", tuple("abcdef"), ONE, text=text, buffers=tuple("xyz"))


def stubbed(launches: int, work: int) -> HostPlan:
    """Build a chain of ``launches`` launches over two inputs, with the arithmetic that real groups need."""
    names = ["x", *(f"t{i}" for i in range(launches - 1)), "out"]
    roles = ["input", *["intermediate"] * (launches - 1), "output"]
    every = enumerate(zip(names, roles, strict=True))
    buffers = {n: Buffer(n, "float32", (B, L * (i % 7 + 1)), r) for i, (n, r) in every}
    buffers["mask"] = Buffer("mask", "int64", (B, L), "input")
    rows = [
        Launch(
            (
                Candidate(
                    "stub",
                    (names[i], "mask", names[i + 1]),
                    (B, L * (i % 7 + 1), B * L, (L + i % 16).ceildiv(16), Index.of("nth"), (B * L).ceildiv(i % 5 + 2)),
                    tasks=B * (L + i % 16).ceildiv(16),
                    scratch=L * 64,
                ),
            ),
            elements=B * L * (i % 7 + 1),
            work=Index.of(work),
        )
        for i in range(launches)
    ]
    sources = (SymbolSource("B", "x", 0), SymbolSource("L", "x", 1))
    return HostPlan("stubbed", ("x", "mask"), ("out",), buffers, {}, sources, (), (stub(),), tuple(rows))


def feeds(same: bool) -> Iterator[dict[str, np.ndarray]]:
    r = np.random.default_rng(0)
    shapes = [(8, 33)] if same else [tuple(s) for s in r.integers(1, 65, (64, 2))]
    arrays = [{"x": np.zeros(s, np.float32), "mask": np.zeros(s, np.int64)} for s in shapes]
    for i in range(CALLS):
        yield arrays[i % len(arrays)]


def measure(program: Program, kind: str) -> tuple[float, float]:
    times = []
    bound = program.bind(next(feeds(True)))
    for f in feeds(kind != "new"):
        start = time.perf_counter_ns()
        bound() if kind == "bound" else program.run(f)
        times.append(time.perf_counter_ns() - start)
    times = sorted(times[100:])
    return times[len(times) // 2] / 1e3, times[len(times) * 99 // 100] / 1e3


def hollow(model: ModelLike) -> HostPlan:
    """Return the host plan of a model with kernels that do nothing."""
    plan = plan_program(model)
    empty = "(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch) {}\n"
    kernels = tuple(replace(k, text=f"void {k.name}{empty}") for k in plan.kernels)
    return replace(plan, kernels=kernels)


def measure_model(path: str) -> None:
    proto, name = onnx.load(path, load_external_data=False), Path(path).stem
    arrays = [inputs.feeds(proto, s) for s in inputs.shapes(name)]
    for threads in (1, 2):
        program = build_program(hollow(path), threads=threads)
        for label, rows in (("same", arrays[:1]), ("new", arrays)):
            times = []
            for i in range(CALLS):
                start = time.perf_counter_ns()
                program.run(rows[i % len(rows)])
                times.append(time.perf_counter_ns() - start)
            times = sorted(times[100:])
            p50, p99 = times[len(times) // 2] / 1e3, times[len(times) * 99 // 100] / 1e3
            print(f"{name:>12} {len(program.launches):>8} {threads:>8} {label:>7} {p50:>8.1f} {p99:>8.1f}", flush=True)


def main(models: Sequence[str]) -> None:
    if models:
        print(f"{'model':>12} {'launches':>8} {'threads':>8} {'shapes':>7} {'p50 us':>8} {'p99 us':>8}")
        for path in models:
            measure_model(path)
        return
    print(f"{'launches':>8} {'threads':>8} {'shapes':>7} {'p50 us':>8} {'p99 us':>8}")
    for launches in (1, 10, 100, 1000):
        for threads in (1, 2):
            program = build_program(stubbed(launches, 10**6), threads=threads)
            for kind in ("bound", "same", "new"):
                p50, p99 = measure(program, kind)
                print(f"{launches:>8} {threads:>8} {kind:>7} {p50:>8.1f} {p99:>8.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
