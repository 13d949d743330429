"""One row per case: everybody's median, the spread, the ratio, the limit, the share of the gap closed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.limits import Limits
from benchmarks.protocol import Contestant, spread, take_turns, verdict

Row = dict[str, Any]
Shape = Mapping[str, int]
TOLERANCE = 1e-3
"""Allowed difference between contestants' outputs, relative to their scale: it finds wrong ones, not rounding."""


class Field(contextlib.ExitStack):
    """The contestants of a benchmark, each in its process for all of it, loaded with one model after another."""

    def __init__(self, kinds: Mapping[str, str] | Sequence[str], threads: int) -> None:
        """``kinds``: contestants of ``benchmarks.rivals.KINDS``, or names for the table -> kinds."""
        super().__init__()
        named = kinds if isinstance(kinds, Mapping) else {k: k for k in kinds}
        self.all = {name: self.enter_context(Contestant(kind, None, threads)) for name, kind in named.items()}
        self.players: dict[str, Contestant] = {}
        """Those that hold the current model."""
        self.refusals: dict[str, str] = {}

    def load(self, path: Path, others: Mapping[str, Path | None] | None = None) -> None:
        """Loads everybody with ``path``; ``others``: with another file, or not at all. Refusals are kept, by name."""
        paths = dict.fromkeys(self.all, path) | dict(others or {})
        self.players, self.refusals = {}, {}
        for name, contestant in self.all.items():
            if (file := paths[name]) is None:
                continue
            try:
                contestant.load(file)
                self.players[name] = contestant
            except RuntimeError as refusal:
                self.refusals[name] = str(refusal)

    def measure(self, shape: Shape, rounds: int, least: float, flops: float = 0) -> Row:
        """One row. ``least``: the case's limit in seconds. RuntimeError when a call fails."""
        players = list(self.players.values())
        noise = spread(players[0], shape, rounds, players)
        series = take_turns(players, shape, rounds)
        seconds = {name: s.median for name, s in zip(self.players, series, strict=True)}
        row = judge(seconds, noise, least) | {"shape": dict(shape), "flops": flops}
        return row | {"refused": self.refusals, "differ": self._differ(shape)}

    def _differ(self, shape: Shape) -> list[str]:
        """Whose output is not the first player's (ONNX Runtime's)."""
        samples = {name: p.sample(shape) for name, p in self.players.items()}
        expected, *_ = samples.values()
        scale = max(map(abs, expected), default=0.0) or 1.0

        def far(got: Sequence[float]) -> bool:
            apart = [abs(a - b) for a, b in zip(got, expected, strict=False)]
            return len(got) != len(expected) or not all(d <= TOLERANCE * scale for d in apart)

        return [name for name, got in samples.items() if far(got)]


def judge(seconds: Mapping[str, float], noise: float, least: float) -> Row:
    """Ratios above 1: polydyn is faster. ``gap_closed`` is against ONNX Runtime, None where that is at the limit."""
    row: Row = {"seconds": dict(seconds), "spread": noise, "bound": least}
    rivals = {k: t for k, t in seconds.items() if k != "polydyn"}
    if "polydyn" not in seconds or not rivals:
        return row
    ours, best = seconds["polydyn"], min(rivals.values())
    primary = min((t for k, t in rivals.items() if k.startswith("onnxruntime")), default=best)
    row |= {"ratio": primary / ours, "verdict": verdict(primary / ours, noise), "to_best": best / ours}
    row["gap_closed"] = (primary - ours) / (primary - least) if primary > least else None
    return row


def clipped(rows: Sequence[Row]) -> float:
    """The mean share of the gap closed, each case clipped to [-1, 1]."""
    gaps = [max(-1.0, min(1.0, r["gap_closed"])) for r in rows if r.get("gap_closed") is not None]
    return statistics.fmean(gaps) if gaps else math.nan


