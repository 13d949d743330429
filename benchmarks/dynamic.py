"""Times data-dependent sizes, loops and recurrences, compared with ONNX Runtime (docs/adr/0027-parts.md).

usage: python -m benchmarks.dynamic [--threads 1 2] [--rounds N] [--seconds S] [--quick]
       python -m benchmarks.dynamic --memory
       python -m benchmarks.dynamic --scatters

Recurrences of 64 to 512 units; a Loop whose number of iterations is data; a Loop that appends a row to its carried
tensor in each iteration; a mask whose positions are gathered; and a detector's tail (scores, non-maximum suppression,
the selected boxes). Protocol: benchmarks/protocol.py. ``--memory``: 1000 calls of the mask, the tail and the growing
loop at random sizes; prints the process's memory in between. ``--scatters``: operators whose indices are data, at 1000
to 100000 elements, minimum times of interleaved calls.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import helper, numpy_helper

import polydyn
from benchmarks import arguments, record
from benchmarks.rows import Field, Row, Shape, progress, show


def recurrence(units: int, kind: str = "LSTM", direction: str = "forward") -> onnx.ModelProto:
    """Build a recurrence with bias; time T, batch B."""
    rng = np.random.default_rng(0)
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if direction == "bidirectional" else 1
    shapes = {"w": (ways, gates * units, units), "r": (ways, gates * units, units), "b": (ways, 2 * gates * units)}
    arrays = {n: (rng.standard_normal(s) / units**0.5).astype(np.float32) for n, s in shapes.items()}
    outputs = ["y", "h", *(["c"] if kind == "LSTM" else [])]
    node = helper.make_node(kind, ["x", *arrays], outputs, hidden_size=units, direction=direction)
    graph = helper.make_graph(
        [node], kind, [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["T", "B", units])],
        [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, None) for o in outputs],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def parsed(text: str) -> onnx.ModelProto:
    """Parse a model in ONNX's text format."""
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
GROW = """
g (float[N, 64] x) => (float[M, 64] y) {
    zero = Constant <value = float {0}> ()
    t = Constant <value = bool {1}> ()
    on = Greater (x, zero)
    ones = Cast <to = 7> (on)
    flat = Constant <value_ints = [0, 1]> ()
    m = ReduceSum <keepdims = 0> (ones, flat)
    y = Loop (m, t, x) <body = body (int64 i, bool go, float[K, 64] v) => (bool go, float[K2, 64] w) {
        first = Constant <value_ints = [0]> ()
        s = ReduceMean <keepdims = 1> (v, first)
        w = Concat <axis = 0> (v, s)
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
    "lstm 512": (recurrence(512), [{"T": 64, "B": 1}, {"T": 64, "B": 8}]),
    "lstm 64": (recurrence(64), [{"T": 100, "B": 1}]),
    "lstm 128, both ways": (recurrence(128, direction="bidirectional"), [{"T": 100, "B": 1}]),
    "gru 256": (recurrence(256, "GRU"), [{"T": 64, "B": 1}, {"T": 64, "B": 8}]),
    "rnn 256": (recurrence(256, "RNN"), [{"T": 64, "B": 1}]),
    "loop": (parsed(LOOP), [{"N": 1}, {"N": 4}]),
    "loop that grows": (parsed(GROW), [{"N": 1}, {"N": 4}]),
    "mask": (parsed(MASK), [{"H": 32, "W": 32}, {"H": 512, "W": 512}]),
    "detector tail": (parsed(TAIL), [{"N": 200}, {"N": 1000}]),
}


def run(threads: int, args: argparse.Namespace) -> Path:
    """Measure all cases on one number of threads."""
    rows: list[Row] = []
    results = record.Results("dynamic", arguments.folder(args))
    with Field(arguments.rivals(threads, ()), threads) as field, tempfile.TemporaryDirectory() as folder:
        for case, (model, shapes) in CASES.items():
            path = Path(folder) / f"{case.replace(' ', '_')}.onnx"
            onnx.save(model, path)
            field.load(path)
            case_rows = []
            for shape in shapes:
                row = field.measure(shape, arguments.effort(args), 1e-9) | {"case": case, "family": case}
                progress(row)
                case_rows.append(row)
            results.add(case, threads, case_rows, **field.about())
            rows += case_rows
    show(rows, f"sizes that data decide, {threads} threads")
    return results.path


def memory(calls: int = 1000) -> None:
    """Print the process's memory and the programs' arenas after ``calls`` calls at random sizes."""
    rng = np.random.default_rng(0)
    programs = {n: polydyn.compile(CASES[n][0]) for n in ("mask", "detector tail", "loop that grows")}
    for k in range(calls + 1):
        if k in (0, 100, calls // 2, calls):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            arenas = sum(p.counters["arena_bytes"] for p in programs.values())
            print(f"{k:5} calls each: {pages * 4096 / 1e6:6.1f} MB, arenas {arenas / 1e6:.2f} MB", flush=True)
        h, w, n, rows = (int(x) for x in rng.integers((0, 0, 1, 0), (500, 500, 500, 8)))
        programs["mask"].run({"x": rng.standard_normal((h, w), np.float32)})
        shapes = {"raw": (1, n, 4), "logits": (1, 20, n)}
        programs["detector tail"].run({i: rng.standard_normal(s, np.float32) for i, s in shapes.items()})
        programs["loop that grows"].run({"x": rng.standard_normal((rows, 64), np.float32)})


SCATTERS = """
line    (float[N] x, int64[N] i, float[N] u) => (float[N] y) { y = ScatterElements <reduction = "none"> (x, i, u) }
sums    (float[N] x, int64[N] i, float[N] u) => (float[N] y) { y = ScatterElements <reduction = "add"> (x, i, u) }
columns (float[N, 16] x, int64[N, 16] i, float[N, 16] u) => (float[N, 16] y) { y = ScatterElements (x, i, u) }
rows    (float[N, 64] x, int64[N, 1] i, float[N, 64] u) => (float[N, 64] y) {
    y = ScatterND <reduction = "add"> (x, i, u) }
