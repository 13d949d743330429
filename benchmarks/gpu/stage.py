"""Shared parts of the stages: a device, the cases of a pack, data on the device, errors, and times of torch."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.runtime.artifact import read_artifact
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import LIBRARY, Session, open_session
from polydyn.runtime.cuda.timing import (
    LAUNCHES,
    ROUNDS,
    SHORT_LAUNCHES,
    SHORT_SECONDS,
    TARGET_SECONDS,
    WARM_UP_SECONDS,
    Times,
    Work,
    replayed,
    sets_beyond,
)
from polydyn.runtime.explain import resolve_dims
from polydyn.runtime.plain_expressions import evaluate

Result = dict[str, Any]
L2_BYTES = 38
"""CUdevice_attribute."""
EMULATED_ELEMENTS = 50_000
"""The emulation skips larger arrays."""
SAMPLE, MAX_POISON_BYTES = 1 << 20, 1 << 26
"""Output elements compared on the host, and maximum bytes of an output that is poisoned from the host."""
PATTERN = (1 << 20) + 7
"""Number of distinct values in an array; they repeat, because drawing gigabytes takes longer than measuring."""


class Stage:
    """A device and the cases of the pack."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.emulate:
            os.environ[LIBRARY] = "emulated"
        self.emulate, self.folder = options.emulate, Path(options.pack)
        self.session: Session = open_session(prefer=options.driver)
        cases = json.loads((self.folder / "cases.json").read_text())["cases"]
        self.cases = [c for c in cases if not options.only or c["name"] in options.only]
        self.l2 = self.session.driver.attribute(L2_BYTES)
        self._programs: dict[str, CudaProgram] = {}

    @functools.cached_property
    def torch(self) -> Any:
        """torch with a CUDA device, or None; importing it takes seconds, a minute at first."""
        if self.emulate:
            return None
        try:
            import torch
        except Exception:  # an installed torch that does not load counts as missing
            return None
        return torch if torch.cuda.is_available() else None

    def cases_of(self, *kinds: str) -> list[Result]:
        """Return the cases of some kinds."""
        return [c for c in self.cases if c["kind"] in kinds]

    def program(self, case: Result) -> CudaProgram:
        """Load a case's program on the device."""
        file = case["file"]
        if file not in self._programs:
            artifact = read_artifact(self.folder / f"{file}.polydyn")
            self._programs[file] = CudaProgram(artifact, session=self.session)
        return self._programs[file]

    def stored(self, case: Result, k: int) -> dict[str, Any]:
        """Return the inputs of a case's k-th shape."""
        data = np.load(self.folder / f"{case['file']}.npz")
        return {n.split("/", 2)[2]: data[n] for n in data.files if n.startswith(f"{k}/in/")}

    def too_large(self, program: CudaProgram, shape: Mapping[str, int]) -> bool:
        """Return whether the emulation skips a shape."""
        if not self.emulate:
            return False
        return sum(int(np.prod(size)) for size, _ in described(program, "inputs", shape)) > EMULATED_ELEMENTS

    def replayed(self, works: Sequence[Work], rounds: int = ROUNDS, warm: float = WARM_UP_SECONDS) -> Times:
        """Measure device times of work by graphs; on the emulation launch it once."""
        with self.session.use() as driver:
            return replayed(driver, works, *((1, 1) if self.emulate else (LAUNCHES, rounds)), warm)

    def sets(self, nbytes: int) -> int:
        """Return the number of data sets that a cold measurement alternates between."""
        return 2 if self.emulate else sets_beyond(nbytes, self.l2)


def described(program: CudaProgram, which: str, shape: Mapping[str, int]) -> list[tuple[list[int], str]]:
    """Return (sizes, dtype) of the inputs or outputs at a shape."""
    dims = resolve_dims(program.manifest, shape)
    return [([evaluate(d, dims) for d in x["dims"]], x["dtype"]) for x in program.manifest[which]]


