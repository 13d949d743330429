"""Search the numbers of a written schedule: tile sizes, the order of the outer loops, factors of unrolling.

The schedule is the starting point. Candidates have the same steps with other numbers; each is proven like every
schedule, compiled and timed, and the trust regions of ``polydyn tune`` choose which ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from polydyn.errors import InputError, LegalityError, ScheduleError
from polydyn.schedules.handmade.steps import Step
from polydyn.search.explorers.trust_region import Result, search_rows
from polydyn.search.spaces.space import coordinates


class Searchable(Protocol):
    """A schedule whose numbers are searched: ``polydyn.explore.Schedule``."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """Its steps."""

    def with_steps(self: S, steps: Sequence[Step]) -> S:
        """Return the schedule of the same group with other steps."""

    def seconds(self, repeat: int = 20, **dims: int) -> float:
        """Return the time of a launch."""


S = TypeVar("S", bound=Searchable)
MOST_CANDIDATES = 4096
"""Maximum candidates; a larger space is sampled."""
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256)
FACTOR = 4
"""Candidates are from a quarter of a number to four times it."""
REPEATS = 9
"""Launches of a measurement; their median counts."""


@dataclass(frozen=True, repr=False)
class Found(Generic[S]):
    """The result of a search. ``best``: the schedule with least cost; ``trials``: schedules in the order of
    measurement, with seconds at each of the sizes; ``candidates``: the number of schedules to choose from; ``refused``:
    trials that a step, the proof or the vectoriser refused. ``result``: regions, and predictions beside measurements.
    ``sizes``: the sizes of the model's dims.
    """

    best: S
    trials: tuple[tuple[S, tuple[float, ...]], ...]
    candidates: int
    refused: int
    result: Result
    sizes: tuple[Mapping[str, int], ...] = ()

    def __repr__(self) -> str:
        timed = f"{len(self.trials)} of {self.candidates} candidates timed, {self.refused} refused"
        return f"{timed}, the best is {self.gain:.2f} times as fast as the first\n{self.best}"

    @property
    def gain(self) -> float:
        """The geometric mean over the sizes of the first schedule's time over that of the best one."""
        before, after = (next(times for s, times in self.trials if s is x) for x in (self.trials[0][0], self.best))
        return float(np.exp(np.mean(np.log(np.divide(before, after)))))

    @property
    def regions(self) -> dict[str, dict[float, float]]:
        """Size -> trials -> schedules in its region after them."""
        rounds, classes = self.result.rounds, len(self.result.regions)
        return {f"size {s}": {x.trials: x.sizes[s] for x in rounds} for s in range(classes)}

    @property
    def opinions(self) -> list[tuple[float, float]]:
        """(predicted, measured) seconds at the first of the sizes, of the schedules that the process chose."""
        out = []
        for x in self.result.rounds:
            measured = self.result.costs[x.trials : x.trials + len(x.predicted), 0]
            out += [(float(p), float(m)) for p, m in zip(x.predicted[:, 0], measured, strict=False) if np.isfinite(m)]
        return out


