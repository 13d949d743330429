"""ShapeContext: a growing set of facts about the sizes of a model, each with the guard that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from polydyn.errors import ShapeError
from polydyn.schedules.index import Atom, Index, IndexLike, floordiv
from polydyn.schedules.names import internal_name
from polydyn.shapes.equations import exact_division, extreme_bounds, extreme_choice, primitive
from polydyn.shapes.facts import DimFacts
from polydyn.shapes.multiples import Multiples
from polydyn.shapes.residues import Condition, Remainders, remainders
from polydyn.shapes.sentences import bare
from polydyn.shapes.sizes import Dims, Sizes, sizes_by_name


class Undecidable(ShapeError):
    """A comparison that no fact decides."""


class Undecided(Undecidable):
    """A comparison that later facts may decide. The propagator parks the node and tries again."""


@dataclass(frozen=True)
class Assumed:
    """A condition assumed of every call: ``left relation right``, relation ``==``, ``<=`` or ``%==`` (a multiple)."""

    left: Index
    relation: str
    right: Index
    message: str
    words: str = ""
    """Simpler form of the condition for users, if there is one: ``H is a multiple of 32``."""


Guarded: TypeAlias = "tuple[Index, str, Index]"
"""A guard without its reasons."""


@dataclass(frozen=True)
class Periodic:
    """A fact about remainders: ``value == 0``, ``value >= 0``, or a multiple of ``divisor``. ``key``: its guard."""

    value: Index
    relation: str
    divisor: Index
    reason: str
    key: Guarded | None = None


class ShapeContext(DimFacts):
    """Facts about dims, and the assumptions that they make about every call. Nothing is specialised without a guard."""

    def __init__(self, dims: Dims | None = None, general: bool = False) -> None:
        """``general``: two sizes that may be equal or 1 get a common size instead of being assumed equal."""
        super().__init__()
        self.notes: list[str] = []
        self.general = general
        self.guessed: list[tuple[Index, Index]] = []
        """Pairs of sizes, known before any kernel runs, that were assumed to be equal."""
        self.common: dict[tuple[Index, Index], tuple[Index, str]] = {}
        """Maps pairs of such sizes to their common size and the reason for it."""
        self.version = 0
        """Number that grows with every new fact."""
        self._requested = {internal_name(n): s for n, s in sizes_by_name(dims).items()}
        self._where: dict[str, str] = {}
        self._divisible: list[Periodic] = []
        self._asked: dict[str, list[tuple[Periodic, Remainders]]] = {}
        self._guards: dict[tuple[Index, str, Index], Assumed] = {}
        self._promised: list[Assumed] = []

    # -- symbols -------------------------------------------------------------------------------------------------

    def declare(self, symbol: str, where: str = "") -> Index:
        """Declare a symbol of the model's inputs, with the user's range if there is one. Equal names are the same
        symbol.
        """
        if symbol not in self._rules.order:
            self._rules.declare(symbol)
            self._where[symbol] = where
            if symbol in self._requested:
                self._restrict(symbol, self._requested[symbol], where)
        return self.canonical(Index.of(symbol))

    def fresh_symbol(self, hint: str, level: int = 1) -> Index:
        """Invent a symbol for a size that depends on data. ``level``: the first part of the program that has it."""
        base, n = internal_name(hint), 0
        while base in self._rules.order:
            n += 1
            base = internal_name(f"{hint}_{n}")
        self._rules.declare(base, invented=True)
        self._rules.levels[base] = level
        self._where[base] = "a size that data decide"
        return Index.of(base)

    def assume_at_most(self, a: IndexLike, b: IndexLike, reason: str) -> None:
        """Learn ``a <= b``, which holds by construction and needs no guard."""
        p, q = self.canonical(a), self.canonical(b)
        if not self.nonnegative(q - p):
            self._promised.append(Assumed(p, "<=", q, reason))
            self._learn_at_most(p, q, reason)

    def check_dims(self) -> None:
        """Raise ShapeError for ranges of symbols that the model does not have."""
        missing = sorted(self._requested.keys() - self._rules.order.keys())
        if missing:
            symbols = ", ".join(s for s in self._rules.order if s not in self._rules.invented) or "none"
            raise ShapeError(
                f"dims names {', '.join(missing)}, which the model does not have",
                dim=missing[0], remedy=f"the dynamic dims of this model are: {symbols}",
            )  # fmt: skip

    def _restrict(self, symbol: str, sizes: Sizes, where: str) -> None:
        """Restrict a dim to the sizes that the user states. Every call checks them."""
        place, s = f"dim {symbol} of {where}: the program was compiled for", Index.of(symbol)
        reason = f"{place} {sizes.low} <= {symbol}" + ("" if sizes.high is None else f" <= {sizes.high}")
        low, high = sizes.bounds
        if low == high:
            self._assume(s, "==", Index.of(low), reason)
            self._learn(s - low, reason)
            return
        self.ranges[symbol] = (low, high)
        if sizes.low:
            self._assume(Index.of(sizes.low), "<=", s, reason)
        if sizes.high is not None:
            self._assume(s, "<=", Index.of(sizes.high), reason)
        if sizes.multiple > 1:
            self._assume(s, "%==", Index.of(sizes.multiple), f"{place} multiples of {sizes.multiple}")
            self._divisible.append(Periodic(s, "%==", Index.of(sizes.multiple), reason))
        self._changed()

    # -- learning ------------------------------------------------------------------------------------------------

    def unify(self, a: IndexLike, b: IndexLike, reason: str) -> Index:
        """Learn ``a == b``, with a guard unless it is already known. Return the canonical dim.

        ``reason`` names node, tensors and axes. It becomes the guard's message and part of later errors.
        """
        ca, cb = self.canonical(a), self.canonical(b)
        same = self.equal(ca, cb)
        if same is None:
            bounds = extreme_choice(ca - cb)
            division = self._exact_division(ca - cb)
            if division:
                self.assume_multiple(*division, reason)
            elif bounds:
                for low, high in bounds:
                    self.at_most(low, high, reason)
            elif not self._repeats(ca, "==", cb, reason):
                left, right = sorted((ca, cb), key=self._rules.preference, reverse=True)
                self._assume(left, "==", right, reason)
                self._learn(ca - cb, reason)
        elif same is False:
            raise ShapeError(f"{ca} and {cb} can never be equal{self._chain((a, b))}", dim=f"{a} and {b}", rule=reason)
        return min(self.canonical(ca), self.canonical(cb), key=self._rules.preference)

    def at_most(self, a: IndexLike, b: IndexLike, reason: str) -> None:
        """Learn ``a <= b``, with a guard unless it is already known."""
        a, b = self.canonical(a), self.canonical(b)
        if self.nonnegative(b - a):
            return
        if self.nonnegative(a - b - 1):
            raise ShapeError(f"{a} can never be at most {b}{self._chain((a, b))}", dim=str(a), rule=reason)
        self._repeats(a, "<=", b, reason)
        self._assume(a, "<=", b, reason)
        self._learn_at_most(a, b, reason)

    def _learn_at_most(self, a: Index, b: Index, reason: str) -> None:
        """Add ``a <= b`` to the facts."""
        if a.is_symbol and b.constant is not None:
            low, high = self.ranges.get(str(a), (0, None))
            self.ranges[str(a)] = (low, int(b) if high is None else min(high, int(b)))
            self._changed()
        elif b.is_symbol and a.constant is not None:
            low, high = self.ranges.get(str(b), (0, None))
            self.ranges[str(b)] = (max(low, int(a)), high)
            self._changed()
        else:
            self._facts.append((b - a, reason))
            self._changed(b - a)

    def decide(self, condition: IndexLike, truth: bool, reason: str) -> None:
        """Learn the value of a condition on sizes, which is 1 or 0, with a guard unless it is already known."""
        zero = self.canonical(1 - Index.of(condition) if truth else condition)
        a = next(iter(zero.atoms()), None)
        if isinstance(a, Atom) and a.kind == "min" and zero == Index({(a,): 1}) and Index.of(1) in a.args:
            (zero, *_) = (x for x in a.args if x != 1)  # min(1, x) with x >= 0
            a = next(iter(zero.atoms()), None)
        if isinstance(a, Atom) and a.kind == "max" and zero == Index({(a,): 1}) and a.args[0] == -a.args[-1]:
            zero = a.args[0]  # absolute value of a difference
        more = Index({m: v for m, v in zero.terms.items() if v > 0})
        self.unify(more, more - zero, reason)

    def forbid(self, reason: str) -> None:
        """Add a guard that always fails, so that no call is allowed."""
        self._assume(Index.of(1), "<=", Index.of(0), reason)

    def assume_multiple(self, a: IndexLike, n: IndexLike, reason: str) -> None:
        """Learn that ``a`` is a multiple of ``n``, with a guard unless it is already known."""
        a, n = self.canonical(a), self.canonical(n)
        if self.is_multiple(a, n):
            return
        if a.constant is not None and n.constant is not None:
            raise ShapeError(f"{a} is not a multiple of {n}{self._chain((a, n))}", dim=str(a), rule=reason)
        self._assume(a, "%==", n, reason)
        self._divisible.append(Periodic(a, "%==", n, reason, (a, "%==", n)))
        self._changed()

    def _repeats(self, a: Index, relation: str, b: Index, reason: str) -> bool:
        """Learn ``a relation b``, with its guard, if it is a condition on the remainders of one size."""
        c = Condition(b - a if relation == "<=" else a - b, ">=" if relation == "<=" else relation)
        if not self._multiples.asks(replace(c, value=self._multiples.inside(c.value))):
            return False
        self._assume(a, relation, b, reason)
        if relation == "==":
            self._equations.append((primitive(c.value), reason))
        self._divisible.append(Periodic(c.value, c.relation, Index.of(0), reason, (a, relation, b)))
        self._changed()
        return True

    def broadcast(self, a: IndexLike, b: IndexLike, reason: str, assume: bool = True) -> Index:
        """Return the broadcast of two dims by numpy's rule. A guess always has a guard and a note.

        With ``assume`` False an undecided pair of symbols raises Undecided, because later facts may decide it.
        """
        a, b = self.canonical(a), self.canonical(b)
        if a == 1 or b == 1:
            return b if a == 1 else a
        if a == 0 or b == 0:
            self.at_most(a + b, 1, reason)  # whatever the other size is, the result is empty
            return Index.of(0)
        same = self.equal(a, b)
        if same:
            return self.unify(a, b, reason)
        if same is False:
            return self._broadcast_different(a, b, reason)
        decided = self.nonnegative(a - 2) or self.nonnegative(b - 2)
        if not decided and not assume:
            raise Undecided(f"whether {a} and {b} are equal or one of them is 1 is not known", dim=str(a), rule=reason)
        short = [x for x in (a, b) if self.nonnegative(1 - x)]
        if len(short) == 1:  # min(1, n), the first of something, next to a size that may be larger: n is not 0
            self.unify(short[0], 1, reason)
            self.notes.append(f"{reason}: {short[0]} is taken to be 1")
            return self.canonical(b if short[0] is a else a)
        if all(x.is_symbol or x.constant is not None for x in (a, b)) and not self.level(a, b):
            if self.general:
                return self._common(a, b, reason)
            self.guessed.append((a, b))
            out = self.unify(a, b, reason)
        else:  # a call in which one of them is 1 is refused
            out = self.unify(a, b, f"{reason}, taken to be equal; {self._remedy_of_guess(a, b)}")
        self.notes.append(f"{reason}: {a} and {b} are taken to be equal (they could also be 1 and broadcast)")
        return out

    def _remedy_of_guess(self, a: Index, b: Index) -> str:
        """Return the remedy for sizes that are taken to be equal, but broadcast."""
        symbols = [str(x) for x in (a, b) if x.is_symbol and not self.level(x, x)]
        by_range = f"compile with dims={{{symbols[0]!r}: (1, 1)}}, or " if symbols else ""
        return f"if one of them is always 1, {by_range}make it a constant 1 in the model, as by a Reshape"

    def _common(self, a: Index, b: Index, reason: str) -> Index:
        """Return the size of the broadcast of two sizes, each equal to it or 1. It is computed before any kernel
        runs.
        """
        if (a, b) not in self.common:
            self.common[a, b] = self.fresh_symbol("common", 0), reason
            for x in (a, b):
                if x.constant is not None:
                    self.unify(self.common[a, b][0], x, reason)
        return self.canonical(self.common[a, b][0])

    def _broadcast_different(self, a: Index, b: Index, reason: str) -> Index:
        """Handle two dims that are never equal: one of them must be 1."""
        large_a, large_b = self.nonnegative(a - 2), self.nonnegative(b - 2)
        if large_a and large_b:
            return self.unify(a, b, reason)  # raises the error
        if not large_a and not large_b:
            raise Undecidable(
                self.undecided_error(f"{a} and {b} are never equal, and which of them is 1 is not known", (a, b)),
                dim=f"{a} and {b}", rule=reason, remedy="give ranges of the dims that decide it",
            )  # fmt: skip
        self.unify(b if large_a else a, 1, reason)
        return a if large_a else b

    def guards(self) -> tuple[Assumed, ...]:
        """Return all assumptions in the order they were learned, except multiples that later equalities made exact.

        Multiples of constants precede bounds, because bounds use the sizes after these multiples. All assumptions about
        the remainders of one size become one guard, with the reason of the strictest condition.
        """
        every = self._guards.items()
        remaining = {k: g for k, g in every if g.relation != "%==" or not self._exact_now(g.left, g.right)}
        for symbol, facts in self._asked.items():
            remaining |= self._one_guard(symbol, remaining, facts)
        ordered = [g for g in remaining.values() if g.relation]
        first = next((k for k, g in enumerate(ordered) if g.relation == "<="), len(ordered))
        order = sorted(ordered[first:], key=lambda g: g.relation != "%==" or g.right.constant is None)
        return (*ordered[:first], *order)

    def promises(self) -> tuple[Assumed, ...]:
        """Return what ``assume_at_most`` learned, over today's sizes."""
        return tuple(replace(g, left=self.canonical(g.left), right=self.canonical(g.right)) for g in self._promised)

    def multiple_of(self, symbol: str) -> int | None:
        """Return the smallest number whose multiples satisfy all assumptions about a symbol's remainders, or None."""
        return self._multiples.allowed(symbol).multiple

    def pinned(self) -> tuple[str, ...]:
        """Return notes for users about input dims whose guards allow only the size 1, or only one batch size."""
        notes = []
        for s, where in self._where.items():
            value, stated = self.canonical(s), self._requested.get(s, Sizes())
            high = self.ranges.get(s, (0, None))[1] if value.constant is None else value.constant
            batch = bool(value.constant) and where.endswith(" axis 0")
            if s in self._rules.invented or stated.high == high or not (high == 1 or batch):
                continue
            whys = [g.message for g in self._guards.values() if s in g.left.symbols() | g.right.symbols()]
            size = str(high) if value.constant is not None else f"at most {high}"
            reason = whys[-1] if whys else "the shapes of the model"
            notes.append(f"every call needs {s} ({where}) to be {size}: {reason}")
        return tuple(notes)

    def _one_guard(
        self, symbol: str, remaining: Mapping[Guarded, Assumed], facts: Sequence[tuple[Periodic, Remainders]]
    ) -> dict[Guarded, Assumed]:
        """Merge the guards on the remainders of a symbol. Guards that are dropped have an empty relation."""
        allowed = self._multiples.allowed(symbol)
        exact, words = allowed.exact(Index.of(symbol)), allowed.words(symbol)
        guarded = [(f.key, r) for f, r in facts if f.key and f.key in remaining]
        stated = [r for f, r in facts if f.key is None]
        if not exact:
            return {k: replace(remaining[k], words=words) for k, _ in guarded}
        out = {k: replace(remaining[k], relation="") for k, _ in guarded}
        if guarded and all(r != allowed for r in stated):
            strictest = max(guarded, key=lambda x: x[1].period / len(x[1].allowed))[0]
            left, n = exact
            if len(guarded) == 1 and strictest[1] == "%==":
                left, n = strictest[0], int(strictest[2])  # in the model's own form
            words_shown = words if words != f"{bare(left)} is a multiple of {n}" else ""
            out[strictest] = Assumed(left, "%==", Index.of(n), remaining[strictest].message, words_shown)
        return out

    def _exact_now(self, a: Index, n: Index) -> bool:
        """Check whether equalities alone make ``a`` a multiple of ``n``. Facts about remainders are guards
        themselves.
        """
        a, n = self._rules.rewritten(a), self._rules.rewritten(n)
        return floordiv(a, n) * n == a and not any(isinstance(x, Atom) for x in floordiv(a, n).atoms())

    # -- inside --------------------------------------------------------------------------------------------------

    def _assume(self, left: Index, relation: str, right: Index, reason: str) -> None:
        self._guards.setdefault((left, relation, right), Assumed(left, relation, right, reason))

    def _changed(self, inequality: Index | None = None) -> None:
        """Update the caches after a new fact. ``inequality``: the only new fact is that this is not negative."""
        self.version += 1
        self._forget(None if self._divisible else inequality)
        if self._divisible:
            self._divide_again()
            self._forget()
            self._solve_again()

    def _exact_division(self, d: Index) -> tuple[Index, Index] | None:
        """Return what ``exact_division`` does, or what it does by the facts about remainders."""
        inside = exact_division(self._multiples.inside(d))
        return exact_division(d) or (inside and (self._multiples.outside(inside[0]), inside[1]))

    def _divide_again(self) -> None:
        """Express facts about remainders over the current dims."""
        self._multiples, self._exact, self._asked = Multiples(), set(), {}
        others: list[tuple[Index, Index]] = []
        for fact in self._divisible:
            a, n = self.canonical(fact.value), self.canonical(fact.divisor)
            if fact.relation == "%==" and self.level(a, n) < self.level(fact.value, fact.divisor):
                self._assume(a, "%==", n, fact.reason)  # a late fact about early sizes is checked early
            c = Condition(a, fact.relation, n.constant or 0)
            if a.constant is not None and n.constant is not None and not c.holds(a.constant):
                raise ShapeError(self._unmet(fact, a, n), dim=str(fact.value), rule=fact.reason)
            if n.constant is not None and self._narrow_remainders(fact, c):
                continue
            division = (a, n) if fact.relation == "%==" else self._exact_division(a) if fact.relation == "==" else None
            if a.constant is None and division:
                others.append(division)
        for a, n in others:
            x, m = self._multiples.inside(a), self._multiples.inside(n)
            loose = floordiv(x, m).atoms()
            self._exact |= {y for y in loose if isinstance(y, Atom) and y.kind == "floordiv" and y.args[1] == m}

    def _solve_again(self) -> None:
        """Solve rules again that facts about remainders rewrite.

        If ``a // 4`` is ``2 * (a // 8)``, the rule ``a // 8 -> a // 4 - 1`` is an equation for ``a // 8``, whose
        replacement contains itself.
        """
        for lead, rest, reason in self._rules.of_atoms():
            d = Index({lead: 1}) - rest
            again = self.simplify(d)
            if again == d:
                continue
            self._rules.drop(lead)
            if again.constant is None:
                return self._learn(again, reason)  # which calls this again
            if again.constant:
                raise ShapeError(f"{Index({lead: 1})} cannot be {rest}{self._chain((d,))}", rule=reason)
            self._forget()
        return None

    def _narrow_remainders(self, fact: Periodic, c: Condition) -> bool:
        """Learn a condition if it is one on remainders of one size."""
        condition = remainders(replace(c, value=self._rules.rewritten(fact.value))) or remainders(c)
        try:
            narrowed = self._multiples.narrow(replace(c, value=self._multiples.inside(c.value)))
        except ValueError:
            raise ShapeError(self._unmet(fact, c.value, fact.divisor), dim=str(fact.value), rule=fact.reason) from None
        if condition and (narrowed or c.value.constant is not None):
            self._asked.setdefault(condition[0], []).append((fact, condition[1]))
        return narrowed

    def _unmet(self, fact: Periodic, a: Index, n: Index) -> str:
        relation = {"==": "0", ">=": "at least 0", "%==": f"a multiple of {n}"}[fact.relation]
        is_now = f"{fact.value} must be {a}, which is not" if a.constant is not None else f"{fact.value} is never"
        return f"{is_now} {relation}{self._chain((fact.value,))}"

    def _learn(self, d: Index, reason: str) -> None:
        extremes = extreme_bounds(d)
        symbol = self._rules.add(d, reason)
        if symbol is None:
            self._equations.append((primitive(d), reason))
        self._changed()
        if symbol:
            low, high = self.ranges.pop(symbol, (0, None))
            value = self.canonical(symbol)
            try:
                if self.level(value) < self.level(symbol):
                    self._ask_early(value, low, high, reason)
                self._narrow(value, low, high, reason)
            except ShapeError as e:
                raise ShapeError(
                    f"{symbol} must be {value}, which the range ({low}, {high}) does not allow",
                    dim=symbol, rule=reason,
                    remedy=f"give a range of {symbol} that contains it",
                ) from e  # fmt: skip
        for less, more in extremes:
            p, q = self.canonical(less), self.canonical(more)
            if not self.nonnegative(q - p):
                if self.level(p, q) < self.level(d):
                    self._assume(p, "<=", q, reason)
                self._learn_at_most(p, q, reason)

    def _ask_early(self, value: Index, low: int, high: int | None, reason: str) -> None:
        """Guard the range of a late size that turned out to consist of early ones, before any kernel runs."""
        if not self.nonnegative(value - low):
            self._assume(Index.of(low), "<=", value, reason)
        if high is not None and not self.nonnegative(high - value):
            self._assume(value, "<=", Index.of(high), reason)

    def _narrow(self, value: Index, low: int, high: int | None, reason: str) -> None:
        """Apply the range of a symbol that was replaced to its replacement (its guards exist already)."""
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
                    self._facts.append((p, reason))
        self._changed()

    def _chain(self, dims: Iterable[IndexLike]) -> str:
        """Return all facts about the symbols of dims, one per line; the facts that replaced them come first."""
        symbols, whys = self._rules.related(s for d in dims for s in Index.of(d).symbols())
        whys += [g.message for g in self._guards.values() if g.left.symbols() | g.right.symbols() <= symbols]
        return "".join(f"\n  because: {w}" for w in dict.fromkeys(whys))

    def undecided_error(self, question: str, dims: Iterable[IndexLike]) -> str:
        """Return the message for an undecided question: the question, the origin of its symbols, the facts about
        them.
        """
        expressions = [Index.of(d) for d in dims]
        symbols = sorted({s for d in expressions for s in (*d.symbols(), *self.canonical(d).symbols())})
        origins = "".join(f"\n  {s} is {self._where[s]}" for s in symbols if s in self._where)
        return f"{question}{origins}{self._chain(expressions) or chr(10) + '  nothing else is known'}"
