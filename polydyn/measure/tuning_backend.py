"""The interface between tuning and a kind of machine: the tasks of a model, and the search of each task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic

from polydyn.backends import Options
from polydyn.graph.ir import Graph
from polydyn.measure.placed import PlacedTask, T
from polydyn.measure.workers import Workers
from polydyn.search.backbone import Problem
from polydyn.search.bench import Bench
from polydyn.search.hardware import Hardware
from polydyn.search.outcomes import Search
from polydyn.search.records import Records
from polydyn.search.strategies import Strategy, Tuned
from polydyn.search.strategies import tune as tune_task

TIMEOUT = 10.0
"""Time limit of one measurement in seconds."""


@dataclass(frozen=True)
class SearchSettings:
    """Settings of a search: strategy, number of tiles to try, seed, records, and a progress callback."""

    strategy: Strategy
    trials: int
    seed: int
    records: Records
    report: Callable[[int, float], None]

    def tuned(self, problem: Problem, hardware: Hardware, bench: Bench) -> Tuned:
        """Return the result of the strategy. EmptySpaceError: no tile fits the group."""
        return tune_task(
            self.strategy, problem, hardware, bench, trials=self.trials, seed=self.seed, records=self.records,
            report=self.report,
        )  # fmt: skip


class TuningBackend(ABC, Generic[T]):
    """A machine that kernels are tuned for. Its worker process exists while the context manager is entered.

    ``hardware`` describes the machine to cost models. ``function`` runs in the worker; None if nothing can be
    measured. ``declined``: the groups that ``tasks`` left out, and the reasons.
    """

    def __init__(self, hardware: Hardware, function: str | None) -> None:
        self.hardware, self.function = hardware, function
        self.workers: Workers | None = None
        self.declined: dict[str, str] = {}

    @abstractmethod
    def tasks(self, graph: Graph, options: Options) -> list[PlacedTask[T]]:
        """Return the groups of a model that can be tuned, each at its first site."""

    @abstractmethod
    def search(self, task: T, problem: Problem, settings: SearchSettings) -> tuple[Search, int, int]:
        """Return the search of a task, the number of binaries it keeps, and the number of new measurements."""

    def __enter__(self) -> TuningBackend[T]:
        self.workers = Workers(self.function, timeout=TIMEOUT) if self.function else None
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self.workers is not None:
            self.workers.close()
