"""Guards that no sizes satisfy together."""

from __future__ import annotations

import pytest

from polydyn.errors import ShapeError
from polydyn.graph.ir import Guard
from polydyn.schedules.index import Index, IndexLike, maximum, minimum
from polydyn.shapes.possible import check_possible

B, L = Index.of("B"), Index.of("L")


def guard(first: IndexLike, relation: str, second: IndexLike) -> Guard:
    return Guard(Index.of(first), relation, Index.of(second), f"{first} {relation} {second}")


@pytest.mark.parametrize(
    "guards",
    [
        [guard(maximum((minimum(B - 1, 1) - B) // 2 + 1, 0), "==", 1)],
        [guard((B + 10) // 16, "==", 2), guard(B, "<=", 20)],
        [guard(B, "%==", 32), guard(1, "<=", B), guard(B, "<=", 31)],
        [guard(B, "==", L), guard(L + 1, "<=", B)],
        [guard(B * 2, "==", L * 2 + 1)],
    ],
)
def test_no_size_is_left(guards: list[Guard]) -> None:
    with pytest.raises(ShapeError, match="no size of B"):
        check_possible(guards)


@pytest.mark.parametrize(
    "guards",
    [
        [guard((B + 10) // 16, "%==", 2), guard((L + 10) // 16, "%==", 2)],
        [guard(B, "==", 0)],
        [guard(B, "==", 1013), guard(L, "<=", 3)],
        [guard(B * L, "==", 6), guard(B, "<=", 20)],  # is not affine
        [guard(B * L, "==", -6)],  # impossible, but undecided
        [],
    ],
)
def test_sizes_are_left(guards: list[Guard]) -> None:
    check_possible(guards)


def test_the_guard_that_leaves_nothing_is_named() -> None:
    guards = [guard(L, "%==", 7), guard(B, "<=", 3), guard(5, "<=", B)]
    with pytest.raises(ShapeError, match=r"no size of B meets.*5 <= B\n  because: B <= 3"):
        check_possible(guards)
