"""Sizes of a model at which the loops of a group have given extents."""

from __future__ import annotations

from math import inf

import pytest

from polydyn.schedules.index import Index, floordiv, maximum, minimum
from polydyn.schedules.ranges import interval
from polydyn.search.tasks.sizes import model_sizes

N, H, W = map(Index.of, "NHW")
PIXELS = floordiv(H - 1, Index.of(2)) * floordiv(W + 1, Index.of(2))


@pytest.mark.parametrize("rows", [1, 2, 3, 14, 61, 252, 3136])
def test_every_count_of_pixels_has_an_image(rows: int) -> None:
    sizes = model_sizes({"i0": N, "i1": PIXELS}, {"i0": 3, "i1": rows})
    assert sizes["N"] == 3
    assert PIXELS.evaluate(sizes) == rows


def test_images_are_as_square_as_their_pixels_allow() -> None:
    sizes = model_sizes({"i1": H * W}, {"i1": 24})
    assert sorted(sizes.values()) == [4, 6]


@pytest.mark.parametrize("rows", [1, 3, 8, 130])
def test_no_side_of_an_image_is_negative(rows: int) -> None:
    """Two sides of -1 pixel would make an image of one pixel, for which a kernel has no scratch."""
    high, wide = (floordiv(x + 1, Index.of(8)) - 1 for x in (H, W))
    sides, offset = [high, wide, Index.of(7)], Index.of(3) - H
    sizes = model_sizes({"i1": high * wide}, {"i1": rows}, [*sides, offset])
    assert (high * wide).evaluate(sizes) >= rows and min(x.evaluate(sizes) for x in sides) >= 1
    assert model_sizes({"i1": high * wide}, {"i1": 1}) == {"H": 1, "W": 1}, "nothing says that these are sides"


def test_extents_that_cannot_be_had_together_are_the_next_ones_above() -> None:
    assert model_sizes({"i0": N, "i1": N * 4}, {"i0": 2, "i1": 7}) == {"N": 2}
    assert model_sizes({"i1": W * 4}, {"i1": 7}) == {"W": 2}


def test_intervals_hold_every_value() -> None:
    x, n = Index.of("x"), Index.of("n")
    e = floordiv(x * 2 - 7, n) * 3 - x + maximum(x - 4, Index.of(0))
    low, high = interval(e, {"x": (0, 9), "n": (1, 3)})
    values = [e.evaluate({"x": a, "n": b}) for a in range(10) for b in (1, 2, 3)]
    assert low <= min(values) <= max(values) <= high
    assert interval(floordiv(x, n), {"x": (0, 9), "n": (-1, 3)}) == (-inf, inf), "divided by what may be negative"


def test_intervals_are_infinite_where_nothing_bounds_a_size() -> None:
    sizes = {"m": (1, 9), "n": (0, 20), "any": (0, None)}
    m, n, unbounded = map(Index.of, sizes)
    ends = [
        (m * n + 3, (3, 183)), (floordiv(m + 7, Index.of(8)) * minimum(n, Index.of(5)), (0, 10)), (m - n, (-19, 9)),
        (maximum(m, n), (1, 20)), (minimum(m, unbounded), (0, 9)), (maximum(m, unbounded), (1, inf)),
        (floordiv(m + 1, unbounded), (0, 10)), (floordiv(unbounded, m), (0, inf)), (m - unbounded, (-inf, 9)),
    ]  # fmt: skip
    for e, expected in ends:
        assert interval(e, sizes) == expected
