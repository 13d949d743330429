"""Equalities of dims as oriented rewriting rules over monomials: a union-find that also handles products.

Every equality ``d == 0`` selects a leading monomial with coefficient +-1 and becomes ``lead -> rest``. A single symbol
is preferred as lead: invented symbols first, then symbols of later inputs. So the representatives are constants and the
symbols of the first inputs. No rule reintroduces what it removed.

Symbols have levels. Symbols of the inputs have level 0; a size that data decide has the level of the program part that
begins when it is read. An equation replaces only symbols of its highest level, so that no size of an early part waits
for a late one.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from polydyn.schedules.index import Atom, Index, Monomial


def content(p: Index) -> int:
    """Return the greatest common divisor of the coefficients (1 for zero)."""
    return gcd(*p.terms.values()) or 1


class Rules:
    """Rewriting rules, each with its reason."""

    def __init__(self) -> None:
        self.order: dict[str, int] = {}
        self.invented: set[str] = set()
        self.levels: dict[str, int] = {}
        self._symbols: dict[str, Index] = {}
        self._monomials: dict[Monomial, tuple[Index, str]] = {}
        self._why: dict[str, str] = {}

    def declare(self, symbol: str, invented: bool = False) -> None:
        """Declare a symbol. Symbols that are declared earlier are preferred."""
        self.order.setdefault(symbol, len(self.order))
        if invented:
            self.invented.add(symbol)

    def level(self, *dims: Index) -> int:
        """Return the highest level of the symbols of dims."""
        return max((self.levels.get(s, 0) for d in dims for s in d.symbols()), default=0)

    def preference(self, p: Index) -> tuple[int, int, int, str]:
        """Return the sort key of representatives: constants, symbols in the order of inputs, expressions."""
        if p.constant is not None:
            return (0, 0, 0, "")
        if p.is_symbol:
            return (2 if str(p) in self.invented else 1, self._rank(str(p)), 0, str(p))
        return (3, len(p.terms), len(str(p)), str(p))

    def _rank(self, symbol: str) -> int:
        return self.order.get(symbol, len(self.order))

    def apply(self, p: Index) -> Index:
        """Apply each rule once."""
        p = p.subs(self._symbols)
        for lead, (rest, _) in self._monomials.items():
            hit = {m: v for m, v in p.terms.items() if _divides(lead, m)}
            if hit:
                q = Index({_quotient(m, lead): v for m, v in hit.items()})
                p = Index({m: v for m, v in p.terms.items() if m not in hit}) + q * rest
        return p

    def rewritten(self, p: Index) -> Index:
        """Rewrite an expression until no rule applies."""
        for _ in range(64):
            q = self.apply(p)
            if q == p:
                break
            p = q
        return p

    def add(self, d: Index, reason: str) -> str | None:
        """Learn ``d == 0`` (already rewritten). Return the symbol that was replaced, "" for another monomial, None for
        none.

        If no monomial can lead (``2*a == 3*b``), nothing is learned here.
        """
        g = content(d)
        d = Index({m: v // g for m, v in d.terms.items()})
        lead = self._lead(d)
        if lead is None:
            return None
        sign = d.terms[lead]
        rest = (Index({lead: sign}) - d) * sign
        head = lead[0]
        if len(lead) > 1 or not isinstance(head, str):
            self._monomials[lead] = (rest, reason)
            return ""
        self._symbols = {s: r.subs({head: rest}) for s, r in self._symbols.items()} | {head: rest}
        self._why[head] = reason
        stale = {m: r for m, r in self._monomials.items() if head in (Index({m: 1}) - r[0]).symbols()}
        for m in stale:
            del self._monomials[m]
        for m, (r, old_reason) in stale.items():
            again = self.apply(Index({m: 1}) - r)
            if again.constant is None:
                self.add(again, old_reason)
        return head

    def _lead(self, d: Index) -> Monomial | None:
        def occurs(symbol: str) -> int:
            return sum(symbol in Index({m: 1}).symbols() for m in d.terms)

        def sum_of_sizes(m: Monomial) -> bool:  # t -> l + p is a better rule than p -> t - l
            return all(v * d.terms[m] < 0 for n, v in d.terms.items() if n != m)

        level = self.level(d)
        terms = {m: v for m, v in d.terms.items() if self.level(Index({m: 1})) == level}
        singles = [
            m for m, v in terms.items()
            if abs(v) == 1 and len(m) == 1 and isinstance(m[0], str) and occurs(m[0]) == 1
        ]  # fmt: skip
        if singles:
            return max(singles, key=lambda m: (m[0] in self.invented, sum_of_sizes(m), self._rank(str(m[0]))))
        others = [m for m, v in terms.items() if abs(v) == 1 and m and (len(m) > 1 or isinstance(m[0], Atom))]
        others = [m for m in others if not any(_divides(m, n) or _inside(m, n) for n in d.terms if n != m)]
        return max(others, key=lambda m: (len(m), str(m)), default=None)

    def of_atoms(self) -> list[tuple[Monomial, Index, str]]:
        """Return the rules for divisions, minima and maxima: monomial, replacement, reason."""
        rules = self._monomials.items()
        return [(m, rest, why) for m, (rest, why) in rules if any(isinstance(a, Atom) for a in m)]

    def drop(self, lead: Monomial) -> None:
        """Forget the rule that replaces a monomial."""
        del self._monomials[lead]

    def related(self, symbols: Iterable[str]) -> tuple[set[str], list[str]]:
        """Return the symbols with all that replaced them or that they replaced, and the reasons."""
        seen = set(symbols)
        while True:
            more = {s for s in self._symbols for x in [{s, *self._symbols[s].symbols()}] if x & seen}
            more |= {x for s in more for x in self._symbols[s].symbols()}
            if more <= seen:
                return seen, [reason for s, reason in self._why.items() if s in seen]
            seen |= more


def _divides(lead: Monomial, m: Monomial) -> bool:
    return all(m.count(a) >= lead.count(a) for a in set(lead)) and len(lead) <= len(m)


def _quotient(m: Monomial, lead: Monomial) -> Monomial:
    rest = list(m)
    for a in lead:
        rest.remove(a)
    return tuple(rest)


def _inside(lead: Monomial, n: Monomial) -> bool:
    """Check whether a factor of ``lead`` occurs inside an atom of ``n``. Rewriting would not end."""
    inner: set[str | Atom] = set()
    for a in n:
        if isinstance(a, Atom):
            for x in a.args:
                inner.update(x.atoms())
    return any(a in inner for a in lead)
