"""Device time of short work: many launches captured in one graph and replayed.

A launch takes the host several microseconds, and a small kernel takes less. Timed launch by launch, all small kernels
would take the host's time. With a graph the host starts all launches at once. The data of a kernel may still be in L2
from the previous launch (``hot``) or not (``cold``). For cold times, launches alternate between enough sets of data
that a set has left L2 when it is used again (``sets_beyond``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from polydyn.gpu.errors import DeviceError
from polydyn.runtime.cuda.driver import Driver

__all__ = [
    "LAUNCHES",
    "ROUNDS",
    "SHORT_LAUNCHES",
    "SHORT_SECONDS",
    "TARGET_SECONDS",
    "WARM_UP_SECONDS",
    "Times",
    "Work",
    "replayed",
    "sets_beyond",
]

Work: TypeAlias = "Callable[[int], None]"
"""Enqueues one or more launches on a stream."""

LAUNCHES, SHORT_LAUNCHES, SHORT_SECONDS = 20, 50, 5e-6
"""Launches per graph; launches per graph if one takes less than SHORT_SECONDS seconds; SHORT_SECONDS."""
ROUNDS, TARGET_SECONDS, WARM_UP_SECONDS = 5, 1e-3, 2e-2
"""Number of rounds, minimum seconds per round, and seconds of warm-up in which the device raises its clocks."""
MAX_SETS = 256
L2_EVICTION_FACTOR = 2
"""A set counts as evicted from L2 after this many times the L2 size has been accessed."""


@dataclass(frozen=True)
class Times:
    """Seconds of a launch in each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The time to report."""
        return median(self.rounds)

    @property
    def least(self) -> float:
        """The time to compare versions by."""
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """The maximum difference of two rounds, relative to the median; smaller differences are noise."""
        return (max(self.rounds) - min(self.rounds)) / max(self.median, 1e-12)


def sets_beyond(nbytes: int, l2: int) -> int:
    """Return how many sets of ``nbytes`` are needed so that no launch finds its data in an L2 of ``l2`` bytes."""
    return max(2, min(MAX_SETS, 1 + -(-L2_EVICTION_FACTOR * l2 // max(nbytes, 1))))


def replayed(
    driver: Driver, works: Sequence[Work], launches: int = LAUNCHES, rounds: int = ROUNDS, warm: float = WARM_UP_SECONDS
) -> Times:
    """Return the times of one of ``works``, which alternate in a graph of at least ``launches`` launches.

    Every work must have run before (kernels are loaded, memory is allocated). Short ones get SHORT_LAUNCHES launches
    if there is more than one round. DeviceError: a kernel fails, or some work cannot be captured.
    """
    with ExitStack() as left:
        stream = driver.stream()
        left.callback(_given_back, driver.free_stream, stream)
        events = driver.event(), driver.event()
        for event in events:
            left.callback(_given_back, driver.free_event, event)

        def timed(count: int, replays: int) -> list[float]:
            count = max(count, len(works))
            graph = _captured(driver, stream, works, count)
            left.callback(_given_back, driver.free_graph, graph)
            once = _seconds(driver, stream, graph, 1, events)
            if replays == 1 and rounds == 1:
                return [once / count]
            _seconds(driver, stream, graph, max(1, round(warm / max(once, 1e-9))), events)
            again = max(1, round(TARGET_SECONDS / max(once, 1e-9)))
            return [_seconds(driver, stream, graph, again, events) / again / count for _ in range(replays)]

        times = timed(launches, 1)
        if rounds == 1:
            return Times(tuple(times))
        return Times(tuple(timed(launches if times[0] > SHORT_SECONDS else max(launches, SHORT_LAUNCHES), rounds)))


def _given_back(free: Callable[[int], None], handle: int) -> None:
    """Free a handle, unless it was lost with its context, so that the original error is reported."""
    with suppress(DeviceError):
        free(handle)


def _captured(driver: Driver, stream: int, works: Sequence[Work], count: int) -> int:
    driver.begin_capture(stream)
    try:
        for k in range(count):
            works[k % len(works)](stream)
    except BaseException:
        with suppress(DeviceError):
            driver.free_graph(driver.end_capture(stream))
        raise
    return driver.end_capture(stream)


def _seconds(driver: Driver, stream: int, graph: int, replays: int, events: tuple[int, int]) -> float:
    driver.record(events[0], stream)
    for _ in range(replays):
        driver.launch_graph(graph, stream)
    driver.record(events[1], stream)
    return driver.elapsed(*events) / 1e3
