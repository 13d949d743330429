"""Where the processor time of a first start goes: each model in a new process with an empty cache, medians of trials.

usage: python -m benchmarks.starting MODEL.onnx ... [--trials 3] [--sizes MODEL:SYMBOL=MULTIPLE ...]

Columns are processor seconds: ``all`` of the process and its compilers; ``import`` of packages; ``graph``: import of
the model, fusion and lowering; ``proofs``: solving and proving; ``isl``: loops by isl; ``IR``: passes over the loop IR,
their check and printing; ``kernels``, ``host.c``, ``run time``: gcc by kind of unit; ``rest``. ``again``: a second new
process, which opens the stored program. ``lines``: lines of C of all kernels, and of the largest. Numbers need a quiet
machine; results go to benchmarks/results/starting.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

PARTS = {
    "graph": ("import of the model", "lowering", "pass "),
    "proofs": ("solving", "proofs"),
    "isl": ("loops by isl",),
    "IR": ("passes over the loop IR", "checking the loop IR", "printing"),
}
"""Column -> the beginnings of the names of its sections (``polydyn/clock.py``)."""
CHILD = """
import json, resource, sys
import polydyn
polydyn_sizes = {s: polydyn.Sizes(multiple=m) for s, m in json.loads(sys.argv[2]).items()}
program = polydyn.compile(sys.argv[1], threads=1, dims=polydyn_sizes or None)
spent = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
timing = program.timing.to_json() if program.timing else {"sections": [], "units": []}
print(json.dumps({"all": sum(u.ru_utime + u.ru_stime for u in spent), **timing}))
"""
Row = dict[str, float]


def start(path: str, multiples: Mapping[str, int], cache: str) -> dict[str, Any]:
    """Compile a model in a new process. Return its processor seconds, and the sections and units of its timing."""
    command = [sys.executable, "-c", CHILD, path, json.dumps(multiples)]
    env = {**os.environ, "POLYDYN_CACHE": cache}
    process = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def row(first: Mapping[str, Any], again: Mapping[str, Any]) -> Row:
    """Return the columns of one trial."""
    sections = {s["name"]: float(s["processor"]) for s in first["sections"]}
    out: Row = {"all": first["all"]}
    for part, names in PARTS.items():
        out[part] = sum(t for s, t in sections.items() if s.startswith(names))
    units = {u["name"]: u for u in first["units"]}
    seconds = {n: float(u["processor"]) for n, u in units.items()}
    out["kernels"] = sum(t for n, t in seconds.items() if n.startswith("kernels"))
    out["host.c"] = seconds.get("host.c", 0.0)
    out["run time"] = sum(seconds.values()) - out["kernels"] - out["host.c"]
    packages = first["all"] - sum(sections.values()) - sum(seconds.values())
    out["import"] = packages + sections.get("loading polydyn", 0.0)
    out["rest"] = out["all"] - sum(t for c, t in out.items() if c != "all")
    lines = [n for u in units.values() for n in u["lines"].values()]
    return out | {"again": again["all"], "lines": sum(lines), "largest": max(lines, default=0)}


def measure(path: str, multiples: Mapping[str, int], trials: int) -> Row:
    """Return the medians of some trials of a model."""
    found = []
    for _ in range(trials):
        with tempfile.TemporaryDirectory() as cache:
            found.append(row(start(path, multiples, cache), start(path, multiples, cache)))
    return {c: statistics.median(r[c] for r in found) for c in found[0]}


def _multiples(texts: Sequence[str]) -> dict[str, dict[str, int]]:
    """Parse ``MODEL:SYMBOL=MULTIPLE`` to the multiples of each model's symbols."""
    out: dict[str, dict[str, int]] = {}
    for text in texts:
        model, _, size = text.partition(":")
        symbol, _, multiple = size.partition("=")
        out.setdefault(model, {})[symbol] = int(multiple)
    return out


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=(), metavar="MODEL:SYMBOL=MULTIPLE")
    args = parser.parse_args()
    multiples, rows = _multiples(args.sizes), dict[str, Row]()
    for path in args.models:
        name = Path(path).stem
        rows[name] = measure(path, multiples.get(name, {}), args.trials)
        if len(rows) == 1:
            print(f"{'model':<24}" + "".join(f"{c:>9}" for c in rows[name]))
        print(f"{name:<24}" + "".join(f"{t:9.2f}" if t < 100 else f"{t:9.0f}" for t in rows[name].values()), flush=True)
    total = sum(r["all"] for r in rows.values())
    mean = math.exp(statistics.fmean(math.log(r["all"]) for r in rows.values()))
    print(f"{len(rows)} models: {total:.1f} s, geometric mean {mean:.1f} s")
    print(f"written: {record.save('starting', models=rows, trials=args.trials).name}")


if __name__ == "__main__":
    main()
