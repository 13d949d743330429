"""Expressions over symbols as plain data: their values, and their form in files.

An expression is an integer, a symbol's name, or a list ``[operator, argument, ...]`` with operator ``+``, ``*``,
``//``, ``min`` or ``max``. Equal parts are one list, in memory and in files (``fold``), because a tile count may use
the same products hundreds of times. Opening a program needs only this module (``expressions`` loads classes of the
schedules).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias

from polydyn.errors import ArtifactError

Expression: TypeAlias = "int | str | list[Any]"
OPERATORS = ("+", "*", "//", "min", "max")
LIST = "list"
"""The key of a reference to a list of the table in a folded manifest."""


def symbols_of(x: Expression) -> set[str]:
    """Return all symbols of an expression."""
    symbols: set[str] = set()
    seen: set[int] = set()
    rest = [x]
    while rest:
        y = rest.pop()
        if isinstance(y, str):
            symbols.add(y)
        elif isinstance(y, list) and id(y) not in seen:
            seen.add(id(y))
            rest += y[1:]
    return symbols


def evaluate(x: Expression, env: Mapping[str, int]) -> int:
    """Return the value for given symbols; ``a // 0`` is 0. KeyError: a symbol is missing. ArtifactError: not an
    expression."""
    return _value(x, env, {})


def _value(x: Expression, env: Mapping[str, int], values: dict[int, int]) -> int:
    """``values``: the results of lists evaluated before, by ``id``."""
    if isinstance(x, int):
        return x
    if isinstance(x, str):
        return env[x]
    if id(x) not in values:
        operator, *arguments = x
        values[id(x)] = _apply(operator, [_value(a, env, values) for a in arguments])
    return values[id(x)]


def _apply(operator: object, values: list[int]) -> int:
    if operator == "+":
        return sum(values)
    if operator == "*":
        return prod(values)
    if operator == "//":
        return values[0] // values[1] if values[1] else 0
    if operator in ("min", "max"):
        return (min if operator == "min" else max)(values)
    raise unknown_operator(operator)


def fold(data: Any) -> tuple[list[list[Any]], Any]:
    """Write each distinct expression of plain data once. Return the table of their lists, and the data.

    A list in the table or the data becomes ``{"list": k}``, a reference to list k of the table, which refers only to
    earlier ones. Keys are visited in order, so that equal data give equal tables.
    """
    table: list[list[Any]] = []
    numbers: dict[tuple[Any, ...], int] = {}
    seen: dict[int, dict[str, int]] = {}

    def visit(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: visit(x[k]) for k in sorted(x)}
        if not isinstance(x, list) or not x:
            return x
        if id(x) in seen:
            return seen[id(x)]
        inside = [visit(v) for v in x]
        if x[0] not in OPERATORS:
            return inside
        key = tuple((True, v[LIST]) if isinstance(v, dict) else (False, v) for v in inside)
        if key not in numbers:
            numbers[key] = len(table)
            table.append(inside)
        seen[id(x)] = {LIST: numbers[key]}
        return seen[id(x)]

    return table, visit(data)


def unfold(table: list[list[Any]], data: Any) -> Any:
    """Return the argument of ``fold``; lists of the table are shared. ValueError: a reference to a later list."""
    lists: list[list[Any]] = []

    def visit(x: Any) -> Any:
        if isinstance(x, list):
            return [visit(v) for v in x]
        if not isinstance(x, dict):
            return x
        if x.keys() != {LIST}:
            return {k: visit(v) for k, v in x.items()}
        if not 0 <= x[LIST] < len(lists):
            raise ValueError(f"expression {x[LIST]} of {len(lists)}")
        return lists[x[LIST]]

    for entry in table:
        lists.append(visit(entry))
    return visit(data)


def unknown_operator(operator: object) -> ArtifactError:
    """Return the error for a list that does not begin with an operator."""
    return ArtifactError(f"{operator!r} is not an operator of symbol arithmetic", remedy="compile the model again")
