"""Tuning: times over tiles and shapes, the trials of a search and its selection, the kernel launched at each size."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

from polydyn.errors import InputError
from polydyn.explore.pictures.axes import Axes, Axis
from polydyn.explore.pictures.colours import GREY, RED, hues, ink, scale, si
from polydyn.explore.pictures.sheet import Picture, Sheet
from polydyn.measure import Progress
from polydyn.runtime.explain import refusal, resolve_dims
from polydyn.runtime.expressions import decision_from_json
from polydyn.runtime.plain_expressions import evaluate
from polydyn.runtime.program import Program
from polydyn.runtime.symbols import THREADS
from polydyn.schedules.decision import Decision, choose, cost
from polydyn.search.backbone import Tile
from polydyn.search.outcomes import KIND
from polydyn.search.records import Record, Records

MOST_COLUMNS = 24


@dataclass(frozen=True)
class Searched:
    """The data of one search of a group in a record file: trials in the order of their cost, times by tile and shape,
    the selected tiles and the decision among them. The cost is in seconds per operation on a saturating instance.
    If no tile was measured on one, it is in seconds at the shape ``trial_shape``.
    """

    group: str
    machine: str
    strategy: str
    threads: int
    trials: tuple[tuple[Tile, float], ...]
    failed: int
    times: Mapping[Tile, Mapping[tuple[tuple[str, int], ...], float]]
    kept: tuple[Tile, ...]
    decision: Decision | None
    trial_shape: tuple[tuple[str, int], ...] = ()

    def chosen(self, shape: Mapping[str, int]) -> Tile | None:
        """Return the tile that the dispatcher selects at a shape, or None if all are candidates at every size."""
        if self.decision is None:
            return self.kept[0] if len(self.kept) == 1 else None
        return self.kept[choose(self.decision, {**shape, THREADS: self.threads})]

    def _repr_html_(self) -> str:
        return trials(self)._repr_html_()


def searches(records: Records | str | os.PathLike[str]) -> list[Searched]:
    """Return the searches in a record file, or in records that are open, by group and strategy."""
    if not isinstance(records, Records):
        with Records.open(records, readonly=True) as opened:
            return searches(opened)
    rows = records.rows()
    by_machine: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in rows:
        by_machine[r.group.digest, r.hardware.digest].append(r)
    return [_searched(r, by_machine[r.group.digest, r.hardware.digest]) for r in rows if r.kind == KIND]


def _searched(r: Record, rows: Sequence[Record]) -> Searched:
    note = json.loads(r.note)
    costs: dict[Tile, float] = {}
    times: dict[Tile, dict[tuple[tuple[str, int], ...], float]] = defaultdict(dict)
    for x in rows:
        if x.kind == "throughput" and x.shape and x.source == r.source:
            times[x.tile][x.shape] = min(x.value("seconds"), times[x.tile].get(x.shape, float("inf")))
        elif x.kind == "throughput" and not x.shape and x.source == r.source:
            costs[x.tile] = min(x.value("cost"), costs.get(x.tile, float("inf")))
    trial_shape: tuple[tuple[str, int], ...] = ()
    if not costs and times:
        counts = Counter(shape for row in times.values() for shape in row)
        trial_shape = max(counts, key=lambda s: (counts[s], s))
        costs = {t: row[trial_shape] for t, row in times.items() if trial_shape in row}
    kept = tuple(Tile(_pairs(c), _pairs(n)) for c, n in note["tiles"])
    decision = decision_from_json(note["decision"]) if "decision" in note else None
    failed = sum(x.kind == "failed" and not x.shape for x in rows)
    ordered = tuple(sorted(costs.items(), key=lambda e: (e[1], e[0])))
    machine, strategy, threads = r.hardware.name, note["strategy"], r.hardware.units
    return Searched(
        r.group.digest[:12], machine, strategy, threads, ordered, failed, times, kept, decision, trial_shape
    )


def _pairs(data: Sequence[Sequence[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((str(n), int(v)) for n, v in data)


def short(tile: Tile) -> str:
    """Format register tile and block of a configuration, as in ``6×16 in 96×64×256``."""
    part = tile.level("w") or tile.level("t")
    inner, outer = ("×".join(str(x[n]) for n in sorted(x)) for x in (part, tile.level("b")))
    return f"{inner} in {outer}" if inner and outer else inner or outer or "the only one"


def trials(x: Searched, title: str = "") -> Picture:
    """Draw all trials of a search, best first: each one's throughput relative to the best; kept tiles are coloured.

    (Record files do not store the order of trials; ``curve`` draws a search while it runs.)
    """
    s = Sheet(title or f"{len(x.trials)} trials of {x.strategy} for group {x.group}",
              f"on {x.machine}; {x.failed} failed; coloured: kept ({len(x.kept)}); grey: only measured")  # fmt: skip
    if not x.trials:
        s.text(12, s.top + 16, "no trial is in the records", 13)
        return s.picture()
    least = x.trials[0][1]
    n = len(x.trials)
    axes = Axes(s, (60, s.top + 20, 500, 220), Axis(0.5, n + 0.5), Axis(0, 1.04),
                "trials, the best first", "share of the best", percent=True)  # fmt: skip
    colour = hues(str(t) for t in x.kept)
    wide = max(1.0, 500 / n - 1)
    for k, (tile, c) in enumerate(x.trials, 1):
        y = axes.py(least / c)
        tip = f"{tile}\n{_rate(x, c)}, {least / c:.0%}"
        s.rect(axes.px(k) - wide / 2, y, wide, s.top + 240 - y, colour.get(str(tile), GREY), r=1,
               opacity=1 if tile in x.kept else 0.4, tip=tip)  # fmt: skip
    y = s.top + 30
    for tile in x.kept:
        spent = dict(x.trials).get(tile)
        rate = f", {_rate(x, spent)}" if spent else ""
        s.rect(580, y - 10, 11, 11, colour[str(tile)], r=2)
        s.text(598, y, f"{short(tile)}{rate}", 12, "m", most=294, tip=str(tile))
        y += 19
    return s.picture()


def _rate(x: Searched, cost: float) -> str:
    """Format the cost of a trial as a throughput, or as a time if the trials are launches at a shape."""
    return f"{si(cost)}s" if x.trial_shape else f"{1 / cost / 1e9:.0f} GFLOP/s"


def curve(progress: Sequence[Progress], title: str = "") -> Picture:
    """Draw the best result so far of every group over the trials, relative to its final best.

    ``progress``: the reports of ``polydyn.tune(..., report=collected.append)``.
    """
    groups: dict[int, list[Progress]] = defaultdict(list)
    for p in progress:
        if p.best:
            groups[p.group].append(p)
    most = max((p.trials for p in progress), default=0)
    count = f"{len(groups)} group{'s' * (len(groups) != 1)}"
    s = Sheet(title or f"the search of {count}", "the best so far, as a share of the best in the end")
    if not groups:
        s.text(12, s.top + 16, "no trial has run", 13)
        return s.picture()
    axes = Axes(s, (60, s.top + 20, 500, 220), Axis(0, most), Axis(0, 1.04), "trials", "best so far", percent=True)
    y, colour = s.top + 30, hues(map(str, groups))
    for n, points in groups.items():
        end = max(p.best for p in points)
        d, best = "", 0.0
        for p in points:
            best = max(best, p.best)
            d += f"{'L' if d else 'M'}{axes.px(p.trials):.1f},{axes.py(best / end):.1f}"
            tip = f"{p.trials} trials: {best / 1e9:.1f} GFLOP/s"
            s.dot(axes.px(p.trials), axes.py(best / end), 2.6, colour[str(n)], tip)
        s.path(d, colour[str(n)], 2, cls="")
        near = next(p.trials for p in points if p.best >= 0.95 * end)
        s.rect(580, y - 10, 11, 11, colour[str(n)], r=2)
        s.text(598, y, f"group {n}: {end / 1e9:.0f} GFLOP/s, 95% after {near}", 12, "m", most=294)
        y += 19
    return s.picture()


def tiles(x: Searched, title: str = "") -> Picture:
    """Draw times of tiles (rows) at shapes (columns). The colour is the throughput relative to the best of the column;
    a frame marks the dispatcher's choice.
    """
    shapes = sorted({sh for row in x.times.values() for sh in row})
    names = dict.fromkeys(n for sh in shapes for n, _ in sh)
    varying = [n for n in names if len({dict(sh).get(n) for sh in shapes}) > 1]
    fixed = ", ".join(f"{n}={v}" for n, v in (shapes[0] if shapes else ()) if n not in varying)
    s = Sheet(title or f"group {x.group} on {x.machine}" + (f", {fixed}" if fixed else ""),
              "numbers: time over the best of the column; framed: what the dispatcher takes")  # fmt: skip
    if not shapes:
        s.text(12, s.top + 16, "no time at a shape is in the records", 13)
        return s.picture()
    step = -(-len(shapes) // MOST_COLUMNS)
    columns = shapes[::step]
    best = {sh: min(row[sh] for row in x.times.values() if sh in row) for sh in columns}
    ordered = sorted(x.times, key=lambda t: (_mean(x.times[t], best), t))
    colour, left, y = hues(str(t) for t in x.kept), 250.0, s.top + 44.0
    cw, ch = (s.width - left - 12) / len(columns), 24.0
    for k, sh in enumerate(columns):
        name = "×".join(str(dict(sh).get(n, "")) for n in varying) or "-"
        s.text(left + (k + 0.5) * cw, y - 8, name, 11.5, "m b", "middle", most=cw + 6)
    s.text(left - 10, y - 8, "×".join(varying), 11.5, "m s", "end")
    for tile in ordered:
        if tile in x.kept:
            s.rect(8, y + 5, 11, ch - 10, colour[str(tile)], r=2)
        s.text(26, y + 16, short(tile), 12, "m b" if tile in x.kept else "m s", most=left - 36, tip=str(tile))
        for k, sh in enumerate(columns):
            seconds = x.times[tile].get(sh)
            if seconds is None or not isfinite(seconds):
                continue
            share = best[sh] / seconds if seconds else 1.0
            c = scale(1 - (1 - share) / 0.4)
            tip = f"{short(tile)} at {dict(sh)}: {si(seconds)}s"
            s.rect(left + k * cw + 0.8, y + 0.8, cw - 1.6, ch - 1.6, c, r=2, tip=tip)
            if cw > 26:
                number = f"{1 / share:.2f}" if share < 0.995 else "best"
                s.text(left + (k + 0.5) * cw, y + 16, number, 11, "", "middle", ink(c))
            if x.chosen(dict(sh)) == tile:
                s.rect(left + k * cw + 1, y + 1, cw - 2, ch - 2, "none", RED, r=2, line=2.4)
        y += ch
    s.text(12, y + 22, "coloured at the left: kept; bold: the dispatcher may take it", 12, "s")
    return s.picture()


def _mean(row: Mapping[Any, float], best: Mapping[Any, float]) -> float:
    """Return the geometric mean of a tile's times relative to the best of each column."""
    logs = [log(row[sh] / b) for sh, b in best.items() if sh in row and isfinite(row[sh]) and b]
    return exp(sum(logs) / len(logs)) if logs else float("inf")


