"""Whole models on the emulation: every group's CUDA kernel runs on the CPU, results against ONNX Runtime.

    python -m benchmarks.gpu.emulated tests/data/bert_tiny.onnx [...] [--shape N]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.accuracy import TOLERANCE, error, reference
from benchmarks.models.inputs import feeds as inputs_of
from benchmarks.models.inputs import shapes
from polydyn.codegen.cuda_emit import LONG
from polydyn.codegen.cuda_kernel import WORKSPACE, CudaKernel
from polydyn.codegen.printers.cuda import PRELUDE
from polydyn.fusion.grouping import fuse
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.passes.merge import merge_contractions
from polydyn.lowering.cuda import CudaBuilder, PlacedCuda

Arrays = dict[str, np.ndarray[Any, Any]]
SHARED = 227 * 1024
"""Bytes of shared memory a block may have on the emulated device (as on an H200)."""
MULTIPROCESSORS = 132
"""Of the same device."""


@functools.cache
def module(*texts: str) -> EmulatedModule:
    """Kernels compiled together: most of a compilation is the header."""
    return EmulatedModule(compile_emulated(PRELUDE + "".join(t.removeprefix(PRELUDE) for t in texts)))


def placed(plan: FusionPlan) -> tuple[PlacedCuda, ...]:
    """The kernels of a plan, in launch order."""
    builder = CudaBuilder(plan)
    return tuple(p for g in plan.groups for p in builder.place(g))


def version(p: PlacedCuda, word: str) -> CudaKernel:
    """The version whose name begins with a word."""
    return next(k for k in p.versions if k.version.startswith(word))


def _kind(k: CudaKernel) -> tuple[bool, bool]:
    return k.version.endswith(LONG), bool(k.after)


def first_fit(p: PlacedCuda, env: dict[str, int]) -> CudaKernel:
    return next(k for k in p.versions if k.fits(env, SHARED, MULTIPROCESSORS))


def run(
    plan: FusionPlan,
    feeds: Arrays,
    choose: Callable[[PlacedCuda, dict[str, int]], CudaKernel] = first_fit,
    kernels: tuple[PlacedCuda, ...] | None = None,
    reverse: bool = False,
    together: bool = True,
) -> tuple[Arrays, list[Counters]]:
    """All launches of a plan on the emulator: the outputs, and the counters of each launch.

    ``together``: all versions of a kernel are compiled at once.
    """
    graph = plan.graph
    dims = {s.symbol: feeds[s.input].shape[s.axis] for s in graph.sources}
    memory: Arrays = {n: np.ascontiguousarray(feeds[n]) for n in feeds}
    counters = []

    def array(name: str) -> np.ndarray[Any, Any]:
        if name not in memory:
            t = graph.tensors[name]
            if name in graph.constants:
                memory[name] = np.ascontiguousarray(graph.constants[name])
            else:
                memory[name] = np.empty([i.evaluate(dims) for i in t.shape], numpy_dtype(t.dtype))
                memory[name].reshape(-1).view(np.uint8).fill(0xFF)
        return memory[name]

    for p in kernels or placed(plan):
        env = {n: i.evaluate(dims) for n, i in p.lowered.params.items()}
        first = choose(p, env)
        assert first.fits(env, SHARED, MULTIPROCESSORS)
        env = first.values(env, MULTIPROCESSORS)
        workspace = np.full(first.workspace.evaluate(env) // 4, np.nan, np.float32)
        alike = [v for v in p.versions if _kind(v) == _kind(first)]
        for k in (first, *first.after):
            grid, smem = k.grid.evaluate(env), k.smem.evaluate(env)
            args: list[Any] = [workspace if a == WORKSPACE else array(p.lowered.buffers[a]) for a in k.buffers]
            args += [np.int64(env[s]) for s in k.symbols]
            if grid > 0:
                built = module(*(v.text for v in alike)) if together and k is first else module(k.text)
                counters.append(built.launch(k.name, grid, k.threads, args, smem=smem, reverse=reverse))
    return {n: array(n) for n in graph.outputs}, counters


def main() -> int:
    """Prints a line for each model; the number of models that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--shape", type=int, default=1, help="which of the model's shapes")
    options = parser.parse_args()
    wrong = 0
    for path in options.models:
        shape = shapes(path.stem)[options.shape]
        plan = fuse(merge_contractions(fold(import_model(path))))
        kernels, start = placed(plan), time.perf_counter()
        got, counters = run(plan, inputs_of(onnx.load(path), shape), kernels=kernels, together=False)
        (want,) = reference(path, [shape])
        difference, seconds = error(got, want), time.perf_counter() - start
        conflicts = sum(c.shared_conflicts + c.ldmatrix_conflicts for c in counters)
        wrong += not difference <= TOLERANCE
        print(f"{path.stem:20} {dict(shape)}: {len(kernels)} launches, error {difference:.1e}, "
              f"{conflicts} bank conflicts, {seconds:.1f} s", flush=True)  # fmt: skip
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
