"""From a tuned group to its dispatch: the programs that may be launched and the decision among them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from polydyn.schedules.decision import ArgMin, Decision, Entry, verify_decision
from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index
from polydyn.search.dispatch.combine import PairForm, pair_form
from polydyn.search.dispatch.tree import features_of, fit_classifier, fit_tree
from polydyn.search.finals import between
from polydyn.search.strategies import Tuned


@dataclass(frozen=True)
class Program:
    """One or two launches. ``kernels``: positions in ``Tuned.kernels``; with two, ``axis`` is cut by ``pair``: the
    first kernel takes ``pair.bigs`` tiles from the start, the second ``pair.smalls`` tiles of the rest.
    """

    kernels: tuple[int, ...]
    axis: str = ""
    pair: PairForm | None = None


@dataclass(frozen=True)
class Dispatch:
    """``decision`` names positions in ``programs``. Symbols are the backbone's dynamic loops."""

    programs: tuple[Program, ...]
    decision: Decision


_DENSE = 1024
"""Sizes that a tree is fitted to."""
_PAIRED = 6
"""How many kernels (the most used) are combined with each other; more would only lengthen the comparison."""


def build_dispatch(tuned: Tuned, pairs: bool = True) -> Dispatch:
    """The dispatch of a tuned group by its strategy's dispatcher; verified. KeyError: unknown dispatcher.

    ``pairs``: launches of two kernels are candidates too, where the strategy has them.
    """
    dispatch = (DISPATCHERS[tuned.dispatcher] if pairs else SINGLES[tuned.dispatcher])(tuned)
    verify_decision(dispatch.decision, len(dispatch.programs), frozenset(_symbols(tuned)))
    return dispatch


def _symbols(tuned: Tuned) -> list[str]:
    return [x.name for x in tuned.backbone.loops if x.extent is None]


def _singles(tuned: Tuned) -> tuple[Program, ...]:
    return tuple(Program((k,)) for k in range(len(tuned.kernels)))


def _argmin(tuned: Tuned) -> Dispatch:
    return Dispatch(_singles(tuned), ArgMin(tuple(Entry(k, c) for k, c in enumerate(tuned.costs))))


def _tree(tuned: Tuned) -> Dispatch:
    """The tree over many sizes, which closed forms make free; over the measured instances where there are none.

    The difference between the table and the closed forms at instances is assumed to hold between them.
    """
    features = features_of(_symbols(tuned))
    shapes, table, weights = tuned.instances, tuned.table, tuned.weights
    if tuned.costs and features:
        shapes, forms = tuple(_dense(tuned)), [evaluator(c) for c in tuned.costs]
        times, estimates = (
            np.array([[max(1, e(s)) for s in of] for e in forms], float) for of in (tuned.instances, shapes)
        )
        logs = np.log(np.array([tuned.backbone.flops(s) for s in tuned.instances], float) / tuned.table / times)
        table, weights = 1 / (estimates * between(tuned.instances, logs, shapes)), (1.0,) * len(shapes)
    return Dispatch(_singles(tuned), fit_tree(features, shapes, table, weights, costs=tuned.costs))


def _dense(tuned: Tuned) -> Iterator[dict[str, int]]:
    """Sizes spaced by ratio up to 2**16, far denser than anything that is measured: all of one loop, or tuples of
    several, drawn with a fixed seed (a grid of as many tuples would have only a few sizes of each).
    """
    names = _symbols(tuned)
    axis = sorted({round(v) for v in np.geomspace(1, 1 << 16, _DENSE if len(names) == 1 else 64)})
    draw = random.Random(0)
    points = [(v,) for v in axis] if len(names) == 1 else [draw.choices(axis, k=len(names)) for _ in range(_DENSE)]
    for sizes in points:
        yield tuned.backbone.sizes(dict(zip(names, sizes, strict=True)))


def _classifier(tuned: Tuned) -> Dispatch:
    features = features_of(_symbols(tuned))
    return Dispatch(_singles(tuned), fit_classifier(features, tuned.instances, tuned.assigned, tuned.weights))


def _combine(tuned: Tuned) -> Dispatch:
    """FTuner: all single kernels, and pairs of the most used ones where they cover the axis without padding.

    A pair's score is the mean of its kernels' (5-B), each at the part of the axis that it takes.
    """
    programs = list(_singles(tuned))
    entries = [Entry(k, c) for k, c in enumerate(tuned.costs)]
    axis = next((x.name for x in tuned.backbone.parallel if x.extent is None), None)
    uses = sorted(range(len(programs)), key=lambda k: (-tuned.assigned.count(k), k))[:_PAIRED]
    for pair in combinations(uses if axis else (), 2):
        big, small = sorted(pair, key=lambda k: (-tuned.kernels[k].tile[f"b.{axis}"], k))
        a, b = (tuned.kernels[k].tile[f"b.{axis}"] for k in (big, small))
        if axis is None or a == b:
            continue
        form = pair_form(a, b, Index.of(axis))
        first, second = tuned.costs[big].subs({axis: form.bigs * a}), tuned.costs[small].subs({axis: form.smalls * b})
        entries.insert(0, Entry(len(programs), (first + second) // 2, form.guard))
        programs.append(Program((big, small), axis, form))
    return Dispatch(tuple(programs), ArgMin(tuple(entries)))


DISPATCHERS: Mapping[str, Callable[[Tuned], Dispatch]] = {
    "argmin": _argmin,
    "tree": _tree,
    "classifier": _classifier,
    "combine": _combine,
}
"""Column ``dispatcher`` of the strategies."""
SINGLES = {**DISPATCHERS, "combine": _argmin}
"""The same with one kernel for a launch."""
