"""Conditions on one size that repeat: which remainders of a size meet ``2 * ((H + 3) // 4) == (H + 1) // 2``.

A sum of quotients by constants is periodic but for a linear part: ``f(H + p) == f(H) + k``. If k is 0, a condition on
it depends on ``H % p`` only, and every remainder is evaluated. Pyramids of poolings and upsamplings, rounded up or
down, with any strides, give one set of remainders, exactly the one for which all sizes agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm

from polydyn.schedules.index import Atom, Index, floordiv

MOST = 1 << 12
"""Longest period that is looked at: a condition with a longer one stays a guard of its own."""


@dataclass(frozen=True)
class Condition:
    """``value == 0`` (relation ``==``), ``value >= 0`` (``>=``), or ``value`` is a multiple of ``of`` (``%==``)."""

    value: Index
    relation: str
    of: int = 0

    def holds(self, value: int) -> bool:
        """Whether it is met by a number."""
        if self.relation == ">=":
            return value >= 0
        return value == 0 if self.relation == "==" or not self.of else value % self.of == 0


@dataclass(frozen=True)
class Remainders:
    """Sizes whose remainder by ``period`` is in ``allowed``."""

    period: int = 1
    allowed: frozenset[int] = frozenset((0,))

    def both(self, other: Remainders) -> Remainders | None:
        """Sizes that are in both; None where the common period is too long."""
        if 1 in (self.period, other.period) and self.allowed and other.allowed:
            return other if self.period == 1 else self
        period = lcm(self.period, other.period)
        if period > MOST:
            return None
        kept = (r for r in range(period) if r % self.period in self.allowed and r % other.period in other.allowed)
        return Remainders(period, frozenset(kept)).short()

    def short(self) -> Remainders:
        """The same sizes by the shortest period."""
        period, allowed = self.period, self.allowed
        if len(allowed) == 1:
            return self
        for q in [d for d in range(2, period + 1) if period % d == 0]:
            while period % q == 0 and allowed == {(r + period // q) % period for r in allowed}:
                period, allowed = period // q, frozenset(r % (period // q) for r in allowed)
        return Remainders(period, allowed)

    def lattice(self) -> tuple[int, int]:
        """``(step, first)``: all sizes are ``step * k + first``, by the largest step."""
        least = min(self.allowed)
        step = gcd(self.period, *(r - least for r in self.allowed))
        return step, least % step

    def inner(self, step: int, first: int) -> Remainders:
        """The k of sizes ``step * k + first``, where ``step`` divides the period."""
        return Remainders(self.period // step, frozenset((r - first) // step for r in self.allowed))

    @property
    def start(self) -> int:
        """The remainder behind the longest gap: from there on all sizes lie close together."""
        rs = sorted(self.allowed)
        return max(rs, key=lambda r: ((r - rs[rs.index(r) - 1] - 1) % self.period, -r))

    @property
    def span(self) -> int:
        """How many numbers there are from the start to the last remainder."""
        return max((r - self.start) % self.period for r in self.allowed) + 1

    def reduce(self, a: Atom) -> Index | None:
        """``(c*y + b) // n`` over the quotient ``(y + t) // period``, where that says it for all sizes y."""
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
        """The condition in words: ``H is a multiple of 32``, with what else is allowed."""
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
        """The least number all multiples of which are allowed; None where 0 is not."""
        divisors = (d for d in range(1, self.period + 1) if self.period % d == 0)
        return next((d for d in divisors if all(r in self.allowed for r in range(0, self.period, d))), None)

    def _near(self) -> list[int]:
        """The remainders as numbers from the start on, where 0 stands for a multiple."""
        at = -self.start % self.period
        return [(r + at) % self.period - at for r in self.allowed]

    def exact(self, symbol: Index) -> tuple[Index, int] | None:
        """``(x, n)``: a size is allowed exactly where x is a multiple of n; None where no such x is known."""
        width = self.span
        if len(self.allowed) < width or self.period % width:
            return None
        shift = self.start if 2 * self.start <= self.period else self.start - self.period
        return floordiv(symbol - shift, Index.of(width)), self.period // width


@lru_cache(maxsize=4096)
def remainders(c: Condition) -> tuple[str, Remainders] | None:
    """The symbol that a condition is about, and its remainders; None where it is about more, or does not repeat."""
    symbols = c.value.symbols()
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    found = repetition(c.value, symbol)
    if found is None:
        return None
    period, growth = found
    if c.relation == "%==" and c.of:
        period, growth = period * (c.of // gcd(c.of, growth)), 0
    linear, rest = c.value.split(symbol)
    if c.relation == "%==" and c.of and linear.constant and rest.constant is not None:
        g = gcd(int(linear), c.of)
        first = [] if int(rest) % g else [-int(rest) // g * pow(int(linear) // g, -1, c.of // g) % (c.of // g)]
        return symbol, Remainders(c.of // g, frozenset(first))
    if growth or period > MOST:
        return None
    allowed = frozenset(r for r in range(period) if c.holds(c.value.evaluate({symbol: r})))
    return symbol, Remainders(period, allowed).short()


def repetition(p: Index, symbol: str) -> tuple[int, int] | None:
    """``(period, k)`` with ``p(s + period) == p(s) + k``; None where p is no sum of quotients by constants."""
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
