"""Symbol arithmetic as JSON, so that a loaded artifact can be explained at a shape.

An expression is an integer, a symbol's name, or a list ``[operator, argument, ...]`` with operator ``+``, ``*``,
``//``, ``min`` or ``max``. Equal parts are one list, in memory and in files (``fold``), because a tile count may use
the same products hundreds of times. Evaluation needs only the standard library. C evaluates the same sizes on every
call (``evaluation.py``), and a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

from polydyn.errors import ArtifactError
from polydyn.schedules.decision import ArgMin, Decision, Entry, Leaf, Split
from polydyn.schedules.index import ZERO, Atom, Index, maximum, minimum, product

Expression: TypeAlias = "int | str | list[Any]"
OPERATORS = ("+", "*", "//", "min", "max")
LIST = "list"
"""The key of a reference to a list of the table in a folded manifest."""


@lru_cache(maxsize=1 << 14)
def to_json(x: Index) -> Expression:
    """Return the expression of an Index. Do not modify it, because parts are shared. ValueError: it reads a tensor."""
    terms: list[Expression] = []
    for monomial, coefficient in sorted(x.terms.items(), key=lambda t: (-len(t[0]), str(t[0]))):
        factors: list[Expression] = [coefficient] if coefficient != 1 or not monomial else []
        factors += [_atom(a) for a in monomial]
        terms.append(factors[0] if len(factors) == 1 else ["*", *factors])
    if not terms:
        return 0
    return terms[0] if len(terms) == 1 else ["+", *terms]


def _atom(a: str | Atom) -> Expression:
    if isinstance(a, str):
        return a
    if a.kind == "fetch":
        raise ValueError(f"{a} depends on the contents of a tensor")
    return [{"floordiv": "//"}.get(a.kind, a.kind), *map(to_json, a.args)]


def from_json(x: Expression) -> Index:
    """Return the Index of an expression. ArtifactError: it is not an expression."""
    if not isinstance(x, list):
        return Index.of(x)
    operator, *arguments = x
    values = [from_json(a) for a in arguments]
    if operator == "+":
        return sum(values, ZERO)
    if operator == "*":
        return product(values)
    if operator == "//":
        return values[0] // values[1]
    if operator in ("min", "max"):
        return (minimum if operator == "min" else maximum)(*values)
    raise _unknown(operator)


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
    raise _unknown(operator)


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


def _unknown(operator: object) -> ArtifactError:
    return ArtifactError(f"{operator!r} is not an operator of symbol arithmetic", remedy="compile the model again")


def decision_to_json(d: Decision) -> dict[str, Any]:
    """Return a dispatch decision as plain data."""
    if isinstance(d, Leaf):
        return {"kernel": d.kernel}
    if isinstance(d, ArgMin):
        return {"least": [{"kernel": e.kernel, "cost": to_json(e.cost)} for e in d.entries]}
    low, high = decision_to_json(d.low), decision_to_json(d.high)
    return {"index": to_json(d.index), "threshold": d.threshold, "low": low, "high": high}


def decision_from_json(x: Mapping[str, Any]) -> Decision:
    """Return the decision that ``decision_to_json`` wrote."""
    if "kernel" in x:
        return Leaf(x["kernel"])
    if "least" in x:
        return ArgMin(tuple(Entry(e["kernel"], from_json(e["cost"])) for e in x["least"]))
    return Split(from_json(x["index"]), x["threshold"], decision_from_json(x["low"]), decision_from_json(x["high"]))
