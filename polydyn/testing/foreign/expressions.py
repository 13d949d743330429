"""``Index`` values read anew: as expressions of sympy, and as integers for given symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias
from zlib import crc32

import sympy

from polydyn.errors import PolydynError
from polydyn.schedules.index import Atom, Index

Env: TypeAlias = Mapping[str, int]


class ForeignError(PolydynError):
    """A decision of the compiler is contradicted by sympy, networkx or an example. A bug in polydyn."""


class Undefined(Exception):
    """A division by a size of 0: there is no element, so nobody uses the value (``schedules/index.py``)."""


class Quotient(sympy.Function):  # type: ignore[misc]
    """``floor(x / n)``."""

    @classmethod
    def eval(cls, x: Any, n: Any) -> Any:
        """The value, where both are integers."""
        return sympy.floor(x / n) if x.is_Integer and n.is_Integer and n != 0 else None


def to_sympy(e: Index) -> Any:
    """The expression over symbols that are integers; divisions are opaque where a size is symbolic."""
    total = sympy.Integer(0)
    for factors, c in e.terms.items():
        term = sympy.Integer(c)
        for f in factors:
            term *= sympy.Symbol(f, integer=True, nonnegative=True) if isinstance(f, str) else _atom(f)
        total += term
    return total


def _atom(a: Atom) -> Any:
    args = [to_sympy(x) for x in a.args]
    if a.kind == "floordiv":
        return Quotient(*args)
    if a.kind in ("min", "max"):
        return (sympy.Min if a.kind == "min" else sympy.Max)(*args)
    return sympy.Function(f"fetch {a.name}", integer=True)(*args)


def value(e: Index, env: Env) -> int:
    """The integer that an expression is for given symbols. What is fetched is some number that place and name decide.

    KeyError: a symbol is missing. Undefined: a size of 0 divides.
    """
    total = 0
    for factors, c in e.terms.items():
        for f in factors:
            c *= env[f] if isinstance(f, str) else _atom_value(f, env)
        total += c
    return total


def _atom_value(a: Atom, env: Env) -> int:
    args = [value(x, env) for x in a.args]
    if a.kind == "floordiv":
        x, n = args
        if n == 0:
            raise Undefined
        return (x - x % n) // n
    if a.kind in ("min", "max"):
        return sorted(args)[0 if a.kind == "min" else -1]
    return crc32(f"{a.name} {args}".encode()) % 9 - 2


def names(e: Index) -> set[str]:
    """The symbols of an expression, those inside of atoms too."""
    out: set[str] = set()
    for factors in e.terms:
        for f in factors:
            out |= {f} if isinstance(f, str) else set().union(*(names(x) for x in f.args))
    return out
