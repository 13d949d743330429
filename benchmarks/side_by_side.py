"""Times polydyn beside ONNX Runtime on any exported model, by benchmarks/protocol.py.

usage: python benchmarks/models.py MODEL.onnx [B=1,L=8 B=4,L=61 ...] [--threads N] [--rounds N] [--rival-only]

Without shapes, the stored ones of the model are used (benchmarks/models/inputs.py). ONNX Runtime runs with its
spinning pool and without on two or more threads, and the faster counts. Per shape: milliseconds of both, their ratio
(above 1: polydyn is faster), what an A/A run differs by, the verdict, the machine's bound for the shape, and the share
of the rival's gap to that bound which is closed. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import record
from benchmarks.bound import bound
from benchmarks.limits import Limits, measure
from benchmarks.models.inputs import Shape, shapes
from benchmarks.protocol import Contestant, spread, take_turns, verdict


def parse_shape(text: str) -> Shape:
    """``B=1,L=8`` as a mapping."""
    pairs = (item.partition("=") for item in text.split(","))
    return {symbol.strip(): int(size) for symbol, _, size in pairs}


def compare(players: Sequence[Contestant], path: str, shape: Shape, rounds: int, limits: Limits) -> dict[str, Any]:
    """One row: medians, spread, ratio, verdict, bound. polydyn, if it plays, is the last player."""
    noise = spread(players[0], shape, rounds, players)
    series = take_turns(players, shape, rounds)
    medians = {p.kind: s.median for p, s in zip(players, series, strict=True)}
    least = bound(path, shape, limits)
    row = {"shape": dict(shape), "seconds": medians, "spread": noise, "bound": least}
    if "polydyn" in medians:
        rival = min(t for kind, t in medians.items() if kind != "polydyn")
        ours = medians["polydyn"]
        row |= {"ratio": rival / ours, "verdict": verdict(rival / ours, noise)}
        row |= {"gap_closed": (rival - ours) / (rival - least) if rival > least else None}
    return row


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The rows for people."""
    out = Table(title=title)
    kinds = list(rows[0]["seconds"])
    for heading in ("shape", *(f"{k} ms" for k in kinds), "ratio", "spread", "verdict", "bound ms", "gap closed"):
        out.add_column(heading, justify="left" if heading in ("shape", "verdict") else "right")
    for r in rows:
        gap = r.get("gap_closed")
        out.add_row(
            ",".join(f"{k}={v}" for k, v in r["shape"].items()),
            *(f"{r['seconds'][k] * 1e3:.3f}" for k in kinds),
            f"{r['ratio']:.2f}" if "ratio" in r else "-",
            f"{r['spread']:.1%}",
            r.get("verdict", "-"),
            f"{r['bound'] * 1e3:.3f}",
            f"{gap:.0%}" if gap is not None else "-",
        )
    return out


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("shapes", nargs="*", type=parse_shape)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rival-only", action="store_true")
    args = parser.parse_args()
    name = Path(args.model).stem
    try:
        wanted = args.shapes or shapes(name)
    except KeyError as error:
        parser.error(f"{error.args[0]}; give shapes, as in B=1,L=8")

    kinds = ["onnxruntime"] if args.threads == 1 else ["onnxruntime", "onnxruntime-nospin"]
    kinds += [] if args.rival_only else ["polydyn"]
    with contextlib.ExitStack() as stack:
        try:
            players = [stack.enter_context(Contestant(kind, args.model, args.threads)) for kind in kinds]
        except RuntimeError as problem:
            raise SystemExit(str(problem)) from None
        limits = measure(args.threads)
        rows = [compare(players, args.model, shape, args.rounds, limits) for shape in wanted]
        load = {p.kind: p.seconds_to_load for p in players}
    title = f"{name}, {args.threads} threads; peak {limits.flops / 1e9:.0f} GFLOP/s, {limits.bandwidth / 1e9:.1f} GB/s"
    Console(width=120).print(table(rows, title))
    print("seconds to load or compile:", ", ".join(f"{k} {v:.2f}" for k, v in load.items()))
    suffix = "_rival" if args.rival_only else ""
    fields = {"model": name, "threads": args.threads, "rounds": args.rounds, "seconds_to_load": load, "rows": rows}
    limits_found = {"gflops": limits.flops / 1e9, "gbytes_per_second": limits.bandwidth / 1e9}
    path = record.save(f"models_{name}_{args.threads}t{suffix}", **fields, limits=limits_found)
    print(f"written: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
