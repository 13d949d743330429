"""Groups and solved schedules as text for people: dumps, golden tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import show as show_value
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.index import ZERO
from polydyn.schedules.model import Array, Group, Statement
from polydyn.schedules.solution.matrix import ScheduleMatrix, Unknown
from polydyn.schedules.solution.patterns import Choice, choose

COMBINED = {"sum": "+=", "prod": "*=", "max": "max=", "min": "min=", None: "="}
"""Reduction -> the assignment operator that combines."""


def show_group(group: Group) -> str:
    """Return the arrays and the statements of a group, one per line."""
    arrays = "".join(f"  {_array(a)}\n" for a in group.arrays.values())
    statements = "".join(f"  {_statement(s)}\n" for s in group.statements)
    return f"group {group.name}({', '.join(group.params)})\n{arrays}{statements}"


def _array(a: Array) -> str:
    strides = ", ".join(map(str, a.strides))
    offset = "" if a.offset == ZERO else f" from {a.offset}"
    return f"{a.role} {a.name}: {a.dtype}[{', '.join(map(str, a.shape))}] by ({strides}){offset}"


def _statement(s: Statement) -> str:
    domain = ", ".join(f"{x} < {e}" for x, e in s.iters)
    index = ", ".join(map(str, s.index))
    return f"{s.role} {s.name}[{domain}]: {s.array}[{index}] {COMBINED[s.reduce]} {show_value(s.value)}"


def show_choice(choice: Choice) -> str:
    """Return the schedule of a group as text.

    It has the pattern, the matrix with its unknowns, their values, and why other patterns declined.
    """
    p = choice.pattern
    dims = [d or "phase" for d in p.dims]
    title = f"pattern {p.name}, a band of {p.band}: {', '.join(dims[: p.band]) or 'none'}\n"
    shifts = [r.shift for _, rows in p.matrix.rows for r in rows]
    unknowns = dict.fromkeys(x.name for x in shifts if isinstance(x, Unknown))
    values = "".join(f"?{name} = {_value(choice, name)}\n" for name in unknowns)
    declined = "".join(f"{name} declined: {why}\n" for name, why in choice.declined)
    return f"{title}{_matrix(p.matrix, dims)}{values}{declined}"


def show_schedule(group: Group) -> str:
    """Return ``show_choice`` of a group whose parameters are at least 1."""
    return show_choice(choose(group, analyse(group, positive=False).under(context(group))))


def _value(choice: Choice, name: str) -> str:
    try:
        return str(choice.solved.shift(name))
    except ScheduleError:  # piecewise
        return str(choice.solved.shifts[name])


def _matrix(m: ScheduleMatrix, dims: Sequence[str]) -> str:
    return aligned([("", *dims), *((name, *map(str, rows)) for name, rows in m.rows)])


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Columns are as wide as their widest cell and two spaces apart."""
    table = [tuple(r) for r in rows]
    widths = [max(len(r[c]) for r in table if c < len(r)) for c in range(max(map(len, table)))]
    return "".join("  ".join(x.ljust(w) for x, w in zip(r, widths, strict=False)).rstrip() + "\n" for r in table)
