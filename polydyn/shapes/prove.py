"""Prove that an Index is never negative, from ranges of symbols, iterators and given inequalities."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, lcm
from typing import TypeAlias

from polydyn.schedules.index import Atom, Index
from polydyn.schedules.ranges import Ranges, interval, is_nonnegative

Sizes: TypeAlias = Mapping[str, "tuple[int, int | None]"]
"""The minimum and maximum of symbols; 0 and None if unspecified."""


@dataclass(frozen=True)
class Facts:
    """Facts of a proof: ``sizes`` (low, high) of symbols, ``facts`` (each >= 0)."""

    sizes: Sizes
    facts: tuple[Index, ...]

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Sizes at which all facts hold: small and large ones, if the facts allow them."""
        return tuple(p for n in (0, 1, 1000) if (p := self._point(n)))

    def _point(self, n: int) -> Point | None:
        point = Point(n, self.sizes, set())
        while failing := [f for f in self.facts if f.evaluate(point.symbol_values(f)) < 0]:
            less = frozenset[str]().union(*(term for f in failing for term in _sides(f)[1])) - point.least
            if not less:
                return None
            point.least.update(less)
        return point

    def refute(self, p: Index, iterators: Ranges) -> bool:
        """Check whether p is negative at one of the points, with all iterators at 0."""
        if p.fetches():
            return False
        begin = dict.fromkeys(iterators, 0)
        return any(
            p.evaluate(point.symbol_values(p) | begin) < 0
            and all(e.evaluate(point.symbol_values(e) | begin) >= 1 for e in iterators.values())
            for point in self.points
        )


@dataclass(frozen=True)
class Point:
    """A point where every size is as close to ``n`` as its bounds allow; the sizes in ``least`` are at their
    minimum.
    """

    n: int
    ends: Sizes
    least: set[str]

    def symbol_values(self, p: Index) -> dict[str, int]:
        """Return the values of the symbols of an expression."""
        ends = {s: self.ends.get(s, (0, None)) for s in p.symbols()}
        return {
            s: low if s in self.least else max(low, self.n if high is None else min(self.n, high))
            for s, (low, high) in ends.items()
        }


def nonnegative(p: Index, facts: Facts, iterators: Ranges, depth: int = 3) -> bool:
    """Return True if ``p >= 0`` is proven over ``0 <= v < extent``. Sizes are >= 0, extents of running iterators >=
    1.
    """
    c = p.constant
    if c is not None:
        return c >= 0
    if all(v > 0 for v in p.terms.values()) and all(_atom(a, facts, iterators, depth) for a in p.atoms()):
        return True
    if _least(p, facts, iterators) >= 0:
        return True
    if facts.refute(p, iterators):
        return False
    scale = _common_denominator(p)
    scaled = p * scale
    extents = tuple(iterators.values())
    inequalities = (*(f for f in facts.facts if helps(f, (p, *extents), facts.sizes)), *(e - 1 for e in extents))
    multiples = (f * c for f in inequalities for c in sorted({1, scale}))
    if any(_direct(scaled - f, facts, iterators) for f in (Index({}), *multiples)):
        return True
    if depth == 0:
        return False
    if any(_by_cases(scaled, a, facts, iterators, depth) for a in _extremes(p)):
        return True
    return any(nonnegative(scaled, facts, looser, depth - 1) for looser in _looser(p, iterators))


def helps(fact: Index, expressions: Collection[Index], sizes: Sizes) -> bool:
    """Check whether ``fact >= 0`` can help to prove something about expressions.

    It cannot if it adds a size that they do not have and that has no upper bound: the proof subtracts the fact, and
    nothing compensates for that size. It cannot either if none of its negative terms has only sizes of the
    expressions.
    """
    foreign = fact.symbols().difference(*(p.symbols() for p in expressions))
    if not foreign:
        return True
    more, less = _sides(fact)
    if any(sizes.get(s, (0, None))[1] is None for s in foreign & more):
        return False
    return any(foreign.isdisjoint(term) for term in less)


