"""Index: the one symbolic integer expression.

Dims of tensors, subscripts, addresses, loop bounds and launch arithmetic are all ``Index`` values: polynomials with
integer coefficients over atoms, in a normal form, so that equality is structural. Atoms are symbols (plain strings)
and ``Atom`` (floor division, min, max, an integer fetched from a tensor). There is no modulo atom:
``x % n`` is ``x - n * (x // n)``, so that ``n * (x // n) + x % n`` becomes ``x`` by cancellation.

All symbols stand for sizes or iterators and are >= 0. ``x // 0`` is 0 by definition (an empty tensor has no
elements to address, so the value is never used).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import TypeAlias, Union

IndexLike: TypeAlias = Union["Index", int, str]
Monomial: TypeAlias = "tuple[str | Atom, ...]"


@dataclass(frozen=True, eq=False)
class Atom:
    """A non-polynomial factor.

    ``kind`` is ``floordiv`` (args: x, n), ``min``, ``max`` (two or more args) or ``fetch`` (an integer read from
    tensor ``name`` at the logical subscripts ``args``).
    """

    kind: str
    args: tuple[Index, ...]
    name: str = ""

    def __str__(self) -> str:
        found: str | None = self.__dict__.get("_str")  # monomials are sorted by it
        if found is None:
            inner = (" // " if self.kind == "floordiv" else ", ").join(map(str, self.args))
            text = f"{self.name}[{inner}]" if self.kind == "fetch" else f"{self.kind}({inner})"
            found = self.__dict__["_str"] = text.removeprefix("floordiv")
        return found

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Atom) or hash(self) != hash(other):
            return False
        equal = (self.kind, self.name, self.args) == (other.kind, other.name, other.args)
        if equal:  # expressions share parts: what holds both compares them by identity from now on
            object.__setattr__(other, "args", self.args)
        return equal

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = self.__dict__["_hash"] = hash((self.kind, self.name, self.args))
        return found

    def __reduce__(self) -> tuple[type[Atom], tuple[object, ...]]:
        return Atom, (self.kind, self.args, self.name)  # hashes of strings differ between processes

    def normal(self) -> Index:
        """Return the Index of the atom in normal form, with divisions and extremes decided as far as possible."""
        if self.kind == "fetch":
            return Index({(self,): 1})
        return floordiv(*self.args) if self.kind == "floordiv" else _extreme(self.kind, self.args)


def _key(atom: str | Atom) -> tuple[int, str]:
    return (0, atom) if isinstance(atom, str) else (1, str(atom))


class Index:
    """A polynomial in normal form; immutable, hashable, with the arithmetic operators of ``int``.

    Planning a model makes millions of them: the slots with an underscore are set when they are first read, symbols and
    small numbers exist once, and an operation without effect returns its operand.
    """

    __slots__ = ("_fetches", "_hash", "_str", "_symbols", "terms")

    terms: dict[Monomial, int]
    _hash: int
    _str: str
    _symbols: frozenset[str]
    _fetches: frozenset[Atom]

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms = {m: c for m, c in terms.items() if c} if 0 in terms.values() else dict(terms)

    def __reduce__(self) -> tuple[type[Index], tuple[object, ...]]:
        return Index, (self.terms,)  # hashes of strings differ between processes

    @staticmethod
    def of(x: IndexLike) -> Index:
        """Return an Index from an int, a symbol's name or an Index."""
        if isinstance(x, Index):
            return x
        found = _INTERNED.get(x)
        if found is None:
            if isinstance(x, str):
                return _INTERNED.setdefault(x, Index({(x,): 1}))
            found = Index({(): int(x)})
            if abs(x) <= MAX_INTERNED:
                return _INTERNED.setdefault(int(x), found)
        return found

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value if it is a constant, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1:
            return self.terms.get(())
        return None

    def __int__(self) -> int:
        c = self.constant
        if c is None:
            raise TypeError(f"{self} is not a constant")
        return c

    @property
    def is_symbol(self) -> bool:
        """Whether it is exactly one symbol."""
        if len(self.terms) != 1:
            return False
        (m, c), *_ = self.terms.items()
        return c == 1 and len(m) == 1 and isinstance(m[0], str)

    def atoms(self) -> tuple[str | Atom, ...]:
        """Return the distinct factors of monomials (not those inside an Atom), in an order independent of hashes."""
        return tuple(dict.fromkeys(a for m in self.terms for a in m))

    def symbols(self) -> frozenset[str]:
        """Return all symbols, including those inside atoms."""
        try:
            return self._symbols
        except AttributeError:
            pass
        out: set[str] = set()
        for m in self.terms:
            for a in m:
                if isinstance(a, str):
                    out.add(a)
                else:
                    out.update(*(x.symbols() for x in a.args))
        self._symbols = frozenset(out)
        return self._symbols

    @property
    def is_polynomial(self) -> bool:
        """Whether all atoms are symbols."""
        return all(isinstance(a, str) for m in self.terms for a in m)

    def fetches(self) -> frozenset[Atom]:
        """Return all ``fetch`` atoms, nested ones included."""
        try:
            return self._fetches
        except AttributeError:
            pass
        out: set[Atom] = set()
        for m in self.terms:
            for a in m:
                if not isinstance(a, str):
                    out.update((a,) if a.kind == "fetch" else (), *(x.fetches() for x in a.args))
        self._fetches = frozenset(out)
        return self._fetches

    def split(self, symbol: str) -> tuple[Index, Index]:
        """Return ``(c, r)`` with ``self == c * symbol + r``; ``symbol`` may remain in ``r`` only inside an atom.

        A term of higher degree in ``symbol`` keeps the rest of the degree in ``c``.
        """
        co: dict[Monomial, int] = {}
        rest: dict[Monomial, int] = {}
        for m, v in self.terms.items():
            if symbol in m:
                i = m.index(symbol)
                co[m[:i] + m[i + 1 :]] = v
            else:
                rest[m] = v
        return Index(co), Index(rest)

    # -- arithmetic ----------------------------------------------------------------------------------------------

    def __add__(self, other: IndexLike) -> Index:
        o = other if isinstance(other, Index) else Index.of(other)
        if not self.terms:
            return o
        return _sum(self, o.terms, 1) if o.terms else self

    __radd__ = __add__

    def __neg__(self) -> Index:
        return _index({m: -v for m, v in self.terms.items()})

    def __sub__(self, other: IndexLike) -> Index:
        o = other if isinstance(other, Index) else Index.of(other)
        return _sum(self, o.terms, -1) if o.terms else self

    def __rsub__(self, other: IndexLike) -> Index:
        return Index.of(other) - self

    def __mul__(self, other: IndexLike) -> Index:
        o = other if isinstance(other, Index) else Index.of(other)
        x, c = self, o.constant
        if c is None:
            x, c = o, self.constant
        if c is not None:
            return x if c == 1 else _index({m: v * c for m, v in x.terms.items()}) if c else ZERO
        r: dict[Monomial, int] = {}
        for m, v in self.terms.items():
            for n, w in o.terms.items():
                k = tuple(sorted(m + n, key=_key)) if m and n else m + n
                r[k] = r.get(k, 0) + v * w
        return Index(r)

    __rmul__ = __mul__

    def __floordiv__(self, other: IndexLike) -> Index:
        return floordiv(self, Index.of(other))

    def __rfloordiv__(self, other: IndexLike) -> Index:
        return floordiv(Index.of(other), self)

    def __mod__(self, other: IndexLike) -> Index:
        o = Index.of(other)
        return self - o * floordiv(self, o)

    def ceildiv(self, other: IndexLike) -> Index:
        """Return the ceiling of the division by a positive size."""
        o = Index.of(other)
        return floordiv(self + o - 1, o)

    # -- rewriting and evaluation --------------------------------------------------------------------------------

    def subs(self, env: Mapping[str, IndexLike]) -> Index:
        """Substitute symbols simultaneously."""
        return self._subs(env, {})

    def _subs(self, env: Mapping[str, IndexLike], done: dict[Atom, Index]) -> Index:
        """``done`` caches the results for atoms: one may occur in many terms of a minimum or a quotient."""
        if self.symbols().isdisjoint(env):
            return self
        total: dict[Monomial, int] = {}
        for m, v in self.terms.items():
            if len(m) == 1 and isinstance(m[0], str):  # most terms of addresses
                for k, w in Index.of(env[m[0]]).terms.items() if m[0] in env else ((m, 1),):
                    total[k] = total.get(k, 0) + v * w
                continue
            p, unchanged = Index({(): v}), list[str | Atom]()
            for a in m:
                if isinstance(a, str):
                    if a in env:
                        p = p * Index.of(env[a])
                    else:
                        unchanged.append(a)
                elif all(x.symbols().isdisjoint(env) for x in a.args):
                    unchanged.append(a)
                else:
                    if a not in done:
                        done[a] = Atom(a.kind, tuple(x._subs(env, done) for x in a.args), a.name).normal()
                    p = p * done[a]
            for k, w in (p * Index({tuple(unchanged): 1}) if unchanged else p).terms.items():
                total[k] = total.get(k, 0) + w
        return Index(total)

    def map_atoms(self, f: Callable[[Atom], Index]) -> Index:
        """Replace every outermost Atom by ``f(atom)``."""
        out = Index({})
        for m, v in self.terms.items():
            p = Index({(): v})
            for a in m:
                p = p * (Index({(a,): 1}) if isinstance(a, str) else f(a))
            out = out + p
        return out

    def rebuild(self, f: Callable[[Atom], Index]) -> Index:
        """Replace every Atom by ``f(atom)``, innermost first: its arguments are rebuilt already."""
        return self._rebuild(f, {})

    def _rebuild(self, f: Callable[[Atom], Index], done: dict[Atom, Index]) -> Index:
        """``done`` caches the results for atoms, as in ``_subs``."""

        def atom(a: Atom) -> Index:
            if a not in done:
                done[a] = f(Atom(a.kind, tuple(x._rebuild(f, done) for x in a.args), a.name))
            return done[a]

        if all(isinstance(a, str) or atom(a).terms == {(a,): 1} for m in self.terms for a in m):
            return self
        return self.map_atoms(atom)

    def evaluate(self, env: Mapping[str, int], fetch: Callable[[str, tuple[int, ...]], int] | None = None) -> int:
        """Return the value for given symbols; ``fetch(name, subscripts)`` evaluates fetch atoms.

        KeyError: unknown symbol.
        """
        return self._evaluate(env, fetch, {})

    def _evaluate(
        self, env: Mapping[str, int], fetch: Callable[[str, tuple[int, ...]], int] | None, done: dict[Atom, int]
    ) -> int:
        """``done`` caches the results for atoms, as in ``_subs``."""
        total = 0
        for m, v in self.terms.items():
            for a in m:
                if isinstance(a, str):
                    v *= env[a]
                    continue
                if a not in done:
                    done[a] = _evaluate_atom(a, tuple(x._evaluate(env, fetch, done) for x in a.args), fetch)
                v *= done[a]
            total += v
        return total

    # -- identity ------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.constant == other
        return isinstance(other, Index) and self.terms == other.terms

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            pass
        c = self.constant
        self._hash = hash(c) if c is not None else hash(frozenset(self.terms.items()))
        return self._hash

    def __str__(self) -> str:
        try:
            return self._str
        except AttributeError:
            pass
        self._str = _print(self)
        return self._str

    def __repr__(self) -> str:
        return str(self)

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self} is not decided; compare with a constant or use the ShapeContext")


