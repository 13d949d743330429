"""Consequences of an equation ``d == 0`` between sizes: bounds of minima and maxima, exact divisions."""

from __future__ import annotations

from polydyn.schedules.index import Atom, Index, floordiv
from polydyn.shapes.rules import content


def primitive(p: Index) -> Index:
    """Divide an expression by the greatest common divisor of its coefficients."""
    return Index({m: v // content(p) for m, v in p.terms.items()})


def extreme_bounds(d: Index) -> list[tuple[Index, Index]]:
    """Return the inequalities that follow from ``d == 0`` if d holds a single min or max: it is at most each
    argument.
    """
    out: list[tuple[Index, Index]] = []
    for m, v in sorted(d.terms.items(), key=str):
        a = m[0] if len(m) == 1 else None
        if abs(v) == 1 and isinstance(a, Atom) and a.kind in ("min", "max"):
            value = (Index({m: v}) - d) * v
            out += [(value, x) if a.kind == "min" else (x, value) for x in a.args]
    return out


def extreme_choice(d: Index) -> list[tuple[Index, Index]]:
    """Return the inequalities that follow from ``d == 0`` if d is 0 only if a min or max takes one of its arguments."""
    for m, v in sorted(d.terms.items(), key=str):
        a = m[0] if len(m) == 1 else None
        if abs(v) == 1 and isinstance(a, Atom) and a.kind in ("min", "max"):
            for x in a.args:
                if (d - Index({m: v}) + x * v) == 0:
                    others = [y for y in a.args if y != x]
                    return [(x, y) if a.kind == "min" else (y, x) for y in others]
    return []


def exact_division(d: Index) -> tuple[Index, Index] | None:
    """Return ``(y, n)`` if ``d == 0`` means exactly that y is a multiple of n: d is ``+-(y - n * ((y + r) // n))``.

    r is 0, or any number below a constant n: an odd size, halved, rounded up and doubled, is not the same size. y may
    be a quotient itself: ``(y + r) // n`` is ``x // (m * n)`` if ``y + r`` is ``x // m``. The quotient may have lost a
    common factor of y and n.
    """
    for a in sorted((a for a in d.atoms() if isinstance(a, Atom) and a.kind == "floordiv"), key=str):
        for e in (d, -d):
            x, n = a.args
            factor, common = -e.terms.get((a,), 0), 1
            if n.constant is not None and factor > 0 and n.constant % factor == 0:
                x, n = floordiv(x, Index.of(n.constant // factor)), Index.of(factor)
            elif n.constant is not None and factor > 0 and factor % n.constant == 0:
                common, n = factor // n.constant, Index.of(factor)
                x = x * common
            y = e + n * Index({(a,): 1})
            r = (x - y).constant
            if r is not None and a not in y.atoms() and -common < r < max(1, n.constant or 0):
                return y, n
    return None
