"""A Gaussian process with several outputs, in numpy.

The kernel is Matern 5/2 with one length per axis (Rasmussen and Williams 2006, 4.2). All outputs share the lengths, the
noise and one Cholesky factorisation; each has its own mean and variance. The lengths and the noise have log-normal
priors. They follow the posterior uphill in a few random steps per fit, starting from the previous fit, so that no
optimiser and no bounds are needed.

Sums have a fixed order: no function here calls BLAS or LAPACK, whose results may depend on the number of threads. The
matrices have at most a few hundred rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

_ROOT5 = 5.0**0.5
_JITTER = 1e-6
"""Added to the diagonal, relative to the variance, so that the factorisation exists for equal points."""
_MEAN_PRECISION = 0.05
"""Precision of the prior of an output's mean, relative to the variance."""
_VARIANCE_COUNT, _VARIANCE_SUM = 2.0, 0.6
"""Prior of an output's variance: as many observations with this sum of squares, for values of unit variance."""
_STEP_SIZES = (0.5, 0.25)
"""Alternating sizes of the random steps, in standard deviations of the prior."""


@dataclass(frozen=True)
class Prior:
    """Log-normal priors: medians, and standard deviations of the logarithms. Lengths are in units of the points,
    ``noise`` is relative to the standard deviation of the values. ``steps``: random steps per fit."""

    length: float = 0.5
    length_deviation: float = 0.7
    noise: float = 0.05
    noise_deviation: float = 0.8
    steps: int = 6


@dataclass(frozen=True)
class _Fit:
    """The factorised covariance of the points for some parameters. ``posterior``: logarithm, up to a constant."""

    posterior: float
    lower: Matrix
    mean: Matrix
    variance: Matrix
    residual: Matrix


class GaussianProcess:
    """A process over points with ``axes`` coordinates. ``random`` draws the steps of the parameters."""

    def __init__(self, axes: int, random: np.random.Generator, prior: Prior | None = None) -> None:
        self._prior, self._random, self._axes = prior or Prior(), random, axes
        p = self._prior
        self._median = np.log(np.array([p.length] * axes + [p.noise]))
        self._deviation = np.array([p.length_deviation] * axes + [p.noise_deviation])
        self._logs = self._median.copy()

    @property
    def lengths(self) -> Matrix:
        """The length of each axis."""
        return np.asarray(np.exp(self._logs[: self._axes]))

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, relative to the values."""
        return float(np.exp(self._logs[-1]))

    def fit(self, points: Matrix, values: Matrix) -> None:
        """Fit to ``values`` (rows x outputs), each output with mean 0 and variance 1, at ``points`` (rows x axes)."""
        self._points, self._values = points, values
        fit = self._factorised(self._logs)
        for n in range(self._prior.steps):
            moved = self._random.random(len(self._logs)) < 0.5
            step = self._random.standard_normal(len(self._logs)) * moved
            logs = self._logs + _STEP_SIZES[n % 2] * self._deviation * step
            other = self._factorised(logs)
            if other.posterior > fit.posterior:
                self._logs, fit = logs, other
        self._fit = fit

    def _factorised(self, logs: Matrix) -> _Fit:
        """Factorise the covariance and compute the posterior density of the parameters ``logs``. Means and variances
        of the outputs are estimated."""
        count = len(self._values)
        covariance = matern(self._points, self._points, np.exp(logs[: self._axes]))
        covariance[np.diag_indices(count)] += np.exp(2 * logs[-1]) + _JITTER
        lower = cholesky(covariance)
        whitened = solve_lower(lower, np.column_stack([np.ones(count), self._values]))
        ones, values = whitened[:, :1], whitened[:, 1:]
        mean = (ones * values).sum(0) / ((ones * ones).sum() + _MEAN_PRECISION)
        residual = values - ones * mean
        variance = ((residual * residual).sum(0) + _VARIANCE_SUM) / (count + _VARIANCE_COUNT)
        likelihood = -0.5 * count * np.log(variance).mean() - np.log(np.diag(lower)).sum()
        prior = -0.5 * (((logs - self._median) / self._deviation) ** 2).sum()
        return _Fit(float(likelihood + prior), lower, mean, variance, residual)

    def predict(self, points: Matrix) -> tuple[Matrix, Matrix]:
        """Return means and standard deviations (rows x outputs) of the values without noise."""
        shared = solve_lower(self._fit.lower, matern(self._points, points, self.lengths))
        mean = self._fit.mean + np.einsum("kn,ks->ns", shared, self._fit.residual)
        share = np.maximum(1 - (shared * shared).sum(0), 1e-9)
        return np.asarray(mean), np.sqrt(share[:, None] * self._fit.variance)


def matern(a: Matrix, b: Matrix, lengths: Matrix) -> Matrix:
    """Return the correlations (rows of ``a`` x rows of ``b``)."""
    square = np.zeros((len(a), len(b)))
    for x, y in zip((a / lengths).T, (b / lengths).T, strict=True):
        square += (x[:, None] - y[None]) ** 2
    r = _ROOT5 * np.sqrt(square)
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


def cholesky(matrix: Matrix) -> Matrix:
    """Return the lower triangular factor of a symmetric positive definite matrix."""
    lower = np.zeros_like(matrix)
    for j in range(len(matrix)):
        column = matrix[j:, j] - np.einsum("ik,k->i", lower[j:, :j], lower[j, :j])
        lower[j:, j] = column / np.sqrt(column[0])
    return lower


def solve_lower(lower: Matrix, right: Matrix) -> Matrix:
    """Return x with ``lower @ x == right`` for a lower triangular matrix and several right-hand sides (columns)."""
    x = np.empty_like(right)
    for i in range(len(lower)):
        x[i] = (right[i] - np.einsum("k,kn->n", lower[i, :i], x[:i])) / lower[i, i]
    return x


def expected_improvement(mean: Matrix, deviation: Matrix, best: Matrix) -> Matrix:
    """Return by how much normal values are expected to be below ``best`` (Jones et al. 1998, equation 15).

    The error function is approximated within 1.5e-7 (Abramowitz and Stegun 7.1.26).
    """
    z = (best - mean) / deviation
    x = np.abs(z) / 2**0.5
    t = 1 / (1 + 0.3275911 * x)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    below = 0.5 * (1 + np.sign(z) * (1 - series * np.exp(-x * x)))
    return np.asarray(deviation * np.maximum(z * below + np.exp(-z * z / 2) / (2 * np.pi) ** 0.5, 0.0))
