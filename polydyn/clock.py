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
from dataclasses import asdict, dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
IMPORT = "import of the model"
"""The first section of every compilation."""
REST = "the rest"
"""The section of time that is in no other section."""


@dataclass(frozen=True)
class Section:
    """A part of a compilation: elapsed seconds, processor seconds of this process, number of times it ran."""

    name: str
    seconds: float
    processor: float
    count: int


@dataclass(frozen=True)
class Unit:
    """A translation unit that the C compiler compiled: its processor seconds, and the lines of C of its kernels."""

    name: str
    processor: float
    lines: Mapping[str, int]


@dataclass(frozen=True)
class Timing:
    """Where the time of a compilation went; ``str()`` is a table. Sections and units are sorted, slowest first.

    Units compile in parallel with the sections, which see only the time spent waiting for them.
    """

    sections: tuple[Section, ...]
    units: tuple[Unit, ...]

    @property
    def seconds(self) -> float:
        """Elapsed seconds of the whole compilation."""
        return sum(s.seconds for s in self.sections)

    @property
    def is_compilation(self) -> bool:
        """Whether the model was compiled; a stored program is only opened."""
        return any(s.name == IMPORT for s in self.sections)

    @property
    def processor(self) -> float:
        """Processor seconds of this process and of its compilers."""
        return sum(s.processor for s in self.sections) + sum(u.processor for u in self.units)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"seconds": self.seconds, "processor": self.processor, **asdict(self)}

    def __repr__(self) -> str:
        return f"<Timing: {self.seconds:.2f} s in {len(self.sections)} sections, {len(self.units)} translation units>"

    def _repr_html_(self) -> str:
        return f"<pre>{self}</pre>"

    def __str__(self) -> str:
        rows = [f"{'section':<36}{'seconds':>9}{'processor':>11}{'times':>8}"]
        rows += [f"{s.name:<36}{s.seconds:9.3f}{s.processor:11.3f}{s.count:8}" for s in self.sections]
        if self.units:
            rows += ["", f"{'translation unit':<36}{'':9}{'processor':>11}{'lines':>8}  kernels"]
        for u in self.units:
            kernels = ", ".join(f"{name} {lines}" for name, lines in u.lines.items())
            rows.append(f"{u.name:<36}{'':9}{u.processor:11.3f}{sum(u.lines.values()) or '':8}  {kernels}".rstrip())
        rows += ["", f"{'all':<36}{self.seconds:9.3f}{self.processor:11.3f}"]
        return "\n".join(rows)


@dataclass
class Clock:
    """The open clock of a compilation. ``open``: the sections that are open, outermost first."""

    totals: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, int]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    last: tuple[float, float] = (0.0, 0.0)

    def enter(self, name: str) -> None:
        """Open a section."""
        self._count()
        self.open.append(name)
        self.totals.setdefault(name, [0.0, 0.0, 0])[2] += 1

    def leave(self) -> None:
        """Close the innermost section."""
        self._count()
        self.open.pop()

    def timing(self) -> Timing:
        """Return the times so far."""
        sections = [Section(n, wall, cpu, int(count)) for n, (wall, cpu, count) in self.totals.items()]
        units = [Unit(n, cpu, self.lines.get(n, {})) for n, cpu in self.units.items()]
        sections.sort(key=lambda s: -s.seconds)
        units.sort(key=lambda u: -u.processor)
        return Timing(tuple(sections), tuple(units))

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
