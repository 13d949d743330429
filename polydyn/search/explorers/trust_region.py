"""The search of large spaces: Bayesian optimisation in trust regions, one for each size class (TSCompiler 5.1).

A trial is a tile that is measured at several sizes; each size is a *class* with a weight. One Gaussian process models
the costs of all classes. A round measures four tiles. Three of them have the most expected improvement, summed over the
classes by weight; a class counts a tile only inside its own region. So the region with the most to gain gets the
tiles, which is TSCompiler's bandit. The fourth tile is the next one of the analytical order, whatever the process
predicts; in the first trials half of a round follows the order.

A region is a number of unmeasured tiles: those nearest to the best tile of its class, by the lengths of the process.
It grows after rounds that improve the class, shrinks after rounds that do not, and begins again when it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polydyn.search.backbone import Tile
from polydyn.search.explorers.explore import Explorer, Objective, Trial, spread
from polydyn.search.explorers.gaussian_process import GaussianProcess, Matrix, expected_improvement
from polydyn.search.spaces.space import Space

Rows = npt.NDArray[np.intp]
RowObjective = Callable[[Sequence[int]], Matrix]
"""Measures rows of a space: returns costs (rows x classes), ``inf`` for a failure."""


@dataclass(frozen=True)
class Rules:
    """Parameters of the search.

    ``starts``: tiles of the analytical order that are measured first: ``leading`` ones at its head, and ones with a
    distance between each other. A space has at least one start per ``tiles_per_start``. ``batch``: tiles per round;
    ``ordered`` of them follow the analytical order, twice as many before ``early`` trials. ``size``: tiles of a new
    region, at least 1 / ``share`` of the space. ``wins``, ``losses``: rounds with and without improvement after which a
    region doubles or halves. ``halvings``: a region that has halved more often below its first size begins again.
    ``improvement``: relative decrease of a cost that counts as a win. ``sharpness``: the process models
    ``log(1 + sharpness * log(cost / best))``, which resolves costs near the best. ``distance``: tiles of one round that
    are nearer to each other than this many lengths count less.
    """

    starts: int = 8
    tiles_per_start: int = 600
    leading: int = 4
    batch: int = 4
    ordered: int = 1
    early: int = 32
    size: int = 128
    share: int = 8
    halvings: int = 2
    wins: int = 1
    losses: int = 2
    improvement: float = 2e-3
    sharpness: float = 10.0
    distance: float = 0.4


@dataclass
class Region:
    """The trust region of a class: its centre (a row) and its size in tiles. ``best``: least cost of the class.
    ``grown``, ``shrunk``, ``restarted`` count its changes; ``at_best``: it is around the best tile of the class."""

    centre: int
    size: int
    best: float
    wins: int = 0
    losses: int = 0
    at_best: bool = True
    grown: int = 0
    shrunk: int = 0
    restarted: int = 0


@dataclass(frozen=True)
class Round:
    """A round of a search. ``trials``: trials before it. ``predicted``: the costs that the process predicted for the
    tiles that it chose (rows x classes), before they were measured; tiles of the analytical order follow them.
    ``sizes``: tiles in each region after the round; ``restarted``: how often each began again.
    """

    trials: int
    predicted: Matrix
    sizes: tuple[int, ...]
    restarted: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """A finished search: ``rows`` in the order of measurement, their ``costs`` and the ``smoothed`` costs that the
    process predicts for them (rows x classes), the regions, and what happened in each round."""

    rows: tuple[int, ...]
    costs: Matrix
    smoothed: Matrix
    regions: tuple[Region, ...]
    rounds: tuple[Round, ...] = ()


def trust_region(order: Sequence[Tile] = (), rules: Rules | None = None) -> Explorer:
    """Return an explorer that starts from the first tiles of ``order``, without one from random tiles."""

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        def costs(rows: Sequence[int]) -> Matrix:
            return np.array(objective([space.tiles[r] for r in rows]), float)

        ordered = [space.position[t] for t in order if t in space.position]
        result = search_rows(
            space.points, costs, trials, order=ordered, weights=objective.weights, seed=seed, rules=rules
        )
        return tuple(
            Trial(space.tiles[row], tuple(map(float, cost)), tuple(map(float, smoothed)))
            for row, cost, smoothed in zip(result.rows, result.costs, result.smoothed, strict=True)
        )

    return explore


def search_rows(
    points: Matrix, objective: RowObjective, trials: int, *, order: Sequence[int] = (), weights: Sequence[float] = (),
    seed: int = 0, rules: Rules | None = None,
) -> Result:  # fmt: skip
    """Search a finite space (TSCompiler 5.1, changed as the module's text says).

    ``points``: coordinates in [0, 1] (tiles x axes). ``order``: rows by an analytical estimate, best first.
    ``weights``: importance of each class (default: equal). At most ``trials`` rows are measured. A shorter search
    with the same seed measures the first rows of a longer one.
    """
    return _Search(points, objective, trials, order, weights, seed, rules or Rules()).run()


class _Search:
    """One run."""

    def __init__(self, points: Matrix, objective: RowObjective, trials: int, order: Sequence[int],
                 weights: Sequence[float], seed: int, rules: Rules) -> None:  # fmt: skip
        self.points, self.objective, self.order, self.rules = points, objective, order, rules
        self.trials = max(0, min(trials, len(points)))
        self.starts = max(rules.starts, len(points) // rules.tiles_per_start)
        self.size = max(rules.size, len(points) // rules.share)
        self.random = np.random.default_rng(seed)
        self.process = GaussianProcess(points.shape[1], self.random)
        self.weights = np.array(weights, float)
        self.rows: list[int] = []
        self.costs: Matrix = np.zeros((0, max(1, len(weights))))
        self.regions: list[Region] = []
        self.rounds: list[Round] = []

    def run(self) -> Result:
        head = list(self.order[: self.rules.leading])
        apart = [r for r in spread(self.points, self.order, self.starts) if r not in head]
        first = [*head, *apart][: self.starts]
        rest = [int(i) for i in self.random.permutation(len(self.points)) if i not in first]
        self._measure([*first, *rest][: self.starts])
        if self.rows and not len(self.weights):
            self.weights = np.ones(self.costs.shape[1])
        for s in range(self.costs.shape[1] if self.rows else 0):
            best = int(np.argmin(self.costs[:, s]))
            self.regions.append(Region(self.rows[best], self.size, float(self.costs[best, s])))
        while len(self.rows) < self.trials:
            self._round()
        return Result(tuple(self.rows), self.costs, self._smoothed(), tuple(self.regions), tuple(self.rounds))

    def _measure(self, rows: Sequence[int]) -> None:
        rows = list(rows)[: self.trials - len(self.rows)]
        if rows:
            costs = np.asarray(self.objective(rows), float).reshape(len(rows), -1)
            self.costs = np.concatenate([self.costs, costs]) if self.rows else costs
            self.rows += rows

    def _fit(self) -> None:
        """Fit the process to all trials. A failure counts as twice the largest cost of its class."""
        ran = np.isfinite(self.costs)
        logs = np.log(np.where(ran, np.maximum(self.costs, np.finfo(float).tiny), 1.0))
        self.least = np.where(ran.any(0), np.where(ran, logs, np.inf).min(0), 0.0)
        worst = np.where(ran.any(0), np.where(ran, logs, -np.inf).max(0), 0.0)
        logs = np.where(ran, logs, worst + np.log(2.0))
        values = np.log1p(self.rules.sharpness * (logs - self.least))
        self.shift, self.scale = values.mean(0), values.std(0) + 1e-9
        self.process.fit(self.points[self.rows], (values - self.shift) / self.scale)

    def _smoothed(self) -> Matrix:
        if not self.rows:
            return self.costs
        self._fit()
        return self._predicted(self.rows)

    def _predicted(self, rows: Sequence[int]) -> Matrix:
        """Return the costs that the process predicts (rows x classes)."""
        values = self.process.predict(self.points[list(rows)])[0] * self.scale + self.shift
        return np.asarray(np.exp(np.expm1(np.maximum(values, -1.0)) / self.rules.sharpness + self.least))

    def _open_rows(self) -> Rows:
        unmeasured = np.ones(len(self.points), bool)
        unmeasured[self.rows] = False
        return np.flatnonzero(unmeasured)

    def _round(self) -> None:
        """Measure a batch: tiles inside the regions, and the next ones of the order."""
        self._fit()
        r, before = self.rules, len(self.rows)
        ordered = r.ordered * (2 if before < r.early else 1)
        rows = self._open_rows()
        inside = np.column_stack([self._inside(rows, region) for region in self.regions])
        rows, inside = rows[inside.any(1)], inside[inside.any(1)]
        picks = self._picks(rows, (self._gains(rows) * inside).sum(1), min(self.trials - before, r.batch - ordered))
        taken = {*self.rows, *(int(rows[k]) for k in picks)}
        following = [i for i in self.order if i not in taken][:ordered]
        predicted = self._predicted([int(rows[k]) for k in picks])
        self._measure([*(int(rows[k]) for k in picks), *following])
        tried = np.asarray(inside[picks[: len(self.rows) - before]].any(0))
        for s, region in enumerate(self.regions):
            self._judge(region, s, before, bool(tried[s]))
        sizes, restarted = zip(*((x.size, x.restarted) for x in self.regions), strict=True)
        self.rounds.append(Round(before, predicted, sizes, restarted))

    def _distance(self, rows: Rows, centre: int) -> Matrix:
        """Return the squared distances of rows to a centre, in lengths of the process."""
        return np.asarray((((self.points[rows] - self.points[centre]) / self.process.lengths) ** 2).sum(1))

    def _inside(self, rows: Rows, region: Region) -> npt.NDArray[np.bool_]:
        """Return which of the open rows are in a region."""
        distance = self._distance(rows, region.centre)
        return np.asarray(distance <= np.sort(distance)[min(region.size, len(rows)) - 1])

    def _gains(self, rows: Rows) -> Matrix:
        """Return the weighted expected improvement of rows (rows x classes) over the least smoothed cost."""
        mean, deviation = self.process.predict(self.points[rows])
        best = self.process.predict(self.points[self.rows])[0].min(0)
        return np.asarray(expected_improvement(mean, deviation, best) * self.scale * self.weights)

    def _picks(self, rows: Rows, gains: Matrix, count: int) -> list[int]:
        """Return positions in ``rows`` with the largest gains. A row near a picked one counts less."""
        picks: list[int] = []
        for _ in range(min(count, len(rows))):
            picks.append(int(np.argmax(gains)))
            near = np.exp(-self._distance(rows, int(rows[picks[-1]])) / self.rules.distance**2)
            gains = gains * (1 - near)
            gains[picks] = -1.0
        return picks

    def _judge(self, region: Region, s: int, before: int, tried: bool) -> None:
        """Move, grow, shrink or restart the region of class ``s`` after a round. ``tried``: the round measured a tile
        inside it by expected improvement."""
        r = self.rules
        row = before + int(np.argmin(self.costs[before:, s]))
        cost = float(self.costs[row, s])
        better = cost < region.best * (1 - r.improvement)
        if cost < region.best:
            region.best, region.centre, region.at_best = cost, self.rows[row], True
        if better:
            region.wins, region.losses = region.wins + 1, 0
        elif tried:
            region.wins, region.losses = 0, region.losses + 1
        if region.wins >= r.wins:
            larger = min(2 * region.size, max(region.size, len(self.points)))
            region.grown, region.size, region.wins = region.grown + (larger > region.size), larger, 0
        elif region.losses >= r.losses:
            region.shrunk, region.size, region.losses = region.shrunk + 1, region.size // 2, 0
            if region.size < self.size >> r.halvings:
                self._restart(region, s)

    def _restart(self, region: Region, s: int) -> None:
        """Restart a region: at the tile with most expected improvement in the farther half of the space, the next time
        at the best tile again."""
        region.restarted, region.size, region.wins, region.losses = region.restarted + 1, self.size, 0, 0
        rows = self._open_rows()
        if not len(rows):
            return
        region.at_best = not region.at_best
        if region.at_best:
            region.centre = self.rows[int(np.argmin(self.costs[:, s]))]
            return
        distance = self._distance(rows, region.centre)
        gains = self._gains(rows)[:, s]
        region.centre = int(rows[np.argmax(np.where(distance >= np.median(distance), gains, -1.0))])
