"""Bounds checks of a tile's taps at the ends of an axis: fewer checks with the same result."""

from __future__ import annotations

from itertools import product

import pytest

from polydyn.codegen.ir import Compare
from polydyn.codegen.passes.reach import input_bounds
from polydyn.schedules.index import ZERO, Index

V = Index.of
COUNT = 4
"""Outputs of a tile."""


def input_guards(step: int, dilation: int, taps: int, pad: int) -> dict[int, tuple[int, tuple[Compare, ...]]]:
    """Map each input of a tile to its first reader and its guard.

    The tile belongs to a window along x with n inputs, from output o on.
    """
    first = dict[int, int]()
    for u, k in product(range(COUNT), range(taps)):
        first.setdefault(step * u + dilation * k, u)
    places = {x: V("o") * step + (x - pad) for x in sorted(first)}
    return {x: (first[x], (Compare(">=", p, ZERO), Compare("<", p, V("n")))) for x, p in places.items()}


@pytest.mark.parametrize(
    ("step", "dilation", "taps", "pad", "joined"),
    [
        (1, 1, 3, 1, True), (2, 1, 3, 1, True), (2, 1, 5, 0, True), (1, 1, 1, 0, True), (3, 1, 2, 1, True),
        (1, 2, 3, 2, False),
    ],
)  # fmt: skip
def test_one_bound_answers_for_inputs_and_outputs(step: int, dilation: int, taps: int, pad: int, joined: bool) -> None:
    before = input_guards(step, dilation, taps, pad)
    after = input_bounds(list(before.values()), V("live"), COUNT, "o")
    for n, tile, live in product(range(12), range(3), range(1, COUNT + 1)):
        env = {"n": n, "o": tile * COUNT, "live": live}
        for (first, guard), left in zip(before.values(), after, strict=True):
            assert (first < live and all(c.holds(env) for c in guard)) == all(c.holds(env) for c in left)
    assert all(len(c) == 1 for c in after[pad:]) == joined, "one question for each input behind the padding"


def test_without_a_guard_or_an_end_that_all_share_nothing_is_joined() -> None:
    live = V("live")
    assert input_bounds([(0, ()), (1, ())], live, COUNT, "o") == [(), (Compare("<", V(1), live),)]
    assert input_bounds([(0, ()), (1, ())], None, COUNT, "o") == [(), ()]
    ends = [(u, (Compare("<", V("o") + u, V(n)),)) for u, n in enumerate("nm")]
    assert input_bounds(ends, live, COUNT, "o") == [ends[0][1], (Compare("<", V(1), live), *ends[1][1])]
