"""What tuning asks of a kind of machine: a model's tasks, and a search of each."""

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
"""Seconds that one measurement may take."""


@dataclass(frozen=True)
class How:
    """How to search: by which strategy, how many tuples, from which seed, with what is in the records."""

    strategy: Strategy
    trials: int
    seed: int
    records: Records
    report: Callable[[int, float], None]

    def tuned(self, problem: Problem, hardware: Hardware, bench: Bench) -> Tuned:
        """The outcome of a strategy. EmptySpaceError: no tile fits the group."""
        return tune_task(
            self.strategy, problem, hardware, bench, trials=self.trials, seed=self.seed, records=self.records,
            report=self.report,
        )  # fmt: skip


class Side(ABC, Generic[T]):
    """A machine that kernels are tuned for; while it is entered as a context manager its worker measures.

    ``hardware``: how cost models see it. ``function``: what the worker runs; None where nothing can be measured.
    ``declined``: groups that ``tasks`` left out, and why.
    """

    def __init__(self, hardware: Hardware, function: str | None) -> None:
        self.hardware, self.function = hardware, function
        self.workers: Workers | None = None
        self.declined: dict[str, str] = {}

    @abstractmethod
    def tasks(self, graph: Graph, options: Options) -> list[PlacedTask[T]]:
        """The groups of a model that can be tuned, each at its first place."""

    @abstractmethod
    def search(self, task: T, problem: Problem, how: How) -> tuple[Search, int, int]:
        """What a search of a task came to, the number of binaries it keeps, and measurements made now."""

    def __enter__(self) -> Side[T]:
        self.workers = Workers(self.function, timeout=TIMEOUT) if self.function else None
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self.workers is not None:
            self.workers.close()
