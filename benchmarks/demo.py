"""Compiles one model once and runs it at five shapes, compared with ONNX Runtime: errors, times, the kernels chosen.

usage: python -m benchmarks.demo MODEL.onnx [B=1,L=8 ...]

Times are medians of a few calls in this process, for a first look only: benchmarks/cpu_all.py compares properly.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

import polydyn
from benchmarks.arguments import parse_shape
from polydyn.testing.accuracy import error
from polydyn.testing.inputs import Shape, feeds, shapes, symbols

SIZES = (1, 2, 7, 16, 33)


def five_shapes(path: str, model: onnx.ModelProto) -> list[Shape]:
    """Return five of the stored shapes, or for an unknown model sizes that differ between its symbols."""
    try:
        stored = shapes(Path(path).stem)
    except KeyError:
        names = symbols(model)
        return [{s: SIZES[(i + k) % 5] for k, s in enumerate(names)} for i in range(5 if names else 1)]
    return [stored[i] for i in (0, 1, 3, 5, 7)]


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median time of seven calls after one warm-up call."""
    call()
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def main(path: str, requested: list[Shape]) -> None:
    """See the module's docstring."""
    model = onnx.load(path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    requested = requested or five_shapes(path, model)

    start = time.perf_counter()
    program = polydyn.compile(path, threads=1, cache=False)
    print(f"{Path(path).name}: compiled once, in {time.perf_counter() - start:.1f} s, for every shape\n")

    table = Table("shape", "error / output's scale", "polydyn ms", "ONNX Runtime ms")
    for shape in requested:
        inputs = feeds(model, shape)
        expected = dict(zip(names, session.run(names, inputs), strict=True))
        worst = error(program.run(inputs), expected)
        ours = milliseconds(lambda inputs=inputs: program.run(inputs))
        theirs = milliseconds(lambda inputs=inputs: session.run(names, inputs))
        label = ", ".join(f"{k}={v}" for k, v in shape.items())
        table.add_row(label, f"{worst:.1e}", f"{ours:.3f}", f"{theirs:.3f}")
    Console().print(table)
    print(f"\nWhat runs at {label}:\n{program.explain(**requested[-1])}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1], [parse_shape(text) for text in sys.argv[2:]])
