"""Symbol arithmetic as JSON, so that a loaded artifact can say what it would do at a shape.

An expression is an integer, a symbol's name, or a list ``[operator, argument, ...]`` with operator ``+``, ``*``,
``//``, ``min`` or ``max``. Evaluation needs the standard library only; C evaluates the same sizes on every call
(``evaluation.py``), and a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, TypeAlias

from polydyn.errors import ArtifactError
from polydyn.schedules.decision import ArgMin, Decision, Entry, Leaf, Split
from polydyn.schedules.index import ZERO, Atom, Index, maximum, minimum, product

Expression: TypeAlias = "int | str | list[Any]"


def to_json(x: Index) -> Expression:
    """The expression of an Index. ValueError: it fetches from a tensor."""
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
    """The Index of an expression. ArtifactError: no expression."""
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
    """All symbols of an expression."""
    if isinstance(x, str):
        return {x}
    return set().union(*map(symbols_of, x[1:])) if isinstance(x, list) else set()


def evaluate(x: Expression, env: Mapping[str, int]) -> int:
    """The value for given symbols; ``a // 0`` is 0. KeyError: a symbol is missing. ArtifactError: no expression."""
    if isinstance(x, int):
        return x
    if isinstance(x, str):
        return env[x]
    operator, *arguments = x
    values = [evaluate(a, env) for a in arguments]
    if operator == "+":
        return sum(values)
    if operator == "*":
        return prod(values)
    if operator == "//":
        return values[0] // values[1] if values[1] else 0
    if operator in ("min", "max"):
        return (min if operator == "min" else max)(values)
    raise _unknown(operator)


def _unknown(operator: object) -> ArtifactError:
    return ArtifactError(f"{operator!r} is no operator of symbol arithmetic", remedy="compile the model again")


def decision_to_json(d: Decision) -> dict[str, Any]:
    """A dispatch decision as plain data."""
    if isinstance(d, Leaf):
        return {"kernel": d.kernel}
    if isinstance(d, ArgMin):
        return {
            "least": [
                {"kernel": e.kernel, "cost": to_json(e.cost)} | ({} if e.guard is None else {"guard": to_json(e.guard)})
                for e in d.entries
            ]
        }
    low, high = decision_to_json(d.low), decision_to_json(d.high)
    return {"index": to_json(d.index), "threshold": d.threshold, "low": low, "high": high}


def decision_from_json(x: Mapping[str, Any]) -> Decision:
    """The decision that ``decision_to_json`` wrote."""
    if "kernel" in x:
        return Leaf(x["kernel"])
    if "least" in x:
        return ArgMin(
            tuple(
                Entry(e["kernel"], from_json(e["cost"]), from_json(e["guard"]) if "guard" in e else None)
                for e in x["least"]
            )
        )
    return Split(from_json(x["index"]), x["threshold"], decision_from_json(x["low"]), decision_from_json(x["high"]))
