"""Evaluate index expressions, guards and decisions, for single integers and for arrays of integers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from polydyn.graph.ir import Guard
from polydyn.schedules.decision import Decision, Leaf, Split
from polydyn.schedules.expr import Array
from polydyn.schedules.index import Atom, Index

Integers: TypeAlias = Any
"""An int or an array of them."""
Fetch: TypeAlias = Callable[[str, tuple[Index, ...], Mapping[str, Integers]], Array]
"""Function that reads integers from a named array: (array, subscripts, values of their symbols) -> integers."""
RELATIONS: Mapping[str, Callable[[Integers, Integers], Integers]] = {
    "==": np.equal, "!=": np.not_equal, "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
}  # fmt: skip


def value_of(i: Index, env: Mapping[str, Integers], fetch: Fetch | None = None) -> Integers:
    """Return the value of an integer expression. Values in ``env`` may be arrays."""
    total: Integers = 0
    for monomial, coefficient in i.terms.items():
        term: Integers = coefficient
        for factor in monomial:
            term = term * (env[factor] if isinstance(factor, str) else _atom(factor, env, fetch))
        total = total + term
    return total


def _atom(a: Atom, env: Mapping[str, Integers], fetch: Fetch | None) -> Integers:
    if a.kind == "fetch":
        assert fetch is not None, "a size that data decide"
        return fetch(a.name, a.args, env)
    args = [value_of(x, env, fetch) for x in a.args]
    if a.kind == "floordiv":
        by_zero = np.equal(args[1], 0)
        return np.where(by_zero, 0, np.floor_divide(args[0], np.where(by_zero, 1, args[1])))
    total = args[0]
    for x in args[1:]:
        total = (np.minimum if a.kind == "min" else np.maximum)(total, x)
    return total


def size_of(i: Index, env: Mapping[str, int]) -> int:
    """Return the value of a size, which is a single integer."""
    return _number(i, env, {})


def _number(i: Index, env: Mapping[str, int], cache: dict[Atom, int]) -> int:
    """Evaluate like ``value_of``, for single integers only. ``cache`` maps atoms to their values."""
    total = 0
    for monomial, coefficient in i.terms.items():
        term = coefficient
        for factor in monomial:
            if isinstance(factor, str):
                term *= int(env[factor])
                continue
            if factor not in cache:
                assert factor.kind != "fetch", "a size that data decide"
                x, *more = (_number(a, env, cache) for a in factor.args)
                if factor.kind == "floordiv":
                    cache[factor] = x // more[0] if more[0] else 0
                else:
                    cache[factor] = min(x, *more) if factor.kind == "min" else max(x, *more)
            term *= cache[factor]
        total += term
    return total


def holds(left: int, relation: str, right: int) -> bool:
    """Return whether the relation of a guard or of a condition holds."""
    if relation == "%==":
        return left == 0 if right == 0 else left % right == 0
    return bool(RELATIONS[relation](left, right))


def guard_holds(g: Guard, env: Mapping[str, int]) -> bool:
    """Return whether a guard holds for the sizes in ``env``."""
    return holds(size_of(g.left, env), g.relation, size_of(g.right, env))


def choice(decision: Decision, env: Mapping[str, int], allowed: Collection[int]) -> int | None:
    """Return the candidate that a decision selects, or None if that candidate is not allowed."""
    while isinstance(decision, Split):
        decision = decision.low if size_of(decision.index, env) <= decision.threshold else decision.high
    if isinstance(decision, Leaf):
        return decision.kernel if decision.kernel in allowed else None
    entries = [e for e in decision.entries if e.kernel in allowed]
    return min(entries, key=lambda e: size_of(e.cost, env)).kernel if entries else None