def _index(terms: dict[Monomial, int]) -> Index:
    """Return the Index of terms without zeros, which belong to it from now on."""
    new = Index.__new__(Index)
    new.terms = terms
    return new


def _sum(x: Index, terms: Mapping[Monomial, int], sign: int) -> Index:
    """Return ``x`` plus ``sign`` times other terms."""
    out = x.terms.copy()
    for m, v in terms.items():
        total = out.get(m, 0) + sign * v
        if total:
            out[m] = total
        else:
            del out[m]
    return _index(out)


def _print(p: Index) -> str:
    if not p.terms:
        return "0"
    out = ""
    for m, c in sorted(p.terms.items(), key=lambda t: ([_key(a) for a in t[0]] or [(2, "")], t[1])):
        factors = [str(a) for a in m]
        if abs(c) != 1 or not m:
            factors.insert(0, str(abs(c)))
        sign = ("-" if c < 0 else "") if not out else (" - " if c < 0 else " + ")
        out += sign + "*".join(factors)
    return f"({out})" if len(p.terms) > 1 else out


def _evaluate_atom(a: Atom, args: tuple[int, ...], fetch: Callable[[str, tuple[int, ...]], int] | None) -> int:
    if a.kind == "floordiv":
        return args[0] // args[1] if args[1] else 0
    if a.kind == "fetch":
        if fetch is None:
            raise KeyError(str(a))
        return fetch(a.name, args)
    return min(args) if a.kind == "min" else max(args)


