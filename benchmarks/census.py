"""A census of architectures: whether polydyn runs models that people use, compared with ONNX Runtime.

usage: python -m benchmarks.census FOLDER [NAME or FAMILY ...] [--limit 300] [--again] [--fallback] [--read] [--report]
       [--keep]

Each model of ``benchmarks/models/architectures.py`` is exported with random weights and dynamic sizes, compiled, and
compared with ONNX Runtime at four shapes. If it is not right, or with ``--fallback``, it also runs with
``Options(fallback="onnxruntime")``.

A call whose results differ from ONNX Runtime's is judged by the same model in PyTorch, computed in float64. Networks
also decide (which of two scores is larger, whether boxes overlap enough), and float32 cannot decide between values
that are closer than its rounding. So every element must be near the exact run, or near one of up to 11 more runs in
which each operator's result moves a little (``in_float64``). The row names the judge.

Every model runs in its own process, one after another, with a time limit. FOLDER/census.jsonl gets a line for each
model, with its commit; models with a line are not examined again without ``--again``. ``--report`` only prints the
table, ``--keep`` also writes it to benchmarks/results/census.json. ``--read`` only imports the models, without and with
fallback, into FOLDER/read.jsonl, which shows within seconds what is not supported.

The states: *right*; *refused* (by name: an UnsupportedError, or a ShapeError or InputError about sizes); *wrong*;
*internal error* (anything else that polydyn raises); *over the limit*. Sizes that ONNX Runtime does not run do not
count.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import polydyn
from benchmarks import record
from benchmarks.models.architectures import FAMILIES, SIZES, export, in_float64
from polydyn.errors import InputError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_parts
from polydyn.graph.fallback import fallback_notes
from polydyn.graph.regions import FallbackNodes

TOLERANCE = 2e-4
"""Maximum error of a finite result, relative to the largest value of ONNX Runtime's."""
MAX_FLOAT64_RUNS = 12
"""Maximum number of float64 runs per call."""
MAX_KEPT_BYTES = 40 << 20
"""Exported files with at most this many bytes stay in the folder, so that they need not be exported again."""
RUNS = ("right", "read", "refused", "wrong", "internal error", "over the limit")
Feeds = Mapping[str, Any]
Row = dict[str, Any]
Exact = Callable[[Feeds, int], list[Any]]
"""Computes results in float64 from inputs and a run number: run 0 is exact, in others operators err a little."""


def feeds_of(session: Any, sizes: Mapping[str, int]) -> Feeds:
    """Return seeded inputs at these sizes; masks are ones."""
    numbers = np.random.default_rng(0)
    feeds = dict[str, Any]()
    for x in session.get_inputs():
        shape = [d if isinstance(d, int) else sizes[d] for d in x.shape]
        if "mask" in x.name:
            feeds[x.name] = np.ones(shape, np.int64)
        elif x.type == "tensor(int64)":
            feeds[x.name] = numbers.integers(3, 90, shape)
        elif x.name == "image":
            feeds[x.name] = numbers.random(shape, np.float32)
        else:
            feeds[x.name] = numbers.standard_normal(shape, np.float32)
    return feeds


@dataclass(frozen=True)
class Call:
    """Sizes by name, inputs by name, and the expected results."""

    sizes: Mapping[str, int]
    feeds: Mapping[str, Any]
    results: list[Any]


def expected(path: Path) -> tuple[list[str], list[Call]]:
    """Return the names of the outputs, and calls with ONNX Runtime's results at the sizes that it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    calls = list[Call]()
    for sizes in SIZES:
        feeds = feeds_of(session, sizes)
        try:
            calls.append(Call(sizes, feeds, session.run(None, feeds)))
        except Exception:  # of many classes: the model does not support the size
            continue
    return [o.name for o in session.get_outputs()], calls


def difference(name: str, got: Any, want: Any) -> str:
    """Return how a result differs from the expected one, or an empty string."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name} is {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return f"{name} has {np.count_nonzero(finite != np.isfinite(got))} elements that only one finds finite"
    a, b = got.astype(np.float64)[finite], want.astype(np.float64)[finite]
    error = np.abs(a - b).max(initial=0.0) / max(np.abs(b).max(initial=0.0), 1e-9)
    return f"{name} is off by {error:.2g} of the largest value" if error > TOLERANCE else ""


def differences(names: list[str], call: Call, got: list[Any]) -> str:
    """Return the first difference in the results of a call, with its sizes, or an empty string."""
    texts = (difference(n, g, w) for n, g, w in zip(names, got, call.results, strict=True))
    return next((f"{dict(call.sizes)}: {x}" for x in texts if x), "")


