"""Symbol arithmetic and launch decisions as JSON, so that a loaded artifact can be explained at a shape.

``plain_expressions`` describes the form of expressions. C evaluates the same sizes on every call (``evaluation.py``),
and a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from polydyn.runtime.plain_expressions import Expression, unknown_operator
from polydyn.schedules.decision import ArgMin, Decision, Entry, Leaf, Split
from polydyn.schedules.index import ZERO, Atom, Index, maximum, minimum, product


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
    raise unknown_operator(operator)


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
