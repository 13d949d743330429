"""Periodic conditions on one size: for which remainders of H does ``2 * ((H + 3) // 4) == (H + 1) // 2`` hold?

A sum of quotients by constants is periodic except for a linear part: ``f(H + p) == f(H) + k``. If k is 0, a condition
on it depends on ``H % p`` only, and every remainder is evaluated. Pyramids of poolings and upsamplings, rounded up or
down, with any strides, give one set of remainders, exactly the one for which all sizes agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm

from polydyn.schedules.index import Atom, Index, floordiv

MAX_PERIOD = 1 << 12
"""Maximum period. A condition with a longer period stays a separate guard."""


@dataclass(frozen=True)
class Condition:
    """``value == 0`` (relation ``==``), ``value >= 0`` (``>=``), or ``value`` is a multiple of ``of`` (``%==``)."""

    value: Index
    relation: str
    of: int = 0

    def holds(self, value: int) -> bool:
        """Return whether the condition holds for a number."""
        if self.relation == ">=":
            return value >= 0
        return value == 0 if self.relation == "==" or not self.of else value % self.of == 0


@dataclass(frozen=True)
class Remainders:
    """The set of sizes whose remainder modulo ``period`` is in ``allowed``."""

    period: int = 1
    allowed: frozenset[int] = frozenset((0,))

    def both(self, other: Remainders) -> Remainders | None:
        """Return the intersection, or None if the common period exceeds the maximum."""
        if 1 in (self.period, other.period) and self.allowed and other.allowed:
            return other if self.period == 1 else self
        period = lcm(self.period, other.period)
        if period > MAX_PERIOD:
            return None
        remainders = (r for r in range(period) if r % self.period in self.allowed and r % other.period in other.allowed)
        return Remainders(period, frozenset(remainders)).short()

    def short(self) -> Remainders:
        """Return the same set of sizes with its shortest period."""
        period, allowed = self.period, self.allowed
        if len(allowed) == 1:
            return self
        for q in [d for d in range(2, period + 1) if period % d == 0]:
            while period % q == 0 and allowed == {(r + period // q) % period for r in allowed}:
                period, allowed = period // q, frozenset(r % (period // q) for r in allowed)
        return Remainders(period, allowed)

    def lattice(self) -> tuple[int, int]:
        """Return ``(step, first)`` with the largest step such that all sizes are ``step * k + first``."""
        least = min(self.allowed)
        step = gcd(self.period, *(r - least for r in self.allowed))
        return step, least % step

    def inner(self, step: int, first: int) -> Remainders:
        """Return the set of k for sizes ``step * k + first``. ``step`` must divide the period."""
        return Remainders(self.period // step, frozenset((r - first) // step for r in self.allowed))

    @property
    def start(self) -> int:
        """The remainder after the longest gap. Remainders counted from here have the smallest spread."""
        rs = sorted(self.allowed)
        return max(rs, key=lambda r: ((r - rs[rs.index(r) - 1] - 1) % self.period, -r))

    @property
    def span(self) -> int:
        """Number of integers from the start to the last remainder, inclusive."""
        return max((r - self.start) % self.period for r in self.allowed) + 1

    def reduce(self, a: Atom) -> Index | None:
        """Express ``(c*y + b) // n`` by ``(y + t) // period``. Returns None if that fails for an allowed size y."""
        (x, n), (symbol,) = a.args, a.args[0].symbols()
        c, rest = x.split(symbol)
        m, b, by = c.constant, rest.constant, n.constant
        if m is None or b is None or not by:
            return None
        t = -self.start % self.period
        g = gcd(m * self.period, by)
        values = {(m * ((r + t) % self.period - t) + b) // g for r in self.allowed}
        if len(values) > 1:
            return None
        quotient = floordiv(Index.of(symbol) + t, Index.of(self.period))
        return floordiv(quotient * (m * self.period // g) + values.pop(), Index.of(by // g))

    def words(self, symbol: str) -> str:
        """Describe the condition for messages, such as ``H is a multiple of 32, or up to 2 less``."""
        if 0 not in self.allowed:
            nearest = min(self.allowed, key=lambda r: (min(r, self.period - r), r))
            shift = nearest if 2 * nearest <= self.period else nearest - self.period
            moved = Remainders(self.period, frozenset((r - shift) % self.period for r in self.allowed))
            return moved.words(f"{symbol} {'-' if shift > 0 else '+'} {abs(shift)}")
        n = self.multiple or 1
        others = sorted(r for r in self.allowed if r % n)
        text = f"{symbol} is a multiple of {n}"
        less, more = max(0, -min(self._near())), max(0, max(self._near()))
        if not others:
            return text
        if n == self.period and self.span == less + more + 1 and len(self.allowed) == self.span:
            ends = [f"up to {k} {word}" for k, word in ((less, "less"), (more, "more")) if k]
            return f"{text}, or {' or '.join(ends)}"
        some = " or ".join(map(str, others[:8])) + " or others" * (len(others) > 8)
        return f"{text}, or {symbol} % {self.period} is {some}"

    @property
    def multiple(self) -> int | None:
        """The smallest number whose multiples are all allowed, or None if 0 is not allowed."""
        divisors = (d for d in range(1, self.period + 1) if self.period % d == 0)
        return next((d for d in divisors if all(r in self.allowed for r in range(0, self.period, d))), None)

    def _near(self) -> list[int]:
        """Return the remainders as offsets from a multiple of the period, counted from the start."""
        at = -self.start % self.period
        return [(r + at) % self.period - at for r in self.allowed]

    def exact(self, symbol: Index) -> tuple[Index, int] | None:
        """Return ``(x, n)`` such that a size is allowed if and only if x is a multiple of n, or None."""
        width = self.span
        if len(self.allowed) < width or self.period % width:
            return None
        shift = self.start if 2 * self.start <= self.period else self.start - self.period
        return floordiv(symbol - shift, Index.of(width)), self.period // width


@lru_cache(maxsize=4096)
def remainders(c: Condition) -> tuple[str, Remainders] | None:
    """Return the symbol of a condition and its remainders, or None if it has more symbols or is aperiodic."""
    symbols = c.value.symbols()
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    periodicity = repetition(c.value, symbol)
    if periodicity is None:
        return None
    period, growth = periodicity
    if c.relation == "%==" and c.of:
        period, growth = period * (c.of // gcd(c.of, growth)), 0
    linear, rest = c.value.split(symbol)
    if c.relation == "%==" and c.of and linear.constant and rest.constant is not None:
        g = gcd(int(linear), c.of)
        first = [] if int(rest) % g else [-int(rest) // g * pow(int(linear) // g, -1, c.of // g) % (c.of // g)]
        return symbol, Remainders(c.of // g, frozenset(first))
    if growth or period > MAX_PERIOD:
        return None
    allowed = frozenset(r for r in range(period) if c.holds(c.value.evaluate({symbol: r})))
    return symbol, Remainders(period, allowed).short()


def repetition(p: Index, symbol: str) -> tuple[int, int] | None:
    """Return ``(period, k)`` with ``p(s + period) == p(s) + k``, or None if p is not a sum of quotients by
    constants.
    """
    parts: list[tuple[int, int]] = []
    for m, c in p.terms.items():
        a = m[0] if len(m) == 1 else None
        if a == symbol:
            parts.append((1, c))
        elif isinstance(a, Atom) and a.kind == "floordiv" and a.args[1].constant:
            inner, n = repetition(a.args[0], symbol), int(a.args[1])
            if inner is None:
                return None
            times = n // gcd(n, inner[1])
            parts.append((inner[0] * times, c * (inner[1] * times // n)))
        elif m:
            return None
    period = lcm(*(q for q, _ in parts))
    return period, sum(k * (period // q) for q, k in parts)
