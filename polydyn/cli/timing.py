"""Timing of whole calls, for ``polydyn bench``, ``compare`` and ``try``: rounds in which runtimes alternate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polydyn.cli.baselines import Call
    from polydyn.runtime.program import Program

CALLS_PER_TURN = 4
"""Calls of each concurrent caller in a round; a single caller makes one."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Plan:
    """How long each shape is measured: ``rounds`` calls of each caller, or ``duration`` seconds for all runtimes.

    ``warmup``: calls before, which are not timed; at least one, whose results are compared. ``concurrency``: callers at
    once, each in a thread of its own.
    """

    rounds: int = 20
    duration: float | None = None
    warmup: int = 1
    concurrency: int = 1


@dataclass
class Times:
    """Seconds of every timed call of a runtime, and the seconds in which its callers were at work."""

    seconds: list[float] = field(default_factory=list)
    busy: float = 0.0

    def percentile(self, percent: int) -> float:
        """Return the seconds that ``percent`` of the calls do not exceed (nearest rank)."""
        ordered = sorted(self.seconds)
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

    @property
    def median(self) -> float:
        """The median of the calls in seconds."""
        return statistics.median(self.seconds)

    @property
    def throughput(self) -> float:
        """Calls per second of all callers together."""
        return len(self.seconds) / self.busy if self.busy else 0.0

    @property
    def spread(self) -> float:
        """The interquartile range relative to the median; 0 for fewer than four calls."""
        if len(self.seconds) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median


def measured(
    program: Program, shapes: Sequence[dict[str, int]], calls: Mapping[str, Call], plan: Plan
) -> Iterator[tuple[dict[str, int], dict[str, Times], dict[str, Mapping[str, Any]]]]:
    """Yield each shape with the times and the results of every runtime, for inputs of ``program``."""
    from polydyn.cli.inputs import feeds_for
    from polydyn.cli.progress import working

    with working(shape_text(shapes[0]), len(shapes), measuring=True) as step:
        for shape, following in zip(shapes, [*map(shape_text, shapes[1:]), ""], strict=True):
            yield shape, *alternating(calls, feeds_for(program, shape, {}), plan)
            step(following)


def alternating(
    calls: Mapping[str, Call], feeds: Mapping[str, Any], plan: Plan
) -> tuple[dict[str, Times], dict[str, Mapping[str, Any]]]:
    """Return the times of every runtime, and the results of its first call, which is not timed."""
    results = {n: call(feeds) for n, call in calls.items()}
    for call in calls.values():
        for _ in range(plan.warmup - 1):
            call(feeds)
    times = {n: Times() for n in calls}
    turn = 1 if plan.concurrency == 1 else CALLS_PER_TURN
    begun = time.perf_counter()
    with ThreadPoolExecutor(plan.concurrency) as pool:
        while not _done(times, plan, time.perf_counter() - begun):
            for name, call in calls.items():
                start = time.perf_counter()
                if plan.concurrency == 1:
                    times[name].seconds += _turn(call, feeds, turn)
                else:
                    turns = [pool.submit(_turn, call, feeds, turn) for _ in range(plan.concurrency)]
                    times[name].seconds += [s for t in turns for s in t.result()]
                times[name].busy += time.perf_counter() - start
    return times, results


def _done(times: Mapping[str, Times], plan: Plan, elapsed: float) -> bool:
    """Whether the plan is fulfilled; every runtime has a call at least."""
    calls = min(len(t.seconds) for t in times.values())
    if plan.duration is not None:
        return calls > 0 and elapsed >= plan.duration
    return calls >= plan.rounds * plan.concurrency


def _turn(call: Callable[[Mapping[str, Any]], Any], feeds: Mapping[str, Any], count: int) -> list[float]:
    """Return the seconds of some calls, one after the other."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call(feeds)
        seconds.append(time.perf_counter() - start)
    return seconds


def shape_text(shape: Mapping[str, int]) -> str:
    """Return a shape as ``B=1,L=8``."""
    return ",".join(f"{n}={v}" for n, v in shape.items())


def allowed_error(program: Program) -> float:
    """Return the allowed difference of results of whole programs: a few units in the last place for 16-bit types."""
    from polydyn.verification import TOLERANCE, UNITS

    return max(TOLERANCE, *(8 * UNITS.get(o["dtype"], 0.0) for o in program.manifest["outputs"]))


def largest_error(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Return the maximum error of all outputs; infinite if their shapes differ."""
    from polydyn.verification import TOLERANCE
    from polydyn.verification import compare as compare_arrays

    return max(
        compare_arrays(n, ours[n], theirs[n], TOLERANCE).error if ours[n].shape == theirs[n].shape else float("inf")
        for n in ours
    )
