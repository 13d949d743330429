"""Record decisions of index arithmetic and facts about sizes during a compilation.

``recording`` replaces the function of each decision, in every module that has it, by one that records arguments and
result, and restores it afterwards. Decisions without consequences ("not proven") are not recorded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from polydyn.schedules import index, ranges
from polydyn.schedules.index import Index
from polydyn.shapes.context import ShapeContext
from polydyn.shapes.facts import DimFacts

Extents = tuple[tuple[str, Index], ...]
MAX_CLAIMS = 20_000
"""Maximum number of recorded claims of a kind per compilation; later ones are dropped and counted."""


@dataclass(frozen=True)
class Claim:
    """``left relation right`` for all sizes, and for all iterators below their ``extents``.

    ``relation``: ``==``, ``!=``, ``<=`` or ``%==`` (a multiple of). ``kind``: the function that decided it.
    """

    kind: str
    left: Index
    relation: str
    right: Index
    extents: Extents = ()


@dataclass
class Context:
    """The facts of one model or body: the decisions from them, and the sizes of callers."""

    facts: ShapeContext
    claims: dict[Claim, None] = field(default_factory=dict)


@dataclass
class Claims:
    """All claims of a compilation. ``arithmetic``: decided from ranges of iterators alone."""

    arithmetic: dict[Claim, None] = field(default_factory=dict)
    contexts: dict[int, Context] = field(default_factory=dict)
    dropped: int = 0

    def note(self, claim: Claim) -> None:
        """Record a claim of index arithmetic."""
        self._add(self.arithmetic, claim)

    def learn(self, facts: ShapeContext, claim: Claim) -> None:
        """Record a claim that facts about sizes decided."""
        self._add(self.contexts.setdefault(id(facts), Context(facts)).claims, claim)

    def _add(self, to: dict[Claim, None], claim: Claim) -> None:
        if len(to) < MAX_CLAIMS:
            to[claim] = None
        else:
            self.dropped += claim not in to


def _extents(iterators: Mapping[str, Index] | None) -> Extents:
    return tuple((iterators or {}).items())


def _arithmetic(claims: Claims) -> dict[tuple[Any, str], Callable[..., None]]:
    """Map (module, function) to a function that records the claim of its arguments and result."""

    def quotient(result: Index, x: Index, n: Index) -> None:
        opaque = Index({(index.Atom("floordiv", (x, n)),): 1})
        claims.note(Claim("floordiv", result, "==", opaque))

    def extreme(result: Index, kind: str, args: tuple[Index, ...]) -> None:
        claims.note(Claim(kind, result, "==", Index({(index.Atom(kind, args),): 1})))

    def nonnegative(result: bool, p: Index, iterators: Mapping[str, Index] | None = None) -> None:
        if result:
            claims.note(Claim("is_nonnegative", index.ZERO, "<=", p, _extents(iterators)))

    def bound(result: Index | None, p: Index, iterators: Mapping[str, Index]) -> None:
        if result is not None:
            claims.note(Claim("upper_bound", p, "<=", result, _extents(iterators)))

    def simpler(result: Index, p: Index, iterators: Mapping[str, Index]) -> None:
        claims.note(Claim("simplify", result, "==", p, _extents(iterators)))

    def divided(result: Index, x: Index, n: Index, iterators: Mapping[str, Index]) -> None:
        opaque = Index({(index.Atom("floordiv", (x, n)),): 1})
        claims.note(Claim("divide", result, "==", opaque, _extents(iterators)))

    return {
        (index, "floordiv"): quotient, (index, "_extreme"): extreme, (ranges, "is_nonnegative"): nonnegative,
        (ranges, "upper_bound"): bound, (ranges, "simplify"): simpler, (ranges, "divide"): divided,
    }  # fmt: skip


def _facts(claims: Claims) -> dict[str, Callable[..., None]]:
    """Map a method of ``DimFacts`` to a function that records the claim of its arguments and result."""
    of = Index.of

    def canonical(result: Index, facts: ShapeContext, dim: Any) -> None:
        claims.learn(facts, Claim("canonical", result, "==", of(dim)))

    def simplify(result: Index, facts: ShapeContext, p: Index, iterators: Mapping[str, Index] | None = None) -> None:
        claims.learn(facts, Claim("simplify", result, "==", p, _extents(iterators)))

    def nonnegative(result: bool, facts: ShapeContext, p: Any, iterators: Mapping[str, Index] | None = None) -> None:
        if result:
            claims.learn(facts, Claim("nonnegative", index.ZERO, "<=", of(p), _extents(iterators)))

    def equal(result: bool | None, facts: ShapeContext, a: Any, b: Any) -> None:
        if result is not None:
            claims.learn(facts, Claim("equal", of(a), "==" if result else "!=", of(b)))

    def multiple(result: bool, facts: ShapeContext, a: Any, n: Any) -> None:
        if result:
            claims.learn(facts, Claim("is_multiple", of(a), "%==", of(n)))

    return {"canonical": canonical, "simplify": simplify, "nonnegative": nonnegative, "equal": equal,
            "is_multiple": multiple}  # fmt: skip


def _noting(f: Callable[..., Any], claim: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(f)
    def noted(*args: Any, **more: Any) -> Any:
        result = f(*args, **more)
        claim(result, *args, **more)
        return result

    return noted


@contextmanager
def recording() -> Iterator[Claims]:
    """Record the decisions made inside the block. Do not use with several threads at once."""
    claims = Claims()
    placed: list[tuple[Any, str, Any]] = []

    def place(where: Any, name: str, new: Any) -> None:
        placed.append((where, name, vars(where)[name]))
        setattr(where, name, new)

    for (module, name), claim in _arithmetic(claims).items():
        old = getattr(module, name)
        new = _noting(old, claim)
        for other in [m for n, m in list(sys.modules.items()) if n.startswith("polydyn.") and m is not None]:
            for alias in [n for n, x in list(vars(other).items()) if x is old]:
                place(other, alias, new)
    for name, claim in _facts(claims).items():
        place(DimFacts, name, _noting(vars(DimFacts)[name], claim))
    try:
        yield claims
    finally:
        for where, name, before in reversed(placed):
            setattr(where, name, before)