def shapes(
    values: Mapping[tuple[int, int], float], x: str = "M", y: str = "N", unit: str = "s", title: str = ""
) -> Picture:
    """Draw numbers over two sizes: ``(x, y)`` -> value; the colour is logarithmic, yellow is the minimum."""
    s = Sheet(title or f"{unit} over {x} and {y}", f"{len(values)} shapes; the colour is logarithmic, yellow is least")
    if not values:
        s.text(12, s.top + 16, "no shape", 13)
        return s.picture()
    positive = [v for v in values.values() if v > 0]
    axis = Axis(min(positive), max(positive), True) if positive else Axis(0, 1)

    def cell(at: tuple[int, int]) -> tuple[str, str, str]:
        v = values[at]
        return scale(1 - axis.at(v) if v > 0 else 1.0), si(v), f"{x}={at[0]}, {y}={at[1]}: {si(v)}{unit}"

    _grid(s, set(values), cell, x, y)
    return s.picture()


def _grid(
    s: Sheet, points: set[tuple[int, int]], cell: Callable[[tuple[int, int]], tuple[str, str, str]], x: str, y: str
) -> float:
    """Draw a grid over two sizes; ``cell`` returns colour, text and tooltip. Return the lower end."""
    xs, ys = sorted({a for a, _ in points}), sorted({b for _, b in points})
    left, top = 74.0, s.top + 34
    cw, ch = (s.width - left - 12) / len(xs), max(14.0, min(26.0, 480 / len(ys)))
    every = max(1, round(34 / cw))
    for k, a in enumerate(xs):
        if k % every == 0:
            s.text(left + (k + 0.5) * cw, top - 7, str(a), 11.5, "m s", "middle")
    for k, b in enumerate(ys):
        s.text(left - 8, top + k * ch + ch / 2 + 4, str(b) if y else "", 11.5, "m s", "end")
    s.text(left - 8, top - 7, f"{y} ↓ {x} →" if y else f"{x} →", 11.5, "b", "end", most=left - 8)
    for i, a in enumerate(xs):
        for k, b in enumerate(ys):
            if (a, b) in points:
                colour, text, tip = cell((a, b))
                s.rect(left + i * cw + 0.5, top + k * ch + 0.5, cw - 1, ch - 1, colour, tip=tip)
                if cw > 38:
                    s.text(left + (i + 0.5) * cw, top + k * ch + ch / 2 + 4, text, 11, "", "middle", ink(colour))
    return top + len(ys) * ch


