"""The device's time of short work: many launches captured in one graph and replayed.

One launch takes the host several microseconds, and a small kernel less; timed launch by launch, all small kernels take
as long as the host does. In a graph the host starts all launches at once. What a kernel reads may still be in L2 from
the launch before (``hot``), or not (``cold``): then launches take turns with so many sets of data that L2 has forgotten
a set when its turn comes again (``sets_beyond``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from polydyn.gpu.errors import DeviceError
from polydyn.runtime.cuda.driver import Driver

__all__ = ["LAUNCHES", "MANY", "MEASURED", "ROUNDS", "SHORT", "WARM", "Times", "Work", "replayed", "sets_beyond"]

Work: TypeAlias = "Callable[[int], None]"
"""Puts a launch, or several, on a stream."""

LAUNCHES, MANY, SHORT = 20, 50, 5e-6
"""Launches in a graph, of those that take less than SHORT seconds, and those seconds."""
ROUNDS, MEASURED, WARM = 5, 1e-3, 2e-2
"""Rounds of at least so many seconds each, after so many in which the device raises its clocks."""
MOST_SETS = 256
FORGOTTEN = 2
"""L2 has forgotten a set when so many times its bytes were used since."""


@dataclass(frozen=True)
class Times:
    """Seconds of a launch in each round, ``median`` of them."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """What to quote."""
        return median(self.rounds)

    @property
    def least(self) -> float:
        """What to compare versions by."""
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """The widest difference of two rounds, over the median: what is less is noise."""
        return (max(self.rounds) - min(self.rounds)) / max(self.median, 1e-12)


def sets_beyond(nbytes: int, l2: int) -> int:
    """How many sets of data of ``nbytes`` each make every launch find its own gone from an L2 of so many bytes."""
    return max(2, min(MOST_SETS, 1 + -(-FORGOTTEN * l2 // max(nbytes, 1))))


def replayed(
    driver: Driver, works: Sequence[Work], launches: int = LAUNCHES, rounds: int = ROUNDS, warm: float = WARM
) -> Times:
    """Times of one of ``works``, which take turns in a graph of at least ``launches``.

    Every work was run before (kernels are loaded, memory is there). Short ones get MANY launches, where more than one
    round is asked for. DeviceError: a kernel fails, or something is not to be captured.
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
            again = max(1, round(MEASURED / max(once, 1e-9)))
            return [_seconds(driver, stream, graph, again, events) / again / count for _ in range(replays)]

        times = timed(launches, 1)
        if rounds == 1:
            return Times(tuple(times))
        return Times(tuple(timed(launches if times[0] > SHORT else max(launches, MANY), rounds)))


def _given_back(free: Callable[[int], None], handle: int) -> None:
    """Frees a handle, unless it went with its context: the error that broke it is the one to see."""
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