@functools.lru_cache(maxsize=16)
def _pattern(dtype: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if dtype in ("int8", "uint8"):
        return rng.integers(-128 * (dtype == "int8"), 128, PATTERN).astype(dtype)
    if dtype == "bfloat16":
        return (rng.standard_normal(PATTERN).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return rng.standard_normal(PATTERN).astype(dtype) if dtype.startswith("float") else np.zeros(PATTERN, dtype)


def data(stage: Stage, program: CudaProgram, shape: Mapping[str, int], turn: int = 0) -> dict[str, DeviceArray]:
    """Return random inputs on the device; integers are zeros, bytes any. Another ``turn`` gives other numbers."""
    made = {}
    names = [i["name"] for i in program.manifest["inputs"]]
    for k, (name, (size, dtype)) in enumerate(zip(names, described(program, "inputs", shape), strict=True)):
        host = _numbers(dtype, int(np.prod(size)), 1009 * (k + 1) + 7919 * turn)
        made[name] = DeviceArray.of(stage.session, host.reshape(size), dtype)
    return made


def _numbers(dtype: str, count: int, first: int) -> np.ndarray[Any, Any]:
    """Return ``count`` of the numbers from ``first`` on, then again from the beginning; small arrays are views."""
    whole, first = _pattern(dtype), first % PATTERN
    return whole[first : first + count] if first + count <= PATTERN else np.resize(np.roll(whole, -first), count)


def outputs(stage: Stage, program: CudaProgram, shape: Mapping[str, int]) -> dict[str, DeviceArray]:
    """Allocate the outputs."""
    names = [o["name"] for o in program.manifest["outputs"]]
    sizes = described(program, "outputs", shape)
    items = {d: 2 if d == "bfloat16" else np.dtype(d).itemsize for _, d in sizes}
    pairs = zip(names, sizes, strict=True)
    return {n: DeviceArray(stage.session, tuple(size), d, items[d]) for n, (size, d) in pairs}


def error(got: Any, want: Any) -> float:
    """Return the norm of the difference over the expected norm; exact for integers; inf if a value is not a number."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if a.shape != b.shape:
        return float("inf")
    norm = float(np.linalg.norm(a - b))
    relative = norm / max(float(np.linalg.norm(b)), 1e-30) if norm else 0.0
    return relative if np.isfinite(relative) else float("inf")


class Output:
    """An output on the device and its correct values: compared there by torch, else as a sample on the host."""

    def __init__(self, stage: Stage, array: DeviceArray) -> None:
        self.array, self._driver = array, stage.session.driver
        self._tensor = stage.torch.from_dlpack(array) if stage.torch is not None else None
        self._torch, self._right = stage.torch, None

    def poison(self) -> None:
        """Overwrite the output, so that old values cannot pass as results."""
        value = float("nan") if "float" in self.array.dtype else -77
        if self._tensor is not None:
            self._tensor.fill_(value)
            self._torch.cuda.synchronize()
        elif self.array.nbytes <= MAX_POISON_BYTES:
            host = np.zeros(self.array.shape, "uint16" if self.array.dtype == "bfloat16" else self.array.dtype)
            host.fill(0x7FC0 if self.array.dtype == "bfloat16" else value)
            self._driver.h2d(self.array.pointer, host)

    def keep(self) -> None:
        """Store the current values as the correct ones."""
        self._right = self._tensor.clone() if self._tensor is not None else self._sample()

    def error(self) -> float:
        """Return ``error`` of the current values."""
        if self._tensor is not None:
            return torch_error(self._torch, self._tensor, self._right)
        return error(self._sample(), self._right)

    def _sample(self) -> Any:
        flat = numbers(self.array.numpy(), self.array.dtype).reshape(-1)
        return flat[:: max(1, flat.size // SAMPLE)]


def torch_error(torch: Any, got: Any, want: Any) -> float:
    """Compute ``error`` on the device."""
    if got.shape != want.shape:
        return float("inf")
    a, b = got.float(), want.float()
    off, norm = (float(torch.linalg.vector_norm(x)) for x in (a - b, b))
    relative = off / max(norm, 1e-30) if off else 0.0
    return relative if np.isfinite(relative) else float("inf")


def numbers(a: Any, dtype: str) -> Any:
    """Return an array that numpy can calculate with; bfloat16 is transferred as bits."""
    bits = dtype == "bfloat16" and np.asarray(a).dtype == np.uint16
    return (np.asarray(a).astype(np.uint32) << 16).view(np.float32) if bits else a


def text(shape: Mapping[str, int]) -> str:
    return "x".join(f"{k}{v}" for k, v in shape.items())


def in_turn(cases: Sequence[Result], count: Callable[[Result], int]) -> Iterator[tuple[Result, int]]:
    """Yield (case, number of a shape): the first shape of every case, then the second of every case, and so on.

    A stage that stops early has then seen all cases.
    """
    for k in range(max(map(count, cases), default=0)):
        yield from ((c, k) for c in cases if k < count(c))


def torch_times(torch: Any, calls: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> Times:
    """Return device times of one of torch's calls, which alternate in a graph, measured like ours."""
    for call in calls[:1]:
        for _ in range(3):
            call()
    torch.cuda.synchronize()

    def graph(count: int) -> Any:
        made = torch.cuda.CUDAGraph()
        kept: deque[Any] = deque(maxlen=len(calls) - 1)  # cold outputs alternate too, like ours
        with torch.cuda.graph(made):
            for k in range(count):
                kept.append(calls[k % len(calls)]())
        return made

    return _torch_rounds(torch, graph, len(calls), rounds)


def _torch_rounds(torch: Any, graph: Callable[[int], Any], calls: int, rounds: int) -> Times:
    def seconds(captured: Any, replays: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            captured.replay()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    count = max(LAUNCHES, calls)
    captured = graph(count)
    once = seconds(captured, 1)
    if once / count < SHORT_SECONDS:
        count = max(SHORT_LAUNCHES, calls)
        captured = graph(count)
    seconds(captured, max(1, round(WARM_UP_SECONDS / max(once, 1e-9))))
    again = max(1, round(TARGET_SECONDS / max(once, 1e-9)))
    return Times(tuple(seconds(captured, again) / again / count for _ in range(rounds)))
