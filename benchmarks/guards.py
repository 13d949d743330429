"""The cost of checking a call, measured inside C; also checks that nothing grows with the number of shapes seen.

usage: python -m benchmarks.guards MODEL.onnx ... [--calls 20000]

``guards``: dtypes, ranks, symbols, their arithmetic, equal dims, guards: all checks of a call with new shapes.
``same``, ``new``: all of pd_shapes (``new``: with the sizes of every buffer and launch and the memory plan), for the
shapes of the previous call and for others. Nanoseconds per call, the minimum of several rounds; shapes as stored for
the model's family. Then the program runs 1000 random shapes, with the bodies of its kernels removed: resident memory,
the arena, contexts and Python objects after the largest shape and after all. Results go to
benchmarks/results/guards.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks import record
from benchmarks.compiling import draw_shapes, resident
from benchmarks.overhead import hollow
from polydyn.build.compiler import build_library
from polydyn.program.assemble import build_program, kernel_units
from polydyn.program.host import host_program
from polydyn.program.plan import HostPlan
from polydyn.runtime.c import sources
from polydyn.runtime.native import DTYPE_CODES, Tensor
from polydyn.runtime.program import Program
from polydyn.testing import inputs

ROUNDS = 7
FIELDS = ("guards", "same", "new")
GROWS = ("resident MB", "arena bytes", "contexts", "Python objects")
"""The entries of ``growth``."""


def times(plan: HostPlan, shapes: list[dict[str, np.ndarray[Any, Any]]], calls: int) -> dict[str, float]:
    """Return nanoseconds per call of each part; ``shapes``: feeds of several shapes."""
    files = dict(sources())
    headers = {n: files.pop(n) for n in list(files) if n.endswith(".h")}
    headers |= dict(plan.headers) | {"host.c": host_program(plan, dict.fromkeys(plan.constants, 0), 0).text}
    files["setup.c"] += (Path(__file__).parent / "guards.c").read_text()
    library = ctypes.CDLL(str(build_library(files | kernel_units(plan), headers).file()))
    program, context, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(128)
    aligned = (ctypes.addressof(memory) + 63) // 64 * 64
    weights, zero = ctypes.c_void_p(aligned), ctypes.c_int64(0)  # never read: the kernels do nothing
    if library.pd_open(None, weights, zero, zero, ctypes.byref(program)):
        raise RuntimeError("the program does not open")
    library.pd_context_new(program, 1, ctypes.byref(context))
    arrays = [f[name] for f in shapes for name in plan.inputs]
    dims = [(ctypes.c_int64 * (a.ndim + 1))(*a.shape) for a in arrays]
    tensors = (Tensor * len(arrays))()
    for t, a, d in zip(tensors, arrays, dims, strict=True):
        t.shape, t.strides, t.dtype, t.rank = ctypes.addressof(d), None, DTYPE_CODES.index(str(a.dtype)), a.ndim
    fields = (ctypes.c_int64 * len(FIELDS))()
    least = [float("inf")] * len(FIELDS)
    for _ in range(ROUNDS):
        refused = library.bench_guards(context, tensors, len(shapes), calls, fields)
        if refused:
            raise RuntimeError("a stored shape was rejected")
        least = [min(a, b / calls) for a, b in zip(least, fields, strict=True)]
    library.pd_context_free(context)
    library.pd_close(program)
    return {name: round(ns, 1) for name, ns in zip(FIELDS, least, strict=True)}


def growth(program: Program, proto: onnx.ModelProto, count: int = 1000) -> dict[str, list[float]]:
    """Return ``GROWS`` after the largest shape (and a few more) and after ``count`` random ones."""
    shapes = draw_shapes(inputs.symbols(proto), count)

    def state() -> list[float]:
        gc.collect()
        counters = program.counters
        return [round(resident(), 1), counters["arena_bytes"], counters["contexts"], len(gc.get_objects())]

    for s in shapes[:20]:
        program.run(inputs.feeds(proto, s))
    before = state()
    for s in itertools.islice(shapes, 20, None):
        program.run(inputs.feeds(proto, s))
    return {"before": before, "after": state()}


def measure(path: str, calls: int) -> dict[str, object]:
    """Return the row of one model."""
    proto, name = onnx.load(path, load_external_data=False), Path(path).stem
    plan = hollow(path)
    fields = times(plan, [inputs.feeds(proto, s) for s in inputs.shapes(name)], calls)
    grown = growth(build_program(plan, threads=1), proto)
    print(
        f"{name:<16}{len(plan.sources):>8}{len(plan.guards):>7}{len(plan.launches):>9}"
        + "".join(f"{fields[f]:>10.0f}" for f in FIELDS)
        + "   " + ", ".join(f"{a:g}->{b:g}" for a, b in zip(grown["before"], grown["after"], strict=True)),
        flush=True,
    )  # fmt: skip
    counts = {"symbols": len(plan.sources), "guards": len(plan.guards), "launches": len(plan.launches)}
    return {"model": name, **counts, "nanoseconds": fields, "growth": grown}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--quick", action="store_true", help="keep the results out of version control")
    args = parser.parse_args()
    columns = "".join(f"{f + ' ns':>10}" for f in FIELDS)
    print(f"{'model':<16}{'symbols':>8}{'guards':>7}{'launches':>9}{columns}   {', '.join(GROWS)}: 20 -> 1000 shapes")
    rows = [measure(m, args.calls) for m in args.models]
    saved = record.save("guards", folder=record.SCRATCH if args.quick else record.RESULTS, grows=GROWS, models=rows)
    print(f"written: {saved.name}")


if __name__ == "__main__":
    main()
