"""Sizes that are multiples of a constant: ``L = 8 * k``, without a new symbol that users would see.

Inside a simplification or a proof ``L`` is written ``8 * %L``, where ``%L`` stands for ``L // 8``. Polynomial
arithmetic then suffices (``L // 4`` is ``2 * %L``, ``(L * W + 3) // 8`` is ``%L * W``). Outside, ``%L`` is the atom
``L // 8``, and ``8 * (L // 8)`` is ``L``. A size that is 1 more than a multiple is ``8 * %L + 1``. Sizes with other
sets of remainders (``residues.py``) are not rewritten; their quotients are written over one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.schedules.index import Atom, Index, Monomial, floordiv
from polydyn.shapes.residues import Condition, Remainders, remainders

MARK = "%"
"""First character of the symbols that stand for quotients. No symbol of a model begins with it."""


class Multiples:
    """The known remainders of each symbol."""

    def __init__(self) -> None:
        self.lattices: dict[str, tuple[int, int]] = {}
        """Maps a symbol to ``(step, first)``: it is ``step * %symbol + first``."""
        self._inner: dict[str, Remainders] = {}
        self._forward: dict[str, Index] = {}

    def narrow(self, c: Condition) -> bool:
        """Add a condition on one symbol, in inside form, if it is periodic. Return False for other conditions or long
        periods.

        Raises ValueError if no size satisfies it and the known conditions.
        """
        both, _ = self._with(c)
        if both is None:
            return False
        (inside,) = c.value.symbols()
        if not both.allowed:
            raise ValueError(f"no {inside} is left")
        symbol = inside.removeprefix(MARK)
        step, first = both.lattice()
        before, offset = self.lattices.get(symbol, (1, 0))
        self._inner.pop(inside, None)
        if step > 1:
            self.lattices[symbol] = before * step, before * first + offset
            self._forward[symbol] = Index.of(MARK + symbol) * (before * step) + self.lattices[symbol][1]
        rest = both.inner(step, first)
        if rest.period > 1:
            self._inner[MARK + symbol if symbol in self.lattices else symbol] = rest
        return True

    def allowed(self, symbol: str) -> Remainders:
        """Return the remainders of a symbol's sizes."""
        step, first = self.lattices.get(symbol, (1, 0))
        inner = self._inner.get(MARK + symbol if symbol in self.lattices else symbol, Remainders())
        return Remainders(step * inner.period, frozenset(step * r + first for r in inner.allowed))

    def settle(self, c: Condition) -> bool | None:
        """Return True if all sizes satisfy a condition in inside form, False if none does, else None."""
        both, known = self._with(c)
        return None if both is None or (both.allowed and both != known) else bool(both.allowed)

    def asks(self, c: Condition) -> bool:
        """Check whether a condition in inside form restricts remainders: some sizes satisfy it and others do not."""
        both, known = self._with(c)
        return both is not None and bool(both.allowed) and both != known

    def _with(self, c: Condition) -> tuple[Remainders | None, Remainders]:
        condition = remainders(c)
        known = self._inner.get(condition[0], Remainders()) if condition else Remainders()
        return condition and condition[1].both(known), known

    def reduced(self, p: Index) -> Index:
        """Express quotients through those that follow from the remainders of their sizes."""
        return p.map_atoms(self._reduce) if self._inner else p

    def _reduce(self, a: Atom) -> Index:
        symbols = a.args[0].symbols()
        known = self._inner.get(next(iter(symbols))) if len(symbols) == 1 and a.kind == "floordiv" else None
        reduced = known.reduce(a) if known else None
        return Index({(a,): 1}) if reduced is None else reduced

    def inside(self, p: Index) -> Index:
        """Rewrite ``L`` as ``8 * %L``."""
        return p.subs(self._forward) if self._forward else p

    def ranges(self, sizes: Mapping[str, tuple[int, int | None]]) -> Mapping[str, tuple[int, int | None]]:
        """Return the ranges of symbols and of their quotients."""
        if not self.lattices:
            return sizes
        out = dict(sizes)
        for s, (step, first) in self.lattices.items():
            low, high = out.pop(s, (0, None))
            out[MARK + s] = (max(0, -((first - low) // step)), None if high is None else (high - first) // step)
        return out

    def outside(self, p: Index) -> Index:
        """Rewrite ``8 * %L`` as ``L``, and a remaining ``%L`` as ``L // 8``."""
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
        """Rewrite one product. Its coefficient turns quotients back into symbols as far as possible."""
        for k, a in enumerate(m):
            if isinstance(a, str) and a.startswith(MARK):
                s, rest = a[len(MARK) :], m[:k] + m[k + 1 :]
                step, first = self.lattices[s]
                whole = Index.of(s) - first
                times = abs(c) // step * (1 if c > 0 else -1)
                left = floordiv(whole, Index.of(step)) * self._term(rest, c - times * step)
                return whole * self._term(rest, times) + left
        return Index({m: c})
