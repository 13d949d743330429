"""One row per case: the median of every contestant, the spread, the ratio, the limit, the share of the gap closed."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.protocol import Contestant, Series, rounds_for, spread, take_turns, verdict, warm_up

Row = dict[str, Any]
Shape = Mapping[str, int]
TOLERANCE = 1e-3
"""Allowed difference between contestants' outputs, relative to their scale: it finds wrong outputs, not rounding."""


@dataclass(frozen=True)
class Effort:
    """Limits for measuring a case: at most ``rounds`` rounds and about ``seconds`` seconds, but at least three rounds.
    """

    rounds: int
    seconds: float


@dataclass(frozen=True)
class Turns:
    """The turns of the contestants that take a shape, the spread of an A/A run of the first, reasons of the others."""

    series: Mapping[str, Series]
    noise: float
    rounds: int
    refused: Mapping[str, str]


def alternate(players: Mapping[str, Contestant], shape: Shape, effort: Effort) -> Turns:
    """Warm all players up at a shape, run the first against itself, then let all of them alternate."""
    calls: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, player in players.items():
        try:
            calls[name] = warm_up(player, shape)
        except RuntimeError as refusal:
            refused[name] = str(refusal)
    if not calls:
        return Turns({}, 0.0, 0, refused)
    able, once = [players[n] for n in calls], list(calls.values())
    rounds = rounds_for(effort.seconds, once, effort.rounds)
    noise = spread(*take_turns([able[0]] * 2, [once[0]] * 2, shape, rounds, able))
    series = take_turns(able, once, shape, rounds)
    return Turns(dict(zip(calls, series, strict=True)), noise, rounds, refused)


class Field(contextlib.ExitStack):
    """The contestants of a benchmark, each in its own process throughout, loaded with one model after another."""

    def __init__(self, kinds: Mapping[str, str] | Sequence[str], threads: int, tolerance: float = TOLERANCE) -> None:
        """Start the contestants. ``kinds``: names of ``benchmarks.rivals.KINDS``, or a mapping from table names to
        kinds.

        ``tolerance``: allowed difference between outputs, relative to their scale.
        """
        super().__init__()
        self.tolerance = tolerance
        named = kinds if isinstance(kinds, Mapping) else {k: k for k in kinds}
        self.all = {name: self.enter_context(Contestant(kind, None, threads)) for name, kind in named.items()}
        self.players: dict[str, Contestant] = {}
        """The contestants that have loaded the current model."""
        self.refusals: dict[str, str] = {}

    def load(self, path: Path, replacements: Mapping[str, Path | None] | None = None) -> None:
        """Load ``path`` into every contestant; ``replacements``: other files, or None to skip one.

        Rejections are kept by name.
        """
        paths = dict.fromkeys(self.all, path) | dict(replacements or {})
        self.players, self.refusals = {}, {}
        for name, contestant in self.all.items():
            if (file := paths[name]) is None:
                continue
            try:
                contestant.load(file)
                self.players[name] = contestant
            except RuntimeError as refusal:
                self.refusals[name] = str(refusal)

    def measure(self, shape: Shape, effort: Effort, least: float, flops: float = 0) -> Row:
        """Measure one row.

        ``least``: the case's limit in seconds. Contestants that reject the shape are omitted and named.
        """
        turns = alternate(self.players, shape, effort)
        about = {"shape": dict(shape), "flops": flops, "refused": self.refusals | turns.refused}
        if not turns.series:
            return judge({}, 0.0, least) | about | {"rounds": 0, "differ": []}
        seconds = {name: s.median for name, s in turns.series.items()}
        differ = self._differ(shape, list(seconds))
        return judge(seconds, turns.noise, least) | about | {"rounds": turns.rounds, "differ": differ}

    def about(self) -> dict[str, Any]:
        """Return seconds to load the current model, versions of the contestants, and their reasons for rejection."""
        return {
            "seconds_to_load": {n: p.seconds_to_load for n, p in self.players.items()},
            "players": {n: p.version for n, p in self.players.items()},
            "refusals": self.refusals,
        }

    def _differ(self, shape: Shape, names: Sequence[str]) -> list[str]:
        """Return the players whose output differs from the first player's (ONNX Runtime's)."""
        samples = {name: self.players[name].sample(shape) for name in names}
        expected, *_ = samples.values()
        scale = max(map(abs, expected), default=0.0) or 1.0

        def far(got: Sequence[float]) -> bool:
            apart = [abs(a - b) for a, b in zip(got, expected, strict=False)]
            return len(got) != len(expected) or not all(d <= self.tolerance * scale for d in apart)

        return [name for name, got in samples.items() if far(got)]


