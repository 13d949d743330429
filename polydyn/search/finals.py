"""The last step of polydyn's search: measure the best kernels at a few sizes, and correct the model.

A closed form predicts one kernel over sizes within a per cent or two. Between two kernels its error can be several per
cent, because the fit (to one wave and one block) excludes caches and memory. A few full launches of each finalist give
a factor for its form, the table at the measured sizes, and an interpolation between them (``between``). Vortex's hybrid
analyzer (5.2) measures the lowest level and estimates the rest; here the top level is measured too.
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

FINALISTS, SIZES, ROUNDS = 12, 16, 2
"""Number of measured kernels, number of sizes, and number of alternating rounds; the minimum time counts."""
MAX_TOTAL_LAUNCHES = 40
"""The total measuring time may be this many of the longest launches. If the drawn sizes exceed it, the largest sizes
are left out, because closed forms predict them best.
"""
UNIT = 1024
"""Denominator of the factors."""
PICOSECONDS = 1e12


def finalists(table: Table, weights: Sequence[float], tiles: Sequence[Tile]) -> list[int]:
    """Return the rows to measure: first a set that covers all instances, then the best on average."""
    rows = list(select.cover(table, weights, tiles, tuples=FINALISTS).kernels)
    average = select.shares(table) @ np.asarray(weights)
    return rows + [int(m) for m in np.argsort(-average, kind="stable") if m not in rows][: FINALISTS - len(rows)]


def sizes_to_measure(
    seconds: Sequence[float], weights: Sequence[float], longest: float, total: float = math.inf
) -> list[int]:
    """Return positions of instances, drawn evenly by weight. None takes more ``seconds`` than ``longest``, and all take
    at most ``total``.
    """
    fits = [i for i, s in enumerate(seconds) if s <= longest]
    while sum(seconds[i] for i in _spread_out(weights, fits)) > total:
        limit = max(seconds[i] for i in fits) / 2
        fits = [i for i in fits if seconds[i] <= limit]
    return _spread_out(weights, fits)


def _spread_out(weights: Sequence[float], fits: list[int]) -> list[int]:
    if len(fits) <= SIZES:
        return fits
    mass = np.cumsum([weights[i] for i in fits])
    drawn = np.searchsorted(mass, (np.arange(SIZES) + 0.5) / SIZES * mass[-1])
    return [fits[i] for i in dict.fromkeys(int(i) for i in drawn)]


def between(
    measured: Sequence[Shape], logs: npt.NDArray[np.float64], others: Sequence[Shape]
) -> npt.NDArray[np.float64]:
    """Return factors at other shapes: the exponential of interpolated ``logs`` (kernels x ``measured``).

    Each shape uses its nearest measured shapes, two per dynamic loop, weighted by the inverse distance of the sizes'
    logarithms.
    """
    names = [n for n in measured[0] if len({s[n] for s in (*measured, *others)}) > 1]
    known, new = (np.array([[math.log(max(1, s[n])) for n in names] for s in some]) for some in (measured, others))
    distance = np.maximum(np.linalg.norm(new[:, None] - known.reshape(1, len(measured), len(names)), axis=2), 1e-9)
    near = np.argsort(distance, axis=1, kind="stable")[:, : max(1, 2 * len(names))]
    weight = 1 / np.take_along_axis(distance, near, 1)
    weight /= weight.sum(1, keepdims=True)
    factors: npt.NDArray[np.float64] = np.exp((logs[:, near] * weight).sum(2))
    return factors


def corrected(
    problem: Problem, bench: Bench, kernels: Sequence[MacroKernel], costs: Sequence[Index], longest: float
) -> tuple[list[MacroKernel], list[Index], Table]:
    """Return the kernels that ran, their closed forms (picoseconds) times their factors, and the table.

    ``longest``: maximum seconds of a measured launch, according to the closed forms.

    BuildError: none of them ran.
    """
    shapes = problem.instances()
    estimates = np.array([[max(1, e(s)) for s in shapes] for e in map(evaluator, costs)], float)
    minimum = list(estimates.min(0) / PICOSECONDS)
    chosen = sizes_to_measure(minimum, problem.weights, longest, MAX_TOTAL_LAUNCHES * longest / len(kernels))
    times = [bench.seconds([k.tile for k in kernels], shapes[i], ROUNDS) for i in chosen]
    spent = PICOSECONDS * np.array(times).reshape(len(chosen), len(kernels)).T
    ran = [n for n, row in enumerate(spent) if np.isfinite(row).all() and (row > 0).all()]
    if not ran:
        raise BuildError(f"none of {len(kernels)} tiles that ran once ran again", rule="finalists are measured")
    kernels, forms, estimates = [kernels[n] for n in ran], [costs[n] for n in ran], estimates[ran]
    if chosen:
        logs = np.log(spent[ran] / estimates[:, chosen])
        mean = np.average(logs, axis=1, weights=[problem.weights[i] for i in chosen])
        forms = [c * max(1, round(UNIT * math.exp(f))) // UNIT for c, f in zip(forms, mean, strict=True)]
        estimates = estimates * between([shapes[i] for i in chosen], logs, shapes)
    return kernels, forms, np.array([problem.backbone.flops(s) for s in shapes], float) / estimates
