"""When each thread worked on which launch of a call. Standard library and numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from polydyn.errors import UnsupportedError
from polydyn.runtime.native import LaunchInfo


@dataclass(frozen=True)
class Span:
    """A thread (0: the caller) at work on ``tasks`` tasks of a launch, from task ``first``.

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
    """Whether a program is launches on threads and nothing else: no device, no steps of the host in between."""
    return "cuda" not in manifest and "own_parts" not in manifest


def refuse_trace(manifest: Mapping[str, Any]) -> None:
    """UnsupportedError: see ``has_spans``."""
    if not has_spans(manifest):
        raise UnsupportedError(
            "only launches on threads are traced, not those of a device and not steps between parts", rule="trace",
            remedy="profile has the time of every launch",
        )  # fmt: skip


def shortest(calls: Sequence[npt.NDArray[Any]], infos: Sequence[LaunchInfo]) -> list[Span]:
    """The spans of the shortest call, in order of beginning; each call as ``Context.trace`` gives it."""
    spans = min(calls, key=lambda c: int(c["end"].max() - c["begin"].min()) if c.size else 0)
    return [
        Span(k, infos[k].label.decode(), infos[k].kernel.decode(), *rest)
        for k, *rest in spans[["launch", "thread", "first", "count", "begin", "end"]].tolist()
    ]
