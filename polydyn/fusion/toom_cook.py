"""Toom-Cook matrices: short convolutions with as few multiplications as there are input elements.

S. Winograd, Arithmetic Complexity of Computations (1980); A. Lavin, S. Gray, Fast Algorithms for Convolutional Neural
Networks (2016). ``F(m, r)`` computes ``m`` neighbouring sums of ``r`` products, ``y[i] = sum(d[i + k] * g[k])``, from
``m + r - 1`` products: ``y = A((B d) * (G g))``. The factors are values of polynomials at ``m + r - 1`` points, one of
them infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]


@dataclass(frozen=True)
class Matrices:
    """The exact matrices of ``F(m, r)``.

    ``sums`` is A, m rows of m + r - 1 numbers. ``elements`` is B, square; the first nonzero number of each row is 1.
    ``taps`` is G, m + r - 1 rows of r numbers.
    """

    sums: Matrix
    elements: Matrix
    taps: Matrix


def matrices(m: int, r: int, points: Sequence[Fraction]) -> Matrices:
    """Build the matrices of ``F(m, r)`` at ``points`` (``m + r - 2`` distinct numbers) and at infinity."""
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
    """Return the monic polynomial with these roots, lowest power first."""
    out = [Fraction(1)]
    for q in roots:
        out = [low - q * high for low, high in zip([Fraction(0), *out], [*out, Fraction(0)], strict=True)]
    return tuple(out)
