"""Record search spaces with the rows of the tables of kernels: every tile at a few sizes, for ``benchmarks.explorers``.

    python -m benchmarks.row_spaces --list
    python -m benchmarks.row_spaces skinny pointwise --tiles 400 --passes 5

A file ``NAME.csv.gz`` (``benchmarks.recorded_spaces``) is written to benchmarks/results/spaces for each space. Times
are processor time of the one thread that runs the kernel, so other load on the machine counts little: the mean of
launches of half a millisecond, the least of three, then the least of all passes. A pass measures all tiles at all sizes
in an order of its own. The best tiles of each size are measured again in alternation, so that no lucky tile is the
best.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gzip
import io
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from rich.progress import track

from benchmarks import record
from benchmarks.recorded_spaces import SPACES
from polydyn.backends import Options
from polydyn.backends.cpu import cpu_target
from polydyn.errors import Declined
from polydyn.graph.expand import import_model
from polydyn.measure import cpu_timing
from polydyn.measure.calibrate import machine
from polydyn.measure.cpu import other_groups, placed_builder, products
from polydyn.measure.cpu_bench import CpuBench, SizedBench
from polydyn.measure.placed import PlacedTask
from polydyn.measure.workers import Workers
from polydyn.schedules.names import internal_name
from polydyn.search.backbone import Tile
from polydyn.search.explorers.explore import aligned_order, with_rows
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.space import Space
from polydyn.search.tasks.cpu import CpuTask
from polydyn.search.tasks.sized import SizedTask
from polydyn.testing import models

TARGET, BLOCK_SECONDS, BLOCKS = "cpu", 5e-4, 3
"""Compiler target; seconds of a block of launches, and blocks of a measurement, of which the least counts."""
BEST, BEST_PASSES = 12, 7
"""Tiles of each size that are measured again, and how often."""
BINARIES = 16
"""Number of binaries compiled together."""
Task = CpuTask | SizedTask


@dataclass(frozen=True)
class Problem:
    """A group to record: a model, whose last task is recorded, and its sizes by the name of a column."""

    text: str
    model: Callable[[], onnx.ModelProto]
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def reduced(axis: int) -> onnx.ModelProto:
    """Build the sums of x[R, C] along an axis."""
    node = helper.make_node("ReduceSum", ["x", "axes"], ["y"], keepdims=0)
    return models.model("sums", [node], {"x": ["R", "C"]}, {"axes": np.array([axis], np.int64)})


def _pixels(side: int) -> dict[str, int]:
    return {"N": 1, "H": side, "W": side}


PROBLEMS: Mapping[str, Problem] = {
    "skinny": Problem(
        "x[M, 4096] @ constant[4096, 1024], float32, M few",
        lambda: models.gemm(1024, 4096),
        {f"M{m}": {"M": m} for m in (1, 4, 16)},
    ),
    "pointwise": Problem(
        "Conv 1x1, 256 -> 64 channels, float32, N = 1, P output pixels",
        lambda: models.convolution("Conv", 256, 64, (1, 1), (1, 1), (), (0, 0)),
        {f"P{n * n}": _pixels(n) for n in (7, 14, 28)},
    ),
    "tiles": Problem(
        "attention of 12 heads of 64, float32, B = 1, L queries and keys: many tiles of keys",
        lambda: models.attention(12, 64),
        {f"L{n}": {"B": 1, "L": n} for n in (128, 256, 512)},
    ),
    "sums": Problem(
        "sums of the rows of x[R, C], float32",
        lambda: reduced(1),
        {f"R{r}": {"R": r, "C": c} for r, c in ((1, 65536), (8, 16384), (256, 1024))},
    ),
    "columns": Problem(
        "sums of the columns of x[R, C], float32",
        lambda: reduced(0),
        {f"C{c}": {"R": r, "C": c} for r, c in ((65536, 8), (16384, 64), (512, 2048))},
    ),
}


def thread_time(
    library: str, which: int, buffers: Sequence[int], symbols: Sequence[int], tasks: int, threads: int, scratch: int
) -> float:
    """Return the processor seconds of a launch on one thread, like ``cpu_timing.time_kernel``."""
    if threads != 1:
        raise ValueError("processor time is that of one thread")
    call = cpu_timing._open(library).pdt_time
    pointers = (ctypes.c_void_p * len(buffers))(*(cpu_timing._buffer(i, b) for i, b in enumerate(buffers)))
    integers = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)

    def run(count: int) -> float:
        spent = (ctypes.c_int64 * count)()
        start = time.thread_time_ns()
        numbers = (ctypes.c_int64(tasks), ctypes.c_int64(threads), ctypes.c_int64(scratch))
        if call(which, pointers, integers, *numbers, count, spent):
            raise MemoryError("no memory for a kernel's scratch")
        return (time.thread_time_ns() - start) / count / 1e9

    first = max(run(1), 1e-8)
    count = max(1, min(500, round(BLOCK_SECONDS / first)))
    return min(run(count) for _ in range(BLOCKS))


def task_of(problem: Problem, hardware: Hardware) -> PlacedTask[Any]:
    """Return the last task of a model."""
    builder, processor = placed_builder(import_model(problem.model()), TARGET, Options(), hardware)
    every = {**other_groups(builder, TARGET), **products(builder, processor, TARGET)}
    *_, last = (x for x in every.values() if not isinstance(x, Declined))
    attention = [x for n, x in every.items() if n.startswith("attention") and not isinstance(x, Declined)]
    return attention[0] if attention else last


def listed(task: Task, hardware: Hardware, tiles: int) -> tuple[list[str], dict[Tile, list[int]], int]:
    """Return the names of sizes, the tiles with their numbers in the analytical order, and the number of all tiles of
    the space. At most ``tiles`` tiles of the searched row are drawn; all tiles of other rows are listed.
    """
    if isinstance(task, SizedTask):
        every = task.tiles()
        return list(task.parameters(every[0])), {t: list(task.parameters(t).values()) for t in every}, len(every)
    space = loop_model(task.backbone, hardware)
    drawn = random.Random(0).sample(space.tiles, min(tiles, len(space)))
    order = with_rows(aligned_order(Space("drawn", tuple(sorted(drawn))), task.backbone, hardware), task.row_tiles)
    whole = Space("drawn", tuple(sorted(drawn))).with_rows(task.row_tiles)
    rows = {row: 1 << k for k, row in enumerate(whole.rows)}
    numbers = {t: [rows[t.row], *(t.get(n) for n in whole.names)] for t in order}
    return ["row", *whole.names], numbers, len(space) + len(task.row_tiles)


def shapes_of(placed: PlacedTask[Any], sizes: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Return the loop extents at each size of the model."""
    backbone = placed.task.backbone
    out = {}
    for name, size in sizes.items():
        values = {internal_name(n): v for n, v in size.items()}
        extents = {x.name: placed.extents[x.name].evaluate(values) for x in backbone.loops if x.extent is None}
        out[name] = placed.task.launched(backbone.sizes(extents))
    return out


