"""DietCode's Figure 10: where a micro-kernel checks that a row exists, in C (``bounds.c``) for this processor."""

from __future__ import annotations

import ctypes
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.papers.report import Grid, Result, Settings, row
from benchmarks.protocol import Contestant
from polydyn.build.compiler import build_library
from polydyn.explore import groups
from polydyn.testing import models

VERSIONS = ("baseline", "global", "partition", "local")
SOURCE = Path(__file__).parent / "bounds.c"
TOLERANCE = 1e-3
BATCH, LENGTHS, EXAMPLE, BLOCK = 16, 128, 60, 128
"""DietCode's batch, its largest T, the T of its Figure 6, rows and columns of the micro-kernel."""
Array = npt.NDArray[np.float32]
Calls = dict[str, Callable[[], float]]


class Versions:
    """The four versions on one product ``y[rows, columns] = x[rows, depth] @ w``. ValueError: the columns
    are not a multiple of a block.
    """

    def __init__(self, columns: int, depth: int, rows: int) -> None:
        if columns % BLOCK:
            raise ValueError(f"{columns} columns are not blocks of {BLOCK}")
        self.library = ctypes.CDLL(str(build_library({SOURCE.name: SOURCE.read_text()}, {}).file()))
        rng = np.random.default_rng(0)
        padded = -(-rows // BLOCK) * BLOCK
        self.x: Array = rng.standard_normal((rows, depth), np.float32)
        self.w: Array = rng.standard_normal((depth, columns), np.float32)
        panel = self.library.bounds_panel()
        self.panels = np.ascontiguousarray(self.w.reshape(depth, -1, panel).swapaxes(0, 1))
        self.y = np.empty((rows, columns), np.float32)
        self.copies = np.empty((padded, depth), np.float32), np.empty((padded, columns), np.float32)
        self.workspace = np.empty(self.library.bounds_memory(), np.uint8)

    def run(self, version: str) -> float:
        """Run a version once and return its seconds."""
        function = getattr(self.library, f"bounds_{version}")
        arrays = (self.workspace, self.x, self.panels, self.y)
        sizes = (*self.y.shape, self.x.shape[1])
        arguments: list[Any] = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        arguments += [*map(ctypes.c_int64, sizes), *(ctypes.c_void_p(a.ctypes.data) for a in self.copies)]
        start = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - start

    def check(self) -> None:
        """Compare every version with numpy. AssertionError: one differs."""
        expected = self.x @ self.w
        for version in VERSIONS:
            self.y[:] = np.nan
            self.run(version)
            assert np.allclose(self.y, expected, atol=TOLERANCE * float(np.abs(expected).max())), version


def bounds(settings: Settings) -> Result:
    """DietCode Fig. 10: checks of the last rows everywhere, on padded tensors, partitioned, or padded locally."""
    columns, depth = (256, 64) if settings.quick else (2304, 768)
    draw = random.Random(settings.seed)
    count = settings.points or (2 if settings.quick else 6)
    others = [t for t in range(1, LENGTHS) if t != EXAMPLE and t * BATCH % BLOCK]
    lengths = [EXAMPLE, *sorted(draw.sample(others, count - 1))]
    model = models.gemm(columns, depth)
    (group,) = groups(model)
    ours = group.compiled()
    columns_of: dict[str, list[float]] = {name: [] for name in (*VERSIONS, "polydyn", "ONNX Runtime")}
    with ExitStack() as stack:
        path = models.save(model, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        player = stack.enter_context(Contestant("onnxruntime", path, 1))
        for length in lengths:
            rows = length * BATCH
            versions = Versions(columns, depth, rows)
            versions.check()
            calls: Calls = {v: lambda v=v, x=versions: x.run(v) for v in VERSIONS}  # type: ignore[misc]
            calls["polydyn"] = lambda m=rows: ours.seconds(3, n0=m)  # type: ignore[misc]
            calls["ONNX Runtime"] = lambda m=rows: statistics.median(player.run({"M": m}, 3))  # type: ignore[misc]
            work = 2e-9 * rows * columns * depth
            for name, seconds in alternate(calls, 2 * settings.rounds).items():
                columns_of[name].append(work / seconds)
    return _result(settings, lengths, columns_of, columns, depth)


def alternate(calls: Calls, rounds: int) -> dict[str, float]:
    """Return the median seconds of calls that take turns, after one untimed call each."""
    for call in calls.values():
        call()
    turns = [{name: call() for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(t[name] for t in turns) for name in calls}


def _result(
    settings: Settings, lengths: list[int], rates_of: dict[str, list[float]], columns: int, depth: int
) -> Result:
    local = rates_of["local"]
    rows = [
        row(name, [*rates, statistics.geometric_mean(r / x for r, x in zip(rates, local, strict=True))])
        for name, rates in rates_of.items()
    ]
    grid = Grid(
        "GFLOP/s of the useful work; the last column is the geometric mean over local padding's.",
        ("version", *(f"T={n}" for n in lengths), "of local"), tuple(rows),
    )  # fmt: skip
    setup = (
        f"[16T, {depth}] x [{columns}, {depth}], T = {EXAMPLE} and {len(lengths) - 1} others drawn by seed "
        f"{settings.seed}; one thread; medians of {2 * settings.rounds} turns that alternate. The four versions are "
        "one micro-kernel of 128 x 128 in C (`benchmarks/papers/bounds.c`) with the stages of DietCode's Listing 1. "
        "Its columns are packed before the clock starts."
    )
    return Result("dietcode-10", setup, (grid,))
