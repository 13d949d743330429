"""Compile index expressions to Python functions. Values are integers, or arrays with one integer per thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from polydyn.codegen.ir import Compare
from polydyn.schedules.index import Atom, Index

Env: TypeAlias = "dict[str, Any]"
"""Values of symbols and registers."""
Run: TypeAlias = Callable[[Env], Any]
Fetch: TypeAlias = "Callable[[Env, str, Any], Any]"
"""Return the integers of an array at addresses, for the threads that the environment says execute."""


class Indices:
    """Compiles index expressions. ``fetch`` reads the integers that they take from memory."""

    def __init__(self, fetch: Fetch) -> None:
        self.scope = {"divide": divide, "least": least, "greatest": greatest, "fetch": fetch}
        self.known: dict[Index, Run] = {}

    def compile(self, i: Index) -> Run:
        """Return the function that evaluates an expression."""
        if i not in self.known:
            constant = i.constant
            self.known[i] = _constant(constant) if constant is not None else eval(f"lambda e: {_text(i)}", self.scope)
        return self.known[i]

    def compare(self, c: Compare) -> Run:
        """Return the function that decides a comparison."""
        left, right = _text(c.left), _text(c.right)
        found: Run = eval(f"lambda e: ({left}) {c.relation} ({right})", self.scope)
        return found


def _constant(n: int) -> Run:
    return lambda e: n


def _text(i: Index) -> str:
    terms = [
        "*".join([str(c), *(f"e[{x!r}]" if isinstance(x, str) else _atom(x) for x in m)]) for m, c in i.terms.items()
    ]
    return " + ".join(terms) or "0"


def _atom(a: Atom) -> str:
    args = ", ".join(_text(x) for x in a.args)
    if a.kind == "fetch":
        return f"fetch(e, {a.name!r}, {args})"
    return f"{ {'floordiv': 'divide', 'min': 'least', 'max': 'greatest'}[a.kind] }({args})"


def divide(a: Any, b: Any) -> Any:
    """Return the quotient, rounded down; 0 if the divisor is 0."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        zero = np.equal(b, 0)
        return np.where(zero, 0, np.floor_divide(a, np.where(zero, 1, b)))
    return a // b if b else 0


def least(first: Any, *others: Any) -> Any:
    """Return the minimum."""
    for x in others:
        first = np.minimum(first, x) if isinstance(first, np.ndarray) or isinstance(x, np.ndarray) else min(first, x)
    return first


def greatest(first: Any, *others: Any) -> Any:
    """Return the maximum."""
    for x in others:
        first = np.maximum(first, x) if isinstance(first, np.ndarray) or isinstance(x, np.ndarray) else max(first, x)
    return first