def geomean(rows: Sequence[Row], rival: str | None = None) -> float:
    """The geometric mean of rival's time over ours, over the cases that have both; default the row's ``ratio``."""

    def ratio(row: Row) -> float | None:
        if rival is None:
            return row.get("ratio")
        times = row["seconds"]
        return times[rival] / times["polydyn"] if {rival, "polydyn"} <= set(times) else None

    logs = [math.log(x) for x in map(ratio, rows) if x is not None]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def name_shape(shape: Shape) -> str:
    """``B=1,L=8``."""
    return ",".join(f"{k}={v}" for k, v in shape.items())


def show(rows: Sequence[Row], title: str, limits: Limits) -> None:
    """Prints the rows as a table for people."""
    names = list(dict.fromkeys(n for r in rows for n in r["seconds"]))
    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda r: r["case"],
        "shape": lambda r: name_shape(r["shape"]),
        **{f"{n} us": lambda r, n=n: f"{r['seconds'][n] * 1e6:.4g}" for n in names},
        "ratio": lambda r: f"{r['ratio']:.2f}",
        "to best": lambda r: f"{r['to_best']:.2f}",
        "spread": lambda r: f"{r['spread']:.1%}",
        "verdict": lambda r: r["verdict"] + (" DIFFERS" if r["differ"] else ""),
        "GFLOP/s": lambda r: f"{_rate(r):.1f}",
        "of peak": lambda r: f"{_rate(r) * 1e9 / limits.flops:.0%}",
        "limit us": lambda r: f"{r['bound'] * 1e6:.4g}",
        "gap closed": lambda r: f"{r['gap_closed']:.0%}",
    }
    table = Table(title=title)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("case", "shape", "verdict") else "right")
    for row in rows:
        table.add_row(*(_cell(row, text) for text in columns.values()))
    Console(width=190).print(table)


def _rate(row: Row) -> float:
    if not row["flops"]:
        raise KeyError("nothing but moves")
    rate: float = row["flops"] / row["seconds"]["polydyn"] / 1e9
    return rate


def _cell(row: Row, text: Callable[[Row], str]) -> str:
    try:
        return text(row)
    except (KeyError, TypeError):  # somebody refused, or there is no gap
        return "-"


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures over all cases: geometric means by rival, the clipped gap, the worst case against the best rival."""
    rivals = list(dict.fromkeys(n for r in rows for n in r["seconds"] if n != "polydyn"))
    worst = min((r for r in rows if "to_best" in r), key=lambda r: r["to_best"], default=None)
    return {
        "cases": len(rows),
        "geomean": {"best onnxruntime": geomean(rows), **{n: geomean(rows, n) for n in rivals}},
        "gap_closed": clipped(rows),
        "worst_to_best": None if worst is None else {k: worst[k] for k in ("case", "shape", "to_best")},
        "slower_than_0.9": sum(r.get("to_best", 1) < 0.9 for r in rows),
        "below_limit": sum(min(r["seconds"].values()) < r["bound"] for r in rows),
        "differ": [f"{r['case']} {name_shape(r['shape'])}: {', '.join(r['differ'])}" for r in rows if r["differ"]],
        "refused": sorted({text for r in rows for text in r["refused"].values()}),
    }


def show_summary(found: Mapping[str, Any]) -> None:
    """Prints what ``summary`` found."""
    means = ", ".join(f"{x:.3f}x {n}" for n, x in found["geomean"].items())
    print(f"{found['cases']} cases; geomean {means}; gap to the limit closed {found['gap_closed']:.2f} (clipped mean)")
    if worst := found["worst_to_best"]:
        print(
            f"worst against the best rival: {worst['to_best']:.2f} at {worst['case']} {name_shape(worst['shape'])}; "
            f"{found['slower_than_0.9']} below 0.9"
        )
    if found["below_limit"]:
        print(f"{found['below_limit']} beat the limit: data in a larger cache, or the limits were measured while busy")
    for text in (*found["differ"], *found["refused"]):
        print("  " + text)
