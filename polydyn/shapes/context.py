"""ShapeContext: everything that is known about the sizes of a model.

A fact learned late holds everywhere, because dims are read through ``canonical``: equalities are kept as oriented
rewriting rules over the monomials of the polynomial normal form. For single symbols this is a union-find whose
preferred representatives are constants, then symbols of earlier inputs, then expressions; for products it is the
dim-collapse equality of BladeDISC 3. Ranges, divisibility and learned inequalities decide min, max and floor divisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polydyn.errors import ShapeError
from polydyn.schedules.index import Atom, Index, IndexLike, floordiv, maximum, minimum
from polydyn.schedules.ranges import Ranges
from polydyn.shapes import prove
from polydyn.shapes.rules import Rules, content


class Undecided(ShapeError):
    """A comparison that later facts may decide: the propagator parks the node and asks again."""


@dataclass(frozen=True)
class Assumed:
    """A condition assumed of every call: ``left relation right``, relation ``==``, ``<=`` or ``%==`` (a multiple)."""

    left: Index
    relation: str
    right: Index
    message: str


class ShapeContext:
    """Facts about dims. Sizes are >= 0 unless a range says more; nothing is ever specialised without a guard."""

    def __init__(self, dims: Mapping[str, tuple[int, int | None]] | None = None) -> None:
        self.ranges: dict[str, tuple[int, int | None]] = {}
        self.notes: list[str] = []
        self.version = 0
        """Grows with every new fact."""
        self._asked = dict(dims or {})
        self._rules = Rules()
        self._equations: list[tuple[Index, str]] = []
        self._facts: list[tuple[Index, str]] = []
        self._exact: set[Atom] = set()
        self._guards: dict[tuple[Index, str, Index], Assumed] = {}
        self._cache: dict[Index, Index] = {}

    # -- symbols -------------------------------------------------------------------------------------------------

    def declare(self, symbol: str, where: str = "") -> Index:
        """A symbol of the model's inputs, with the user's range if there is one; the same name is the same symbol."""
        if symbol not in self._rules.order:
            self._rules.declare(symbol)
            if symbol in self._asked:
                self._restrict(symbol, *self._asked[symbol], where)
        return self.canonical(Index.of(symbol))

    def fresh(self, hint: str) -> Index:
        """An invented symbol, for a size that only the data decides."""
        base, n = hint, 0
        while base in self._rules.order:
            n += 1
            base = f"{hint}_{n}"
        self._rules.declare(base, invented=True)
        return Index.of(base)

    def invented(self) -> frozenset[str]:
        """The symbols made by ``fresh``."""
        return frozenset(self._rules.invented)

    def check_dims(self) -> None:
        """Refuses ranges for symbols that the model does not have."""
        unknown = sorted(self._asked.keys() - self._rules.order.keys())
        if unknown:
            known = ", ".join(s for s in self._rules.order if s not in self._rules.invented) or "none"
            raise ShapeError(
                f"dims names {', '.join(unknown)}, which the model does not have",
                dim=unknown[0], remedy=f"the dynamic dims of this model are: {known}",
            )  # fmt: skip

    def _restrict(self, symbol: str, low: int, high: int | None, where: str) -> None:
        if low < 0 or (high is not None and high < low):
            raise ShapeError(f"the range ({low}, {high}) holds no size", dim=symbol, remedy="give 0 <= low <= high")
        why = f"dim {symbol} of {where}: the program was compiled for {low} <= {symbol}" + (
            "" if high is None else f" <= {high}"
        )
        s = Index.of(symbol)
        if low == high:
            self._assume(s, "==", Index.of(low), why)
            self._learn(s - low, why)
            return
        self.ranges[symbol] = (low, high)
        if low:
            self._assume(Index.of(low), "<=", s, why)
        if high is not None:
            self._assume(s, "<=", Index.of(high), why)
        self._changed()

    # -- asking --------------------------------------------------------------------------------------------------

    def canonical(self, dim: IndexLike) -> Index:
        """The preferred form of a dim under all facts known now."""
        p = Index.of(dim)
        if p in self._cache:
            return self._cache[p]
        start = p
        for _ in range(64):
            q = self.simplify(self._rules.apply(p))
            if q == p:
                break
            p = q
        self._cache[start] = p
        return p

    def simplify(self, p: Index, ranges: Ranges | None = None) -> Index:
        """Decides min, max and floor divisions from all facts and the ranges of iterators (``0 <= v < extent``).

        Iterators only run when their extents are positive, which is used; nothing else is assumed to be positive.
        """
        if not any(isinstance(a, Atom) for a in p.atoms()):
            return p

        def atom(a: Atom) -> Index:
            args = tuple(self.simplify(x, ranges) for x in a.args)
            if a.kind == "fetch":
                return Index({(Atom("fetch", args, a.name),): 1})
            if a.kind == "floordiv":
                return self._quotient(args[0], args[1], ranges)
            return self._extreme(a.kind, args, ranges)

        return self._divide_exact(p.map_atoms(atom))

    def _quotient(self, x: Index, n: Index, ranges: Ranges | None) -> Index:
        q = floordiv(x, n)
        for a in [a for a in q.atoms() if isinstance(a, Atom) and a.kind == "floordiv" and a.args[1] == n]:
            r = a.args[0]
            if self.nonnegative(r, ranges) and self.nonnegative(n - 1 - r, ranges):
                q = q - Index({(a,): 1})
        return q

    def _extreme(self, kind: str, args: tuple[Index, ...], ranges: Ranges | None) -> Index:
        keep = list(args)
        for a in args:
            others = [b for b in keep if b != a]
            if others and any(self.nonnegative(a - b if kind == "min" else b - a, ranges) for b in others):
                keep = others
        return (minimum if kind == "min" else maximum)(*keep)

    def _divide_exact(self, p: Index) -> Index:
        """``n * (x // n)`` is ``x`` where x is known to be a multiple of n."""
        for a in sorted((a for a in p.atoms() if isinstance(a, Atom) and a in self._exact), key=str):
            x, n = a.args
            co = Index({_without(m, a): v for m, v in p.terms.items() if m.count(a) == 1})
            q = floordiv(co, n)
            if q * n == co:
                p = Index({m: v for m, v in p.terms.items() if m.count(a) != 1}) + q * x
        return p

    def nonnegative(self, p: IndexLike, ranges: Ranges | None = None) -> bool:
        """True when ``p >= 0`` is proven from ranges and learned inequalities."""
        facts = [f for f, _ in self._facts]
        return prove.nonnegative(Index.of(p), prove.Known(self.ranges, tuple(facts), ranges or {}))

    def equal(self, a: IndexLike, b: IndexLike) -> bool | None:
        """True or False when proven, None when undecided."""
        d = self.canonical(Index.of(a) - Index.of(b))
        c = d.constant
        if c is not None:
            return c == 0
        if self.nonnegative(d - 1) or self.nonnegative(-d - 1):
            return False
        g = content(d)
        offset = d.terms.get((), 0)
        if offset % content(d - offset):
            return False
        known = {self.canonical(e) for e, _ in self._equations}
        reduced = Index({m: v // g for m, v in d.terms.items()})
        return True if reduced in known or -reduced in known else None

    def is_multiple(self, a: IndexLike, n: IndexLike) -> bool:
        """True when ``a`` is proven to be a multiple of ``n``."""
        a, n = self.canonical(a), self.canonical(n)
        return self.canonical(floordiv(a, n) * n - a) == 0

    # -- learning ------------------------------------------------------------------------------------------------

    def unify(self, a: IndexLike, b: IndexLike, why: str) -> Index:
        """Learns ``a == b``, with a guard when it was not known; returns the canonical dim.

        ``why`` names node, tensors and axes; it becomes the guard's message and part of later errors.
        """
        ca, cb = self.canonical(a), self.canonical(b)
        known = self.equal(ca, cb)
        if known is None:
            bounds = _extreme_choice(ca - cb)
            division = _exact_division(ca - cb)
            if division:
                self.assume_multiple(*division, why)
            elif bounds:
                for low, high in bounds:
                    self.at_most(low, high, why)
            else:
                left, right = sorted((ca, cb), key=self._rules.preference, reverse=True)
                self._assume(left, "==", right, why)
                self._learn(ca - cb, why)
        elif not known:
            raise ShapeError(f"{ca} and {cb} can never be equal{self._chain((a, b))}", dim=f"{a} and {b}", rule=why)
        return min(self.canonical(ca), self.canonical(cb), key=self._rules.preference)

    def at_most(self, a: IndexLike, b: IndexLike, why: str) -> None:
        """Learns ``a <= b``, with a guard when it was not known."""
        a, b = self.canonical(a), self.canonical(b)
        if self.nonnegative(b - a):
            return
        if self.nonnegative(a - b - 1):
            raise ShapeError(f"{a} can never be at most {b}{self._chain((a, b))}", dim=str(a), rule=why)
        self._assume(a, "<=", b, why)
        if a.is_symbol and b.constant is not None:
            low, high = self.ranges.get(str(a), (0, None))
            self.ranges[str(a)] = (low, int(b) if high is None else min(high, int(b)))
        elif b.is_symbol and a.constant is not None:
            low, high = self.ranges.get(str(b), (0, None))
            self.ranges[str(b)] = (max(low, int(a)), high)
        else:
            self._facts.append((b - a, why))
        self._changed()

    def assume_multiple(self, a: IndexLike, n: IndexLike, why: str) -> None:
        """Learns that ``a`` is a multiple of ``n``, with a guard when it was not known."""
        a, n = self.canonical(a), self.canonical(n)
        if self.is_multiple(a, n):
            return
        if a.constant is not None and n.constant is not None:
            raise ShapeError(f"{a} is not a multiple of {n}{self._chain((a, n))}", dim=str(a), rule=why)
        self._assume(a, "%==", n, why)
        loose = [x for x in floordiv(a, n).atoms() if isinstance(x, Atom) and x.kind == "floordiv" and x.args[1] == n]
        self._exact.update(loose)
        self._changed()

    def broadcast(self, a: IndexLike, b: IndexLike, why: str, assume: bool = True) -> Index:
        """The broadcast of two dims by numpy's rule, never guessed without a guard and a note.

        With ``assume`` False an undecided pair of symbols raises Undecided, so that facts may still arrive.
        """
        a, b = self.canonical(a), self.canonical(b)
        if a == 1 or b == 1:
            return b if a == 1 else a
        if self.equal(a, b):
            return self.unify(a, b, why)
        decided = self.nonnegative(a - 2) or self.nonnegative(b - 2) or self.equal(a, b) is False
        if not decided and not assume:
            raise Undecided(f"whether {a} and {b} are equal or one of them is 1 is not known", dim=str(a), rule=why)
        out = self.unify(a, b, why)
        self.notes.append(f"{why}: {a} and {b} are taken to be equal (they could also be 1 and broadcast)")
        return out

    def guards(self) -> tuple[Assumed, ...]:
        """Everything assumed, in the order it was learned, less divisibilities that later equalities made exact."""
        return tuple(g for g in self._guards.values() if g.relation != "%==" or not self._exact_now(g.left, g.right))

    def _exact_now(self, a: Index, n: Index) -> bool:
        a, n = self.canonical(a), self.canonical(n)
        return floordiv(a, n) * n == a and not any(isinstance(x, Atom) for x in floordiv(a, n).atoms())

    # -- inside --------------------------------------------------------------------------------------------------

    def _assume(self, left: Index, relation: str, right: Index, why: str) -> None:
        self._guards.setdefault((left, relation, right), Assumed(left, relation, right, why))

    def _changed(self) -> None:
        self.version += 1
        self._cache.clear()

    def _learn(self, d: Index, why: str) -> None:
        symbol = self._rules.add(d, why)
        if symbol is None:
            self._equations.append((Index({m: v // content(d) for m, v in d.terms.items()}), why))
        self._changed()
        if symbol:
            low, high = self.ranges.pop(symbol, (0, None))
            value = self.canonical(symbol)
            try:
                self._narrow(value, low, high, why)
            except ShapeError as e:
                raise ShapeError(
                    f"{symbol} must be {value}, which the range ({low}, {high}) does not allow", dim=symbol, rule=why,
                    remedy=f"give a range of {symbol} that contains it",
                ) from e  # fmt: skip

    def _narrow(self, value: Index, low: int, high: int | None, why: str) -> None:
        """The range of a symbol that was replaced holds for its replacement (its guards exist already)."""
        if value.is_symbol:
            old_low, old_high = self.ranges.get(str(value), (0, None))
            highs = [h for h in (high, old_high) if h is not None]
            low = max(low, old_low)
            if highs and min(highs) < low:
                raise ShapeError("no size is left")
            self.ranges[str(value)] = (low, min(highs) if highs else None)
        else:
            for p in (value - low, *([high - value] if high is not None else [])):
                if self.nonnegative(-p - 1):
                    raise ShapeError("no size is left")
                if not self.nonnegative(p):
                    self._facts.append((p, why))
        self._changed()

    def _chain(self, dims: Iterable[IndexLike]) -> str:
        whys = self._rules.reasons(s for d in dims for s in Index.of(d).symbols())
        return "".join(f"\n  because: {w}" for w in whys)


def _without(m: tuple[str | Atom, ...], a: Atom) -> tuple[str | Atom, ...]:
    i = m.index(a)
    return m[:i] + m[i + 1 :]


def _extreme_choice(d: Index) -> list[tuple[Index, Index]]:
    """``d == 0`` where d becomes 0 when a min or max takes one of its arguments: the inequalities that say so."""
    for m, v in sorted(d.terms.items(), key=str):
        a = m[0] if len(m) == 1 else None
        if abs(v) == 1 and isinstance(a, Atom) and a.kind in ("min", "max"):
            for x in a.args:
                if (d - Index({m: v}) + x * v) == 0:
                    others = [y for y in a.args if y != x]
                    return [(x, y) if a.kind == "min" else (y, x) for y in others]
    return []



def _exact_division(d: Index) -> tuple[Index, Index] | None:
    """``(x, n)`` when ``d == 0`` says no more than that x is a multiple of n: d is ``+-(x - n * (x // n))``."""
    for a in sorted((a for a in d.atoms() if isinstance(a, Atom) and a.kind == "floordiv"), key=str):
        x, n = a.args
        rest = x - n * Index({(a,): 1})
        if rest in (d, -d):
            return x, n
    return None
