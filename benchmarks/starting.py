"""Where the processor time of a first start goes: each model in a new process with an empty cache, medians of trials.

usage: python -m benchmarks.starting MODEL.onnx ... [--trials 3] [--sizes MODEL:SYMBOL=MULTIPLE ...]
       python -m benchmarks.starting --shipped FOLDER [PART OF A NAME ...] [--trials 3]
       python -m benchmarks.starting --short [--trials 9]

Columns are processor seconds: ``all`` of the process and its compilers; ``import`` of packages; ``graph``: import of
the model, fusion and lowering; ``proofs``: solving and proving; ``isl``: loops by isl; ``IR``: passes over the loop IR,
their check and printing; ``kernels``, ``host.c``, ``run time``: gcc by kind of unit; ``rest``. ``again``: a second new
process, which opens the stored program. ``lines``: lines of C of all kernels, and of the largest. Numbers need a quiet
machine; results go to benchmarks/results/starting.json. ``--shipped``: the models of ``benchmarks.shipped``, which are
downloaded to FOLDER/models if they are not there; those that polydyn refuses are listed, and not counted.

``--short``: processor seconds of short processes, minimum and median of the trials, in alternating rounds: a saved
program that runs once, a session of a cached program, ``polydyn --help`` and TABs. A row ``numpy`` is Python with
numpy alone, which the first two include. The limit is ``SHORT_LIMIT``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record, shipped

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
SHORT_LIMIT = 0.15
"""Processor seconds that a short process may take on a quiet machine."""
TAB = "import sys; sys.argv = ['polydyn']; from polydyn.__main__ import start; start()"
SHORT: Mapping[str, tuple[list[str], Mapping[str, str]]] = {
    "python": (["-c", "pass"], {}),
    "numpy": (["-c", "import numpy"], {}),
    "polydyn.load, run": (["-c", "import polydyn, numpy as np\n"
                           "polydyn.load('toy.polydyn').run({'x': np.ones((3, 96), np.float32)})"], {}),
    "session, run": (["-c", "import polydyn, numpy as np\n"
                      "polydyn.InferenceSession('toy.onnx').run(None, {'x': np.ones((3, 96), np.float32)})"], {}),
    "polydyn --help": (["-m", "polydyn", "--help"], {}),
    "TAB: commands": (["-c", TAB], {"COMP_WORDS": "polydyn ", "COMP_CWORD": "1"}),
    "TAB: options": (["-c", TAB], {"COMP_WORDS": "polydyn compile --", "COMP_CWORD": "2"}),
}  # fmt: skip
"""Name -> arguments of Python and environment of a short process, in a folder with a model and its program."""


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


def short(trials: int) -> dict[str, list[float]]:
    """Return the processor seconds of every trial of the processes of ``SHORT``."""
    out: dict[str, list[float]] = {name: [] for name in SHORT}
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join([os.getcwd(), *sys.path])
        env = {**os.environ, "POLYDYN_CACHE": f"{folder}/cache", "PYTHONPATH": paths}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        _write_toy(Path(folder))
        for trial in range(trials + 1):
            for name, (arguments, more) in SHORT.items():
                complete = {"_POLYDYN_COMPLETE": "bash_complete"} if more else {}
                variables = {**env, **more, **complete}
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(
                    [sys.executable, *arguments], cwd=folder, env=variables, check=True, stdout=subprocess.DEVNULL
                )
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                if trial:  # the first one fills the cache and compiles bytecode
                    out[name].append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return out


def _write_toy(folder: Path) -> None:
    """Write a small model and its program."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    import polydyn

    w = numpy_helper.from_array(np.ones((96, 32), np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, 1, ["B", size]) for n, size in (("x", 96), ("y", 32)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "toy", [x], [y], [w])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(folder / "toy.onnx"))
    polydyn.compile(model).save(folder / "toy.polydyn")


def report_short(trials: int) -> None:
    """Measure and print ``SHORT``."""
    rows = short(trials)
    print(f"{'process':<20}{'min':>8}{'median':>8}   processor seconds; limit {SHORT_LIMIT} on a quiet machine")
    for name, seconds in rows.items():
        print(f"{name:<20}{min(seconds):8.3f}{statistics.median(seconds):8.3f}")
    print(f"written: {record.save('starting_short', rows=rows, trials=trials).name}")


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
    parser.add_argument("models", nargs="*")
    parser.add_argument("--shipped", type=Path, metavar="FOLDER")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--sizes", nargs="*", default=(), metavar="MODEL:SYMBOL=MULTIPLE")
    args = parser.parse_args()
    if args.short:
        report_short(args.trials)
        return
    multiples, rows = _multiples(args.sizes), dict[str, Row]()
    for name, path in _models(args.models, args.shipped):
        try:
            rows[name] = measure(path, multiples.get(name, {}), args.trials)
        except subprocess.CalledProcessError as e:
            print(f"{name[-40:]:<40} does not compile: {e.stderr.strip().splitlines()[-1][:200]}", flush=True)
            continue
        if len(rows) == 1:
            print(f"{'model':<40}" + "".join(f"{c:>9}" for c in rows[name]))
        texts = [f"{t:9.2f}" if t < 100 else f"{t:9.0f}" for t in rows[name].values()]
        print(f"{name[-40:]:<40}" + "".join(texts), flush=True)
    for column in ("all", "again") if rows else ():
        seconds = [r[column] for r in rows.values()]
        print(f"{column}, {len(rows)} models: {sum(seconds):.1f} s, geometric mean {_mean(seconds):.2f}, ", end="")
        print(f"largest {max(seconds):.2f}")
    name = "starting_shipped" if args.shipped else "starting"
    print(f"written: {record.save(name, models=rows, trials=args.trials).name}")


def _models(paths: Sequence[str], folder: Path | None) -> list[tuple[str, str]]:
    """Return name and path of each model: the given ones, or those of packages of which a given text is a part."""
    if folder is None:
        return [(Path(p).stem, p) for p in paths]
    files = [copies[0] for copies in shipped.models(folder / "models", paths).values()]
    return [(shipped.name_of(folder / "models", f), str(f)) for f in files]


def _mean(seconds: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, seconds)))


if __name__ == "__main__":
    main()
