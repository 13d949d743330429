"""A census of architectures: what polydyn makes of models that people have, beside ONNX Runtime.

usage: python -m benchmarks.census FOLDER [NAME or FAMILY ...] [--limit 300] [--again] [--read] [--report] [--keep]

Each model of ``benchmarks/models/architectures.py`` is exported with random weights and dynamic sizes, compiled, and
compared with ONNX Runtime at four shapes; then again with ``Options(fallback="onnxruntime")`` where it is not right.
Every model runs in a process of its own, one after another, with a time limit. FOLDER/census.jsonl gets a line for
each, with its commit; what is there already is not done again, without ``--again``. ``--report`` prints the table
alone, ``--keep`` also writes it to benchmarks/results/census.json. ``--read`` only imports the models, without and with
fallback, into FOLDER/read.jsonl: what is refused shows in seconds.

The states: *right*; *refused* (by name: an UnsupportedError, or a ShapeError or InputError about sizes); *wrong*;
*internal error* (anything else that polydyn raises); *over the limit*. What ONNX Runtime does not run does not count.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import polydyn
from benchmarks import record
from benchmarks.models.architectures import FAMILIES, SIZES, export
from polydyn.errors import InputError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_parts
from polydyn.graph.fallback import fallback_notes

TOLERANCE = 2e-4
"""Largest error of a finite result, over the largest value of ONNX Runtime's."""
KEPT = 40 << 20
"""Bytes of an exported file that stays in the folder, so that it need not be exported again."""
RUNS = ("right", "read", "refused", "wrong", "internal error", "over the limit")
Feeds = Mapping[str, Any]


def feeds_of(session: Any, sizes: Mapping[str, int]) -> Feeds:
    """Seeded inputs at these sizes; masks are ones."""
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


