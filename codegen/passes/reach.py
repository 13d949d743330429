"""Merge the bounds checks of a tile at the end of an axis into one check per input.

An input at the end of an axis counts if it exists and an output exists that reads it. Both depend on the extent of the
tile. Adjacent outputs read adjacent inputs, so one bound often covers both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polydyn.codegen.ir import Compare
from polydyn.schedules.index import Index, minimum

GuardedInput = tuple[int, tuple[Compare, ...]]
"""The number of the first output that reads an input, and the guard of the input."""
V = Index.of


def input_bounds(
    inputs: Sequence[GuardedInput], live: Index | None, count: int, origin: str
) -> list[tuple[Compare, ...]]:
    """Return the remaining checks for each input of a tile.

    ``live``: outputs that exist, of ``count`` (None: all do); ``origin``: the symbol of the first output, which is
    never negative. An input whose first reader is output 0 needs no check of outputs, because a tile has at least one.
    Checks that follow from ``origin`` are dropped.
    """
    guards = [[c for c in guard if not _follows(end_of(c), origin)] for _, guard in inputs]
    first = [f for f, _ in inputs]
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
    """Return an Index that is >= 0 exactly if an order comparison holds."""
    a, b = (c.left, c.right) if c.relation in (">=", ">") else (c.right, c.left)
    return a - b - (1 if c.relation in ("<", ">") else 0)


def _parts(guard: Sequence[Compare]) -> Iterator[tuple[Compare, tuple[Index, int]]]:
    """Yield each comparison with its end, split into the part without the constant and the constant."""
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
    """Return the end of an axis without its constant, and the bound that replaces it for all inputs, or None.

    Inputs have offsets (``needs``) from the tile's first input. With p + 1 outputs, the inputs that one of them reads
    must be exactly those with an offset of at most ``step * p + reach``.
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
