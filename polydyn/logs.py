"""What happens, for people: the logger ``polydyn`` with children, and the progress of a compilation.

``note`` logs to ``polydyn.SUBJECT`` at level INFO. ``POLYDYN_LOGS=cache,fusion`` shows these subjects on standard
error, ``POLYDYN_LOGS=all`` all of them; a program that configures ``logging`` itself sees them without it. Without
both, a note costs a lookup: ``logging`` is not imported. Standard library only: every room above ``debug`` may use
this module.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from polydyn.debug import DebugError

if TYPE_CHECKING:
    from logging import Logger

SWITCH = "POLYDYN_LOGS"
SUBJECTS = {
    "cache": "programs and kernels that the cache has, and those that are compiled",
    "compile": "stages of a compilation and their seconds",
    "fusion": "the number of groups or nodes after every pass",
    "guards": "conditions that every call of a program checks",
    "jobs": "steps of a batch",
    "start": "quick starts: what answers calls until the program is compiled",
    "torch": "graphs that torch.compile hands over, and why one runs eager",
    "tune": "tuned groups and their gain",
}
"""Children of the logger ``polydyn``, and what they say."""


class CompileProgress(NamedTuple):
    """The progress of a compilation: step ``done`` of ``total`` of a ``stage`` is finished (total 0: no steps).

    ``elapsed``: seconds since the compilation began. ``left``: estimated seconds left in this stage, None if unknown.
    """

    stage: str
    done: int
    total: int
    elapsed: float
    left: float | None


Report = Callable[[CompileProgress], None]


def note(subject: str, message: str, *values: Any) -> None:
    """Log a message about one of ``SUBJECTS``; ``values`` as for ``logging``. DebugError: ``POLYDYN_LOGS`` is wrong."""
    if "logging" in sys.modules or SWITCH in os.environ:
        _logger(subject, os.environ.get(SWITCH, "")).info(message, *values)


@functools.cache
def _logger(subject: str, switch: str) -> Logger:
    """Return the logger of a subject. It shows its messages if ``switch`` names the subject."""
    import logging

    found = logging.getLogger(f"polydyn.{subject}")
    if subject in shown(switch):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        found.addHandler(handler)
        found.setLevel(logging.INFO)
        found.propagate = False
    return found


def shown(switch: str) -> frozenset[str]:
    """Return the subjects that a value of ``POLYDYN_LOGS`` names. DebugError: it names something else."""
    names = {n.strip() for n in switch.split(",") if n.strip()}
    unknown = sorted(names - SUBJECTS.keys() - {"all"})
    if unknown:
        remedy = f"write all, or names among {', '.join(SUBJECTS)}"
        raise DebugError(f"{SWITCH} names {unknown[0]!r}", rule=SWITCH, remedy=remedy)
    return frozenset(SUBJECTS if "all" in names else names)


def activate() -> None:
    """Show what ``POLYDYN_LOGS`` names also if the messages come from ``logging`` directly. DebugError: as ``note``."""
    if switch := os.environ.get(SWITCH, ""):
        for subject in shown(switch):
            _logger(subject, switch)


class _Reporter:
    """Calls ``report`` with the times of a compilation."""

    def __init__(self, report: Report) -> None:
        self.report, self.begun, self.stage, self.since = report, time.monotonic(), "", 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self.stage or not done:
            self.stage, self.since = stage, now
        left = (now - self.since) / done * (total - done) if done and total else None
        self.report(CompileProgress(stage, done, total, now - self.begun, left))


_REPORTER: ContextVar[_Reporter | None] = ContextVar("polydyn_reporter", default=None)


@contextmanager
def reporting(report: Report | None) -> Iterator[None]:
    """Call ``report`` for the steps of the compilations inside the block. Its errors end the compilation."""
    if report is None:
        yield
        return
    token = _REPORTER.set(_Reporter(report))
    try:
        yield
    finally:
        _REPORTER.reset(token)


def progress(stage: str, done: int = 0, total: int = 0) -> None:
    """Report that ``done`` of ``total`` steps of a stage are finished; 0 of 0 for a stage without steps."""
    if (reporter := _REPORTER.get()) is not None:
        reporter(stage, done, total)
    if not done:
        note("compile", "%s%s", stage, f": {total} steps" if total else "")
