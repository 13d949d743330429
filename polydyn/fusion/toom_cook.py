"""Matrices of Toom and Cook: short sums of products with as few multiplications as there are elements.

S. Winograd, Arithmetic Complexity of Computations (1980); A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural
Networks (2016). ``F(m, r)`` are ``m`` neighbouring sums of ``r`` products, ``y[i] = sum(d[i + k] * g[k])``, made of
``m + r - 1`` products: ``y = A((B d) * (G g))``. The factors are values of polynomials at as many points, one of them
infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]


@dataclass(frozen=True)
class Matrices:
    """``sums``: A, m rows of m + r - 1; ``elements``: B, square, each row's first number that is not 0 is 1;
    ``taps``: G, m + r - 1 rows of r. All numbers are exact.
    """

    sums: Matrix
    elements: Matrix
    taps: Matrix


def matrices(m: int, r: int, points: Sequence[Fraction]) -> Matrices:
    """Of ``F(m, r)`` at ``points``, ``m + r - 2`` numbers that differ, and at infinity."""
    size = m + r - 1
    assert len(set(points)) == len(points) == size - 1, "one point less than elements, all different"
    sums = tuple((*(p**i for p in points), Fraction(i == m - 1)) for i in range(m))
    elements, taps = [], []
    for j, p in enumerate(points):
        others = [q for i, q in enumerate(points) if i != j]
        elements.append((*_product(others), Fraction(0)))
        scale = Fraction(1)
        for q in others:
            scale *= p - q
        taps.append(tuple(p**k / scale for k in range(r)))
    elements.append(_product(points))
    taps.append(tuple(Fraction(k == r - 1) for k in range(r)))
    first = [next(x for x in row if x) for row in elements]
    return Matrices(
        sums,
        tuple(tuple(x / f for x in row) for row, f in zip(elements, first, strict=True)),
        tuple(tuple(x * f for x in row) for row, f in zip(taps, first, strict=True)),
    )


def _product(roots: Sequence[Fraction]) -> Row:
    """The polynomial with these roots and 1 before its highest power, lowest power first."""
    out = [Fraction(1)]
    for q in roots:
        out = [low - q * high for low, high in zip([Fraction(0), *out], [*out, Fraction(0)], strict=True)]
    return tuple(out)