def measure(
    placed: PlacedTask[Any], hardware: Hardware, tiles: Sequence[Tile], shapes: Mapping[str, Mapping[str, int]],
    passes: int,
) -> dict[str, list[list[float]]]:  # fmt: skip
    """Return for each size the seconds of each tile in each pass; ``inf``: failed."""
    task, draw = placed.task, random.Random(1)
    seconds: dict[str, list[list[float]]] = {n: [[] for _ in tiles] for n in shapes}
    with Workers("benchmarks.row_spaces:thread_time", timeout=20.0) as workers:
        bench = (
            SizedBench(task, hardware, workers) if isinstance(task, SizedTask) else CpuBench(task, hardware, workers)
        )
        parts = list({t.compile: t for t in tiles}.values())
        for k in track(range(0, len(parts), BINARIES), description="building", transient=True):
            bench.build(parts[k : k + BINARIES])
        for _ in track(range(passes), description="measuring", transient=True):
            order = draw.sample(range(len(tiles)), len(tiles))
            for k in range(0, len(order), BINARIES):
                for n, shape in shapes.items():
                    some = order[k : k + BINARIES]
                    for row, spent in zip(some, bench.seconds([tiles[i] for i in some], shape), strict=True):
                        seconds[n][row].append(spent)
        for n, shape in shapes.items():
            best = sorted(range(len(tiles)), key=lambda i, n=n: min(seconds[n][i]))[:BEST]  # type: ignore[misc]
            for _ in range(BEST_PASSES):
                for row, spent in zip(best, bench.seconds([tiles[i] for i in best], shape), strict=True):
                    seconds[n][row].append(spent)
    return seconds


