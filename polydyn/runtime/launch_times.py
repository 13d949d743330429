"""Times of the launches of a profiled call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polydyn.runtime.native import LaunchInfo
from polydyn.runtime.tables import Table


@dataclass(frozen=True)
class LaunchTime:
    """One launch of a profiled call: time in nanoseconds, and its work (operations, bytes, tasks)."""

    label: str
    kernel: str
    nanoseconds: int
    flops: int
    bytes: int
    tasks: int
    threads: int


def launch_times(infos: Sequence[LaunchInfo], times: Sequence[Sequence[int]]) -> Table[LaunchTime]:
    """Return the work of each launch, and the median of its times."""
    from statistics import median  # its import takes longer than opening a program

    return times_table(
        LaunchTime(i.label.decode(), i.kernel.decode(), ns, i.flops, i.bytes, i.tasks, i.threads)
        for k, i in enumerate(infos)
        for ns in [round(median(t[k] for t in times))]
    )


def times_table(rows: Iterable[LaunchTime]) -> Table[LaunchTime]:
    """Return times with the total in their title."""
    found = list(rows)
    return Table(found, f"profile, {sum(t.nanoseconds for t in found) / 1e6:.3f} ms", "launch")