unpool  (float[1, 1, N] x, int64[1, 1, N] i) => (float[1, 1, M] y) {
    y = MaxUnpool <kernel_shape = [2], strides = [2]> (x, i) }
running (float[N] x, int64 i) => (float[N] y) { a = Constant <value = int64 {0}> () y = CumSum (x, a) }
first   (float[N] x) => (float[K] y, int64[K] p) { k = Constant <value_ints = [100]> () y, p = TopK (x, k) }
order   (float[N] x) => (float[N] y, int64[N] p) { k = Shape (x) y, p = TopK (x, k) }
unique  (float[N] x) => (float[K] y, int64[K] f, int64[N] v, int64[K] c) { y, f, v, c = Unique (x) }
kinds   (int64[N, 4] x) => (int64[K, 4] y, int64[K] f, int64[N] v, int64[K] c) { y, f, v, c = Unique <axis = 0> (x) }
"""


def _least(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the minimum microseconds of each call; the calls alternate."""
    least = [np.inf] * len(calls)
    for _ in range(rounds):
        for k, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            least[k] = min(least[k], 1e6 * (time.perf_counter() - begin))
    return least


def scatters(threads: int, rounds: int = 30) -> None:
    """Print the minimum time of a call in microseconds, compared with ONNX Runtime's."""
    rng = np.random.default_rng(0)
    for text in SCATTERS.strip().replace("\n   ", "").splitlines():
        model = parsed(text)
        program = polydyn.compile(model, threads=threads)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        for n in (1000, 10000, 100000):
            feeds = {}
            for i in model.graph.input:
                shape = [d.dim_value or n for d in i.type.tensor_type.shape.dim]
                floats = i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
                feeds[i.name] = rng.standard_normal(shape, np.float32) if floats else rng.integers(0, n, shape)
            mine, theirs = _least([partial(program.run, feeds), partial(session.run, None, feeds)], rounds)
            print(
                f"{model.graph.name:8} {n:7}: {mine:9.1f} us, ONNX Runtime {theirs:9.1f}, {theirs / mine:.2f}",
                flush=True,
            )


def main() -> None:
    """Run from the command line."""
    parser = arguments.parser(__doc__, seconds=2)
    parser.add_argument("--memory", action="store_true", help="only memory at random sizes")
    parser.add_argument("--scatters", action="store_true", help="only operators whose indices are data")
    args = parser.parse_args()
    if args.memory:
        memory()
        return
    if args.scatters:
        for threads in args.threads:
            scatters(threads)
        return
    arguments.finish([run(threads, args) for threads in args.threads])


if __name__ == "__main__":
    main()
