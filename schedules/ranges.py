"""Properties of Index expressions that follow from the ranges of iterators: bounds, signs, exact divisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import gcd, inf, isinf
from typing import TypeAlias

from polydyn.schedules.index import ZERO, Atom, Index, fetch, floordiv, maximum, minimum, polynomial_division

Ranges: TypeAlias = Mapping[str, Index]
"""Iterators and their extents: ``0 <= v < extent``."""


def upper_bound(p: Index, ranges: Ranges) -> Index | None:
    """Return the largest value over the ranges, as an Index without the ranged symbols. None if no bound is found."""
    return _bound(p, ranges, upper=True)


def _bound(p: Index, ranges: Ranges, upper: bool) -> Index | None:
    p, extra = _expand_divisions(p, ranges, sizes=not upper)
    p = _settle_iterators(p, extra, upper)
    total = ZERO
    for m, v in p.terms.items():
        ranged = [a for a in m if isinstance(a, str) and a in extra]
        moving = [a for a in m if isinstance(a, Atom) and any(x.symbols() & extra.keys() for x in a.args)]
        if not ranged and not moving:
            total = total + Index({m: v})
            continue
        sign = v * _sign(a for a in m if a not in moving)
        if not sign:
            return None
        if moving:
            quotient = (
                _quotient_bound(moving[0], extra, (sign > 0) == upper) if len(moving) == 1 and not ranged else None
            )
            if quotient is None:
                return None
            total = total + quotient * Index({tuple(a for a in m if a != moving[0]): v})
        elif (sign > 0) == upper:
            t = Index({tuple(a for a in m if a not in ranged): v})
            for a in ranged:
                t = t * (extra[str(a)] - 1)
            total = total + t
    if total.symbols() & extra.keys():  # extents that depend on other ranged symbols
        return _bound(total, ranges, upper)
    return total


def _settle_iterators(p: Index, ranges: Ranges, upper: bool) -> Index:
    """Set iterators whose factor is a difference of known sign to the end of their range where p has its bound.

    ``b * ((S + 1) // 2) - b`` is ``b * T`` for one T, which runs from 0 to ``(B - 1) * T``.
    """
    for v, extent in ranges.items():
        factor, rest = p.split(v)
        signs = {c > 0 for c in factor.terms.values()}
        if len(signs) < 2 or v in factor.symbols() | rest.symbols() or not factor.symbols().isdisjoint(ranges):
            continue
        sizes = [e for e in ranges.values() if e.symbols().isdisjoint(ranges)]
        if _is_product(factor, sizes):
            p = rest + factor * (extent - 1) if upper else rest
        elif _is_product(-factor, sizes):
            p = rest if upper else rest + factor * (extent - 1)
    return p


def _is_product(p: Index, extents: list[Index]) -> bool:
    """Whether p is at least an extent, or a product of extents and nonnegative factors; extents are >= 1."""
    if is_nonnegative(p) or any(is_nonnegative(p - e + 1) for e in extents):
        return True
    for e in (e for e in extents if len(e.terms) > 1):
        q, rest = polynomial_division(p, e)
        if not rest.terms and _is_product(q, extents):
            return True
    return False


def _quotient_bound(a: Atom, ranges: Ranges, upper: bool) -> Index | None:
    """Return the bound of ``x // n`` for a constant n, from the bound of x."""
    if a.kind != "floordiv" or (a.args[1].constant or 0) < 1:
        return None
    x = _bound(a.args[0], ranges, upper)
    return None if x is None else floordiv(x, a.args[1])


def _expand_divisions(p: Index, ranges: Ranges, sizes: bool) -> tuple[Index, dict[str, Index]]:
    """Rewrite ``c*n*(x // n)`` as ``c*(x - m)`` with a fresh ``0 <= m < n`` wherever that is exact.

    In the same way, ``c*(x // n) - c*k*(x // (n*k))``, the digit of x above its last one, is c times a fresh ``0 <= m <
    k``. Without ``sizes``, quotients of sizes alone are left unchanged: a bound that names them is exact.
    """
    extra = dict(ranges)
    for _ in range(8):
        divisions = sorted((a for a in p.atoms() if isinstance(a, Atom) and a.kind == "floordiv"), key=str)
        divisions = [a for a in divisions if sizes or not Index({(a,): 1}).symbols().isdisjoint(extra)]
        digit = next(_digits(p, divisions), None)
        if digit:
            a, b, co, k = digit
            fresh = f"%m{len(extra)}"
            extra[fresh] = k
            p = Index({m: v for m, v in p.terms.items() if a not in m and b not in m}) + co * fresh
            continue
        for a in divisions:
            x, n = a.args
            co = _factor(p, a)
            c = n.constant
            q = Index({m: v // c for m, v in co.terms.items() if v % c == 0}) if c else polynomial_division(co, n)[0]
            if not co.terms or q * n != co:
                continue
            fresh = f"%m{len(extra)}"
            extra[fresh] = n
            p = Index({m: v for m, v in p.terms.items() if a not in m}) + q * (x - fresh)
            break
        else:
            return p, extra
    return p, extra


def _factor(p: Index, a: Atom) -> Index:
    """Return the factor of the atom in p, or 0 if the atom occurs next to itself or another division."""
    terms = {m: v for m, v in p.terms.items() if a in m}
    if any(sum(isinstance(b, Atom) for b in m) > 1 for m in terms):
        return ZERO
    return Index({tuple(b for b in m if b != a): v for m, v in terms.items()})


def _digits(p: Index, divisions: list[Atom]) -> Iterator[tuple[Atom, Atom, Index, Index]]:
    """Yield (``x // n``, ``x // (n*k)``, c, k) if p multiplies the first by c and the second by -c*k."""
    same_dividend: dict[Index, list[Atom]] = {}
    for d in divisions:
        same_dividend.setdefault(d.args[0], []).append(d)
    for a, b in ((d, e) for d in divisions for e in same_dividend[d.args[0]] if e != d):
        k, rest = polynomial_division(b.args[1], a.args[1])
        co = _factor(p, a)
        if co.terms and not rest.terms and _factor(p, b) == -(k * co):
            yield a, b, co, k


def interval(e: Index, sizes: Mapping[str, tuple[float, float | None]]) -> tuple[float, float]:
    """Return the interval of an expression, infinite on a side without a bound.

    ``sizes`` gives (low, high) of its symbols; high is None if unknown. KeyError: a symbol is missing.
    """
    return _interval(e, sizes, {})


Intervals = dict[Atom, tuple[float, float]]


def _interval(e: Index, sizes: Mapping[str, tuple[float, float | None]], done: Intervals) -> tuple[float, float]:
    """``done`` caches the intervals of atoms, because one atom may occur in many terms of a minimum or a quotient."""
    low: float = 0
    high: float = 0
    for monomial, c in e.terms.items():
        ends: tuple[float, float] = (c, c)
        for a in monomial:
            if isinstance(a, str):
                x, y = sizes[a]
            else:
                if a not in done:
                    done[a] = _atom_interval(a, sizes, done)
                x, y = done[a]
            products = [u * v if u and v else 0 for u in ends for v in (x, inf if y is None else y)]
            ends = min(products), max(products)
        low, high = low + ends[0], high + ends[1]
    return low, high


def _atom_interval(a: Atom, sizes: Mapping[str, tuple[float, float | None]], done: Intervals) -> tuple[float, float]:
    args = [_interval(x, sizes, done) for x in a.args]
    if a.kind in ("min", "max"):
        pick = min if a.kind == "min" else max
        return pick(x for x, _ in args), pick(y for _, y in args)
    if a.kind != "floordiv" or args[1][0] < 0:
        return -inf, inf
    divisors = [max(1, n) for n in args[1]]
    quotients = [x if isinf(x) else x // n for x in args[0] for n in divisors] + [0] * (args[1][0] == 0)
    return min(quotients), max(quotients)


def is_nonnegative(p: Index, ranges: Ranges | None = None) -> bool:
    """Whether ``p >= 0`` is proven over the ranges.

    All symbols are >= 0. If iterators run at all, their extents are >= 1, so the symbols of an extent that is a single
    product are >= 1 too.
    """
    if min(p.terms.values(), default=0) >= 0 and not any(map(_may_be_negative, p.atoms())):
        return True
    low = _bound(p, ranges or {}, upper=False)
    if low is None:
        return False
    positive = {a for e in (ranges or {}).values() if len(e.terms) == 1 for a in next(iter(e.terms))}
    least = low.subs({a: Index.of(a) + 1 for a in positive if isinstance(a, str)})
    if all(v * _sign(m) > 0 for m, v in least.terms.items()):
        return True
    differences = [e for e in (ranges or {}).values() if len({v > 0 for v in e.terms.values()}) > 1]
    return bool(differences) and _is_product(low, differences)


def _sign(factors: Iterable[str | Atom]) -> int:
    """Return 1 for a product that is never negative, -1 for one that is never positive, 0 for one that may be both."""
    sign = 1
    for a in factors:
        if _may_be_negative(a):
            sign = -sign if _never_positive(a) else 0
    return sign


def _never_positive(a: str | Atom) -> bool:
    if isinstance(a, str) or a.kind == "fetch":
        return False
    if a.kind == "floordiv":
        return is_nonnegative(-a.args[0])
    return (any if a.kind == "min" else all)(is_nonnegative(-x) for x in a.args)


def _may_be_negative(a: str | Atom) -> bool:
    if isinstance(a, str):
        return False
    if a.kind == "fetch":
        return True
    return not (any if a.kind == "max" else all)(is_nonnegative(x) for x in a.args)


def simplify(p: Index, ranges: Ranges) -> Index:
    """Resolve floor divisions, minima and maxima whose outcome follows from the ranges of iterators."""
    return p if p.is_polynomial else p.map_atoms(lambda a: _simplify_atom(a, tuple(ranges.items())))


@lru_cache(maxsize=1 << 14)
def _simplify_atom(a: Atom, extents: tuple[tuple[str, Index], ...]) -> Index:
    """Cached, because the loads of a node, and the candidate forms of a group, have subscripts in common."""
    ranges = dict(extents)
    args = tuple(simplify(x, ranges) for x in a.args)
    if a.kind == "fetch":
        return fetch(a.name, args)
    if a.kind == "floordiv":
        return divide(args[0], args[1], ranges)
    return _simplify_extreme(a.kind, args, ranges)


def _simplify_extreme(kind: str, args: tuple[Index, ...], ranges: Ranges) -> Index:
    keep = list(args)
    for a in args:
        others = [b for b in keep if b != a]
        dominated = any(is_nonnegative(a - b if kind == "min" else b - a, ranges) for b in others)
        if dominated and len(keep) > 1:
            keep = others
    return (minimum if kind == "min" else maximum)(*keep)


def divide(x: Index, n: Index, ranges: Ranges) -> Index:
    """Return ``x // n`` without remainders that the ranges prove to be in [0, n).

    ``(g*y + r) // (g*m)`` is ``y // m`` if ``0 <= r < g``: the position in an image does not affect its channel.
    """
    q = floordiv(x, n)
    loose = [a for a in q.atoms() if isinstance(a, Atom) and a.kind == "floordiv" and a.args[1] == n]
    for a in loose:
        r = a.args[0]
        if _remainder(r, n, ranges):
            q = q - Index({(a,): 1})
            continue
        for g in _common_factors(n, r):
            y, rest = polynomial_division(r, g)
            if y.terms and rest.terms and _remainder(rest, g, ranges):
                q = q - Index({(a,): 1}) + divide(y, floordiv(n, g), ranges)
                break
    return q


def _remainder(r: Index, n: Index, ranges: Ranges) -> bool:
    """Whether ``0 <= r < n`` is proven."""
    return is_nonnegative(r, ranges) and is_nonnegative(n - 1 - r, ranges)


def _common_factors(n: Index, r: Index) -> list[Index]:
    """Return the largest proper divisors of a product: without its coefficient, without one of its symbols.

    For a constant, return the divisors that it has in common with a coefficient of ``r``.
    """
    if len(n.terms) != 1:
        return []
    ((m, c),) = n.terms.items()
    if not m:
        return [Index.of(g) for g in sorted({gcd(c, v) for k, v in r.terms.items() if k} - {1, c}, reverse=True)]
    out = [Index({m: 1})] if c > 1 and m else []
    return out + [Index({m[:k] + m[k + 1 :]: c}) for k in range(len(m)) if len(m) > 1 or c > 1]