def expected(path: Path) -> tuple[list[str], list[tuple[Mapping[str, int], Feeds, list[Any]]]]:
    """Names of the outputs, and ONNX Runtime's results at the sizes that it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = list[tuple[Mapping[str, int], Feeds, list[Any]]]()
    for sizes in SIZES:
        feeds = feeds_of(session, sizes)
        try:
            found.append((sizes, feeds, session.run(None, feeds)))
        except Exception:  # of many classes: a size that the model does not have
            continue
    return [o.name for o in session.get_outputs()], found


def difference(name: str, got: Any, want: Any) -> str:
    """What is wrong with a result; empty when nothing is."""
    got = np.asarray(got)
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{name} is {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return f"{name} has {np.count_nonzero(finite != np.isfinite(a))} elements that only one finds finite"
    error = np.abs(a - b)[finite].max(initial=0.0) / max(np.abs(b)[finite].max(initial=0.0), 1e-9)
    return f"{name} is off by {error:.2g} of the largest value" if error > TOLERANCE else ""


def compared(path: Path, outputs: list[str], references: list[Any], options: polydyn.Options) -> dict[str, Any]:
    """State, reason, seconds to compile, and nodes that were left to ONNX Runtime."""
    start, result = time.time(), dict[str, Any]()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = polydyn.compile(path, threads=1, options=options)
        result["compile_s"] = round(time.time() - start, 1)
        result["left"] = sum(") runs in ONNX Runtime: " in n for n in program.manifest["notes"])
        for sizes, feeds, wants in references:
            got = program.run(feeds)
            for name, want in zip(outputs, wants, strict=True):
                if why := difference(name, got[name], want):
                    return result | {"state": "wrong", "why": f"{sizes}: {why}"}
    except (UnsupportedError, ShapeError, InputError) as e:
        return result | {"state": "refused", "why": f"{type(e).__name__}: {e}"[:400]}
    except Exception as e:  # what the census looks for
        return result | {"state": "internal error", "why": f"{type(e).__name__}: {e}"[:400]}
    return result | {"state": "right"}


def imported(path: Path, fallback: bool) -> dict[str, Any]:
    """State, reason, processor seconds, and nodes that are left to ONNX Runtime; compiles nothing."""
    start, result = time.process_time(), dict[str, Any]()
    try:
        graph = import_parts(path, fallback=fallback)
        result |= {"state": "read", "steps": len(graph.steps), "left": len(fallback_notes(graph))}
    except (UnsupportedError, ShapeError) as e:
        result |= {"state": "refused", "why": f"{type(e).__name__}: {e}"[:400]}
    except Exception as e:  # what the census looks for
        result |= {"state": "internal error", "why": f"{type(e).__name__}: {e}"[:400]}
    return result | {"import_s": round(time.process_time() - start, 1)}


def examine(family: str, name: str, folder: Path, read: bool) -> dict[str, Any]:
    """Everything about one model; ``read``: what its import says."""
    path, row = folder / f"{name}.onnx", dict[str, Any](family=family, name=name)
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
        outputs, references = expected(path)
    except Exception as e:  # of many classes
        return row | {"state": "ONNX Runtime refuses", "why": str(e)[:300]}
    if not references:
        return row | {"state": "ONNX Runtime refuses", "why": "at every size"}
    row["nodes"], row["shapes"] = len(onnx.load(path, load_external_data=False).graph.node), len(references)
    row |= compared(path, outputs, references, polydyn.Options())
    if row["state"] != "right":
        row["fallback"] = compared(path, outputs, references, polydyn.Options(fallback="onnxruntime"))
    return row


def in_child(work: Callable[[], dict[str, Any]], limit: int) -> dict[str, Any] | None:
    """What ``work`` gives in a process of its own; None when it died or took longer than ``limit`` seconds."""
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
    row: dict[str, Any] | None = json.loads(data) if data else None
    return row


def rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The latest row of every model in a file."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {(r["family"], r["name"]): r for r in lines}


def report(path: Path) -> None:
    """Counts by family, then every model that is not right."""
    found = rows(path)
    for family in FAMILIES:
        states = Counter(r["state"] for (f, _), r in found.items() if f == family)
        print(f"{family:11} {dict(states)}")
    can = [r for r in found.values() if r["state"] in RUNS]
    states = Counter(r["state"] for r in can)
    helped = Counter(r.get("fallback", r)["state"] for r in can)
    good = states["right"] + states["read"]
    print(f"{len(can)} models: {dict(states)}, {100 * good / max(len(can), 1):.1f} % right or read")
    print(f"with fallback: {dict(helped)}")
    for r in found.values():
        if r["state"] not in ("right", "read"):
            after = r.get("fallback", {})
            print(f"  {r['family']} {r['name']}: {r['state']}; {r.get('why', '')}")
            if after:
                print(
                    f"      with fallback: {after['state']}, {after.get('left', 0)} nodes left; {after.get('why', '')}"
                )


def models(names: list[str]) -> Iterator[tuple[str, str]]:
    """Family and name of those that are asked for; all without any."""
    for family, listed in FAMILIES.items():
        yield from ((family, n) for n in listed.split() if not names or family in names or n in names)


def main() -> int:
    """The command line; 1 when something is wrong or an internal error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=300, help="seconds for a model")
    parser.add_argument("--again", action="store_true", help="also what has a row already")
    parser.add_argument("--read", action="store_true", help="only import the models")
    parser.add_argument("--report", action="store_true", help="examine nothing")
    parser.add_argument("--keep", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_intermixed_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file = args.folder / ("read.jsonl" if args.read else "census.jsonl")
    done = {} if args.again else rows(file)
    left = [] if args.report else [m for m in models(args.names) if m not in done]
    if any(not (args.folder / f"{name}.onnx").exists() for _, name in left):
        import torch  # children have it from here
        import transformers  # noqa: F401

        torch.set_num_threads(1)
        logging.disable(logging.ERROR)
    for family, name in left:
        start = time.time()
        row = in_child(lambda f=family, n=name: examine(f, n, args.folder, args.read), args.limit)  # type: ignore[misc]
        row = row or {"family": family, "name": name, "state": "over the limit", "why": f"{args.limit} s, or it died"}
        row |= {"seconds": round(time.time() - start, 1), "commit": record.commit()}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        path = args.folder / f"{name}.onnx"
        if path.exists() and path.stat().st_size > KEPT:
            path.unlink()
    report(file)
    if args.keep:
        record.save("census", rows=list(rows(file).values()))
    bad = ("wrong", "internal error", "over the limit")
    return int(any(r["state"] in bad or r.get("fallback", r)["state"] in bad for r in rows(file).values()))


if __name__ == "__main__":
    sys.exit(main())