@lru_cache(4096)
def _sides(p: Index) -> tuple[frozenset[str], tuple[frozenset[str], ...]]:
    """Return the symbols of the terms that are added, and of each term that is subtracted."""
    terms = [(v > 0, Index({m: 1}).symbols()) for m, v in p.terms.items()]
    return frozenset[str]().union(*(x for plus, x in terms if plus)), tuple(x for plus, x in terms if not plus)


def _least(p: Index, facts: Facts, iterators: Ranges) -> float:
    """Return a lower bound of an expression of sizes."""
    if not p.symbols().isdisjoint(iterators):
        return -inf
    return interval(p, {s: facts.sizes.get(s, (0, None)) for s in p.symbols()})[0]


def _looser(p: Index, iterators: Ranges) -> list[Ranges]:
    """Return iterators with weaker bounds: an iterator below ``min(a, b)`` is below each of them."""
    used = p.symbols()
    bounds = [(v, a) for v, e in iterators.items() for a in _extremes(e) if v in used and e == Index({(a,): 1})]
    return [{**iterators, v: x} for v, a in bounds if a.kind == "min" for x in a.args]


def _atom(a: str | Atom, facts: Facts, iterators: Ranges, depth: int) -> bool:
    """Return True if a factor is never negative: a symbol always, other atoms by their arguments."""
    if isinstance(a, str):
        return True
    if a.kind == "fetch" or depth == 0:
        return False
    return (any if a.kind == "max" else all)(nonnegative(x, facts, iterators, depth - 1) for x in a.args)


def _extremes(p: Index) -> list[Atom]:
    return sorted((a for a in p.atoms() if isinstance(a, Atom) and a.kind in ("min", "max")), key=str)


def _by_cases(p: Index, a: Atom, facts: Facts, iterators: Ranges, depth: int) -> bool:
    """Prove by cases that a min or max is one of its arguments. With the right sign, one case is enough."""
    cases = [p.map_atoms(lambda b, x=x: x if b == a else Index({(b,): 1})) for x in a.args]  # type: ignore[misc]
    signs = {v > 0 for m, v in p.terms.items() if a in m}
    linear = all(m == (a,) for m in p.terms if a in m)
    if linear and signs == {a.kind == "max"}:
        return any(nonnegative(q, facts, iterators, depth - 1) for q in cases)
    return all(nonnegative(q, facts, iterators, depth - 1) for q in cases)


def _common_denominator(p: Index) -> int:
    """Return the factor for p after which n divides the coefficient of every ``c * (x // n)`` with a constant n."""
    scale = 1
    for a in p.atoms():
        if isinstance(a, Atom) and a.kind == "floordiv":
            scale = lcm(scale, a.args[1].constant or 1)
    return scale if scale < 1 << 20 else 1


def _direct(p: Index, facts: Facts, iterators: Ranges) -> bool:
    """Try two proofs. The second uses upper bounds of sizes, because these weaken a product of two bounded symbols."""
    lows = {s: low for s, (low, _) in facts.sizes.items()}
    for e in iterators.values():  # if a product of sizes is >= 1, so are its factors
        if len(e.terms) == 1:
            lows |= {s: max(1, lows.get(s, 0)) for s in next(iter(e.terms)) if isinstance(s, str)}
    shift = {s: Index.of(s) + low for s, low in lows.items() if low}
    p = p.subs(shift)
    ranges = {v: e.subs(shift) for v, e in iterators.items()}
    if is_nonnegative(p, ranges):
        return True
    highs = {s: high - lows.get(s, 0) for s, (_, high) in facts.sizes.items() if high is not None}
    ends = {s: Index.of(h + 1) for s, h in highs.items() if h >= 0}
    return bool(ends) and is_nonnegative(p, ranges | ends)
