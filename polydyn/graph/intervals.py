"""The least and the greatest value of integer tensors, as far as constants and dtypes decide them.

A subscript that is read from a table of known numbers needs no check in every call, and no remainder for negative
values. Intervals follow loads, choices, minima, maxima, sums and casts from node to node.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np

from polydyn.graph.ir import Compute, Concat, Dim
from polydyn.schedules.expr import Array, Const, FromIndex, Load, Op, Value
from polydyn.schedules.index import Index
from polydyn.shapes.facts import DimFacts

Interval = tuple[int, int]
"""(least, greatest) value."""
INTEGERS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def of_dtype(dtype: str) -> Interval | None:
    """Return all values of an integer dtype of at least a byte, or None for another one."""
    if dtype == "bool":
        return 0, 1
    if dtype not in INTEGERS:
        return None
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def of_array(array: Array) -> Interval | None:
    """Return the interval of an array's elements; None if it has none, or other elements than integers."""
    return (int(array.min()), int(array.max())) if of_dtype(str(array.dtype)) and array.size else None


def stays_inside(subscript: Index, size: Dim, below: Mapping[str, Dim], facts: DimFacts) -> bool:
    """Check whether a subscript is in [0, size) because of what it fetches: elements of a tensor t are in
    [0, ``below[t]``).
    """
    names = {a: f"fetched {k}" for k, a in enumerate(sorted(subscript.fetches(), key=str))}
    if any(a.name not in below for a in names):
        return False
    ranges = {x: below[a.name] for a, x in names.items()}
    free = subscript.rebuild(lambda a: Index.of(names[a]) if a in names else Index({(a,): 1}))
    return facts.simplify(free % size, ranges) == facts.simplify(free, ranges)


class Intervals:
    """The intervals of the tensors so far."""

    def __init__(self) -> None:
        self._known: dict[str, Interval] = {}
        self._vectors: dict[str, Array] = {}

    def of(self, name: str) -> Interval | None:
        """Return the interval of a tensor's elements, or None if nothing but its dtype is known."""
        return self._known.get(name)

    def learn_constant(self, name: str, array: Array) -> None:
        """Record a constant of integers."""
        found = of_array(array)
        if found is not None:
            self._known[name] = found
            self._vectors |= {name: array} if array.ndim == 1 else {}

    def learn(self, node: Compute) -> None:
        """Record the result of a map. A reduction may be empty, and then has its neutral element."""
        found = self._value(node.body) if node.reduce is None else None
        if found is not None and found != of_dtype(node.body.dtype):
            self._known[node.output] = found

    def learn_concat(self, node: Concat) -> None:
        """Record a concatenation of tensors with intervals."""
        parts = [self._known.get(p) for p in node.parts]
        known = [p for p in parts if p is not None]
        if len(known) == len(parts):
            self._known[node.output] = min(p[0] for p in known), max(p[1] for p in known)

    def _value(self, v: Value) -> Interval | None:
        """Return the interval of an integer expression, which is one of its dtype."""
        every = of_dtype(v.dtype)
        if every is None:
            return None
        found = self._form(v)
        if found is None or found[0] < every[0] or found[1] > every[1]:
            return every  # the result wraps around
        return found

    def _column(self, v: Load) -> Interval | None:
        """Return the interval of a column, if a table of records is read at ``length * x + column``."""
        table = self._vectors.get(v.buffer)
        if table is None:
            return None
        steps = [c for m, c in v.index[0].terms.items() if m]
        length = gcd(*steps) if steps else 0
        column = v.index[0].terms.get((), 0)
        return of_array(table[column % length :: length]) if length > 1 else None

    def _form(self, v: Value) -> Interval | None:
        if isinstance(v, Const):
            return int(v.value), int(v.value)
        if isinstance(v, Load):
            return self._column(v) or self._known.get(v.buffer)
        if isinstance(v, FromIndex):
            number = v.index.constant
            return None if number is None else (number, number)
        if not isinstance(v, Op):
            return None
        args = [self._value(a) for a in (v.args[1:] if v.name in ("where", "select") else v.args)]
        known = [a for a in args if a is not None]
        return _combined(v.name, known) if len(known) == len(args) else None


def _combined(name: str, args: list[Interval]) -> Interval | None:
    """Return the interval of an operation on intervals, without regard to overflow; None for other operations."""
    if not args:
        return None
    lows, highs = [a[0] for a in args], [a[1] for a in args]
    products = [a * b for a in args[0] for b in args[-1]]
    rules: Mapping[str, Interval] = {
        "where": (min(lows), max(highs)), "select": (min(lows), max(highs)), "cast": (lows[0], highs[0]),
        "min": (min(lows), min(highs)), "max": (max(lows), max(highs)), "add": (sum(lows), sum(highs)),
        "sub": (lows[0] - highs[-1], highs[0] - lows[-1]), "neg": (-highs[0], -lows[0]),
        "mul": (min(products), max(products)),
    }  # fmt: skip
    if name == "mod" and lows[1] == highs[1] > 0:
        return 0, highs[1] - 1
    if name == "bitand" and min(lows) >= 0:
        return 0, min(highs)
    return rules.get(name)