def search(
    schedule: S, sizes: Sequence[Mapping[str, int]], trials: int = 32, seed: int = 0,
    weights: Sequence[float] = (), time: Callable[[S, Mapping[str, int]], float] | None = None,
) -> Found[S]:  # fmt: skip
    """Search other numbers for the steps of a schedule.

    ``sizes``: sizes of the model's dims at which a kernel is timed, with ``weights`` (by default equal ones). The cost
    is the weighted mean of logarithms. ``time``: returns seconds, by default the median of a launch on one thread. The
    same seed and times choose the same schedules. InputError: no sizes, or weights for other ones.
    """
    if isinstance(sizes, Mapping) or trials < 1 or any(w <= 0 for w in weights):
        reason = f"trials={trials!r}, sizes={sizes!r}, weights={weights!r}"
        raise InputError(reason, rule="search", remedy="search([{'L': 8}, {'L': 128}], trials=24), weights above 0")
    if not sizes or (weights and len(weights) != len(sizes)):
        reason = f"{len(weights)} weights for {len(sizes)} sizes"
        raise InputError(reason, rule="sizes of a search", remedy="[{'L': 128}]")
    weigh = np.array(weights or [1.0] * len(sizes)) / sum(weights or [1.0] * len(sizes))
    measure = time or (lambda s, dims: s.seconds(REPEATS, **dims))
    every = _candidates(schedule, random.Random(seed))
    done: list[tuple[S, tuple[float, ...]]] = []
    refused = 0

    def costs(rows: Sequence[int]) -> Any:
        nonlocal refused
        out = np.full((len(rows), len(sizes)), np.inf)
        for n, row in enumerate(rows):
            try:
                candidate = schedule.with_steps(every[row][0])
                times = tuple(measure(candidate, dims) for dims in sizes)
            except (ScheduleError, LegalityError):
                refused += 1
                continue
            done.append((candidate, times))
            out[n] = times
        return out

    points = coordinates([numbers for _, numbers in every])
    result = search_rows(points, costs, trials, order=range(len(every)), weights=tuple(weigh), seed=seed)
    if not done:
        remedy = "schedule.compile() says why this one cannot"
        raise InputError("no candidate could be timed", rule="search", remedy=remedy)
    best = min(done, key=lambda x: float(weigh @ np.log(np.maximum(x[1], 1e-12))))
    return Found(best[0], tuple(done), len(every), refused, result, tuple(sizes))


Candidate = tuple[tuple[Step, ...], tuple[int, ...]]
"""Steps, and the numbers in them that vary."""


def _candidates(schedule: Searchable, rng: random.Random) -> list[Candidate]:
    """Return the steps of the schedule, then those with other numbers, the nearest first."""
    lanes = next((x.arguments[0] for x in schedule.steps if x.name == "pack"), 1)
    vectors = {x.arguments[0].partition(".")[0] for x in schedule.steps if x.name == "vectorize"}
    options = [list(_options(x, lanes, vectors)) for x in schedule.steps]
    first: Candidate = (tuple(x[0][0] for x in options), tuple(n for x in options for n in x[0][1]))
    size = np.prod([float(len(x)) for x in options])
    chosen = itertools.product(*options) if size <= MOST_CANDIDATES else (
        tuple(map(rng.choice, options)) for _ in range(MOST_CANDIDATES)
    )  # fmt: skip
    every = {tuple(n for _, ns in x for n in ns): tuple(s for s, _ in x) for x in chosen}
    every.pop(first[1], None)
    own = np.log2(np.maximum(first[1], 1))

    def far(numbers: tuple[int, ...]) -> float:
        return float(np.abs(np.log2(np.maximum(numbers, 1)) - own).sum())

    return [first, *((every[n], n) for n in sorted(every, key=lambda n: (far(n), n)))]


def _options(step: Step, lanes: int, vectors: set[str]) -> Iterator[tuple[Step, tuple[int, ...]]]:
    """Yield a step with its own numbers, and with others."""
    if step.name == "tile":
        axes = [list(_sizes(n, lanes if axis in vectors else 1)) for axis, n in step.named]
        for sizes in itertools.product(*axes):
            named = tuple((axis, n) for (axis, _), n in zip(step.named, sizes, strict=True))
            numbers = tuple(x for n in sizes for x in (n if isinstance(n, tuple) else (n,)))
            yield replace(step, named=named), numbers
    elif step.name == "reorder":
        yield step, (1,)
        if len(step.arguments) == 2:
            yield replace(step, arguments=step.arguments[::-1]), (2,)
    elif step.name == "unroll" and (factor := dict(step.named).get("factor")):
        for n in dict.fromkeys((factor, 2, 4, 8)):
            yield replace(step, named=(("factor", n),)), (n,)
    else:
        yield step, ()


def _sizes(n: Any, lanes: int) -> Iterator[Any]:
    """Yield the size of a tile, and others: multiples of ``lanes``, of two levels with the ratio of the first."""
    yield n
    inner = n[-1] if isinstance(n, tuple) else n
    for x in (r * lanes for r in RATIOS):
        if inner <= FACTOR * x and x <= FACTOR * inner and x != inner:
            yield (n[0] // n[1] * x, x) if isinstance(n, tuple) else x
