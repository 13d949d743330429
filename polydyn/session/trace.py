"""The times of calls and of their launches as a trace for Chrome and Perfetto."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polydyn.build.cache import write_atomically
from polydyn.errors import UnwritableError
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.program import Program
from polydyn.runtime.spans import Span, has_spans


class Trace:
    """A sequence of calls; ``write`` saves it to a file."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self.start = prefix, time.monotonic_ns()
        self._events: list[dict[str, Any]] = []

    def add(self, begin: int, end: int, events: Iterable[dict[str, Any]]) -> None:
        """Add a call (begin and end in ``time.monotonic_ns``) and the ``call_events`` of a similar call."""
        offset = (begin - self.start) / 1e3
        self._events.append(_event("model_run", offset, (end - begin) / 1e3, 0))
        self._events += [e | {"ts": round(e["ts"] + offset, 3)} for e in events]

    def write(self) -> str:
        """Write ``<prefix><date>.json`` and return its name. ArtifactError: the folder is not writable."""
        path = Path(f"{self._prefix}{time.strftime('%Y-%m-%d_%H-%M-%S')}.json")
        write_trace(path, self._events)
        return str(path)


def call_events(program: Program, feeds: Mapping[str, Any], repeats: int) -> list[dict[str, Any]]:
    """Return the launches of a call as events that start at 0.

    Launches on threads have the times of ``Program.trace``. Launches on a device, or between host steps, follow each
    other with the times of ``Program.profile``.
    """
    if has_spans(program.manifest):
        return _span_events(program.trace(feeds, repeats))
    return _launch_events(program.profile(feeds, repeats))


def _span_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return events with one row per thread, numbered from 1."""
    start = min((s.begin for s in spans), default=0)
    return [
        _event(s.label, (s.begin - start) / 1e3, (s.end - s.begin) / 1e3, s.thread + 1)
        | {"args": {"kernel": s.kernel, "first": s.first, "tasks": s.tasks}}
        for s in spans
    ]


def _launch_events(launches: Iterable[LaunchTime]) -> list[dict[str, Any]]:
    """Return one event per launch in row 1, in microseconds."""
    events, begin = [], 0.0
    for x in launches:
        length = x.nanoseconds / 1e3
        facts = {"kernel": x.kernel, "flops": x.flops, "bytes": x.bytes, "tasks": x.tasks, "threads": x.threads}
        events.append(_event(x.label, begin, length, 1) | {"args": facts})
        begin += length
    return events


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Write a trace file. UnwritableError: it cannot be written."""
    try:
        write_atomically(path, json.dumps(events, indent=0).encode())
    except OSError as e:
        raise UnwritableError.of(path, e) from e


def _event(name: str, begin: float, length: float, row: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": round(begin, 3), "dur": round(length, 3), "pid": 0, "tid": row}
