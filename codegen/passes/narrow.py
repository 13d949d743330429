"""Decide when 32-bit index arithmetic suffices: bound every integer that a kernel computes."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from polydyn.codegen.indices import node_indices
from polydyn.codegen.ir import Body, Compare, For, Let, bodies
from polydyn.schedules.index import ZERO, Atom, Index
from polydyn.schedules.ranges import is_nonnegative

LIMIT = 2**31 - 1
MOST_THREADS = 1024
Bound = tuple[Index, int]
"""A polynomial with non-negative coefficients, and its divisor."""


class _UnknownValueError(Exception):
    """A value that is read from memory has no known bound."""


def narrow_conditions(body: Body, limits: Mapping[str, Index]) -> tuple[Compare, ...] | None:
    """Return the conditions under which all index arithmetic of a body stays below 2**31, or None if there are none.

    ``limits``: upper bounds of names over the parameters: of the thread symbols, and of names bound inside (block and
    tile numbers) whose own arithmetic is the caller's responsibility. Every sum is bounded by the sum of the absolute
    values of its terms, so partial results are bounded too, in any order.
    """
    bounds = _Bounds(limits)
    try:
        bounds.visit(body, bounds.limits, set())
    except _UnknownValueError:
        return None
    ceilings = dict.fromkeys(_ceiling(b) for b in bounds.bounds)
    if any((b.constant or 0) > LIMIT for b in ceilings):
        return None
    symbolic = [b for b in ceilings if b.constant is None]
    most = [b for b in symbolic if not any(_covers(o, b) for o in symbolic if o != b)]
    return tuple(Compare("<=", b, Index.of(LIMIT)) for b in most)


def _ceiling(b: Bound) -> Index:
    return Index({m: -(-c // b[1]) for m, c in b[0].terms.items()})


def _covers(a: Index, b: Index) -> bool:
    return all(a.terms.get(m, 0) >= c for m, c in b.terms.items())


class _Bounds:
    def __init__(self, limits: Mapping[str, Index]) -> None:
        self.bounds: dict[Bound, None] = {}
        self.limits = {n: self.of(i, {}) for n, i in limits.items()}

    def visit(self, body: Body, env: Mapping[str, Bound], done: set[Index]) -> None:
        """Bound all expressions of a body. ``done``: expressions over these names that have a bound."""
        for n in body:
            inner = env
            if isinstance(n, Let) and n.var in self.limits:
                self.visit(n.body, env, done)
                continue
            for i in node_indices(n):
                if i not in done:
                    done.add(i)
                    self.of(i, env)
            if isinstance(n, For):  # thread-mapped loops step past their end
                step = MOST_THREADS if n.kind in ("warp", "block") else 0
                inner = {**env, n.var: self.limits.get(n.var) or self.of(n.hi + step, env)}
            elif isinstance(n, Let):
                inner = {**env, n.var: self.of(n.value, env)}
            for b in bodies(n):
                self.visit(b, inner, done if inner is env else set())

    def of(self, i: Index, env: Mapping[str, Bound]) -> Bound:
        """Return the bound of an expression; record it and those of its parts."""
        terms: list[Bound] = []
        for m, c in i.terms.items():
            term, by = Index.of(abs(c)), 1
            for a in m:
                bound, divisor = env.get(a, (Index.of(a), 1)) if isinstance(a, str) else self._atom(a, env)
                term, by = term * bound, by * divisor
            terms.append((term, by))
        out = _sum(terms)
        self.bounds[out] = None
        return out

    def _atom(self, a: Atom, env: Mapping[str, Bound]) -> Bound:
        if a.kind == "fetch":
            raise _UnknownValueError
        bounds = [self.of(x, env) for x in a.args]
        if a.kind == "floordiv":
            return bounds[0][0], bounds[0][1] * (a.args[1].constant or 1)
        fixed = [x.constant for x in a.args if x.constant is not None]
        if a.kind == "min" and fixed and min(fixed) >= 0 and all(map(is_nonnegative, a.args)):
            return Index.of(min(fixed)), 1
        return _sum(bounds)


def _sum(bounds: list[Bound]) -> Bound:
    whole = lcm(*(by for _, by in bounds))
    return sum((t * (whole // by) for t, by in bounds), ZERO), whole
