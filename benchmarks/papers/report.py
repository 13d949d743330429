"""One table of a paper: its statements, the measurements here, and how far the two may be compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import record
from benchmarks.papers.statements import STATEMENTS, paragraphs

PAGE = record.RESULTS.parent.parent / "docs" / "paper_tables.md"
"""The page that ``--record`` writes to."""


@dataclass(frozen=True)
class Settings:
    """The options of every command. ``models``: the folder of exported models. ``only``: parts of names of models or
    strategies; empty for all. ``quick``: tiny inputs, for tests.
    """

    threads: int = 1
    seed: int = 0
    trials: int = 0
    points: int = 0
    rounds: int = 3
    models: Path = record.RESULTS.parent / "out" / "models"
    only: tuple[str, ...] = ()
    quick: bool = False

    def asks(self, name: str) -> bool:
        """Return whether ``only`` admits a name."""
        return not self.only or any(part in name for part in self.only)


@dataclass(frozen=True)
class Grid:
    """Columns and rows of one Markdown table, with a line of text above it."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """Return the table as Markdown; numbers are aligned right."""
        marks = [":--" if n == 0 else "--:" for n in range(len(self.columns))]
        lines = (self.columns, marks, *self.rows)
        return "\n".join([self.caption, "", *("| " + " | ".join(line) + " |" for line in lines)])


@dataclass(frozen=True)
class Result:
    """The output of one command. ``settings``: sizes, seed, threads, protocol."""

    name: str
    settings: str
    grids: tuple[Grid, ...]

    def markdown(self) -> str:
        """Return the section as Markdown."""
        stated, machine, versions = STATEMENTS[self.name], record.machine(), record.versions()
        used = ", ".join(f"{n} {versions[n]}" for n in ("polydyn", "onnxruntime", "torch") if n in versions)
        where = f"{record.now()[:10]}, {machine['processor']}, {machine['cores']} cores; {used}"
        parts = [
            f"## {self.name}: {stated.title}",
            "Printed:\n\n" + "\n".join(f"- {x}" for x in paragraphs(stated.printed)),
            f"Measured ({where}): {self.settings}",
            *(g.markdown() for g in self.grids),
            f"Comparable: {paragraphs(stated.comparable)[0]}",
            f"Not comparable: {paragraphs(stated.not_comparable)[0]}",
        ]
        return "\n\n".join(parts) + "\n"


def save(result: Result, page: Path = PAGE) -> None:
    """Write a section to the page, in place of the section of the same table; other sections stay."""
    head, *sections = re.split(r"(?m)^(?=## )", page.read_text())
    kept = [s for s in sections if not s.startswith(f"## {result.name}:")]
    page.write_text(head + "\n".join(s.rstrip() + "\n" for s in sorted([*kept, result.markdown()])))


def number(value: float) -> str:
    """Return a number with about three digits."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}" if value >= 0.1 else f"{value:.2g}"


def row(name: str, values: Sequence[float | int | str]) -> tuple[str, ...]:
    """Return the cells of a row: counts and texts as they are, other numbers with three digits."""
    return (name, *(number(v) if isinstance(v, float) else str(v) for v in values))
