"""Check the results at every shape: each model is compiled once and compared with ONNX Runtime at its stored shapes.

usage: python -m benchmarks.accuracy MODEL.onnx | FOLDER ... [--threads N]

The error of an output is its largest absolute difference divided by the largest absolute value of the reference. An
audit hook counts the processes that are started during the runs: a second compilation would start a compiler. The exit
code is 1 if an error exceeds the tolerance or a process was started. Results are added to
benchmarks/results/accuracy.json and replace earlier ones of the same model and number of threads.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import onnx

from benchmarks import record
from polydyn.testing.accuracy import TOLERANCE, Starts, error, reference
from polydyn.testing.inputs import feeds, shapes


def check(path: str, threads: int, starts: Starts) -> dict[str, Any]:
    """Compile a model once and run its shapes."""
    import polydyn

    shapes_to_run = shapes(Path(path).stem)
    expected = reference(path, shapes_to_run, threads)
    begin = time.perf_counter()
    program = polydyn.compile(path, threads=threads, cache=False)
    compile_seconds = time.perf_counter() - begin
    before, model = starts.count, onnx.load(path)
    errors = [error(program.run(feeds(model, s)), e) for s, e in zip(shapes_to_run, expected, strict=True)]
    return {
        "model": Path(path).stem,
        "compile_seconds": compile_seconds,
        "processes_started_while_running": starts.count - before,
        "worst": max(errors),
        "rows": [{"shape": dict(s), "error": e} for s, e in zip(shapes_to_run, errors, strict=True)],
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    paths = [str(p) for m in args.models for p in (sorted(Path(m).glob("*.onnx")) if Path(m).is_dir() else [Path(m)])]
    starts, good, results = Starts(), True, record.Results("accuracy", record.RESULTS)
    for path in paths:
        try:
            r = check(path, args.threads, starts)
        except Exception as problem:  # one model's failure must not hide the others' results
            good = False
            print(f"{Path(path).stem:24} FAILED {type(problem).__name__}: {problem}", flush=True)
            continue
        extra = r["processes_started_while_running"]
        print(
            f"{r['model']:24} compiled in {r['compile_seconds']:6.1f} s, {len(r['rows'])} shapes, worst error "
            f"{r['worst']:.1e}, processes started while running: {extra}",
            flush=True,
        )
        good = good and r["worst"] <= TOLERANCE and not extra
        results.add(r.pop("model"), args.threads, r.pop("rows"), tolerance=TOLERANCE, **r)
    print(f"written: benchmarks/results/{results.path.name}")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
