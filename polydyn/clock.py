"""A clock for compilations: where the time of a compilation goes.

``measuring`` opens a clock for this thread. ``section`` and ``timed`` attribute time to a named part of the
compilation; time in a section inside another one counts for the inner one only, so all sections add up to the whole.
Without an open clock they do nothing. Standard library only: every room may use this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from polydyn.timing import Timing

P = ParamSpec("P")
T = TypeVar("T")
REST = "the rest"
"""The section of time that is in no other section."""


class Clock:
    """The open clock of a compilation. ``open``: the sections that are open, outermost first."""

    def __init__(self) -> None:
        self.totals: dict[str, list[float]] = {}
        self.units: dict[str, float] = {}
        self.lines: dict[str, dict[str, int]] = {}
        self.open: list[str] = []
        self.last = (0.0, 0.0)

    def enter(self, name: str) -> None:
        """Open a section."""
        self._count()
        self.open.append(name)
        self.totals.setdefault(name, [0.0, 0.0, 0])[2] += 1

    def leave(self) -> None:
        """Close the innermost section."""
        self._count()
        self.open.pop()

    def reading(self) -> Callable[[], Timing]:
        """Return a function that returns the times until now. Its classes are made when it is called: most programs
        are opened from the cache, and their times are not read."""
        totals = [(n, wall, processor, int(count)) for n, (wall, processor, count) in self.totals.items()]
        units = [(n, processor, dict(self.lines.get(n, {}))) for n, processor in self.units.items()]

        def timing() -> Timing:
            from polydyn.timing import Section, Timing, Unit

            sections = sorted((Section(*x) for x in totals), key=lambda s: -s.seconds)
            return Timing(tuple(sections), tuple(sorted((Unit(*x) for x in units), key=lambda u: -u.processor)))

        return timing

    def timing(self) -> Timing:
        """Return the times so far."""
        return self.reading()()

    def _count(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self.open:
            total = self.totals[self.open[-1]]
            total[0] += now[0] - self.last[0]
            total[1] += now[1] - self.last[1]
        self.last = now


class DeadlineExceeded(BaseException):
    """A compilation has no time left. It is no Exception, so that no stage takes it for a failure of its own."""


_DEADLINE: ContextVar[float | None] = ContextVar("polydyn_deadline", default=None)


@contextmanager
def until(seconds: float | None) -> Iterator[None]:
    """Limit the block to some seconds (None: no limit, or that of a block around it).

    DeadlineExceeded: raised at the first section that begins later, or by a wait for the C compiler.
    """
    around = _DEADLINE.get()
    end = around if seconds is None else time.monotonic() + seconds
    token = _DEADLINE.set(end if around is None or end is None else min(around, end))
    try:
        yield
    finally:
        _DEADLINE.reset(token)


def seconds_left() -> float | None:
    """Return the seconds until the deadline, or None if there is none. DeadlineExceeded: it has passed."""
    end = _DEADLINE.get()
    if end is None:
        return None
    if (left := end - time.monotonic()) <= 0:
        raise DeadlineExceeded
    return left


_CLOCK: ContextVar[Clock | None] = ContextVar("polydyn_clock", default=None)


@contextmanager
def measuring() -> Iterator[Clock]:
    """Open a clock for this thread. Inside another clock it is a part of that one."""
    clock = _CLOCK.get()
    if clock is not None:
        yield clock
        return
    clock = Clock()
    token = _CLOCK.set(clock)
    clock.enter(REST)
    try:
        yield clock
    finally:
        clock.leave()
        _CLOCK.reset(token)


@contextmanager
def section(name: str) -> Iterator[None]:
    """Attribute the time of the block to a section of the open clock. DeadlineExceeded: see ``until``."""
    seconds_left()
    clock = _CLOCK.get()
    if clock is None:
        yield
        return
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function: attribute its time to a section of the open clock."""

    def decorate(f: Callable[P, T]) -> Callable[P, T]:
        @wraps(f)
        def function(*args: P.args, **kwargs: P.kwargs) -> T:
            with section(name):
                return f(*args, **kwargs)

        return function

    return decorate


def unit_compiled(name: str, processor: float) -> None:
    """Record the processor seconds of the C compiler for a translation unit."""
    if (clock := _CLOCK.get()) is not None:
        clock.units[name] = clock.units.get(name, 0.0) + processor


def unit_lines(name: str, lines: Mapping[str, int]) -> None:
    """Record the lines of C of each kernel in a translation unit."""
    if (clock := _CLOCK.get()) is not None:
        clock.lines.setdefault(name, {}).update(lines)
