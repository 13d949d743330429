"""TSCompiler's explorer (5.1): Bayesian optimisation in several trust regions, with hardware-aligned starts.

Each region has a local Gaussian process over the rank of the cost (its normal quantile). Costs near the optimum differ
by tenths of a per cent, elsewhere by factors; a process over costs would model only the factors. A round draws
candidates inside every region's box, projects them to the nearest valid tiles, and drops the measured ones. It fills
a batch with the smallest posterior samples over all regions, so regions compete like the arms of a bandit with Thompson
sampling. A region grows after successes, shrinks after failures, and restarts elsewhere if it is too small.
Its box always contains the next value on every axis. Costs are only compared. Needs ``polydyn[tune]``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import UnsupportedError
from polydyn.search.backbone import Tile
from polydyn.search.explorers.explore import Explorer, Objective, Trial, spread
from polydyn.search.spaces.space import Points, Space

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Regions:
    """Parameters of the trust regions.

    ``start`` tiles are measured first: ``aligned`` ones from the hardware-aligned order and the rest at random.
    Aligned tiles are good but similar, and a model of one corner misleads. Lengths are sides of the box in the space's
    unit coordinates (``length``: L_b).
    """

    count: int = 3
    start: int = 12
    aligned: int = 6
    batch: int = 8
    length: float = 0.5
    longest: float = 1.0
    shortest: float = 0.06
    successes: int = 2
    failures: int = 2
    candidates: int = 192
    neighbours: int = 48


@dataclass
class _Region:
    center: int
    length: float
    best: float = math.inf
    wins: int = 0
    losses: int = 0
    kernel: Any = None


def trust_region(order: Sequence[Tile] = (), regions: Regions | None = None) -> Explorer:
    """Return an explorer whose regions start at random tiles and at spread-out first tiles of ``order``."""
    _sklearn()

    def explore(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1):  # the matrices are tiny, and the order of sums stays fixed
            return _Search(space, objective, trials, seed, order, regions or Regions()).run()

    return explore


def _sklearn() -> None:
    try:
        import sklearn.gaussian_process  # noqa: F401
    except ImportError as e:
        raise UnsupportedError(
            "the trust-region explorer needs scikit-learn",
            rule="extra [tune]",
            remedy="pip install 'polydyn[tune]', or choose the explorer 'random'",
        ) from e


def _descend(objective: Callable[..., Any], theta: Any, bounds: Any) -> tuple[Any, Any]:
    """Run a few steps of L-BFGS on the marginal likelihood; the region's next round continues from there."""
    from scipy.optimize import minimize

    result = minimize(objective, theta, jac=True, bounds=bounds, method="L-BFGS-B", options={"maxiter": 6})
    return result.x, result.fun


