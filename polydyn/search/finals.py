"""The last step of polydyn's search: measure the best kernels at a few sizes, and correct the model.

A closed form predicts one kernel over sizes within a per cent or two. Between two kernels its error can be several per
cent, because the fit (to one wave and one block) excludes caches and memory. A few full launches of each finalist give
a factor for its form, the table at the measured sizes, and an interpolation between them (``between``). Vortex's hybrid
analyzer (5.2) measures the lowest level and estimates the rest; here the top level is measured too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polydyn.errors import BuildError
from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search import select
from polydyn.search.backbone import Problem, Shape, Tile
from polydyn.search.bench import Bench
from polydyn.search.cost import MacroKernel
from polydyn.search.explorers.explore import Trial
from polydyn.search.hardware import Hardware
from polydyn.search.select import Table

FINALISTS, SIZES, ROUNDS = 12, 16, 2
"""Number of measured kernels, number of sizes, and number of alternating rounds; the minimum time counts."""
MAX_TOTAL_LAUNCHES = 40
"""The total measuring time may be this many of the longest launches. If the drawn sizes exceed it, the largest sizes
are left out, because closed forms predict them best.
"""
CLASSES = 4
"""Maximum number of sizes at which an exploration measures each tile."""
OTHER_SIZES = 0.1
"""Minimum share of the weight that the saturating instance has, if sizes are dynamic."""
MAX_EXPLORED_SECONDS = 1.0
"""All launches of an exploration together take at most this time at the machine's peak."""
UNIT = 1024
"""Denominator of the factors."""
PICOSECONDS = 1e12


def finalists(table: Table, weights: Sequence[float], tiles: Sequence[Tile]) -> list[int]:
    """Return the rows to measure: first a set that covers all instances, then the best on average."""
    rows = list(select.cover(table, weights, tiles, tuples=FINALISTS).kernels)
    average = select.shares(table) @ np.asarray(weights)
    return rows + [int(m) for m in np.argsort(-average, kind="stable") if m not in rows][: FINALISTS - len(rows)]


def best_explored(trials: Sequence[Trial], weights: Sequence[float]) -> list[Tile]:
    """Return the tiles to measure after an exploration of size classes, by smoothed cost: first tiles that cover all
    classes, then the best on average. Failures at a class count as slow there; tiles that ran nowhere are left out.
    """
    ran = [t for t in trials if np.isfinite(t.costs).any()]
    costs = np.array([np.where(np.isfinite(t.costs), t.smoothed or t.costs, np.inf) for t in ran])
    served = np.isfinite(costs).any(0)
    if not ran:
        return []
    tiles = [t.tile for t in ran]
    return [tiles[k] for k in finalists(1 / costs[:, served], np.asarray(weights)[served].tolist(), tiles)]


def sizes_to_measure(
    seconds: Sequence[float], weights: Sequence[float], longest: float, total: float = math.inf
) -> list[int]:
    """Return positions of instances, drawn evenly by weight. None takes more ``seconds`` than ``longest``, and all take
    at most ``total``.
    """
    return list(weighted_sizes(seconds, weights, longest, total, SIZES))


def weighted_sizes(
    seconds: Sequence[float], weights: Sequence[float], longest: float, total: float, count: int
) -> dict[int, float]:
    """Return at most ``count`` positions as ``sizes_to_measure`` does, with the weight that each represents."""
    fits = [i for i, s in enumerate(seconds) if s <= longest]
    while sum(seconds[i] for i in _spread_out(weights, fits, count)) > total:
        limit = max(seconds[i] for i in fits) / 2
        fits = [i for i in fits if seconds[i] <= limit]
    return _spread_out(weights, fits, count)


def _spread_out(weights: Sequence[float], fits: list[int], count: int) -> dict[int, float]:
    if len(fits) <= count:
        return {i: weights[i] for i in fits}
    mass = np.cumsum([weights[i] for i in fits])
    drawn = np.searchsorted(mass, (np.arange(count) + 0.5) / count * mass[-1])
    return {fits[i]: n * float(mass[-1]) / count for i, n in Counter(int(i) for i in drawn).items()}


@dataclass(frozen=True)
class SizeClasses:
    """Sizes that stand for the shapes of a problem in an exploration, the largest first: they need whole kernels, which
    smaller sizes then use too. ``saturating``: weight of one more class, the saturating instance of each tile."""

    shapes: tuple[Shape, ...]
    weights: tuple[float, ...]
    saturating: float


def size_classes(problem: Problem, hardware: Hardware, trials: int) -> SizeClasses:
    """Return the classes for an exploration of ``trials`` tiles.

    Shapes are drawn evenly by weight. All launches together take at most ``MAX_EXPLORED_SECONDS`` at the machine's peak
    and bandwidth. The saturating instance stands for longer launches. If any size is dynamic, it also stands for larger
    sizes than the given ones.
    """
    b = problem.backbone
    shapes = [(s, w) for s, w in zip(problem.instances(), problem.weights, strict=True) if b.flops(s) and w > 0]
    seconds = [
        max(b.flops(s) / hardware.peak(b.dtype), sum(b.bytes_moved(s)) / hardware.memory_bandwidth) for s, _ in shapes
    ]
    limit, total = MAX_EXPLORED_SECONDS / max(1, trials), sum(w for _, w in shapes)
    chosen = weighted_sizes(seconds, [w for _, w in shapes], limit, limit, CLASSES)
    rows = sorted(chosen, key=lambda i: (-seconds[i], i))
    least = OTHER_SIZES * total if any(x.extent is None for x in b.loops) else 0.0
    rest = max(total - sum(chosen.values()), least) if total else 1.0
    return SizeClasses(tuple(shapes[i][0] for i in rows), tuple(chosen[i] for i in rows), rest)


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
