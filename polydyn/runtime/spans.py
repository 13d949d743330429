"""The times at which each thread worked on each launch of a call. Standard library and numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from polydyn.errors import UnsupportedError
from polydyn.runtime.native import LaunchInfo
from polydyn.runtime.tables import Table, counted


@dataclass(frozen=True)
class Span:
    """A time in which a thread (0: the caller) computed ``tasks`` tasks of a launch, from task ``first``.

    ``launch``: its position in the program; ``begin`` and ``end``: nanoseconds of ``time.monotonic_ns``.
    """

    launch: int
    label: str
    kernel: str
    thread: int
    first: int
    tasks: int
    begin: int
    end: int


def has_spans(manifest: Mapping[str, Any]) -> bool:
    """Return whether a program consists only of launches on threads, without a device and without host steps."""
    return "cuda" not in manifest and "own_parts" not in manifest


def reject_trace(manifest: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless ``has_spans``."""
    if not has_spans(manifest):
        raise UnsupportedError(
            "trace supports only launches on threads, not on a device and not with steps between parts", rule="trace",
            remedy="profile has the time of every launch",
        )  # fmt: skip


def shortest(calls: Sequence[npt.NDArray[Any]], infos: Sequence[LaunchInfo]) -> Table[Span]:
    """Return the spans of the fastest call, ordered by begin. ``calls``: results of ``Context.trace``."""
    spans = min(calls, key=lambda c: int(c["end"].max() - c["begin"].min()) if c.size else 0)
    rows = [
        Span(k, infos[k].label.decode(), infos[k].kernel.decode(), *rest)
        for k, *rest in spans[["launch", "thread", "first", "count", "begin", "end"]].tolist()
    ]
    spent = max((x.end for x in rows), default=0) - min((x.begin for x in rows), default=0)
    return Table(rows, f"trace, {counted(len({x.thread for x in rows}), 'thread')}, {spent / 1e6:.3f} ms", "span")
