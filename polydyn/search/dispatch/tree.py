"""Decision trees over symbols: cost-sensitive (the default), or BladeDISC's classifier (5.2.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from polydyn.schedules.decision import ArgMin, Decision, Entry, Leaf, Split
from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search.select import Table, shares

Values = npt.NDArray[np.int64]


_MAX_LEAF_KERNELS = 4
"""Maximum number of kernels that a leaf compares, because the comparison is on the launch path."""


def features_of(symbols: Sequence[str], tiles: Sequence[Index] = ()) -> tuple[Index, ...]:
    """Return the expressions that a tree may test: every symbol, and expressions such as block counts."""
    return (*(Index.of(s) for s in symbols), *tiles)


def evaluate(features: Sequence[Index], shapes: Sequence[Mapping[str, int]]) -> Values:
    """Return the value of every feature (columns) at every shape (rows)."""
    return np.array(_values(features, shapes), np.int64).reshape(len(shapes), len(features))


def _values(features: Sequence[Index], shapes: Sequence[Mapping[str, int]]) -> list[list[int]]:
    forms = list(map(evaluator, features))
    return [[value(s) for value in forms] for s in shapes]


def fit_tree(
    features: Sequence[Index],
    shapes: Sequence[Mapping[str, int]],
    table: Table,
    weights: Sequence[float] | None = None,
    *,
    leaves: int = 32,
    costs: Sequence[Index] = (),
) -> Decision:
    """Return a tree with little loss of throughput over the shapes.

    ``table[k, i]``: throughput of kernel k at shape i. The growth is greedy: it takes the split that saves the most
    weighted loss (1 - relative throughput) of all leaves, up to ``leaves`` or until nothing is saved. With ``costs``
    (closed forms of the kernels) a leaf has the few kernels whose comparison by cost loses least at its shapes;
    without, it has one kernel.
    """
    w = np.ones(table.shape[1]) if weights is None else np.asarray(weights, float)
    loss = ((1 - shares(table)) * (w / w.sum())).T
    estimates = np.array(_values(costs, shapes), float) if costs else None
    return _Grower(features, evaluate(features, shapes), loss, costs, estimates).grow(leaves)


class _Grower:
    """Best-first growth. A leaf is the array of its shapes' rows."""

    def __init__(
        self, features: Sequence[Index], values: Values, loss: Table, costs: Sequence[Index], estimates: Table | None
    ) -> None:
        self.features, self.values, self.loss, self.costs, self.estimates = features, values, loss, costs, estimates

    def grow(self, leaves: int) -> Decision:
        root = np.arange(len(self.values))
        parts: dict[str, npt.NDArray[np.intp]] = {"": root}
        tests: dict[str, tuple[int, int]] = {}
        while len(parts) < leaves:
            offers = [(saved, path, test) for path, rows in parts.items() for saved, *test in [self._split(rows)]]
            saved, path, (feature, threshold) = max(offers, key=lambda o: (o[0], o[1]))
            if saved <= 1e-9:
                break
            rows = parts.pop(path)
            low = self.values[rows, feature] <= threshold
            tests[path] = (feature, threshold)
            parts[path + "0"], parts[path + "1"] = rows[low], rows[~low]
        return self._node("", parts, tests)

    def _split(self, rows: npt.NDArray[np.intp]) -> tuple[float, int, int]:
        """Return (saved loss, feature, threshold) of the best split of a leaf."""
        undivided, best = float(self._impurity(self.loss[rows].sum(0))), (0.0, 0, 0)
        for f in range(self.values.shape[1]):
            order = rows[np.argsort(self.values[rows, f], kind="stable")]
            v = self.values[order, f]
            cut = np.nonzero(v[1:] > v[:-1])[0]
            if not len(cut):
                continue
            sums = np.cumsum(self.loss[order], 0)
            after = self._impurity(sums[cut]) + self._impurity(sums[-1] - sums[cut])
            i = int(after.argmin())
            low, high = int(v[cut[i]]), int(v[cut[i] + 1])
            best = max(best, (undivided - float(after[i]), f, (low + high) // 2), key=lambda o: o[0])
        return best

    def _impurity(self, sums: Table) -> Table:
        """Return what a split decreases, from sums of the loss over shapes (last axis: kernels): the least loss."""
        return np.asarray(sums.min(-1))

    def _node(
        self, path: str, parts: Mapping[str, npt.NDArray[np.intp]], tests: Mapping[str, tuple[int, int]]
    ) -> Decision:
        if path not in tests:
            return self._leaf(parts[path])
        feature, threshold = tests[path]
        low, high = self._node(path + "0", parts, tests), self._node(path + "1", parts, tests)
        return low if low == high else Split(self.features[feature], threshold, low, high)

    def _leaf(self, rows: npt.NDArray[np.intp]) -> Decision:
        loss = self.loss[rows].sum(0)
        chosen, least = [int(loss.argmin())], float(loss.min())
        while self.estimates is not None and len(chosen) < _MAX_LEAF_KERNELS:
            more = [k for k in range(len(loss)) if k not in chosen]
            after, k = min(((self._compared(rows, [*chosen, k]), k) for k in more), default=(least, 0))
            if least - after <= 1e-6:
                break
            chosen, least = [*chosen, k], after
        if len(chosen) == 1:
            return Leaf(chosen[0])
        return ArgMin(tuple(Entry(k, self.costs[k]) for k in sorted(chosen)))

    def _compared(self, rows: npt.NDArray[np.intp], kernels: Sequence[int]) -> float:
        """Return the loss at the shapes of ``rows`` if closed forms choose among kernels; ties go to the first."""
        assert self.estimates is not None
        candidates = np.array(sorted(kernels))
        picked = candidates[self.estimates[np.ix_(rows, candidates)].argmin(1)]
        return float(self.loss[rows, picked].sum())


class _Classifier(_Grower):
    """Growth by Gini impurity: ``loss`` has the weight of each label at each shape."""

    def _impurity(self, sums: Table) -> Table:
        total = sums.sum(-1)
        return np.asarray(total - (sums * sums).sum(-1) / np.maximum(total, 1e-300))

    def _leaf(self, rows: npt.NDArray[np.intp]) -> Decision:
        return Leaf(int(self.loss[rows].sum(0).argmax()))


def fit_classifier(
    features: Sequence[Index],
    shapes: Sequence[Mapping[str, int]],
    labels: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    leaves: int = 64,
) -> Decision:
    """Fit BladeDISC's decision-tree classifier of best kernels: best-first growth by Gini impurity (Breiman et al.
    1984), up to ``leaves``. ``labels``: the best kernel of each shape."""
    w = np.ones(len(labels)) if weights is None else np.asarray(weights, float)
    loss = np.zeros((len(labels), max(labels) + 1))
    loss[np.arange(len(labels)), np.asarray(labels)] = w / w.sum()
    return _Classifier(features, evaluate(features, shapes), loss, (), None).grow(max(2, leaves))
