"""Times sizes that data decide, loops and recurrences beside ONNX Runtime (docs/adr/0027-parts.md).

usage: python -m benchmarks.dynamic [--threads 1 2] [--rounds N] [--seconds S] [--quick]

An LSTM of 512 units and one of 64, a Loop whose number of iterations is data, a mask whose places are gathered, and a
detector's tail (scores, non-maximum suppression, the boxes that stay). Protocol: benchmarks/protocol.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

from benchmarks import arguments, record
from benchmarks.rows import Field, Row, Shape, progress, show


def lstm(units: int) -> onnx.ModelProto:
    """One direction, with bias; time T, batch B."""
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 4 * units, units), "r": (1, 4 * units, units), "b": (1, 8 * units)}
    arrays = {n: (rng.standard_normal(s) / units**0.5).astype(np.float32) for n, s in shapes.items()}
    node = helper.make_node("LSTM", ["x", *arrays], ["y", "h", "c"], hidden_size=units)
    graph = helper.make_graph(
        [node], "lstm", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["T", "B", units])],
        [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in "yhc"],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def parsed(text: str) -> onnx.ModelProto:
    """A model in ONNX's text."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


LOOP = """
g (float[N, 256] x) => (float[N, 256] y) {
    zero = Constant <value = float {0}> ()
    t = Constant <value = bool {1}> ()
    on = Greater (x, zero)
    ones = Cast <to = 7> (on)
    flat = Constant <value_ints = [0, 1]> ()
    m = ReduceSum <keepdims = 0> (ones, flat)
    half = Constant <value = float {0.5}> ()
    y = Loop (m, t, x) <body = body (int64 i, bool go, float[N, 256] v) => (bool go, float[N, 256] w) {
        a = Tanh (v)
        b = Mul (a, half)
        w = Add (b, x)
    }>
}
"""
MASK = """
g (float[H, W] x) => (float s) {
    zero = Constant <value = float {0}> ()
    m = Greater (x, zero)
    i = NonZero (m)
    t = Transpose <perm = [1, 0]> (i)
    v = GatherND (x, t)
    e = Exp (v)
    s = ReduceSum <keepdims = 0> (e)
}
"""
TAIL = """
g (float[1, N, 4] raw, float[1, 20, N] logits) => (float[4] s) {
    corner = Sigmoid (raw)
    scores = Sigmoid (logits)
    most = Constant <value = int64[1] {100}> ()
    overlap = Constant <value = float[1] {0.5}> ()
    least = Constant <value = float[1] {0.6}> ()
    kept = NonMaxSuppression (corner, scores, most, overlap, least)
    two = Constant <value = int64 {2}> ()
    box = Gather <axis = 1> (kept, two)
    one = Constant <value_ints = [0]> ()
    all = Squeeze (corner, one)
    best = Gather <axis = 0> (all, box)
    s = ReduceSum <keepdims = 0> (best, one)
}
"""
CASES: dict[str, tuple[onnx.ModelProto, list[Shape]]] = {
    "lstm 512": (lstm(512), [{"T": 64, "B": 1}, {"T": 64, "B": 8}]),
    "lstm 64": (lstm(64), [{"T": 100, "B": 1}]),
    "loop": (parsed(LOOP), [{"N": 1}, {"N": 4}]),
    "mask": (parsed(MASK), [{"H": 32, "W": 32}, {"H": 512, "W": 512}]),
    "detector tail": (parsed(TAIL), [{"N": 200}, {"N": 1000}]),
}


def run(threads: int, args: argparse.Namespace) -> Path:
    """All cases on one number of threads."""
    rows: list[Row] = []
    results = record.Results("dynamic", arguments.folder(args))
    with Field(arguments.rivals(threads, ()), threads) as field, tempfile.TemporaryDirectory() as folder:
        for case, (model, shapes) in CASES.items():
            path = Path(folder) / f"{case.replace(' ', '_')}.onnx"
            onnx.save(model, path)
            field.load(path)
            made = []
            for shape in shapes:
                row = field.measure(shape, arguments.effort(args), 1e-9) | {"case": case, "family": case}
                progress(row)
                made.append(row)
            results.add(case, threads, made, **field.about())
            rows += made
    show(rows, f"sizes that data decide, {threads} threads")
    return results.path


def main() -> None:
    """Runs from the command line."""
    args = arguments.parser(__doc__, seconds=2).parse_args()
    arguments.finish([run(threads, args) for threads in args.threads])


if __name__ == "__main__":
    main()