def far(got: list[Any], want: list[Any]) -> list[Any]:
    """Return which elements of results are not near the expected ones: all if shapes differ."""
    if any(g.shape != w.shape for g, w in zip(got, want, strict=True)):
        return [np.ones(g.shape, bool) for g in got]
    scales = [max(float(np.abs(w[np.isfinite(w)]).max(initial=0.0)), 1e-9) for w in want]
    return [~np.isclose(g, w, 0, TOLERANCE * s, equal_nan=True) for g, w, s in zip(got, want, scales, strict=True)]


def judged(names: list[str], calls: list[Call], results: list[list[Any]], load: Callable[[], Exact]) -> Row:
    """Return state, reason and judge: ONNX Runtime, or float64 for calls whose results differ from ONNX Runtime's.

    With float64 as judge, ``differs`` is the first difference, ``runs`` the number of float64 runs for each of these
    calls, and ``beyond`` how many elements of polydyn and of ONNX Runtime are beyond the tolerance from the exact run.
    """
    both = zip(calls, results, strict=True)
    contested = [(c, got, why) for c, got in both if (why := differences(names, c, got))]
    if not contested:
        return {"state": "right", "judge": "ONNX Runtime"}
    row = Row(judge="float64", differs=contested[0][2], runs=[], beyond={n: [0, 0] for n in names})
    try:
        exact = load()
        for call, got, _ in contested:
            runs, first = 1, exact(call.feeds, 0)
            left = far(got, first)
            for n, a, b in zip(names, left, far(call.results, first), strict=True):
                row["beyond"][n] = [x + int(y.sum()) for x, y in zip(row["beyond"][n], (a, b), strict=True)]
            while any(x.any() for x in left) and runs < MAX_FLOAT64_RUNS:
                left = [a & b for a, b in zip(left, far(got, exact(call.feeds, runs)), strict=True)]
                runs += 1
            row["runs"].append(runs)
            if why := [f"{x.sum()} elements of {n}" for n, x in zip(names, left, strict=True) if x.any()]:
                return row | {"state": "wrong", "why": f"{dict(call.sizes)}: near no run are {', '.join(why)}"}
    except Exception as e:  # of many classes: the model does not run in float64
        why = f"{type(e).__name__}: {e}"[:300]
        return {"state": "wrong", "why": contested[0][2], "judge": f"ONNX Runtime, as float64 fails: {why}"}
    return row | {"state": "right"}


def compared(
    path: Path, names: list[str], calls: list[Call], options: polydyn.Options, judge: Callable[[list[list[Any]]], Row]
) -> Row:
    """Return state, reason, judge, seconds to compile, and the nodes that ran in ONNX Runtime."""
    start, row = time.time(), Row()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = polydyn.compile(path, threads=1, options=options, cache=False)
        row["compile_s"] = round(time.time() - start, 1)
        row["left"] = sum(") runs in ONNX Runtime: " in n for n in program.manifest["notes"])
        results = [[np.array(found[n]) for n in names] for found in (program.run(c.feeds) for c in calls)]
    except (UnsupportedError, ShapeError, InputError) as e:
        return row | {"state": "refused", "why": f"{type(e).__name__}: {e}"[:400]}
    except Exception as e:  # the census records any failure
        return row | {"state": "internal error", "why": f"{type(e).__name__}: {e}"[:400]}
    return row | judge(results)


def imported(path: Path, fallback: bool) -> Row:
    """Import the model without compiling it; return state, reason, processor seconds, and nodes left to ONNX Runtime.
    """
    start, result = time.process_time(), Row()
    try:
        graph = import_parts(path, left=FallbackNodes() if fallback else None)
        result |= {"state": "read", "steps": len(graph.steps), "left": len(fallback_notes(graph))}
    except (UnsupportedError, ShapeError) as e:
        result |= {"state": "refused", "why": f"{type(e).__name__}: {e}"[:400]}
    except Exception as e:  # the census records any failure
        result |= {"state": "internal error", "why": f"{type(e).__name__}: {e}"[:400]}
    return result | {"import_s": round(time.process_time() - start, 1)}


def file_of(folder: Path, family: str, name: str) -> Path:
    """Return the path that a model is exported to."""
    return folder / f"{family}-{name}.onnx"