MAX_INTERNED = 1 << 12
"""Largest number that exists once as an Index."""
_INTERNED: dict[str | int, Index] = {}
ZERO = Index({})
ONE = Index({(): 1})


def floordiv(x: Index, n: Index) -> Index:
    """Return ``x // n`` with exactly divisible parts divided out. ``n`` is a size; division by 0 gives 0."""
    if (c := n.constant) == 0:
        return ZERO
    if c is not None:
        if c < 0:
            x, c = -x, -c
        q = Index({m: v // c for m, v in x.terms.items() if v % c == 0 or m == ()})
        r = x - q * c
        if (rc := r.constant) is not None:
            return q + rc // c
        g = gcd(c, *(v for m, v in r.terms.items() if m))  # (g*y + k) // (g*n) is (y + k // g) // n
        return q + _nested_floordiv(Index({m: v // g for m, v in r.terms.items()}), Index.of(c // g))
    q, r = polynomial_division(x, n)
    return q + _nested_floordiv(r, n) if r.terms else q


def _nested_floordiv(r: Index, n: Index) -> Index:
    """Rewrite ``(y // a + k) // b`` as ``(y + a*k) // (a*b)``, for constants, or for sizes if k is 0."""
    k = r.terms.get((), 0)
    a = _single_atom(r - k if k else r)
    if a is not None and a.kind == "floordiv" and (not k or (a.args[1].constant and n.constant)):
        return floordiv(a.args[0] + a.args[1] * k, a.args[1] * n)
    return Index({(Atom("floordiv", (r, n)),): 1})


def polynomial_division(x: Index, n: Index) -> tuple[Index, Index]:
    """Return (q, r) with ``x == q * n + r``, dividing the terms of ``x`` by the leading term of ``n``."""
    lead = max(n.terms, key=lambda m: (len(m), [_key(a) for a in m]))
    lc = n.terms[lead]
    q, r = ZERO, x
    for m in sorted(x.terms, key=lambda m: (-len(m), [_key(a) for a in m])):
        v = r.terms.get(m, 0)
        rest = _remove(m, lead)
        if v and rest is not None and v % lc == 0:
            t = Index({rest: v // lc})
            q, r = q + t, r - t * n
    if len(n.terms) > 1 and r.terms:  # a partial division simplifies nothing
        return ZERO, x
    return q, r


def _remove(m: Monomial, part: Monomial) -> Monomial | None:
    rest = list(m)
    for a in part:
        if a not in rest:
            return None
        rest.remove(a)
    return tuple(rest)


def _extreme(kind: str, args: tuple[Index, ...]) -> Index:
    """Return the min or max of several, flattened and ordered. Constant differences are decided."""
    flat: list[Index] = []
    for a in args:
        inner = _single_atom(a)
        flat.extend(inner.args if inner is not None and inner.kind == kind else (a,))
    keep: list[Index] = []
    for a in flat:
        for i, b in enumerate(keep):
            d = (a - b).constant
            if d is not None:
                if (d < 0) == (kind == "min") and d != 0:
                    keep[i] = a
                break
        else:
            keep.append(a)
    if len(keep) == 1:
        return keep[0]
    return Index({(Atom(kind, tuple(sorted(keep, key=str))),): 1})


def _single_atom(a: Index) -> Atom | None:
    """Return the Atom that is the whole expression, or None."""
    if len(a.terms) != 1:
        return None
    ((m, c),) = a.terms.items()
    return m[0] if c == 1 and len(m) == 1 and isinstance(m[0], Atom) else None


def minimum(*args: IndexLike) -> Index:
    """Return the smallest argument."""
    return _extreme("min", tuple(map(Index.of, args)))


def maximum(*args: IndexLike) -> Index:
    """Return the largest argument."""
    return _extreme("max", tuple(map(Index.of, args)))


def fetch(name: str, subscripts: Iterable[IndexLike]) -> Index:
    """Return the integer that tensor ``name`` has at ``subscripts``."""
    return Index({(Atom("fetch", tuple(map(Index.of, subscripts)), name),): 1})


def product(xs: Iterable[IndexLike]) -> Index:
    """Return the product of sizes (1 for none)."""
    return reduce(lambda a, b: a * b, map(Index.of, xs), ONE)
