"""The possible gain of sizes that no search chooses: of element-wise and row kernels and of attention.

    python -m benchmarks.untuned [--threads N] [--quick]    # about 3 minutes

The generators of such groups fix sizes that a search would choose: elements of a task (launch-time, ``P_t``) and the
rows of an attention's block (compile-time). Every value is timed at every shape, alternating. The table has the time of
the fixed value over the best value's at each shape (mean, worst), and the same for the one value that is best on
average. Row kernels (softmax, norms) have no such size: their rows are tasks, and the bytes of a row select the version
with or without row buffers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from benchmarks import record
from polydyn.backends import Options as PlanOptions
from polydyn.backends.cpu import Cpu, cpu_target
from polydyn.build.compiler import build_library
from polydyn.codegen.cpu.attention import AttentionKernel
from polydyn.codegen.kernel import Kernel
from polydyn.graph.expand import import_model
from polydyn.lowering.attention import AttentionGroup
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.measure.cpu_bench import timing_units
from polydyn.measure.cpu_timing import TIMER
from polydyn.measure.workers import Workers
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.index import Index, product
from polydyn.schedules.solution.schedule import schedule_attention
from polydyn.testing import models

TURNS = 9
Shape = dict[str, int]
TILES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (2, 3, 4, 6, 8, 10, 12)


@dataclass(frozen=True)
class Option:
    """A kernel, and its launch-time sizes in addition to the shape."""

    value: int
    kernel: Kernel
    launch: Mapping[str, Index]


def tiles(builder: KernelBuilder, placed: PlacedGroup) -> Iterator[Option]:
    """Yield an element-wise group with other numbers of elements per task, the fixed one first."""
    fixed = int(placed.kernels[0].launch["P_t"])
    for n in dict.fromkeys((fixed, *TILES)):
        yield Option(n, placed.kernels[0], placed.kernels[0].launch | {"P_t": Index.of(n)})


def row_blocks(builder: KernelBuilder, placed: PlacedGroup) -> Iterator[Option]:
    """Yield an attention with other numbers of rows per block, the fixed one first."""
    form = builder.forms[placed.key]
    assert isinstance(form, AttentionGroup)
    parts, group = schedule_attention(form.parts), form.lowered.group
    fixed = AttentionKernel("fixed", group, parts, builder.target, frozenset()).rows
    for rows in dict.fromkeys((fixed, *ROWS)):
        built = AttentionKernel(f"attention_{rows}", group, parts, builder.target, frozenset(), rows).build()
        yield Option(rows, built, built.launch)


def column_sums() -> onnx.ModelProto:
    """Build y[768] = x[R, 768] summed over R."""
    node = onnx.helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    return models.model("column_sums", [node], {"x": ["R", 768]}, {"axes": np.array([0])})


Options = Callable[[KernelBuilder, PlacedGroup], Iterator[Option]]
SIZES = (8, 32, 128, 512, 2048)
"""Smaller numbers of rows take less time than the clock can resolve."""
WORK: tuple[tuple[str, Options, onnx.ModelProto, Sequence[Shape]], ...] = (
    ("Gelu [R,768]: elements of a task", tiles, models.unary("Gelu", ["R", 768]), [{"R": r} for r in SIZES]),
    ("Add [R,768]: elements of a task", tiles, models.binary("Add", ["R", 768], ["R", 768], "add"),
     [{"R": r} for r in SIZES]),
    ("transpose [R,768]: elements along one axis", tiles, models.transpose(["R", 768], [1, 0], "turn"),
     [{"R": r} for r in SIZES]),
    ("sum over R of [R,768]: elements of a task", tiles, column_sums(), [{"R": r} for r in SIZES]),
    ("attention, 12 heads of 64: rows of a block", row_blocks, models.attention(),
     [{"B": b, "L": n} for b, n in ((1, 8), (1, 33), (1, 64), (1, 128), (1, 384), (4, 61), (4, 128))]),
)  # fmt: skip


def arguments(
    option: Option, placed: PlacedGroup, library: str, which: int, shape: Shape, threads: int
) -> dict[str, Any]:
    """Return the timing worker's arguments for a launch."""
    env = {n: Index.of(i.evaluate(shape)) for n, i in placed.lowered.params.items()} | {THREADS: Index.of(threads)}
    env |= {n: i.subs(env) for n, i in option.launch.items()}
    number = {n: int(i) for n, i in env.items()}
    arrays = placed.lowered.group.arrays
    sizes = {n: product(arrays[n].shape).evaluate(number) * ITEMSIZE[arrays[n].dtype] for n in option.kernel.buffers}
    return {
        "library": library, "which": which, "buffers": [max(sizes.values())] * len(sizes),
        "symbols": [number[n] for n in option.kernel.symbols], "tasks": option.kernel.tasks.evaluate(number),
        "threads": threads, "scratch": option.kernel.scratch.evaluate(number),
    }  # fmt: skip


def times(
    options: Sequence[Option], placed: PlacedGroup, shapes: Sequence[Shape], threads: int, workers: Workers
) -> npt.NDArray[np.float64]:
    """Return the minimum seconds of every option (rows) at every shape (columns)."""
    kernels = list({o.kernel.name: o.kernel for o in options}.values())
    library = build_library(*timing_units(kernels, cpu_target("cpu").width), "cpu")
    path = str(library.file())
    names = [k.name for k in kernels]
    jobs = [arguments(o, placed, path, names.index(o.kernel.name), s, threads) for o in options for s in shapes]
    turns = []
    for _ in range(TURNS):
        answers = workers.map(jobs)
        turns.append([float("inf") if a.failure else float(a.value) for a in answers])
    return np.array(turns).min(0).reshape(len(options), len(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="results not kept")
    options = parser.parse_args()
    rows = []
    print(f"{'':50}{'fixed':>7}{'mean':>7}{'worst':>7}   best one (mean, worst)   best at each shape")
    with Workers(TIMER) as workers:
        for name, make, model, shapes in WORK:
            backend = Cpu("cpu", PlanOptions())
            builder = backend.builder(backend.fuse(backend.rewrite(import_model(model))))
            placed = max(backend.place(builder).placed, key=lambda p: len(p.fused.nodes))
            choices = list(make(builder, placed))
            table = times(choices, placed, shapes, options.threads, workers)
            over = table / table.min(0)
            one = int(over.mean(1).argmin())
            values = [c.value for c in choices]
            best = f"{values[one]:6} ({over[one].mean():.3f}, {over[one].max():.3f})"
            each = [values[i] for i in table.argmin(0)]
            print(f"{name:50}{values[0]:7}{over[0].mean():7.3f}{over[0].max():7.3f}   {best}   {each}", flush=True)
            rows.append({
                "choice": name, "values": values, "shapes": list(shapes),
                "microseconds": [[round(x * 1e6, 3) for x in row] for row in table],
                "mean": float(over[0].mean()), "worst": float(over[0].max()),
            })  # fmt: skip
    folder = record.SCRATCH if options.quick else record.RESULTS
    record.save(f"untuned_{options.threads}t", folder=folder, rows=rows)


if __name__ == "__main__":
    main()
