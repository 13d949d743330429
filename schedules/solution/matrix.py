"""Schedule matrices: the declarative form of a schedule, with unknown shifts (TSCompiler 5.2).

A row is ``expr + shift``: an affine expression over the statement's iterators, and a shift that is known (affine over
parameters) or a named unknown, the paper's ``?``. A row whose expression is 0 and whose shift is a constant is a
*phase*. Matrices are small frozen data, hashable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.model import Group


@dataclass(frozen=True)
class Unknown:
    """A shift to be solved; equal names mean equal shifts."""

    name: str

    def __str__(self) -> str:
        return f"?{self.name}"


Shift: TypeAlias = Index | Unknown


@dataclass(frozen=True)
class Row:
    """One schedule dimension of one statement: ``expr + shift``."""

    expr: Index
    shift: Shift = ZERO

    def __str__(self) -> str:
        if isinstance(self.shift, Unknown):
            return str(self.shift) if self.expr == 0 else f"{self.expr} + {self.shift}"
        return str(self.expr + self.shift)


def row(expr: IndexLike, shift: IndexLike | Unknown = 0) -> Row:
    """Return a Row from plain values."""
    return Row(Index.of(expr), shift if isinstance(shift, Unknown) else Index.of(shift))


@dataclass(frozen=True)
class ScheduleMatrix:
    """Statement -> rows, outermost first; all statements have the same number of rows."""

    rows: tuple[tuple[str, tuple[Row, ...]], ...]

    def __getitem__(self, statement: str) -> tuple[Row, ...]:
        for name, rows in self.rows:
            if name == statement:
                return rows
        raise ScheduleError(f"the schedule matrix has no rows for {statement}")

    @property
    def depth(self) -> int:
        """The number of rows."""
        return len(self.rows[0][1]) if self.rows else 0

    def __str__(self) -> str:
        return "\n".join(f"{name}: ({', '.join(map(str, rows))})" for name, rows in self.rows)


def matrix(rows: dict[str, list[Row | IndexLike]]) -> ScheduleMatrix:
    """Return a ScheduleMatrix from plain values."""
    return ScheduleMatrix(
        tuple((n, tuple(r if isinstance(r, Row) else row(r) for r in listed)) for n, listed in rows.items())
    )


def verify_matrix(m: ScheduleMatrix, group: Group) -> None:
    """Check the invariants of a matrix; ScheduleError otherwise.

    Every statement of the group has rows, and no other. All have the same number of rows. Expressions are over the
    statement's iterators and the parameters, shifts over parameters.
    """
    names = [n for n, _ in m.rows]
    if sorted(names) != sorted(s.name for s in group.statements):
        raise ScheduleError(
            f"the matrix has rows for {names}, the group statements {[s.name for s in group.statements]}"
        )
    for s in group.statements:
        rows = m[s.name]
        if len(rows) != m.depth:
            raise ScheduleError(f"{s.name} has {len(rows)} rows, others {m.depth}", node=s.name)
        for r in rows:
            known = r.shift if isinstance(r.shift, Index) else ZERO
            wrong = (r.expr.symbols() - {*s.iterators, *group.params}) | (known.symbols() - set(group.params))
            if wrong:
                raise ScheduleError(f"row {r} of {s.name} mentions {sorted(wrong)}", node=s.name)
