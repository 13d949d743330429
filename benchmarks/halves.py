"""Models in float16 and bfloat16, and in float32 with products in bfloat16, compared with float32: time, bytes, error.

usage: python -m benchmarks.halves MODEL.onnx ... [--shapes B=1,L=8 ...] [--threads 1] [--rounds 15]
                                  [--only words float32] [--also openvino]

Each model is compiled four times from one file: unchanged, with all its float32 tensors in each 16-bit type, and
unchanged with ``Options(precision="bf16")`` ("words"). The programs alternate in this process with ONNX Runtime's
float32 and float16, one call at a time; medians and minima are printed. ``--only``: the programs to compile; ``--also
openvino``: OpenVINO with products in bfloat16 (pip install openvino). Dynamic dims are the model's own, at its stored
shapes (polydyn/testing/inputs.py) or at the shapes of ``--shapes``. Error: the largest difference from the float32
model on inputs rounded in the same way, divided by the largest value. float16 in ONNX Runtime is timed if it has the
model's operators. Results go to benchmarks/results/halves.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import polydyn
from benchmarks import record
from polydyn.cli.parsing import sizes
from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import Array
from polydyn.testing.halves import HALVES, in_type, rounded, widened
from polydyn.testing.inputs import feeds, shapes

Run = Callable[[], Any]
WORDS = "words"
"""float32 with products in bfloat16."""


def rival(model: onnx.ModelProto, threads: int) -> ort.InferenceSession | None:
    """Return ONNX Runtime's session, or None if it lacks an operator in the model's type."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # its errors have no common root
        return None


def artifact_bytes(program: polydyn.Program) -> int:
    """Return the bytes of a saved program."""
    with tempfile.TemporaryDirectory() as folder:
        program.save(Path(folder) / "p")
        return (Path(folder) / "p").stat().st_size


def openvino_run(path: str, threads: int) -> Callable[[Mapping[str, Array]], Any]:
    """Return OpenVINO's call of a model, with products in bfloat16."""
    import openvino  # may be missing: only this option needs it

    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda feeds: [x.copy() for x in request.infer(dict(feeds)).values()]


def times(runs: Mapping[str, Run], rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median and minimum milliseconds of each run; the runs alternate."""
    taken: dict[str, list[float]] = {n: [] for n in runs}
    for _ in range(rounds + 2):
        for n, run in runs.items():
            start = time.perf_counter()
            run()
            taken[n].append((time.perf_counter() - start) * 1e3)
    return {n: (statistics.median(t[2:]), min(t[2:])) for n, t in taken.items()}


def measure(path: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one model."""
    plain, points, threads, rounds = onnx.load(path), args.shapes, args.threads, args.rounds
    models = {"float32": plain, **{t: in_type(plain, t) for t in HALVES if t in args.only}}
    programs = {t: polydyn.compile(m, threads=threads) for t, m in models.items()}
    programs[WORDS] = polydyn.compile(plain, threads=threads, options=polydyn.Options(precision="bf16"))
    programs = {t: p for t, p in programs.items() if t in ("float32", *args.only)}
    size = {t: artifact_bytes(p) for t, p in programs.items()}
    others = {t: s for t in ("float32", "float16") if t in models and (s := rival(models[t], threads)) is not None}
    more = {"openvino bfloat16": openvino_run(path, threads)} if "openvino" in args.also else {}
    rows = []
    for shape in points or shapes(Path(path).stem):
        inputs_float32 = feeds(plain, shape)
        inputs: dict[str, dict[str, Array]] = {t: {n: rounded(x, t) for n, x in inputs_float32.items()} for t in HALVES}
        inputs |= {"float32": inputs_float32, WORDS: inputs_float32}
        runs: dict[str, Run] = {t: partial(p.run, inputs[t]) for t, p in programs.items()}
        runs |= {f"onnxruntime {t}": partial(s.run, None, inputs[t]) for t, s in others.items()}
        runs |= {n: partial(run, inputs_float32) for n, run in more.items()}
        row: dict[str, Any] = {"model": Path(path).stem, "shape": shape, "bytes": size, "ms": times(runs, rounds)}
        row["error"] = {t: _error(programs, inputs[t], t) for t in (*HALVES, WORDS) if t in programs}
        rows.append(row)
        print(row)
    return rows


def _error(programs: Mapping[str, polydyn.Program], inputs: Mapping[str, Array], dtype: str) -> float:
    stored = "float32" if dtype == WORDS else dtype
    exact = {n: x.astype(np.float32) if x.dtype == numpy_dtype(stored) else x for n, x in inputs.items()}
    expected, got = programs["float32"].run(exact), programs[dtype].run(dict(inputs))
    return max(
        float(np.abs(widened(got[n], stored) - x).max() / np.abs(x).max()) for n, x in expected.items() if x.size
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--shapes", nargs="+", type=sizes, default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    every = ("float32", *HALVES, WORDS)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--also", nargs="+", choices=("openvino",), default=())
    args = parser.parse_args()
    rows = [r for m in args.models for r in measure(m, args)]
    print(f"written: {record.save('halves', models=rows).name}")


if __name__ == "__main__":
    main()
