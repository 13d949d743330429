"""Ordered tables of kernels: which rows serve which sizes, and what declines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from polydyn.codegen.alternatives import Alternative
from polydyn.codegen.kernel import Kernel
from polydyn.lowering.alternatives import Offer, Serves, place
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.decision import ONLY, ArgMin, Decision, Entry, Leaf, Split, choose, chooses
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import ONE, Index

EMPTY = PlacedGroup(None, None, "key", ())  # type: ignore[arg-type]


def offer(name: str, where: Serves | None = None) -> Offer:
    return Offer(lambda: (Kernel(name, ("n",), ONE),), where, reasons=(f"because of {name}",))


def table(**rows: Offer | Declined) -> Sequence[Alternative[object, Offer]]:
    return [Alternative(name, lambda _, row=row: row) for name, row in rows.items()]  # type: ignore[misc]


def few(most: int) -> Serves:
    return Serves(Index.of("n"), most)


@pytest.mark.parametrize(("n", "kernel"), [(1, "tiny"), (2, "tiny"), (3, "small"), (8, "small"), (9, "large")])
def test_the_first_row_that_serves_a_size_is_launched(n: int, kernel: str) -> None:
    rows = table(tiny=offer("tiny", few(2)), small=offer("small", few(8)), large=offer("large"))
    placed = place(rows, None, EMPTY)
    assert placed.kernels[choose(placed.decision, {"n": n})].name == kernel
    assert placed.reasons == ("because of large", "because of small", "because of tiny")


def test_a_row_may_serve_sizes_above_a_limit() -> None:
    placed = place(table(long=offer("long", Serves(Index.of("n"), 4, above=True)), any=offer("any")), None, EMPTY)
    assert [placed.kernels[choose(placed.decision, {"n": n})].name for n in (4, 5)] == ["any", "long"]


def test_rows_below_one_that_serves_every_size_are_not_asked() -> None:
    def never(_: object) -> Offer:
        raise AssertionError("asked")

    rows = (*table(unit=Declined("the processor has none"), any=offer("any")), Alternative("never", never))
    placed = place(rows, None, EMPTY)
    assert placed.declined == (("unit", "the processor has none"),)
    assert placed.decision == ONLY and [k.name for k in placed.kernels] == ["any"]


def test_a_table_without_a_row_for_every_size_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="the last row serves every size"):
        place(table(tiny=offer("tiny", few(2)), unit=Declined("none")), None, EMPTY)


def drawn(r: np.random.Generator, depth: int) -> Decision:
    """Return a random decision among four kernels over two symbols."""
    n, m = Index.of("n"), Index.of("m")
    value = int(r.integers(-3, 4)) * n + int(r.integers(-3, 4)) * m
    kind = int(r.integers(3)) if depth else 0
    if kind == 0:
        return Leaf(int(r.integers(4)))
    if kind == 1:
        return Split(value, int(r.integers(-5, 6)), drawn(r, depth - 1), drawn(r, depth - 1))
    named = r.permutation(4)[: int(r.integers(1, 5))]
    return ArgMin(tuple(Entry(int(k), int(r.integers(-2, 3)) * n + int(r.integers(3))) for k in named))


def test_the_kernel_that_a_decision_names_has_the_indicator_1() -> None:
    r = np.random.default_rng(0)
    for _ in range(60):
        decision = drawn(r, 3)
        for n, m in r.integers(0, 8, (6, 2)):
            env = {"n": int(n), "m": int(m)}
            found = [chooses(decision, k).evaluate(env) for k in range(4)]
            assert found == [int(k == choose(decision, env)) for k in range(4)], (decision, env)
