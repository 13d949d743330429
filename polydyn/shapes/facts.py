"""DimFacts: the known facts about the sizes of a model, and the queries that they answer.

A fact learned late holds everywhere, because dims are read through ``canonical``. Equalities are oriented rewriting
rules over the monomials of the polynomial normal form. For single symbols this is a union-find whose preferred
representatives are constants, then symbols of earlier inputs, then expressions. For products it is the dim-collapse
equality of BladeDISC 3. Ranges, divisibility and learned inequalities decide min, max and floor divisions.
"""

from __future__ import annotations

from collections.abc import Collection

from polydyn.debug import verifying
from polydyn.errors import ShapeError
from polydyn.schedules.index import Atom, Index, IndexLike, floordiv, maximum, minimum
from polydyn.schedules.ranges import Ranges
from polydyn.shapes import prove
from polydyn.shapes.multiples import Multiples
from polydyn.shapes.residues import Condition
from polydyn.shapes.rules import Rules, content
from polydyn.shapes.sizes import Dims, Sizes

MAX_REWRITINGS = 64
"""Maximum passes of all rules over an expression. Rules that end need a few."""


class DimFacts:
    """Facts about dims. Queries do not change them. Sizes are >= 0 unless a range says more."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[int, int | None]] = {}
        self._rules = Rules()
        self._multiples = Multiples()
        self._equations: list[tuple[Index, str]] = []
        self._facts: list[tuple[Index, str]] = []
        self._exact: set[Atom] = set()
        self._cache: dict[Index, Index] = {}
        self._answers: dict[tuple[Index, tuple[tuple[str, Index], ...]], bool] = {}
        self._proofs: dict[int, prove.Facts] = {}

    def level(self, *dims: IndexLike) -> int:
        """Return the first part of the program in which dims are known: 0 if they follow from the inputs' sizes."""
        return self._rules.level(*map(Index.of, dims))

    def sizes_of(self, symbols: Collection[str]) -> Dims:
        """Return the range and the divisor of each symbol that has one."""
        sizes: dict[str, Sizes] = {}
        for s in sorted(symbols):
            (low, high), (step, first) = self.ranges.get(s, (0, None)), self._multiples.lattices.get(s, (1, 0))
            multiple = 1 if first else step
            if low or high is not None or multiple > 1:
                sizes[s] = Sizes(low, high, multiple)
        return sizes

    def invented(self) -> frozenset[str]:
        """Return the symbols made by ``fresh_symbol``."""
        return frozenset(self._rules.invented)

    def declared(self) -> frozenset[str]:
        """Return the symbols that are sizes of inputs."""
        return frozenset(self._rules.order) - self._rules.invented

    def canonical(self, dim: IndexLike) -> Index:
        """Return the preferred form of a dim under all facts so far."""
        p = Index.of(dim)
        if p in self._cache:
            return self._cache[p]
        start = p
        for _ in range(MAX_REWRITINGS):
            q = self.simplify(self._rules.apply(p))
            if q == p:
                break
            p = q
        else:
            if verifying():
                raise ShapeError(f"the rules for sizes rewrite {start} without end", dim=str(start), rule="rules end")
            p = start  # a bug, but this form is right
        self._cache[start] = p
        return p

    def simplify(self, p: Index, ranges: Ranges | None = None) -> Index:
        """Decide min, max and floor divisions from all facts and the ranges of iterators (``0 <= v < extent``).

        Iterators run only if their extents are positive, and this is used. Nothing else is assumed to be positive.
        """
        if not any(isinstance(a, Atom) for a in p.atoms()):
            return p
        return self._multiples.outside(self._simplify(self._multiples.inside(p), ranges or {}, {}))

    def _simplify(self, p: Index, ranges: Ranges, done: dict[Atom, Index]) -> Index:
        """Simplify recursively. ``done`` caches the results of atoms, which many expressions share."""

        def atom(a: Atom) -> Index:
            if a not in done:
                args = tuple(self._simplify(x, ranges, done) for x in a.args)
                if a.kind == "fetch":
                    done[a] = Index({(Atom("fetch", args, a.name),): 1})
                elif a.kind == "floordiv":
                    done[a] = self._quotient(args[0], args[1], ranges)
                else:
                    done[a] = self._extreme(a.kind, args, ranges)
            return done[a]

        return self._divide_exact(p.map_atoms(atom))

    def _quotient(self, x: Index, n: Index, ranges: Ranges) -> Index:
        q = floordiv(x, n)
        for a in [a for a in q.atoms() if isinstance(a, Atom) and a.kind == "floordiv" and a.args[1] == n]:
            r = a.args[0]
            if self.nonnegative(r, ranges) and self.nonnegative(n - 1 - r, ranges):
                q = q - Index({(a,): 1})
        return self._multiples.reduced(q)

    def _extreme(self, kind: str, args: tuple[Index, ...], ranges: Ranges) -> Index:
        keep = list(args)
        for a in args:
            others = [b for b in keep if b != a]
            if others and any(self.nonnegative(a - b if kind == "min" else b - a, ranges) for b in others):
                keep = others
        return (minimum if kind == "min" else maximum)(*keep)

    def _divide_exact(self, p: Index) -> Index:
        """Replace ``n * (x // n)`` by ``x`` if x is known to be a multiple of n."""
        for a in sorted((a for a in p.atoms() if isinstance(a, Atom) and a in self._exact), key=str):
            x, n = a.args
            co = Index({_without(m, a): v for m, v in p.terms.items() if m.count(a) == 1})
            q = floordiv(co, n)
            if q * n == co:
                p = Index({m: v for m, v in p.terms.items() if m.count(a) != 1}) + q * x
        return p

    def nonnegative(self, p: IndexLike, ranges: Ranges | None = None) -> bool:
        """Return True if ``p >= 0`` is proven from ranges and learned inequalities. Results are cached until a new
        fact.
        """
        question = (Index.of(p), tuple((ranges or {}).items()))
        if question not in self._answers:
            self._answers[question] = self._nonnegative(*question)
        return self._answers[question]

    def _nonnegative(self, p: Index, iterated: tuple[tuple[str, Index], ...]) -> bool:
        inside = self._multiples.inside
        level = self.level(p, *(e for _, e in iterated))
        return prove.nonnegative(inside(p), self._facts_of_level(level), {v: inside(e) for v, e in iterated})

    def _facts_of_level(self, level: int) -> prove.Facts:
        """Return the facts for proofs about sizes of a level. Facts of later levels do not hold earlier."""
        if level not in self._proofs:
            facts = tuple(self._multiples.inside(f) for f, _ in self._facts if self._rules.level(f) <= level)
            self._proofs[level] = prove.Facts(self._multiples.ranges(self.ranges), facts)
        return self._proofs[level]

    def _forget(self, fact: Index | None = None) -> None:
        """Drop cached results that a new fact may improve: all, or those that ``fact >= 0`` helps. Proven results
        stay.
        """

        def stays(*of: Index) -> bool:
            if fact is None:
                return False
            return self._rules.level(fact) > self._rules.level(*of) or not prove.helps(fact, of, self.ranges)

        self._proofs.clear()
        self._cache = {p: q for p, q in self._cache.items() if stays(q)}
        self._answers = {
            (p, ranges): known for (p, ranges), known in self._answers.items()
            if known or stays(p, *(e for _, e in ranges))
        }  # fmt: skip

    def equal(self, a: IndexLike, b: IndexLike) -> bool | None:
        """Return True or False if proven, None if undecided."""
        d = self.canonical(Index.of(a) - Index.of(b))
        c = d.constant
        if c is not None:
            return c == 0
        if self.nonnegative(d - 1) or self.nonnegative(-d - 1):
            return False
        g = content(d)
        inner = self._multiples.inside(d)
        offset = inner.terms.get((), 0)
        if offset % content(inner - offset):
            return False
        settled = self._multiples.settle(Condition(inner, "=="))
        if settled is not None:
            return settled
        level = self.level(a, b)
        equations = {self.canonical(e) for e, _ in self._equations if self._rules.level(e) <= level}
        reduced = Index({m: v // g for m, v in d.terms.items()})
        return True if reduced in equations or -reduced in equations else None

    def is_multiple(self, a: IndexLike, n: IndexLike) -> bool:
        """Return True if ``a`` is proven to be a multiple of ``n``."""
        a, n = self.canonical(a), self.canonical(n)
        return self.canonical(floordiv(a, n) * n - a) == 0


def _without(m: tuple[str | Atom, ...], a: Atom) -> tuple[str | Atom, ...]:
    i = m.index(a)
    return m[:i] + m[i + 1 :]