class _Search:
    """One run. ``cost`` maps each measured row to its cost."""

    def __init__(
        self,
        space: Space,
        objective: Objective,
        trials: int,
        seed: int,
        order: Sequence[Tile],
        r: Regions,
    ) -> None:
        self.space, self.objective, self.trials, self.rule = space, objective, trials, r
        self.rng = np.random.default_rng(seed)
        aligned = spread(space, [t for t in order if t in space.position], r.aligned)
        random = [space.tiles[i] for i in self.rng.permutation(len(space))]
        self.starts = [space.position[t] for t in dict.fromkeys((*aligned, *random))]
        self.cost: dict[int, float] = {}
        self.log: list[Trial] = []

    def run(self) -> tuple[Trial, ...]:
        first = self._next_starts(self.rule.start)
        self._measure(first)
        ranked = sorted((i for i in first if i in self.cost), key=lambda i: (self.cost[i], i))
        self.regions = [_Region(i, self.rule.length, self.cost[i]) for i in ranked[: self.rule.count]]
        while len(self.log) < self.trials and len(self.cost) < len(self.space):
            picks = self._round()
            self._measure([row for row, _ in picks])
            for region in self.regions:
                self._judge(region, [row for row, r in picks if r is region])
        return tuple(self.log)

    def _measure(self, rows: Sequence[int]) -> None:
        rows = rows[: self.trials - len(self.log)]
        tiles = [self.space.tiles[i] for i in rows]
        for row, tile, cost in zip(rows, tiles, self.objective(tiles) if tiles else (), strict=True):
            self.cost[row] = cost
            self.log.append(Trial(tile, cost))

    def _next_starts(self, count: int) -> list[int]:
        out: list[int] = []
        while self.starts and len(out) < count:
            row = self.starts.pop(0)
            if row not in self.cost and row not in out:
                out.append(row)
        return out

    def _round(self) -> list[tuple[int, _Region]]:
        """Return a batch: the smallest posterior samples over all regions, each row once."""
        measured, quantiles = self._targets()
        rows: list[int] = []
        owners: list[_Region] = []
        samples: list[Points] = []
        for region in self.regions:
            candidates = self._candidates(region)
            if len(candidates):
                rows += candidates.tolist()
                owners += [region] * len(candidates)
                samples.append(self._samples(region, candidates, measured, quantiles))
        if not rows:  # no region has candidates left
            return [(row, self.regions[0]) for row in self._next_starts(self.rule.batch)]
        picks: dict[int, _Region] = {}
        for sample in np.concatenate(samples).T:
            best = next((i for i in np.argsort(sample, kind="stable") if rows[i] not in picks), None)
            if best is not None:
                picks[rows[best]] = owners[best]
        return list(picks.items())

    def _candidates(self, region: _Region) -> Rows:
        """Return points of the box, projected to valid tiles that are not measured."""
        center = self.space.points[region.center]
        reach = np.maximum(region.length / 2, self.space.steps)
        x = center + (2 * self.rng.random((self.rule.candidates, len(center))) - 1) * reach
        rows = np.unique(self.space.nearest(np.clip(x, 0.0, 1.0)))
        return np.array([r for r in rows if int(r) not in self.cost], np.intp)

    def _targets(self) -> tuple[Rows, Points]:
        """Return the measured rows and the normal quantiles of their ranks; ties share one, failures are last."""
        from scipy.special import ndtri
        from scipy.stats import rankdata

        measured = np.array(sorted(self.cost), np.intp)
        ranks = rankdata([self.cost[int(i)] for i in measured])
        return measured, np.asarray(ndtri((ranks - 0.5) / max(len(measured), 1)))

    def _samples(self, region: _Region, rows: Rows, measured: Rows, quantiles: Points) -> Points:
        """Return posterior samples (rows x batch) of the region's local process."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        points = self.space.points
        distance = ((points[measured] - points[region.center]) ** 2).sum(1)
        near = np.argsort(distance, kind="stable")[: self.rule.neighbours]
        kernel = region.kernel
        if kernel is None:
            kernel = ConstantKernel(1.0, (0.05, 20.0)) * Matern([0.5] * points.shape[1], (0.05, 10.0), nu=2.5)
            kernel += WhiteKernel(1e-2, (1e-6, 1.0))
        process = GaussianProcessRegressor(kernel, optimizer=_descend, normalize_y=True, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a length scale at its bound is acceptable
            process.fit(points[measured[near]], quantiles[near])
            mean, covariance = process.predict(points[rows], return_cov=True)
        region.kernel = process.kernel_
        draws = self.rng.standard_normal((len(rows), self.rule.batch))
        return np.asarray(mean[:, None] + np.linalg.cholesky(covariance + 1e-9 * np.eye(len(rows))) @ draws)

    def _judge(self, region: _Region, rows: Sequence[int]) -> None:
        """Grow, shrink, move or restart a region after its trials in this round."""
        measured = [r for r in rows if r in self.cost]
        if measured:
            row = min(measured, key=lambda i: (self.cost[i], i))
            if self.cost[row] < region.best:
                region.center, region.best = row, self.cost[row]
                region.wins, region.losses = region.wins + 1, 0
            else:
                region.wins, region.losses = 0, region.losses + 1
        elif not len(self._candidates(region)):
            region.losses = self.rule.failures
        if region.wins >= self.rule.successes:
            region.length, region.wins = min(2 * region.length, self.rule.longest), 0
        if region.losses >= self.rule.failures:
            region.length, region.losses = region.length / 2, 0
        if region.length < self.rule.shortest:
            self._restart(region)

    def _restart(self, region: _Region) -> None:
        starts = self._next_starts(1)
        if starts and len(self.log) < self.trials:
            self._measure(starts)
            region.center, region.best = starts[0], self.cost[starts[0]]
            region.length, region.wins, region.losses = self.rule.length, 0, 0
