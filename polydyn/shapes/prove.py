"""Proofs that an Index is never negative, from ranges of symbols, iterators and given inequalities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, lcm

from polydyn.schedules.index import Atom, Index
from polydyn.schedules.ranges import Ranges, interval, is_nonnegative


@dataclass(frozen=True)
class Facts:
    """Facts of a proof: ``sizes`` (low, high) of symbols, ``facts`` (each >= 0), ``iterators`` with their extents."""

    sizes: Mapping[str, tuple[int, int | None]]
    facts: tuple[Index, ...]
    iterators: Ranges


def nonnegative(p: Index, facts: Facts, depth: int = 3) -> bool:
    """True when ``p >= 0`` is proven. Sizes are >= 0, and extents of running iterators are >= 1."""
    c = p.constant
    if c is not None:
        return c >= 0
    if all(v > 0 for v in p.terms.values()) and all(_atom(a, facts, depth) for a in p.atoms()):
        return True
    if _least(p, facts) >= 0:
        return True
    p = _clear_denominators(p)
    inequalities = (*facts.facts, *(e - 1 for e in facts.iterators.values()))
    if _direct(p, facts) or any(_direct(p - f, facts) for f in inequalities):
        return True
    if depth == 0:
        return False
    if any(_by_cases(p, a, facts, depth) for a in _extremes(p)):
        return True
    return any(nonnegative(p, looser, depth - 1) for looser in _looser(p, facts))


def _least(p: Index, facts: Facts) -> float:
    """A number that an expression of sizes is not below."""
    if not p.symbols().isdisjoint(facts.iterators):
        return -inf
    return interval(p, {s: facts.sizes.get(s, (0, None)) for s in p.symbols()})[0]


def _looser(p: Index, facts: Facts) -> list[Facts]:
    """An iterator below ``min(a, b)`` is below each of them."""
    used = p.symbols()
    bounds = [(v, a) for v, e in facts.iterators.items() for a in _extremes(e) if v in used and e == Index({(a,): 1})]
    return [
        replace(facts, iterators={**facts.iterators, v: x}) for v, a in bounds if a.kind == "min" for x in a.args
    ]  # fmt: skip


def _atom(a: str | Atom, facts: Facts, depth: int) -> bool:
    """True when a factor is never negative: symbols are, the rest by its arguments."""
    if isinstance(a, str):
        return True
    if a.kind == "fetch" or depth == 0:
        return False
    return (any if a.kind == "max" else all)(nonnegative(x, facts, depth - 1) for x in a.args)


def _extremes(p: Index) -> list[Atom]:
    return sorted((a for a in p.atoms() if isinstance(a, Atom) and a.kind in ("min", "max")), key=str)


def _by_cases(p: Index, a: Atom, facts: Facts, depth: int) -> bool:
    """A min or max is one of its arguments; with the right sign, one bound is enough."""
    cases = [p.map_atoms(lambda b, x=x: x if b == a else Index({(b,): 1})) for x in a.args]  # type: ignore[misc]
    signs = {v > 0 for m, v in p.terms.items() if a in m}
    linear = all(m == (a,) for m in p.terms if a in m)
    if linear and signs == {a.kind == "max"}:
        return any(nonnegative(q, facts, depth - 1) for q in cases)
    return all(nonnegative(q, facts, depth - 1) for q in cases)


def _clear_denominators(p: Index) -> Index:
    """Multiplied so that every ``c * (x // n)`` with a constant n has a coefficient that n divides."""
    scale = 1
    for a in p.atoms():
        if isinstance(a, Atom) and a.kind == "floordiv":
            scale = lcm(scale, a.args[1].constant or 1)
    return p * scale if scale < 1 << 20 else p


def _direct(p: Index, facts: Facts) -> bool:
    """Two attempts: upper ends of sizes are tried last, because a product of two bounded symbols bounds worse."""
    lows = {s: low for s, (low, _) in facts.sizes.items()}
    for e in facts.iterators.values():  # a product of sizes that is >= 1 has factors >= 1
        if len(e.terms) == 1:
            lows |= {s: max(1, lows.get(s, 0)) for s in next(iter(e.terms)) if isinstance(s, str)}
    shift = {s: Index.of(s) + low for s, low in lows.items() if low}
    p = p.subs(shift)
    ranges = {v: e.subs(shift) for v, e in facts.iterators.items()}
    if is_nonnegative(p, ranges):
        return True
    highs = {s: high - lows.get(s, 0) for s, (_, high) in facts.sizes.items() if high is not None}
    ends = {s: Index.of(h + 1) for s, h in highs.items() if h >= 0}
    return bool(ends) and is_nonnegative(p, ranges | ends)
