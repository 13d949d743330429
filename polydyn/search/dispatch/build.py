"""Build the decision among the kernels of a tuned group."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from polydyn.schedules.decision import ArgMin, Decision, Entry, verify_decision
from polydyn.schedules.evaluator import evaluator
from polydyn.search.dispatch.tree import features_of, fit_classifier, fit_tree
from polydyn.search.finals import between
from polydyn.search.strategies import Tuned

_DENSE = 1024
"""Number of sizes that a tree is fitted to."""


def build_dispatch(tuned: Tuned) -> Decision:
    """Return the verified decision among ``tuned.kernels``, over the backbone's dynamic loops. The strategy names the
    dispatcher.

    KeyError: unknown dispatcher.
    """
    decision = DISPATCHERS[tuned.dispatcher](tuned)
    verify_decision(decision, len(tuned.kernels), frozenset(_symbols(tuned)))
    return decision


def _symbols(tuned: Tuned) -> list[str]:
    return [x.name for x in tuned.backbone.loops if x.extent is None]


def _argmin(tuned: Tuned) -> Decision:
    return ArgMin(tuple(Entry(k, c) for k, c in enumerate(tuned.costs)))


def _tree(tuned: Tuned) -> Decision:
    """Fit a tree. Closed forms allow many sizes at no cost; without them, the measured instances are used.

    The ratio of the table to the closed forms at instances is interpolated between them.
    """
    features = features_of(_symbols(tuned))
    shapes, table, weights = tuned.instances, tuned.table, tuned.weights
    if tuned.costs and features:
        shapes, forms = tuple(_dense(tuned)), [evaluator(c) for c in tuned.costs]
        times, estimates = (
            np.array([[max(1, e(s)) for s in some] for e in forms], float) for some in (tuned.instances, shapes)
        )
        logs = np.log(np.array([tuned.backbone.flops(s) for s in tuned.instances], float) / tuned.table / times)
        table, weights = 1 / (estimates * between(tuned.instances, logs, shapes)), (1.0,) * len(shapes)
    return fit_tree(features, shapes, table, weights, costs=tuned.costs)


def _dense(tuned: Tuned) -> Iterator[dict[str, int]]:
    """Yield sizes spaced by ratio up to 2**16, much denser than the measured sizes. For one loop these are all sizes;
    for several, combinations drawn with a fixed seed (a grid of that many points would have few sizes per loop).
    """
    names = _symbols(tuned)
    axis = sorted({round(v) for v in np.geomspace(1, 1 << 16, _DENSE if len(names) == 1 else 64)})
    draw = random.Random(0)
    points = [(v,) for v in axis] if len(names) == 1 else [draw.choices(axis, k=len(names)) for _ in range(_DENSE)]
    for sizes in points:
        yield tuned.backbone.sizes(dict(zip(names, sizes, strict=True)))


def _classifier(tuned: Tuned) -> Decision:
    features = features_of(_symbols(tuned))
    return fit_classifier(features, tuned.instances, tuned.assigned, tuned.weights)


DISPATCHERS: Mapping[str, Callable[[Tuned], Decision]] = {
    "argmin": _argmin,
    "tree": _tree,
    "classifier": _classifier,
}
"""The values of column ``dispatcher`` of the strategies."""
