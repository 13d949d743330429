"""``Index`` values, read again: as expressions of sympy, and as integers for given symbols."""

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
    """A division by 0 or less.

    Divisors are sizes: there is no element, so the value is unused (``schedules/index.py``).
    """


class Quotient(sympy.Function):  # type: ignore[misc]
    """``floor(x / n)``."""

    @classmethod
    def eval(cls, x: Any, n: Any) -> Any:
        """Return the value if both are integers."""
        return sympy.floor(x / n) if x.is_Integer and n.is_Integer and n != 0 else None


class Least(sympy.Function):  # type: ignore[misc]
    """The minimum of integers."""

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """Return the value if all are integers."""
        return sorted(args)[0] if all(a.is_Integer for a in args) else None


class Greatest(sympy.Function):  # type: ignore[misc]
    """The maximum of integers."""

    @classmethod
    def eval(cls, *args: Any) -> Any:
        """Return the value if all are integers."""
        return sorted(args)[-1] if all(a.is_Integer for a in args) else None


OPAQUE = {"floordiv": Quotient, "min": Least, "max": Greatest}


def to_sympy(e: Index) -> Any:
    """Return the expression over symbols that are integers.

    Divisions are opaque if a size is symbolic, and so are min and max, which sympy would order for minutes.
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


def value(e: Index, env: Env, values: dict[Atom, int] | None = None) -> int:
    """Return the integer value of an expression for given symbols.

    A fetched integer is a number that depends on position and name. ``values``: atoms and their values there.
    KeyError: a symbol is missing. Undefined: a size of 0 divides.
    """
    values, total = {} if values is None else values, 0
    for factors, c in e.terms.items():
        for f in factors:
            if not isinstance(f, str) and f not in values:
                values[f] = _atom_value(f, env, values)
            c *= env[f] if isinstance(f, str) else values[f]
        total += c
    return total


def _atom_value(a: Atom, env: Env, values: dict[Atom, int]) -> int:
    args = [value(x, env, values) for x in a.args]
    if a.kind == "floordiv":
        x, n = args
        if n <= 0:
            raise Undefined
        return (x - x % n) // n
    if a.kind in ("min", "max"):
        return sorted(args)[0 if a.kind == "min" else -1]
    return crc32(f"{a.name} {args}".encode()) % 9 - 2


def names(e: Index) -> frozenset[str]:
    """Return the symbols of an expression, including symbols inside of atoms."""
    found = [frozenset({f}) if isinstance(f, str) else _names_inside(f) for factors in e.terms for f in factors]
    return frozenset().union(*found)


@lru_cache(maxsize=20_000)
def _names_inside(a: Atom) -> frozenset[str]:
    return frozenset().union(*map(names, a.args))