def regions(
    program: Program, label: str, x: tuple[str, Sequence[int]], y: tuple[str, Sequence[int]] | None = None,
    **others: int,
) -> Picture:  # fmt: skip
    """Draw which kernel a launch selects over one or two sizes of the model; one hue per kernel and tiles.

    ``label``: the launch's label, or a unique part of it. ``x``, ``y``: a dim and its sizes; ``others``: sizes of the
    other dims. InputError: no such launch or dim.
    """
    launch = _launch(program, label)
    decision = decision_from_json(program.manifest["decisions"][launch["decision"]])
    (xn, xs), (yn, ys) = x, y or ("", (0,))
    taken: dict[tuple[int, int], str] = {}
    notes: dict[tuple[int, int], str] = {}
    for a in xs:
        for b in ys:
            env = resolve_dims(program.manifest, {**others, xn: a, **({yn: b} if yn else {})})
            name, note = _launched(launch, decision, {**env, THREADS: program.threads})
            taken[a, b], notes[a, b] = name, note
    colour = hues(sorted(set(taken.values())))
    names = {c["name"] for c in launch["candidates"]}
    s = Sheet(f"{launch['label']}: {len(names & set(colour))} of {len(names)} kernels are taken here",
              ", ".join([*(f"{k}={v}" for k, v in others.items()), f"threads: {program.threads}"]))  # fmt: skip
    if not taken:
        s.text(12, s.top + 16, "no sizes", 13)
        return s.picture()
    at = {(a, b): f"{xn}={a}" + f", {yn}={b}" * bool(yn) for a, b in taken}
    end = _grid(s, set(taken), lambda p: (colour[taken[p]], "", f"{at[p]}: {taken[p]}{notes[p]}"), xn, yn)
    for k, (n, c) in enumerate(colour.items()):
        s.rect(12, end + 18 + 19 * k, 11, 11, c, r=2)
        text = next((r for r in launch["reasons"] if r.startswith(f"{n}: ")), n)
        s.text(30, end + 28 + 19 * k, text, 12, "m", most=s.width - 42)
    return s.picture()


def _launch(program: Program, label: str) -> Mapping[str, Any]:
    matches = [x for x in program.manifest["launches"] if x["label"] == label]
    matches = matches or [x for x in program.manifest["launches"] if label in x["label"]]
    if len(matches) != 1:
        names = ", ".join(x["label"] for x in program.manifest["launches"][:8])
        raise InputError(
            f"{len(matches)} launches are called {label!r}", rule="regions", remedy=f"name one of: {names}"
        )
    first: Mapping[str, Any] = matches[0]
    return first


def _launched(launch: Mapping[str, Any], decision: Decision, env: Mapping[str, int]) -> tuple[str, str]:
    """Return the name of the candidate that is launched, and a note with its estimated cost."""
    candidates = launch["candidates"]
    if evaluate(launch["elements"], env) == 0:
        return "nothing: no elements", ""
    barred = [k for k, c in enumerate(candidates) if "block" not in c and refusal(c, env, None)]
    k = choose(decision, env, barred) if len(barred) < len(candidates) else len(candidates) - 1
    estimate = cost(decision, k, env)
    return candidates[k]["name"], f", estimated {si(estimate * 1e-12)}s" if estimate else ""
