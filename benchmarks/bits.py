"""Which results have equal bits: of two calls, two processes, several numbers of threads, several targets.

usage: python -m benchmarks.bits MODEL.onnx | FOLDER ... [--threads 1 2 3] [--targets cpu:avx512 cpu:avx2]
                               [--shapes K ...]

Each setting compiles the model in a process of its own and calls it twice at each stored shape. The first target on one
thread is compared with itself (two calls; another process), with more threads, and with the other targets. The exit
code is 1 if calls, processes or numbers of threads of one target differ. Targets may differ (docs/numerics.md); the
largest difference over the largest value is printed, and how many shapes have equal bits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from polydyn.testing.accuracy import error
from polydyn.testing.inputs import feeds, shapes

ROOT = Path(__file__).parents[1]
Results = Sequence[Mapping[str, Any]]
"""Outputs of each shape."""


def calls(path: Path, threads: int, target: str, numbers: Sequence[int], cache: bool = False) -> tuple[Results, bool]:
    """Compile a model and return its outputs at the shapes, and whether a second call has the same bits.

    ``cache``: a program that is stored serves too.
    """
    import polydyn

    model, same, found = onnx.load(path), True, []
    program = polydyn.compile(str(path), threads=threads, target=target, cache=cache)
    for k in numbers:
        given = feeds(model, shapes(path.stem)[k])
        first, second = ({n: np.array(a) for n, a in program.run(dict(given)).items()} for _ in range(2))
        same = same and equal([first], [second])
        found.append(first)
    return found, same


def equal(a: Results, b: Results) -> bool:
    """Return whether all arrays have the same names, types, shapes and bytes."""
    return all(
        x.keys() == y.keys()
        and all((x[n].dtype, x[n].shape, x[n].tobytes()) == (y[n].dtype, y[n].shape, y[n].tobytes()) for n in x)
        for x, y in zip(a, b, strict=True)
    )


def elsewhere(
    path: Path, threads: int, target: str, numbers: Sequence[int], cache: bool = False
) -> tuple[Results, bool]:
    """Return ``calls`` of a new process. RuntimeError: it failed."""
    with tempfile.TemporaryDirectory() as folder:
        request = json.dumps([str(path), threads, target, list(numbers), cache, folder])
        made = subprocess.run([sys.executable, "-m", "benchmarks.bits", "--call", request], cwd=ROOT,
                              capture_output=True, text=True)  # fmt: skip
        if made.returncode:
            raise RuntimeError(f"{path.stem}, {target}, {threads} threads: {made.stderr.strip().splitlines()[-1]}")
        loaded = [dict(np.load(Path(folder) / f"{k}.npz")) for k in numbers]
        return loaded, made.stdout.strip() == "same"


def compared(path: Path, threads: Sequence[int], targets: Sequence[str], numbers: Sequence[int]) -> dict[str, Any]:
    """Return for a model which settings have equal bits, and the differences between targets."""
    first, again = elsewhere(path, threads[0], targets[0], numbers)
    row: dict[str, Any] = {
        "calls": again,
        "processes": equal(first, elsewhere(path, threads[0], targets[0], numbers)[0]),
    }
    row["threads"] = {t: equal(first, elsewhere(path, t, targets[0], numbers)[0]) for t in threads[1:]}
    row["targets"] = {}
    for target in targets[1:]:
        other, _ = elsewhere(path, threads[0], target, numbers)
        same = sum(equal([a], [b]) for a, b in zip(first, other, strict=True))
        worst = max(error(a, b) for a, b in zip(first, other, strict=True))
        row["targets"][target] = {"equal": same, "shapes": len(first), "difference": worst}
    return row


def _call(request: str) -> None:
    path, threads, target, numbers, cache, folder = json.loads(request)
    found, same = calls(Path(path), threads, target, numbers, cache)
    for k, outputs in zip(numbers, found, strict=True):
        np.savez(Path(folder) / f"{k}.npz", **outputs)
    print("same" if same else "different")


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--targets", nargs="+", default=["cpu:avx512", "cpu:avx2"])
    parser.add_argument("--shapes", nargs="+", type=int, default=range(8), metavar="K")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        _call(args.call)
        return 0
    good = True
    for path in (p for m in args.models for p in (sorted(Path(m).glob("*.onnx")) if Path(m).is_dir() else [Path(m)])):
        row = compared(path.resolve(), args.threads, args.targets, args.shapes)
        fixed = row["calls"] and row["processes"] and all(row["threads"].values())
        good = good and fixed
        others = "; ".join(
            f"{t}: {x['equal']} of {x['shapes']} equal, {x['difference']:.1e}" for t, x in row["targets"].items()
        )
        print(f"{path.stem:22} {'equal bits' if fixed else 'DIFFERS ' + json.dumps(row)}; {others}", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
