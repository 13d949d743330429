"""The gain of ``polydyn tune`` for whole models: with records and without, at the tuned sizes and at others.

usage: python -m benchmarks.tuned MODEL.onnx ... [--targets cpu] [--threads 1] [--trials 64] [--shapes H=224,W=224 ...]
       [--records FOLDER] [--processor] [--no-measure]

The model is tuned for every second one of its stored shapes (polydyn/testing/inputs.py) or of ``--shapes``, and
not for the other sizes. Records begin empty, or with the model's records in ``--records FOLDER``, so that an
interrupted run resumes. Both programs alternate in this process, one call at a time, and medians over all calls are
compared; with ``--processor`` the least processor time of the calling thread, for one thread on a busy machine.
``--no-measure`` only tunes. Above 1 tuning gains. Results go to benchmarks/results/tuned.json, by model, target and
number of threads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import onnx

import polydyn
from benchmarks import record
from benchmarks.halves import times
from polydyn.cli.parsing import sizes
from polydyn.search.backbone import Tile
from polydyn.search.outcomes import KIND, MIN_GAIN
from polydyn.search.records import Records
from polydyn.testing.inputs import feeds, shapes

NAME = "tuned"


def measure(path: str, target: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Tune a model, and measure its row unless it is only tuned."""
    model, points = onnx.load(path), args.shapes or shapes(Path(path).stem)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() if args.records is None else nullcontext(args.records) as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        records = Path(folder) / f"{Path(path).stem}_{target.replace(':', '_')}.db"
        groups = polydyn.tune(
            path, records, target=target, threads=args.threads, trials=args.trials, seen=[(s, 1) for s in points[::2]]
        )
        seconds, rows_chosen = time.perf_counter() - start, chosen_rows(records)
        print(f"{Path(path).stem} on {target}: {len(groups)} groups tuned in {seconds:.0f} s", flush=True)
        if args.no_measure:
            return None
        programs = {
            name: polydyn.compile(path, target=target, threads=args.threads, records=r)
            for name, r in (("default", None), ("tuned", records))
        }
    rows = []
    for number, shape in enumerate(points):
        inputs = feeds(model, shape)
        runs = {n: partial(p.run, inputs) for n, p in programs.items()}
        ms = (least_processor_ms if args.processor else medians)(runs, args.rounds)
        ratio = ms["default"] / ms["tuned"]
        rows.append({"shape": shape, "told": number % 2 == 0, "ms": ms, "ratio": ratio})
        print(
            f"  {shape}{'' if number % 2 else ' (tuned for)'}: {ms['default']:.2f} -> {ms['tuned']:.2f} ms, {ratio:.3f}"
        )
    gains = [g.gain for g in groups if g.gain is not None]
    return {
        "model": Path(path).stem, "machine": record.machine(), "target": target, "threads": args.threads,
        "trials": args.trials, "clock": "least processor time" if args.processor else "median",
        "tuning_s": seconds, "groups": len(groups), "rows_chosen": rows_chosen,
        "not_tuned": sum(bool(g.declined) for g in groups),
        "default_kept": sum(x < MIN_GAIN for x in gains), "gains": gains, "rows": rows,
        "told": _mean([r["ratio"] for r in rows if r["told"]]),
        "others": _mean([r["ratio"] for r in rows if not r["told"]]),
    }  # fmt: skip


def chosen_rows(records: Path) -> dict[str, int]:
    """Return in how many groups a search kept a tile of each row other than the one whose tiles are searched."""
    with Records.open(records, readonly=True) as opened:
        notes = [json.loads(r.note) for r in opened.rows(kind=KIND)]
    kept = [{Tile(tuple((n, v) for n, v in c)).row for c, _ in note["tiles"]} for note in notes]
    return dict(sorted(Counter(row for rows in kept for row in rows if row).items()))


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the medians of alternating runs in milliseconds."""
    return {name: median for name, (median, _) in times(runs, rounds).items()}


def least_processor_ms(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the least processor time of the calling thread in milliseconds; the runs alternate, after one each."""
    least = dict.fromkeys(runs, math.inf)
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.thread_time_ns()
            run()
            least[name] = min(least[name], (time.thread_time_ns() - start) / 1e6)
    return least


def _mean(ratios: list[float]) -> float | None:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--targets", nargs="+", default=["cpu"])
    parser.add_argument("--shapes", nargs="+", type=sizes, default=[])
    parser.add_argument("--records", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processor", action="store_true")
    parser.add_argument("--no-measure", action="store_true")
    args = parser.parse_args()
    stored = record.RESULTS / f"{NAME}.json"
    before = json.loads(stored.read_text()) if stored.exists() else {"models": []}
    known = [{"machine": before["machine"], **r} for r in before["models"]]  # rows may be of several machines
    for model in args.models:
        for target in args.targets:
            row = measure(model, target, args)
            if row is None:
                continue
            same = ("model", "target", "threads")
            known = [*(r for r in known if any(r[n] != row[n] for n in same)), row]
            print({n: row[n] for n in (*same, "tuning_s", "groups", "default_kept", "told", "others")})
            record.save(NAME, models=known)


if __name__ == "__main__":
    main()
