"""Sizes that are multiples of a constant: ``L = 8 * k`` without inventing a symbol that a user would see.

Inside a simplification or a proof ``L`` is written ``8 * %L``, where ``%L`` stands for ``L // 8``; polynomial
arithmetic then does everything (``L // 4`` is ``2 * %L``, ``(L * W + 3) // 8`` is ``%L * W``). Outside, ``%L`` is the
atom ``L // 8`` and ``8 * (L // 8)`` is ``L``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, lcm

from polydyn.schedules.index import Atom, Index, Monomial, floordiv

MARK = "%"
"""First character of the symbols that stand for quotients; no model's symbol begins with it."""


class Multiples:
    """Symbol -> the largest constant that certainly divides it."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self._forward: dict[str, Index] = {}

    def learn(self, symbol: str, n: int) -> None:
        """``symbol`` is a multiple of ``n`` too."""
        self.of[symbol] = lcm(n, self.of.get(symbol, 1))
        self._forward[symbol] = Index.of(MARK + symbol) * self.of[symbol]

    def quotients(self, facts: Sequence[tuple[Index, Index]]) -> list[tuple[Index, Index]]:
        """Takes facts (x, n), x a multiple of n. Learns from those whose x is a quotient; returns the others.

        An ``L`` whose half is a multiple of 2 is one of 4.
        """
        while True:
            left: list[tuple[Index, Index]] = []
            for x, n in facts:
                ((m, c),) = t if len(t := tuple(self.inside(x).terms.items())) == 1 else (((), 0),)
                marked = len(m) == 1 and isinstance(m[0], str) and m[0].startswith(MARK)
                if marked and n.constant:
                    symbol = str(m[0])[len(MARK) :]
                    self.learn(symbol, self.of[symbol] * (n.constant // gcd(n.constant, c)))
                else:
                    left.append((x, n))
            if len(left) == len(facts):
                return left
            facts = left

    def inside(self, p: Index) -> Index:
        """``L`` written as ``8 * %L``."""
        return p.subs(self._forward) if self._forward else p

    def ranges(self, sizes: Mapping[str, tuple[int, int | None]]) -> Mapping[str, tuple[int, int | None]]:
        """The ranges of symbols, with those of the quotients."""
        if not self.of:
            return sizes
        out = dict(sizes)
        for s, n in self.of.items():
            low, high = out.pop(s, (0, None))
            out[MARK + s] = (-(-low // n), None if high is None else high // n)
        return out

    def outside(self, p: Index) -> Index:
        """``8 * %L`` written as ``L``, and a remaining ``%L`` as ``L // 8``."""
        if not any(s.startswith(MARK) for s in p.symbols()):
            return p
        p = p.map_atoms(self._atom)
        out: Index = Index({})
        for m, c in p.terms.items():
            out = out + self._term(m, c)
        return out

    def _atom(self, a: Atom) -> Index:
        return Atom(a.kind, tuple(self.outside(x) for x in a.args), a.name).normal()

    def _term(self, m: Monomial, c: int) -> Index:
        """One product. Its coefficient, as far as it goes, turns quotients back into symbols."""
        for k, a in enumerate(m):
            if isinstance(a, str) and a.startswith(MARK):
                s, rest = Index.of(a[len(MARK) :]), m[:k] + m[k + 1 :]
                n = self.of[str(s)]
                quotient = abs(c) // n * (1 if c > 0 else -1)
                return s * self._term(rest, quotient) + floordiv(s, Index.of(n)) * self._term(rest, c - quotient * n)
        return Index({m: c})