def head(problem: Problem, task: Task, count: int, every: int, passes: int, noise: Mapping[str, float]) -> list[str]:
    """Return the lines that describe a file."""
    m, rows = record.machine(), ("", *task.rows.choices)
    parts = f"{count} of the {every} legal tiles, drawn at random" if count < every else f"all {every} tiles"
    sizes = ", ".join(f"{1 << k}: {row or task.rows.main or 'the only row'}" for k, row in enumerate(rows))
    times = (
        f"means of launches of {BLOCK_SECONDS * 1e3} ms, least of {BLOCKS}, least of {passes} passes in random orders"
    )
    return [
        f"{problem.text}; {parts}",
        f"processor: {m['processor']} (family {m['family']}), {cpu_target(TARGET).name}, 1 thread of {m['cores']} "
        f"shared cores; compiler gcc {m['compiler']}; {time.strftime('%Y-%m-%d')}",
        f"generated kernels of polydyn {record.commit()}, launched by its CPU bench; processor time of the thread; "
        f"{times}; the best {BEST} of each column were measured {BEST_PASSES} times more",
        "median spread of the two least passes: " + " ".join(f"{n}={x:.1%}" for n, x in noise.items()),
        "columns: sizes of the tile (1 or 0: the row has no such size); rank: place in the order of the search; "
        "microseconds of a whole launch",
        f"row: {sizes}",
    ]


def spread(seconds: Sequence[Sequence[float]]) -> float:
    """Return the median over the tiles of the relative difference of the two least passes."""
    pairs = [sorted(x)[:2] for x in seconds if len(x) > 1 and math.isfinite(min(x))]
    return float(np.median([b / a - 1 for a, b in pairs])) if pairs else 0.0


def write(path: Path, lines: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write a file. Equal data give equal bytes."""
    text = io.StringIO()
    text.writelines(f"# {line}\n" for line in lines)
    csv.writer(text, lineterminator="\n").writerows([names, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def record_space(name: str, folder: Path, tiles: int, passes: int) -> Path:
    """Record one space. Return its file."""
    problem, hardware = PROBLEMS[name], machine(cpu_target(TARGET), TARGET, 1)
    placed = task_of(problem, hardware)
    names, numbers, every = listed(placed.task, hardware, tiles)
    shapes = shapes_of(placed, problem.sizes)
    seconds = measure(placed, hardware, list(numbers), shapes, passes)
    noise = {n: spread(x) for n, x in seconds.items()}
    lines = head(problem, placed.task, len(numbers), every, passes, noise)
    rows = [
        [*sizes, rank, *(f"{min(seconds[n][rank]) * 1e6:.4g}" for n in shapes)]
        for rank, sizes in enumerate(numbers.values())
    ]
    path = folder / f"{name}.csv.gz"
    write(path, lines, [*names, "rank", *shapes], sorted(rows))
    return path


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", choices=[[], *PROBLEMS], default=[])
    parser.add_argument("--list", action="store_true", help="print the spaces")
    parser.add_argument("--tiles", type=int, default=400, help="maximum number of tiles of the searched row")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=SPACES)
    options = parser.parse_args()
    for name in options.names if not options.list else PROBLEMS:
        if options.list:
            print(f"{name}: {PROBLEMS[name].text}")
            continue
        start = time.monotonic()
        path = record_space(name, options.folder, options.tiles, options.passes)
        print(f"{path.name}: {path.stat().st_size} bytes, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
