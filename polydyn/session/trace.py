"""The times of calls and of their launches as a trace that Chrome and Perfetto show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polydyn.build.cache import write_atomically
from polydyn.errors import ArtifactError
from polydyn.runtime.program import LaunchTime, Program
from polydyn.runtime.spans import Span, has_spans


class Trace:
    """Calls one after the other; ``write`` makes a file of them."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self.start = prefix, time.monotonic_ns()
        self._events: list[dict[str, Any]] = []

    def add(self, begin: int, end: int, events: Iterable[dict[str, Any]]) -> None:
        """A call (nanoseconds of ``time.monotonic_ns``), and ``call_events`` of such a call."""
        at = (begin - self.start) / 1e3
        self._events.append(_event("model_run", at, (end - begin) / 1e3, 0))
        self._events += [e | {"ts": round(e["ts"] + at, 3)} for e in events]

    def write(self) -> str:
        """Writes ``<prefix><date>.json`` and returns its name. ArtifactError: the folder cannot be written."""
        path = Path(f"{self._prefix}{time.strftime('%Y-%m-%d_%H-%M-%S')}.json")
        write_trace(path, self._events)
        return str(path)


def call_events(program: Program, feeds: Mapping[str, Any], repeats: int) -> list[dict[str, Any]]:
    """The launches of a call, from 0: on every thread, as ``Program.trace`` has them; those of a device, or between
    steps of the host, one behind the other, as ``Program.profile`` has them.
    """
    if has_spans(program.manifest):
        return _span_events(program.trace(feeds, repeats))
    return _launch_events(program.profile(feeds, repeats))


def _span_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """A row for each thread, from 1."""
    start = min((s.begin for s in spans), default=0)
    return [
        _event(s.label, (s.begin - start) / 1e3, (s.end - s.begin) / 1e3, s.thread + 1)
        | {"args": {"kernel": s.kernel, "first": s.first, "tasks": s.tasks}}
        for s in spans
    ]


def _launch_events(launches: Iterable[LaunchTime]) -> list[dict[str, Any]]:
    """One event for each launch in row 1, microseconds."""
    events, at = [], 0.0
    for x in launches:
        length = x.nanoseconds / 1e3
        facts = {"kernel": x.kernel, "flops": x.flops, "bytes": x.bytes, "tasks": x.tasks, "threads": x.threads}
        events.append(_event(x.label, at, length, 1) | {"args": facts})
        at += length
    return events


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """A trace file. ArtifactError: it cannot be written."""
    try:
        write_atomically(path, json.dumps(events, indent=0).encode())
    except OSError as e:
        raise ArtifactError(f"cannot write {path}: {e.strerror}", remedy="choose a writable folder") from e


def _event(name: str, at: float, length: float, row: int) -> dict[str, Any]:
    return {"name": name, "ph": "X", "ts": round(at, 3), "dur": round(length, 3), "pid": 0, "tid": row}
