"""The matrices of short sums of products, in exact numbers."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from polydyn.fusion.toom_cook import Matrices, Matrix, matrices
from polydyn.fusion.winograd import POINTS, TAPS

FORMS = [*((m, TAPS, (0, *(s * p for p in rest for s in (1, -1)))) for m, (_, *rest) in POINTS.items())]
FORMS += [(3, 2, (0, 1, -1)), (2, 5, (0, 1, -1, 2, Fraction(-1, 3))), (1, 1, ())]


def is_right(m: int, r: int, x: Matrices) -> bool:
    """Return whether sum_j A[i][j] * G[j][k] * B[j][e] is 1 if e = i + k, else 0: then y[i] = sum(d[i + k] * g[k])."""
    size = m + r - 1
    return all(
        sum(x.sums[i][j] * x.taps[j][k] * x.elements[j][e] for j in range(size)) == (e == i + k)
        for i in range(m)
        for k in range(r)
        for e in range(size)
    )


@pytest.mark.parametrize(("m", "r", "points"), FORMS)
def test_products_at_points_are_the_sums_and_no_entry_is_idle(m: int, r: int, points: tuple[Fraction, ...]) -> None:
    exact = matrices(m, r, [Fraction(p) for p in points])
    assert is_right(m, r, exact)
    for name in ("sums", "elements", "taps"):
        matrix: Matrix = getattr(exact, name)
        for i, row in enumerate(matrix):
            for j, x in enumerate(row):
                wrong = (*matrix[:i], (*row[:j], x + Fraction(1, 97), *row[j + 1 :]), *matrix[i + 1 :])
                assert not is_right(m, r, replace(exact, **{name: wrong})), (name, i, j)
