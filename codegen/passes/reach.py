"""Questions that the taps of a tile ask at the end of an axis, as one for each input.

An input at the end of an axis counts where it exists and where an output exists that reads it. Both ask how far the
tile reaches. Neighbouring outputs read neighbouring inputs, so that one bound often answers for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polydyn.codegen.ir import Compare
from polydyn.schedules.index import Index, minimum

Asked = tuple[int, tuple[Compare, ...]]
"""The number of the first output that reads an input, and the guard of the input."""
V = Index.of


def reached(asked: Sequence[Asked], live: Index | None, count: int, origin: str) -> list[tuple[Compare, ...]]:
    """What is left to ask for each input of a tile.

    ``live``: outputs that exist, of ``count`` (None: all do); ``origin``: the symbol of the first one's place, which is
    never negative. An input whose first reader is output 0 asks for no output, as a tile has one. Questions whose
    answer follows from ``origin`` are left out.
    """
    guards = [[c for c in guard if not _follows(end_of(c), origin)] for _, guard in asked]
    first = [f for f, _ in asked]
    bound = _bound(first, guards, live, count, origin) if live is not None else None
    out = []
    for f, guard in zip(first, guards, strict=True):
        ends = {c: -least for c, (base, least) in _parts(guard) if bound and base == bound[0]}
        left = [Compare(">=", bound[1], V(ends[c])) if bound and c in ends else c for c in guard]
        if live is not None and f and not ends:
            left.insert(0, Compare("<", V(f), live))
        out.append(tuple(left))
    return out


def end_of(c: Compare) -> Index:
    """What is >= 0 exactly where a comparison by order holds."""
    a, b = (c.left, c.right) if c.relation in (">=", ">") else (c.right, c.left)
    return a - b - (1 if c.relation in ("<", ">") else 0)


def _parts(guard: Sequence[Compare]) -> Iterator[tuple[Compare, tuple[Index, int]]]:
    """Each comparison with its end: without its constant, and the constant."""
    for c in guard:
        end = end_of(c)
        constant = end.terms.get((), 0)
        yield c, (end - constant, constant)


def _follows(e: Index, origin: str) -> bool:
    """Whether an expression is >= 0 because the symbol is."""
    return all(c >= 0 and m in ((), (origin,)) for m, c in e.terms.items())


def _bound(
    first: Sequence[int], guards: Sequence[Sequence[Compare]], live: Index, count: int, origin: str
) -> tuple[Index, Index] | None:
    """The end of an axis without a constant, and the bound that takes its place; None: there is none for all inputs.

    Inputs are so many places (``needs``) behind the tile's first. With p + 1 outputs, those that one of them reads must
    be those that need no more than ``step * p + reach``.
    """
    found = [(f, base, -c) for f, guard in zip(first, guards, strict=True) for _, (base, c) in _parts(guard)]
    bases = {base for _, base, _ in found if (base.split(origin)[0].constant or 0) < 0}
    if len(bases) != 1:
        return None
    (base,) = bases
    needs = [(f, n) for f, x, n in found if x == base]
    last, near = max(f for f, _ in needs), max((n for f, n in needs if f == 0), default=0)
    step = (max(n for _, n in needs) - near) // max(1, last)
    reach = max(n - step * f for f, n in needs)
    if any((f <= p) != (n <= step * p + reach) for f, n in needs for p in range(count)):
        return None
    return base, minimum(base, (live - 1) * step + reach)
