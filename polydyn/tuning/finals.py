"""polydyn's last step of a search: what its model likes best is measured at a few sizes, and the model is corrected.

A closed form follows one kernel from size to size within a per cent or two; between two kernels it can be wrong by
several, because what it was fitted to (one wave, one block) knows neither caches nor memory. A few whole launches of
each finalist give one factor for its form, and the table where they were measured. Vortex's hybrid analyzer (5.2)
measures the lowest level and estimates the rest; here the top is measured too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from polydyn.errors import BuildError
from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.tuning import select
from polydyn.tuning.backbone import Problem, Tile
from polydyn.tuning.bench import Bench
from polydyn.tuning.cost import Kernel
from polydyn.tuning.select import Table

FINALISTS, SIZES = 12, 16
"""Kernels that are measured, and at how many sizes."""
LONG = 40
"""As much as so many of the longest launches may be run in all: where the drawn sizes are more, the largest sizes are
left out, which closed forms follow best.
"""
UNIT = 1024
"""A factor is a whole number of these parts."""
PICOSECONDS = 1e12


def finalists(table: Table, weights: Sequence[float], tiles: Sequence[Tile]) -> list[int]:
    """Rows that deserve to be measured: those that together cover all instances, then the best on average."""
    kept = list(select.cover(table, weights, tiles, tuples=FINALISTS).kept)
    average = select.shares(table) @ np.asarray(weights)
    return kept + [int(m) for m in np.argsort(-average, kind="stable") if m not in kept][: FINALISTS - len(kept)]


def sizes_to_measure(
    seconds: Sequence[float], weights: Sequence[float], longest: float, together: float = math.inf
) -> list[int]:
    """Positions of instances, drawn evenly by their weights, none that takes more ``seconds`` than ``longest``, and
    no more than ``together`` in all.
    """
    fits = [i for i, s in enumerate(seconds) if s <= longest]
    while sum(seconds[i] for i in _drawn(weights, fits)) > together:
        most = max(seconds[i] for i in fits)
        fits = [i for i in fits if seconds[i] <= most / 2]
    return _drawn(weights, fits)


def _drawn(weights: Sequence[float], fits: list[int]) -> list[int]:
    if len(fits) <= SIZES:
        return fits
    mass = np.cumsum([weights[i] for i in fits])
    drawn = np.searchsorted(mass, (np.arange(SIZES) + 0.5) / SIZES * mass[-1])
    return [fits[i] for i in dict.fromkeys(int(i) for i in drawn)]


def corrected(
    problem: Problem, bench: Bench, kernels: Sequence[Kernel], costs: Sequence[Index], longest: float
) -> tuple[list[Kernel], list[Index], Table]:
    """Kernels that ran, their closed forms (picoseconds) times a factor of their own, and the table.

    ``longest``: seconds of the longest launch that is measured, by the closed forms.

    BuildError: none of them ran.
    """
    shapes, estimates = problem.instances(), [evaluator(c) for c in costs]
    least = [min(e(s) for e in estimates) / PICOSECONDS for s in shapes]
    asked = sizes_to_measure(least, problem.weights, longest, LONG * longest / len(kernels))
    times = [bench.seconds([k.tile for k in kernels], shapes[i]) for i in asked]
    spent = np.array(times).reshape(len(asked), len(kernels))
    ran, forms, rows = [], [], []
    for n, (kernel, cost) in enumerate(zip(kernels, costs, strict=True)):
        measured = dict(zip(asked, spent[:, n], strict=True))
        if not all(math.isfinite(t) and t > 0 for t in measured.values()):
            continue
        form = cost * _factor(problem, measured, cost) // UNIT if measured else cost
        estimate = evaluator(form)
        filled = [PICOSECONDS * measured[i] if i in measured else max(1, estimate(s)) for i, s in enumerate(shapes)]
        ran.append(kernel)
        forms.append(form)
        rows.append([problem.backbone.flops(s) / t for s, t in zip(shapes, filled, strict=True)])
    if not ran:
        raise BuildError(f"none of {len(kernels)} tuples that ran once ran again", rule="finalists are measured")
    return ran, forms, np.array(rows, float)


def _factor(problem: Problem, measured: dict[int, float], cost: Index) -> int:
    """Measured over estimated time, in ``UNIT`` parts: the weighted geometric mean."""
    shapes = problem.instances()
    logs = [math.log(PICOSECONDS * t / max(1, cost.evaluate(shapes[i]))) for i, t in measured.items()]
    weights = [problem.weights[i] for i in measured]
    return max(1, round(UNIT * math.exp(float(np.average(logs, weights=weights)))))
