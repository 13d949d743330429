"""Sizes that are multiples of a constant: ``L = 8 * k`` without inventing a symbol that a user would see.

Inside a simplification or a proof ``L`` is written ``8 * %L``, where ``%L`` stands for ``L // 8``; polynomial
arithmetic then does everything (``L // 4`` is ``2 * %L``, ``(L * W + 3) // 8`` is ``%L * W``). Outside, ``%L`` is the
atom ``L // 8`` and ``8 * (L // 8)`` is ``L``. A size that is 1 more than a multiple is ``8 * %L + 1``. Sizes with other
sets of remainders (``residues.py``) are what they are; their quotients are written over one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.schedules.index import Atom, Index, Monomial, floordiv
from polydyn.shapes.residues import Condition, Remainders, remainders

MARK = "%"
"""First character of the symbols that stand for quotients; no model's symbol begins with it."""


class Multiples:
    """Symbol -> what is known of its remainders."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[int, int]] = {}
        """Symbol -> ``(step, first)``: it is ``step * %symbol + first``."""
        self._inner: dict[str, Remainders] = {}
        self._forward: dict[str, Index] = {}

    def narrow(self, c: Condition) -> bool:
        """A condition on one symbol, written inside, that repeats; False: it is another one, or repeats too late.

        ValueError: no size meets it and what is known.
        """
        both, _ = self._with(c)
        if both is None:
            return False
        (inside,) = c.value.symbols()
        if not both.allowed:
            raise ValueError(f"no {inside} is left")
        symbol = inside.removeprefix(MARK)
        step, first = both.lattice()
        before, offset = self.of.get(symbol, (1, 0))
        self._inner.pop(inside, None)
        if step > 1:
            self.of[symbol] = before * step, before * first + offset
            self._forward[symbol] = Index.of(MARK + symbol) * (before * step) + self.of[symbol][1]
        rest = both.inner(step, first)
        if rest.period > 1:
            self._inner[MARK + symbol if symbol in self.of else symbol] = rest
        return True

    def allowed(self, symbol: str) -> Remainders:
        """The remainders of a symbol's sizes."""
        step, first = self.of.get(symbol, (1, 0))
        inner = self._inner.get(MARK + symbol if symbol in self.of else symbol, Remainders())
        return Remainders(step * inner.period, frozenset(step * r + first for r in inner.allowed))

    def settle(self, c: Condition) -> bool | None:
        """Whether all sizes meet a condition that is written inside (True) or none does (False); else None."""
        both, known = self._with(c)
        return None if both is None or (both.allowed and both != known) else bool(both.allowed)

    def asks(self, c: Condition) -> bool:
        """Whether a condition that is written inside is one on remainders that some sizes meet and others do not."""
        both, known = self._with(c)
        return both is not None and bool(both.allowed) and both != known

    def _with(self, c: Condition) -> tuple[Remainders | None, Remainders]:
        found = remainders(c)
        known = self._inner.get(found[0], Remainders()) if found else Remainders()
        return found and found[1].both(known), known

    def reduced(self, p: Index) -> Index:
        """Quotients over those that the remainders of their sizes give."""
        return p.map_atoms(self._reduce) if self._inner else p

    def _reduce(self, a: Atom) -> Index:
        symbols = a.args[0].symbols()
        known = self._inner.get(next(iter(symbols))) if len(symbols) == 1 and a.kind == "floordiv" else None
        found = known.reduce(a) if known else None
        return Index({(a,): 1}) if found is None else found

    def inside(self, p: Index) -> Index:
        """``L`` written as ``8 * %L``."""
        return p.subs(self._forward) if self._forward else p

    def ranges(self, sizes: Mapping[str, tuple[int, int | None]]) -> Mapping[str, tuple[int, int | None]]:
        """The ranges of symbols, with those of the quotients."""
        if not self.of:
            return sizes
        out = dict(sizes)
        for s, (step, first) in self.of.items():
            low, high = out.pop(s, (0, None))
            out[MARK + s] = (max(0, -((first - low) // step)), None if high is None else (high - first) // step)
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
                s, rest = a[len(MARK) :], m[:k] + m[k + 1 :]
                step, first = self.of[s]
                whole = Index.of(s) - first
                times = abs(c) // step * (1 if c > 0 else -1)
                left = floordiv(whole, Index.of(step)) * self._term(rest, c - times * step)
                return whole * self._term(rest, times) + left
        return Index({m: c})
