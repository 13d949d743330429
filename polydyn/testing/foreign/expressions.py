"""``Index`` values read anew: as expressions of sympy, and as integers for given symbols."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias
from zlib import crc32

import sympy

from polydyn.errors import PolydynError
from polydyn.schedules.index import Atom, Index

Env: TypeAlias = Mapping[str, int]


class ForeignError(PolydynError):
    """A decision of the compiler is contradicted by sympy, networkx or an example. A bug in polydyn."""


class Undefined(Exception):
    """A division by 0 or less. Divisors are sizes: there is no element, so nobody uses the value
    (``schedules/index.py``).
    """


class Quotient(sympy.Function):  # type: ignore[misc]
    """``floor(x / n)``."""

    @classmethod
    def eval(cls, x: Any, n: Any) -> Any:
        """The value, where both are integers."""
        return sympy.floor(x / n) if x.is_Integer and n.is_Integer and n != 0 else None


class Least(sympy.Function):  # type: ignore[misc]
    """The least of integers."""

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """The value, where all are integers."""
        return sorted(args)[0] if all(a.is_Integer for a in args) else None


class Greatest(sympy.Function):  # type: ignore[misc]
    """The greatest of integers."""

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """The value, where all are integers."""
        return sorted(args)[-1] if all(a.is_Integer for a in args) else None


OPAQUE = {"floordiv": Quotient, "min": Least, "max": Greatest}


def to_sympy(e: Index) -> Any:
    """The expression over symbols that are integers.

    Divisions are opaque where a size is symbolic, and so are min and max, which sympy would order for minutes.
    """
    total = sympy.Integer(0)
    for factors, c in e.terms.items():
        term = sympy.Integer(c)
        for f in factors:
            term *= sympy.Symbol(f, integer=True, nonnegative=True) if isinstance(f, str) else _atom(f)
        total += term
    return total


@lru_cache(maxsize=20_000)
def _atom(a: Atom) -> Any:
    args = [to_sympy(x) for x in a.args]
    return OPAQUE[a.kind](*args) if a.kind in OPAQUE else sympy.Function(f"fetch {a.name}", integer=True)(*args)


def value(e: Index, env: Env, seen: dict[Atom, int] | None = None) -> int:
    """The integer that an expression is for given symbols. What is fetched is some number that place and name decide.

    ``seen``: atoms with their values there. KeyError: a symbol is missing. Undefined: a size of 0 divides.
    """
    seen, total = {} if seen is None else seen, 0
    for factors, c in e.terms.items():
        for f in factors:
            if not isinstance(f, str) and f not in seen:
                seen[f] = _atom_value(f, env, seen)
            c *= env[f] if isinstance(f, str) else seen[f]
        total += c
    return total


def _atom_value(a: Atom, env: Env, seen: dict[Atom, int]) -> int:
    args = [value(x, env, seen) for x in a.args]
    if a.kind == "floordiv":
        x, n = args
        if n <= 0:
            raise Undefined
        return (x - x % n) // n
    if a.kind in ("min", "max"):
        return sorted(args)[0 if a.kind == "min" else -1]
    return crc32(f"{a.name} {args}".encode()) % 9 - 2


def names(e: Index) -> frozenset[str]:
    """The symbols of an expression, those inside of atoms too."""
    found = [frozenset({f}) if isinstance(f, str) else _names_inside(f) for factors in e.terms for f in factors]
    return frozenset().union(*found)


@lru_cache(maxsize=20_000)
def _names_inside(a: Atom) -> frozenset[str]:
    return frozenset().union(*map(names, a.args))
