"""A rotary position with and without pass ``pieces``, on the CPU: minimum microseconds of alternating calls.

    python -m benchmarks.rotations [--heads 32] [--size 128] [--threads 1] [--rounds 7]

x cos + concat(-x2, x1) sin over x [B, heads, L, size], where x1 and x2 are the halves of x; B and L are symbols.
Results go to benchmarks/results/rotations.json.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper

import polydyn
from benchmarks import record
from polydyn.backends import Options

SHAPES = ((1, 1), (1, 16), (1, 128), (1, 512), (4, 256))
"""(batch, length)."""
ELEMENTS = 1 << 21
"""Number of elements computed in one measurement."""


def rotation(heads: int, size: int) -> ModelProto:
    """Build the model."""
    node = helper.make_node
    nodes = [
        node("Slice", ["x", "half", "end", "last"], ["x2"]), node("Slice", ["x", "zero", "half", "last"], ["x1"]),
        node("Neg", ["x2"], ["m"]), node("Concat", ["m", "x1"], ["r"], axis=-1), node("Mul", ["x", "cos"], ["a"]),
        node("Mul", ["r", "sin"], ["b"]), node("Add", ["a", "b"], ["y"]),
    ]  # fmt: skip
    ends = {"zero": 0, "half": size // 2, "end": size, "last": -1}
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", heads if n == "x" else 1, "L", size])
        for n in ("x", "cos", "sin")
    ]
    constants = [helper.make_tensor(n, TensorProto.INT64, [1], [v]) for n, v in ends.items()]
    graph = helper.make_graph(nodes, "rotation", inputs, [helper.make_empty_tensor_value_info("y")], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def measure(call: Any, calls: int) -> float:
    """Return the microseconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    """Print and store a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("heads", 32), ("size", 128), ("threads", 1), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    model, rng = rotation(o.heads, o.size), np.random.default_rng(0)
    without = {"pieces": Options(), "joined": Options(without=("pieces",))}
    programs = {n: polydyn.compile(model, threads=o.threads, options=x) for n, x in without.items()}
    rows = []
    for batch, length in SHAPES:
        dims = {n: (batch, o.heads if n == "x" else 1, length, o.size) for n in ("x", "cos", "sin")}
        feeds = {n: rng.standard_normal(d).astype(np.float32) for n, d in dims.items()}
        calls, number = {n: p.bind(feeds) for n, p in programs.items()}, max(3, ELEMENTS // int(np.prod(dims["x"])))
        times = [{n: measure(c, number) for n, c in calls.items()} for _ in range(o.rounds)]
        us = {n: min(t[n] for t in times) for n in calls}
        rows.append({"batch": batch, "length": length, "us": us, "ratio": us["joined"] / us["pieces"]})
        print(f"({batch}, {length}): {us['pieces']:.1f} us, joined {us['joined']:.1f}, ratio {rows[-1]['ratio']:.2f}")
    record.save("rotations", heads=o.heads, size=o.size, threads=o.threads, rows=rows)


if __name__ == "__main__":
    main()