def examine(family: str, name: str, folder: Path, read: bool, fallback: bool) -> Row:
    """Examine one model. ``read``: only import it. ``fallback``: run it with fallback even if it is right without."""
    path, row = file_of(folder, family, name), Row(family=family, name=name)
    if not path.exists():
        try:
            export(family, name, path)
        except Exception as e:  # of many classes
            path.unlink(missing_ok=True)
            return row | {"state": "not exported", "why": f"{type(e).__name__}: {e}"[:300]}
    if read:
        row |= imported(path, False)
        return row if row["state"] == "read" else row | {"fallback": imported(path, True)}
    try:
        names, calls = expected(path)
    except Exception as e:  # of many classes
        return row | {"state": "ONNX Runtime refuses", "why": str(e)[:300]}
    if not calls:
        return row | {"state": "ONNX Runtime refuses", "why": "at every size"}
    row["nodes"], row["shapes"] = len(onnx.load(path, load_external_data=False).graph.node), len(calls)
    judge = functools.partial(judged, names, calls, load=functools.partial(in_float64, family, name))
    row |= compared(path, names, calls, polydyn.Options(), judge)
    if fallback or row["state"] != "right":
        row["fallback"] = compared(path, names, calls, polydyn.Options(fallback="onnxruntime"), judge)
    return row


def in_child(work: Callable[[], Row], limit: int) -> Row | None:
    """Return the result of ``work`` in a child process, or None if it died or took longer than ``limit`` seconds."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(limit)
        for stream in (1, 2):  # exporters print whole graphs
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        os.write(there, json.dumps(work()).encode())
        os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    row: Row | None = json.loads(data) if data else None
    return row


def rows(path: Path) -> dict[tuple[str, str], Row]:
    """Return the latest row of every model in a file."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(r["family"], r["name"]): r for r in lines}


def report(path: Path) -> None:
    """Print counts by family, then every model that is not right."""
    latest = rows(path)
    for family in FAMILIES:
        states = Counter(r["state"] for (f, _), r in latest.items() if f == family)
        print(f"{family:11} {dict(states)}")
    can = [r for r in latest.values() if r["state"] in RUNS]
    states = Counter(r["state"] for r in can)
    helped = Counter(r.get("fallback", r)["state"] for r in can)
    judges = Counter(r.get("judge", "ONNX Runtime") for r in can if r["state"] == "right")
    good = states["right"] + states["read"]
    print(f"{len(can)} models: {dict(states)}, {100 * good / max(len(can), 1):.1f} % right or read")
    print(f"with fallback: {dict(helped)}; right as judged by: {dict(judges)}")
    for r in latest.values():
        if r["state"] not in ("right", "read"):
            after = r.get("fallback", {})
            print(f"  {r['family']} {r['name']}: {r['state']}; {r.get('why', '')}")
            if after:
                print(
                    f"      with fallback: {after['state']}, {after.get('left', 0)} nodes left; {after.get('why', '')}"
                )


def models(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield family and name of the requested models, of all models if ``names`` is empty."""
    for family, listed in FAMILIES.items():
        yield from ((family, n) for n in listed.split() if not names or family in names or n in names)


def main() -> int:
    """Run the command line; return 1 if a model is wrong or has an internal error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=300, help="seconds per model")
    parser.add_argument("--again", action="store_true", help="also models that have a row")
    parser.add_argument("--read", action="store_true", help="only import the models")
    parser.add_argument("--fallback", action="store_true", help="use fallback also for models that are right without")
    parser.add_argument("--report", action="store_true", help="examine nothing")
    parser.add_argument("--keep", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_intermixed_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / ("read.jsonl" if args.read else "census.jsonl")
    done = {} if args.again else rows(file)
    left = [] if args.report else [m for m in models(args.names) if m not in done]
    if not all(file_of(args.folder, *m).exists() for m in left):
        import torch  # children inherit the import
        import transformers  # noqa: F401

        torch.set_num_threads(1)
        logging.disable(logging.ERROR)
    for family, name in left:
        start = time.time()
        work = functools.partial(examine, family, name, args.folder, args.read, args.fallback)
        row = in_child(work, args.limit)
        row = row or {"family": family, "name": name, "state": "over the limit", "why": f"{args.limit} s, or it died"}
        row |= {"seconds": round(time.time() - start, 1), "commit": record.commit()}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        path = file_of(args.folder, family, name)
        if path.exists() and path.stat().st_size > MAX_KEPT_BYTES:
            path.unlink()
    report(file)
    if args.keep:
        record.save("census", rows=list(rows(file).values()))
    bad = ("wrong", "internal error", "over the limit")
    return int(any(r["state"] in bad or r.get("fallback", r)["state"] in bad for r in rows(file).values()))


if __name__ == "__main__":
    sys.exit(main())
