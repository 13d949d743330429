"""Operators and short idioms one by one, beside ONNX Runtime: which are slow, and which are wrong.

usage: python -m benchmarks.single [--only WORD ...] [--type f32 ...] [--sample N] [--resume] [--seconds S] [--seed N]
                                 [--record] [--worst N]
       python -m benchmarks.single --show [--worst N]

Each case is a model of one operator or a short idiom (``benchmarks/single/``) whose sizes are symbols, compiled once
and called at two or three sizes. The first symbol is scaled until a call of ONNX Runtime takes 0.2 to 20 ms. Both run
on one thread in one process, on memory that is allocated before; calls alternate, medians of processor time are
compared, so a busy machine disturbs less. Results are compared with ONNX Runtime's.

``--only``: cases whose name has one of the words. ``--sample``: as many of them, drawn by the seed. ``--resume``: those
that the file lacks. ``--record``: results go to benchmarks/results/single.json instead of benchmarks/out/results; rows
of other cases are kept. ``--show``: print the table of the file. The table has the ``--worst`` rows by ratio, polydyn's
time over ONNX Runtime's.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.single import elementwise, moves, products, quantized, rows, windows
from benchmarks.single.case import DTYPES, Case
from benchmarks.single.measure import measured, prepare

SLOW = 2.0
KEPT_EVERY = 5
"""Cases after which the file is written: an interrupted run keeps its rows."""


def every() -> Iterator[Case]:
    """Yield all cases."""
    for module in (elementwise, moves, windows, rows, products, quantized):
        yield from module.every()


def selected(words: Sequence[str], types: Sequence[str]) -> list[Case]:
    """Return the cases whose name has one of the words, of one of the types; all without words or types."""
    kinds = {DTYPES[t] for t in types}
    return [c for c in every() if (not words or any(w in c.name for w in words)) and (not kinds or c.kind in kinds)]


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    sizes = ",".join(f"{n}={v}" for n, v in row.get("sizes", {}).items())
    if "refused" in row:
        return f"{row['case']:44} {sizes:28} {row['refused']}: {row['why']}"
    times = f"{1e3 * row['polydyn']:9.3f} {1e3 * row['onnxruntime']:9.3f} {row['ratio']:8.2f}"
    return f"{row['case']:44} {sizes:28} {times}  {row['wrong'] and 'DIFFERS ' + row['wrong']}"


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Return counts and the geometric mean of the ratios."""
    timed = [r for r in found if "ratio" in r]
    if not timed:
        return "nothing was timed"
    mean = math.exp(sum(math.log(r["ratio"]) for r in timed) / len(timed))
    above = sum(r["ratio"] > SLOW for r in timed)
    by = {who: sum(r.get("refused") == who for r in found) for who in ("polydyn", "onnxruntime", "crash")}
    return (
        f"{len({r['case'] for r in timed})} cases, {len(timed)} rows: {above} above {SLOW:g} times ONNX Runtime, "
        f"{sum(r['ratio'] > 1 for r in timed)} above 1; geometric mean {mean:.3f}; "
        f"{sum(bool(r['wrong']) for r in timed)} differ; not run by polydyn {by['polydyn']}, "
        f"by ONNX Runtime {by['onnxruntime']}, crashed {by['crash']}"
    )


def table(found: Sequence[dict[str, Any]], worst: int) -> str:
    """Return the rows with the largest ratios, then what differs or does not run, then the summary."""
    timed = sorted((r for r in found if "ratio" in r), key=lambda r: -r["ratio"])
    other = [r for r in found if r.get("wrong") or r.get("refused") in ("polydyn", "crash")]
    head = f"{'case':44} {'sizes':28} {'polydyn':>9} {'ORT, ms':>9} {'ratio':>8}"
    return "\n".join([head, *map(line, timed[:worst]), *(["", *map(line, other)] if other else []), "", summary(found)])


def merged(folder: Path, found: Sequence[dict[str, Any]]) -> Path:
    """Write the rows in place of earlier ones of the same cases, keep all others, and return the file's path."""
    new = {r["case"] for r in found}
    return record.save("single", folder=folder, rows=[*(r for r in rows_of(folder) if r["case"] not in new), *found])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the file, none if there is no file."""
    path = folder / "single.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--type", nargs="+", default=[], choices=tuple(DTYPES))
    parser.add_argument("--sample", type=int, default=0, metavar="N")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.25, help="processor seconds a row, about (0.25)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--worst", type=int, default=60, help="rows of the table (60)")
    args = parser.parse_args()
    folder = record.RESULTS if args.record or args.show else record.SCRATCH
    chosen = [] if args.show else selected(args.only, args.type)
    kept = {r["case"] for r in rows_of(folder)} if args.resume else set()
    chosen = [c for c in chosen if c.name not in kept]
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    found: list[dict[str, Any]] = []
    if chosen:
        prepare()
    for k, case in enumerate(chosen, 1):
        about = {"case": case.name, "commit": record.commit(), "seed": args.seed}
        part = [about | r for r in measured(case, args.seconds, args.seed)]
        found += part
        print("\n".join(map(line, part)), flush=True)
        if k % KEPT_EVERY == 0 or k == len(chosen):
            path = merged(folder, found)
    print("\n" + table(found if chosen else rows_of(folder), args.worst))
    if chosen:
        print(f"written: benchmarks/{path.relative_to(record.RESULTS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