def judge(seconds: Mapping[str, float], noise: float, least: float) -> Row:
    """Return the ratios; above 1 polydyn is faster.

    ``gap_closed`` compares with ONNX Runtime; None if that is at the limit.
    """
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
    """Return the mean share of the gap closed, each case clipped to [-1, 1]."""
    gaps = [max(-1.0, min(1.0, r["gap_closed"])) for r in rows if r.get("gap_closed") is not None]
    return statistics.fmean(gaps) if gaps else math.nan


def geomean(rows: Sequence[Row], rival: str | None = None) -> float:
    """Return the geometric mean of a baseline's time over ours, over the cases that have both; default: ``ratio``."""

    def ratio(row: Row) -> float | None:
        if rival is None:
            return row.get("ratio")
        return times_ours(row, rival) if {rival, "polydyn"} <= set(row["seconds"]) else None

    logs = [math.log(x) for x in map(ratio, rows) if x is not None]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def name_shape(shape: Shape) -> str:
    """Format a shape, such as ``B=1,L=8``."""
    return ",".join(f"{k}={v}" for k, v in shape.items())


def progress(row: Row) -> None:
    """Print one line as soon as a case is measured."""
    ours = row["seconds"].get("polydyn")
    time = f"{ours * 1e3:.4g} ms" if ours else "refused"
    ratio = f", ratio {row['ratio']:.2f}, {row['rounds']} rounds" if "ratio" in row else ""
    print(f"  {row['case']} {name_shape(row['shape'])} {time}{ratio}", flush=True)


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table; baselines by their time over polydyn's, ONNX Runtime by its best form."""
    rivals = [n for n in names(rows) if n != "polydyn" and not n.startswith("onnxruntime")]
    unit, scale = ("ms", 1e3) if statistics.median(r["bound"] for r in rows) > 1e-3 else ("us", 1e6)
    columns: dict[str, Callable[[Row], str]] = {
        "case": lambda r: r["case"],
        "shape": lambda r: name_shape(r["shape"]),
        f"polydyn {unit}": lambda r: f"{r['seconds']['polydyn'] * scale:.4g}",
        "x ORT": lambda r: f"{r['ratio']:.2f}",
        "spread": lambda r: f"{r['spread']:.1%}",
        "verdict": lambda r: r["verdict"] + (" DIFFERS" if r["differ"] else ""),
        f"limit {unit}": lambda r: f"{r['bound'] * scale:.4g}",
        "of limit": lambda r: f"{r['bound'] / r['seconds']['polydyn']:.0%}",
        "gap closed": lambda r: f"{r['gap_closed']:.0%}",
        **{f"x {n}": lambda r, n=n: f"{times_ours(r, n):.2f}" for n in rivals},
        "GFLOP/s": lambda r: f"{r['flops'] / r['seconds']['polydyn'] / 1e9:.1f}" if r["flops"] else "-",
    }
    table = Table(title=title)
    for heading in columns:
        table.add_column(heading, justify="left" if heading in ("case", "shape", "verdict") else "right")
    for row in rows:
        table.add_row(*(_cell(row, text) for text in columns.values()))
    Console(width=190).print(table)


