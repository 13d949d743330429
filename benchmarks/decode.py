"""Decoding with a cache that grows in place, compared with ONNX Runtime, which feeds its outputs back.

usage: python -m benchmarks.decode MODEL.onnx [--steps N] [--prompt N] [--batch N] [--threads N] [--save]

A prompt, then steps of one token. Both runtimes take every step, alternating, in this process. ONNX Runtime keeps its
keys and values as its own values (OrtValue), so that nothing passes through numpy; with more than one thread it does
not spin between its steps. The output has the medians of the steps' milliseconds, the largest error of all outputs, and
the bytes that polydyn moved without computing, compared with the bytes that appending requires. Works for any model
whose program names appendable outputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

import polydyn
from benchmarks import record
from polydyn.runtime.program import Program
from polydyn.testing.accuracy import error
from polydyn.testing.inputs import feeds

Array = npt.NDArray[Any]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e3, result


class Rival:
    """ONNX Runtime with its own keys and values."""

    def __init__(self, path: str, threads: int, pairs: Mapping[str, str], empty: Mapping[str, Array]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [o.name for o in self.session.get_outputs()]
        self.pairs = pairs
        self.past = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in empty.items()}

    def step(self, inputs: Mapping[str, Array]) -> tuple[float, dict[str, Array]]:
        """Return the milliseconds of a step, and its outputs."""
        feeds = {n: ort.OrtValue.ortvalue_from_numpy(a) for n, a in inputs.items()}
        elapsed, values = timed(lambda: self.session.run_with_ort_values(self.names, {**feeds, **self.past}))
        out = dict(zip(self.names, values, strict=True))
        self.past = {past: out[present] for present, past in self.pairs.items()}
        return elapsed, {n: v.numpy() for n, v in out.items()}


class Growing:
    """polydyn with one array per cache, allocated once."""

    def __init__(self, program: Program, room: int, empty: Mapping[str, Array]) -> None:
        self.program, self.length = program, 0
        self.caches = {
            present: np.zeros([room if n == 0 else n for n in empty[past].shape], empty[past].dtype)
            for present, past in program.appendable.items()
        }
        self.axes = {present: empty[past].shape.index(0) for present, past in program.appendable.items()}

    def _views(self, length: int) -> dict[str, Array]:
        return {n: c[(slice(None),) * self.axes[n] + (slice(length),)] for n, c in self.caches.items()}

    def step(self, inputs: Mapping[str, Array], tokens: int) -> tuple[float, dict[str, Array]]:
        """Return the milliseconds of a step that appends ``tokens`` positions (making the views included), and its
        outputs.
        """

        def call() -> dict[str, Array]:
            before, after = self._views(self.length), self._views(self.length + tokens)
            past = {self.program.appendable[n]: a for n, a in before.items()}
            return self.program.run({**inputs, **past}, after)

        elapsed, out = timed(call)
        self.length += tokens
        return elapsed, out


def decode(path: str, steps: int, prompt: int, batch: int, threads: int) -> dict[str, Any]:
    """Time and compare both; return the result as plain data."""
    seconds, program = timed(lambda: polydyn.compile(path, threads=threads, cache=False))
    model = onnx.load(path)
    start = feeds(model, {"B": batch, "L": 1, "P": 0, "T": 1})
    empty = {past: start[past] for past in program.appendable.values()}
    rival = Rival(path, threads, program.appendable, empty)
    growing = Growing(program, prompt + steps, empty)
    times: list[tuple[float, float]] = []
    worst = 0.0
    for step in range(steps + 1):
        tokens = 1 if step else prompt
        shape = {"B": batch, "L": tokens, "P": growing.length, "T": growing.length + tokens}
        inputs = {n: a for n, a in feeds(model, {**shape, "P": 0}, step).items() if n not in empty}
        inputs = {n: np.ones_like(a) if "mask" in n else a for n, a in inputs.items()}
        theirs, expected = rival.step(inputs)
        ours, got = growing.step(inputs, tokens)
        worst = max(worst, error(got, expected))
        times.append((ours, theirs))
    appended = sum(c.nbytes for c in growing.caches.values())
    ours, theirs = (statistics.median(t) for t in zip(*times[1:], strict=True))
    return {
        "model": Path(path).stem, "steps": steps, "prompt": prompt, "batch": batch, "threads": threads,
        "compile_seconds": seconds / 1e3, "polydyn_ms": ours, "onnxruntime_ms": theirs,
        "prompt_ms": {"polydyn": times[0][0], "onnxruntime": times[0][1]}, "error": worst,
        "bytes_copied": program.counters["bytes_copied"], "bytes_appended": appended,
    }  # fmt: skip


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("model")
    for name, default in {"steps": 64, "prompt": 16, "batch": 1, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    a = parser.parse_args()
    r = decode(a.model, a.steps, a.prompt, a.batch, a.threads)
    print(f"{r['model']}: compiled in {r['compile_seconds']:.1f} s; {a.threads} threads, batch {a.batch}")
    print(f"prompt of {a.prompt}: polydyn {r['prompt_ms']['polydyn']:.1f} ms, ONNX Runtime "
          f"{r['prompt_ms']['onnxruntime']:.1f} ms")  # fmt: skip
    print(f"{a.steps} steps: polydyn {r['polydyn_ms']:.2f} ms, ONNX Runtime {r['onnxruntime_ms']:.2f} ms per step; "
          f"largest error {r['error']:.1e}")  # fmt: skip
    print(f"bytes moved without computing: {r['bytes_copied']}; appended keys and values: {r['bytes_appended']}")
    if a.save:
        print(record.save(f"decode_{r['model']}", **r))


if __name__ == "__main__":
    main()
