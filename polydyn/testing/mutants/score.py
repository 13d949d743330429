"""The score of a subject: how many of its mutants a check kills."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

COLUMNS = f"{'subject':10} {'mutants':>8} {'killed':>8} {'score':>8} {'seconds':>9} {'longest':>9}"


@dataclass
class Score:
    """Counts of one subject. ``survivors``: descriptions of mutants that no check kills.

    ``notes``: reasons for what is left out, with their number. ``seconds``: time of all mutants. ``longest``: time of
    the slowest mutant.
    """

    subject: str
    planted: int = 0
    killed: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    survivors: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, kills: Callable[[], bool]) -> None:
        """Count one mutant. ``kills``: whether a check detects it."""
        start = time.monotonic()
        dead = kills()
        taken = time.monotonic() - start
        self.planted += 1
        self.killed += dead
        self.seconds += taken
        self.longest = max(self.longest, taken)
        if not dead:
            self.survivors.append(what)

    @property
    def percent(self) -> float:
        """The share of mutants that are killed, in percent."""
        return 100 * self.killed / max(1, self.planted)

    def row(self) -> str:
        """Return the row of the table."""
        numbers = f"{self.planted:8} {self.killed:8} {self.percent:6.1f} % {self.seconds:9.1f} {self.longest:9.1f}"
        return f"{self.subject:10} {numbers}"


def table(scores: Iterable[Score]) -> str:
    """Return the scores of all subjects and their sum, one a line."""
    scores = list(scores)
    total = Score("all")
    for s in scores:
        total.planted, total.killed = total.planted + s.planted, total.killed + s.killed
        total.seconds, total.longest = total.seconds + s.seconds, max(total.longest, s.longest)
    return "\n".join([COLUMNS, *(s.row() for s in (*scores, total))])