def names(rows: Sequence[Row]) -> list[str]:
    """Return all players in order."""
    return list(dict.fromkeys(n for r in rows for n in r["seconds"]))


def times_ours(row: Row, rival: str) -> float:
    """Return a baseline's time over polydyn's. KeyError: one of them did not play."""
    seconds: Mapping[str, float] = row["seconds"]
    return seconds[rival] / seconds["polydyn"]


def _cell(row: Row, text: Callable[[Row], str]) -> str:
    try:
        return text(row)
    except (KeyError, TypeError):  # a contestant rejected the case, or there is no gap
        return "-"


WORST = 5
"""Number of worst cases that a summary names."""


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise all cases: geometric means by baseline, shares of the limit, the clipped gap, the worst cases."""
    rivals = [n for n in names(rows) if n != "polydyn"]
    shares = [r["bound"] / r["seconds"]["polydyn"] for r in rows if "polydyn" in r["seconds"] and r["bound"]]
    return {
        "cases": len(rows),
        "geomean": {"best onnxruntime": geomean(rows), **{n: geomean(rows, n) for n in rivals}},
        "gap_closed": clipped(rows),
        "of_limit": _mean_and_least(shares),
        "of_peak": _mean_and_least([r["of_peak"] for r in rows if "of_peak" in r]),
        "slower": [_named(r, "ratio") for r in rows if r.get("verdict") == "slower" and r["ratio"] < 0.97],
        "worst": [_named(r, "ratio") for r in _worst(rows, "ratio")],
        "worst_to_best": [_named(r, "to_best") for r in _worst(rows, "to_best")],
        "below_0.9_of_best": sum(r.get("to_best", 1) < 0.9 for r in rows),
        "below_limit": sum(min(r["seconds"].values(), default=math.inf) < r["bound"] for r in rows),
        "differ": [f"{r['case']} {name_shape(r['shape'])}: {', '.join(r['differ'])}" for r in rows if r["differ"]],
        "refused": sorted({f"{r['case']}: {text}" for r in rows for text in r["refused"].values()}),
    }


def _mean_and_least(shares: Sequence[float]) -> dict[str, float] | None:
    return {"mean": statistics.fmean(shares), "least": min(shares)} if shares else None


def _worst(rows: Sequence[Row], key: str) -> list[Row]:
    return sorted((r for r in rows if key in r), key=lambda r: float(r[key]))[:WORST]


def _named(row: Row, key: str) -> dict[str, Any]:
    return {"case": row["case"], "shape": row["shape"], key: round(row[key], 3)}


def _listed(cases: Sequence[Mapping[str, Any]], key: str) -> str:
    return "; ".join(f"{c[key]:.2f} {c['case']} {name_shape(c['shape'])}" for c in cases)


def show_summary(total: Mapping[str, Any]) -> None:
    """Print the result of ``summary``."""
    means = ", ".join(f"{x:.3f}x {n}" for n, x in total["geomean"].items())
    print(f"{total['cases']} cases; geomean {means}; gap to the limit closed {total['gap_closed']:.2f} (clipped mean)")
    for key, what in (("of_limit", "share of the limit"), ("of_peak", "share of the FMA peak, all sizes >= 48")):
        if share := total[key]:
            print(f"  {what}: mean {share['mean']:.0%}, least {share['least']:.0%}")
    print(f"  worst against ONNX Runtime: {_listed(total['worst'], 'ratio')}")
    print(
        f"  worst against the best rival: {_listed(total['worst_to_best'], 'to_best')}; "
        f"{total['below_0.9_of_best']} below 0.9"
    )
    print(f"  more than 3 % slower than ONNX Runtime: {_listed(total['slower'], 'ratio') or 'none'}")
    if total["below_limit"]:
        print(f"  {total['below_limit']} beat the limit: data in a cache, or the limits were measured while busy")
    for text in (*total["differ"], *total["refused"]):
        print("  " + text)
