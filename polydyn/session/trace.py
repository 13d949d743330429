"""The times of calls and of their launches as a trace that Chrome and Perfetto show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from polydyn.build.cache import write_atomically
from polydyn.errors import ArtifactError
from polydyn.runtime.program import LaunchTime


class Trace:
    """Calls one after the other; ``write`` makes a file of them."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self.start = prefix, time.monotonic_ns()
        self._events: list[dict[str, Any]] = []

    def add(self, begin: int, end: int, launches: Iterable[LaunchTime]) -> None:
        """A call (nanoseconds of ``time.monotonic_ns``), and its launches as ``Program.profile`` timed them."""
        at = (begin - self.start) / 1e3
        self._events.append(_event("model_run", at, (end - begin) / 1e3, 0))
        self._events += launch_events(launches, at)

    def write(self) -> str:
        """Writes ``<prefix><date>.json`` and returns its name. ArtifactError: the folder cannot be written."""
        path = Path(f"{self._prefix}{time.strftime('%Y-%m-%d_%H-%M-%S')}.json")
        write_trace(path, self._events)
        return str(path)


def launch_events(launches: Iterable[LaunchTime], at: float = 0.0) -> list[dict[str, Any]]:
    """One event for each launch, one behind the other from ``at`` (microseconds)."""
    events = []
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
