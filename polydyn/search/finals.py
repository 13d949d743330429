"""polydyn's last step of a search: the model's best kernels are measured at a few sizes, and the model is corrected.

A closed form follows one kernel from size to size within a per cent or two; between two kernels it can be wrong by
several, because what it was fitted to (one wave, one block) knows neither caches nor memory. A few whole launches of
each finalist give one factor for its form, the table where they were measured, and what is between these sizes
(``between``). Vortex's hybrid analyzer (5.2) measures the lowest level and estimates the rest; here the top is
measured too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polydyn.errors import BuildError
from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search import select
from polydyn.search.backbone import Problem, Shape, Tile
from polydyn.search.bench import Bench
from polydyn.search.cost import MacroKernel
from polydyn.search.select import Table

FINALISTS, SIZES, TURNS = 12, 16, 2
"""Kernels that are measured, at how many sizes, and how often, in turns: the least time counts."""
LONG = 40
"""As much as so many of the longest launches may be run in all: where the drawn sizes are more, the largest sizes are
left out, which closed forms follow best.
"""
UNIT = 1024
"""A factor is a whole number of these parts."""
PICOSECONDS = 1e12


def finalists(table: Table, weights: Sequence[float], tiles: Sequence[Tile]) -> list[int]:
    """Rows that deserve to be measured: those that together cover all instances, then the best on average."""
    rows = list(select.cover(table, weights, tiles, tuples=FINALISTS).kernels)
    average = select.shares(table) @ np.asarray(weights)
    return rows + [int(m) for m in np.argsort(-average, kind="stable") if m not in rows][: FINALISTS - len(rows)]


def sizes_to_measure(
    seconds: Sequence[float], weights: Sequence[float], longest: float, together: float = math.inf
) -> list[int]:
    """Positions of instances, drawn evenly by their weights, none that takes more ``seconds`` than ``longest``, and
    no more than ``together`` in all.
    """
    fits = [i for i, s in enumerate(seconds) if s <= longest]
    while sum(seconds[i] for i in _spread_out(weights, fits)) > together:
        most = max(seconds[i] for i in fits)
        fits = [i for i in fits if seconds[i] <= most / 2]
    return _spread_out(weights, fits)


def _spread_out(weights: Sequence[float], fits: list[int]) -> list[int]:
    if len(fits) <= SIZES:
        return fits
    mass = np.cumsum([weights[i] for i in fits])
    places = np.searchsorted(mass, (np.arange(SIZES) + 0.5) / SIZES * mass[-1])
    return [fits[i] for i in dict.fromkeys(int(i) for i in places)]


def between(
    measured: Sequence[Shape], logs: npt.NDArray[np.float64], others: Sequence[Shape]
) -> npt.NDArray[np.float64]:
    """Factors at other shapes: the exponential of ``logs`` (kernels x ``measured``).

    Each shape takes those of its nearest measured shapes, two for every dynamic loop, weighted by the inverse distance
    of the sizes' logarithms.
    """
    names = [n for n in measured[0] if len({s[n] for s in (*measured, *others)}) > 1]
    here, there = (np.array([[math.log(max(1, s[n])) for n in names] for s in of]) for of in (measured, others))
    distance = np.maximum(np.linalg.norm(there[:, None] - here.reshape(1, len(measured), len(names)), axis=2), 1e-9)
    near = np.argsort(distance, axis=1, kind="stable")[:, : max(1, 2 * len(names))]
    weight = 1 / np.take_along_axis(distance, near, 1)
    weight /= weight.sum(1, keepdims=True)
    factors: npt.NDArray[np.float64] = np.exp((logs[:, near] * weight).sum(2))
    return factors


def corrected(
    problem: Problem, bench: Bench, kernels: Sequence[MacroKernel], costs: Sequence[Index], longest: float
) -> tuple[list[MacroKernel], list[Index], Table]:
    """Kernels that ran, their closed forms (picoseconds), each times its factor, and the table.

    ``longest``: seconds of the longest launch that is measured, by the closed forms.

    BuildError: none of them ran.
    """
    shapes = problem.instances()
    estimates = np.array([[max(1, e(s)) for s in shapes] for e in map(evaluator, costs)], float)
    least = list(estimates.min(0) / PICOSECONDS)
    chosen = sizes_to_measure(least, problem.weights, longest, LONG * longest / len(kernels))
    times = [bench.seconds([k.tile for k in kernels], shapes[i], TURNS) for i in chosen]
    spent = PICOSECONDS * np.array(times).reshape(len(chosen), len(kernels)).T
    ran = [n for n, row in enumerate(spent) if np.isfinite(row).all() and (row > 0).all()]
    if not ran:
        raise BuildError(f"none of {len(kernels)} tuples that ran once ran again", rule="finalists are measured")
    kernels, forms, estimates = [kernels[n] for n in ran], [costs[n] for n in ran], estimates[ran]
    if chosen:
        logs = np.log(spent[ran] / estimates[:, chosen])
        mean = np.average(logs, axis=1, weights=[problem.weights[i] for i in chosen])
        forms = [c * max(1, round(UNIT * math.exp(f))) // UNIT for c, f in zip(forms, mean, strict=True)]
        estimates = estimates * between([shapes[i] for i in chosen], logs, shapes)
    return kernels, forms, np.array([problem.backbone.flops(s) for s in shapes], float) / estimates
