"""The cost of compiling: seconds cold and warm, and peak memory. Also checks that new shapes take no more memory.

usage: python -m benchmarks.compiling MODEL.onnx ... [--shapes 1000]

Cold: an empty cache; kernels: a second process over the same cache, without stored programs; warm: a third one, which
opens the stored program. Peak memory is the process's largest resident set;
the C compilers that it starts are counted separately (the largest of them). Memory after 1000 random shapes (dims in
1..64, batches in 1..4, drawn with seed 0) is compared with memory after one run at the largest shape. Results go to
benchmarks/results/compiling.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from benchmarks import record
from polydyn.testing import inputs

MAX_BATCH = {"B": 4, "N": 4}
"""Maximum batch; other dims go to 64 (images: multiples of 32 up to 256)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--shapes", type=int, default=1000)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.models[0], args.child, args.shapes)))
        return
    rows = [measure(m, args.shapes) for m in args.models]
    print(f"written: {record.save('compiling', models=rows).name}")


def measure(path: str, shapes: int) -> Mapping[str, object]:
    """Measure one model, in processes of its own."""
    with tempfile.TemporaryDirectory() as cache:
        cold = _start(path, cache, "cold", shapes)
        kernels = _start(path, cache, "kernels", shapes)
        warm = _start(path, cache, "warm", shapes) | {"processor_seconds": opening_seconds(path, cache)}
    size = Path(path).stat().st_size / 1e6
    row = {"model": Path(path).stem, "model_mb": round(size, 1), "cold": cold, "kernels": kernels, "warm": warm}
    print(
        f"{row['model']:<16} cold {cold['seconds']:6.1f} s, kernels {kernels['seconds']:5.1f} s, "
        f"warm {warm['seconds']:5.2f} s ({warm['processor_seconds']:.2f} s of processor time), "
        f"peak {cold['peak_mb']:.0f} MB (allowed {3 * size + 300:.0f}), "
        f"{shapes} shapes: {warm['before_mb']:.1f} -> {warm['after_mb']:.1f} MB",
        flush=True,
    )
    return row


def _start(path: str, cache: str, kind: str, shapes: int) -> dict[str, float]:
    env = {**os.environ, "POLYDYN_CACHE": cache}
    command = [sys.executable, "-m", "benchmarks.compiling", path, "--child", kind, "--shapes", str(shapes)]
    process = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def opening_seconds(path: str, cache: str, trials: int = 5) -> float:
    """Return the minimum processor time in which a new process opens the stored program, numpy's import included."""
    text = "import sys, polydyn, time; polydyn.compile(sys.argv[1]); print(time.process_time())"
    command, env = [sys.executable, "-c", text, path], {**os.environ, "POLYDYN_CACHE": cache}
    runs = (subprocess.run(command, env=env, check=True, capture_output=True, text=True) for _ in range(trials))
    return min(float(run.stdout) for run in runs)


def child(path: str, kind: str, shapes: int) -> dict[str, float]:
    """Compile, and in the warm process run."""
    start = time.perf_counter()
    import polydyn

    program = polydyn.compile(path, cache=kind != "kernels")
    out = {"seconds": time.perf_counter() - start, "peak_mb": _peak(resource.RUSAGE_SELF)}
    out["compiler_peak_mb"] = _peak(resource.RUSAGE_CHILDREN)
    if kind == "warm":
        proto = onnx.load(path, load_external_data=False)
        random_shapes = draw_shapes(inputs.symbols(proto), shapes)
        for s in (random_shapes[0], *random_shapes[1:20]):
            program.run(inputs.feeds(proto, s))
        out["before_mb"] = resident()
        for s in random_shapes[1:]:
            program.run(inputs.feeds(proto, s))
        out["after_mb"] = resident()
    return out


def draw_shapes(symbols: Sequence[str], count: int) -> list[dict[str, int]]:
    """Return the largest shape, then random ones; a mask over past and new tokens has the length of both."""
    r = np.random.default_rng(0)

    def draw(s: str) -> int:
        if s in ("H", "W"):
            return 32 * int(r.integers(2, 5))
        return int(r.integers(1, MAX_BATCH.get(s, 64) + 1))

    largest = {s: 128 if s in ("H", "W") else MAX_BATCH.get(s, 64) for s in symbols}
    shapes = [largest, *({s: draw(s) for s in symbols} for _ in range(count))]
    return [{**s, "T": s["L"] + s["P"]} if {"L", "P", "T"} <= s.keys() else s for s in shapes]


def _peak(process: int) -> float:
    return resource.getrusage(process).ru_maxrss / 1024


def resident() -> float:
    """Return the resident memory of this process in MB."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
