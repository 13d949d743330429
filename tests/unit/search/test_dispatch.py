"""Dispatch decisions: their choices, totality, and closed forms that equal Python's computation."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.errors import ScheduleError
from polydyn.schedules.decision import ArgMin, Entry, Leaf, Split, choose, explain, verify_decision, walk
from polydyn.schedules.evaluator import Evaluator, evaluator
from polydyn.schedules.index import Index
from polydyn.search.dispatch import tree as trees
from polydyn.search.dispatch.tree import features_of, fit_classifier, fit_tree

L, B = Index.of("L"), Index.of("B")


def test_argmin_takes_the_cheapest_entry_and_the_first_among_equals() -> None:
    table = ArgMin((Entry(1, L * 5), Entry(2, L * 5), Entry(3, 40 + L)))
    assert [choose(table, {"L": n}) for n in (0, 1, 10, 11, 100)] == [1, 1, 1, 3, 3]
    verify_decision(table, 4, frozenset("L"))


def test_explain_shows_path_estimates_and_barred_kernels() -> None:
    d = Split(L, 16, Leaf(2), ArgMin((Entry(0, L), Entry(1, L * 2))))
    here, away = "the only candidate here", "not compared here"
    assert explain(d, {"L": 7}, "abc") == (
        "L = 7 <= 16", f"taken: c, no estimate, {here}", f"a: 7, {away}", f"b: 14, {away}"
    )  # fmt: skip
    assert explain(d, {"L": 20}, "abc", " ns") == (
        "L = 20 > 16", "taken: a, 20 ns, the least of the 2 that may run", "b: 40 ns", f"c: no estimate, {away}",
    )  # fmt: skip


def test_barred_kernels_are_not_taken() -> None:
    d = Split(L, 16, Leaf(2), ArgMin((Entry(0, L), Entry(1, L * 2), Entry(2, L * 2))))
    assert choose(d, {"L": 20}) == 0 and choose(d, {"L": 20}, {0}) == 1
    said = explain(d, {"L": 20}, "abc", barred={0: "it needs more"})
    assert said[:2] == ("not a: it needs more", "L = 20 > 16")
    assert said[2] == "taken: b, 40, the least of the 2 that may run, the first of 2 equal ones"
    for barred in ({2}, {0, 1, 2}):
        with pytest.raises(ScheduleError, match="no kernel may be launched"):
            choose(d, {"L": 7}, barred)
    assert explain(d, {"L": 7}, "abc", barred={2: "no"})[2] == "none of the others may run"


def test_a_decision_must_be_total_and_closed() -> None:
    with pytest.raises(ScheduleError, match="total"):
        verify_decision(ArgMin(()), 1, frozenset("L"))
    with pytest.raises(ScheduleError, match="kernel 3 of 2"):
        verify_decision(Split(L, 1, Leaf(0), Leaf(3)), 2, frozenset("L"))
    with pytest.raises(ScheduleError, match="unknown symbols"):
        verify_decision(Split(B, 1, Leaf(0), Leaf(1)), 2, frozenset("L"))


SHAPES = [{"L": n, "B": b} for n in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377) for b in (1, 2, 4, 8, 16)]


def best_kernel(s: dict[str, int]) -> int:
    if s["L"] * s["B"] <= 100:
        return 0
    return 1 if s["L"] <= 60 else 2


TABLE = np.array([[1.0 if best_kernel(s) == k else 0.4 for s in SHAPES] for k in range(3)])
FEATURES = features_of(["L", "B"], [L * B])


def test_the_tree_recovers_a_rule_over_expressions() -> None:
    tree = fit_tree(FEATURES, SHAPES, TABLE)
    assert [choose(tree, s) for s in SHAPES] == [best_kernel(s) for s in SHAPES]
    assert sum(isinstance(n, Leaf) for n in walk(tree)) <= 4
    verify_decision(tree, 3, frozenset("LB"))


def test_an_expression_is_made_a_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of a thousand sizes, which takes longer than walking the expression."""
    made: list[Index] = []

    def make(x: Index) -> Evaluator:
        made.append(x)
        return evaluator(x)

    monkeypatch.setattr(trees, "evaluator", make)
    values = trees.evaluate(FEATURES, SHAPES)
    assert made == [*FEATURES]
    assert values.tolist() == [[s["L"], s["B"], s["L"] * s["B"]] for s in SHAPES]
    fit_tree(FEATURES, SHAPES, TABLE, costs=(L, B, L * B))
    assert len(made) == 9


def test_the_tree_spends_its_leaves_on_loss_not_on_labels() -> None:
    """Kernels 0 and 1 differ by a thousandth everywhere; only kernel 2's region is worth a leaf."""
    shapes = [{"L": n} for n in range(1, 41)]
    table = np.array(
        [[1 - 0.001 * (n % 2) for n in range(40)], [1 - 0.001 * (n % 2 == 0) for n in range(40)], [0.5] * 40]
    )
    table[2, 30:] = 4.0
    tree = fit_tree(features_of(["L"]), shapes, table, leaves=2)
    assert isinstance(tree, Split)
    assert (tree.index, tree.threshold, tree.high) == (L, 30, Leaf(2))
    assert fit_tree(features_of(["L"]), shapes, table, leaves=1) == Leaf(0)


def test_weights_move_the_tree() -> None:
    shapes = [{"L": 1}, {"L": 2}]
    table = np.array([[1.0, 0.9], [0.2, 1.0]])
    assert fit_tree(features_of(["L"]), shapes, table, [1, 1], leaves=1) == Leaf(0)
    assert fit_tree(features_of(["L"]), shapes, table, [0.01, 1], leaves=1) == Leaf(1)


def test_a_leaf_with_several_winners_compares_their_costs() -> None:
    shapes = [{"L": n} for n in range(1, 30)]
    costs = (Index.of(20), L)
    table = np.array([[1 / c.evaluate(s) for s in shapes] for c in costs])
    tree = fit_tree(features_of(["L"]), shapes, table, leaves=1, costs=costs)
    assert isinstance(tree, ArgMin)
    assert [choose(tree, s) for s in shapes] == [int(table[:, i].argmax()) for i in range(len(shapes))]


def test_a_leaf_does_not_compare_costs_that_the_table_contradicts() -> None:
    shapes = [{"L": n} for n in range(1, 30)]
    costs = (Index.of(20), L)  # claim that kernel 1 is better below 20
    table = np.array([[1.0] * 29, [0.5] * 14 + [1.5] * 15])  # it is better from 15 on
    assert fit_tree(features_of(["L"]), shapes, table, leaves=1, costs=costs) == Leaf(0)
    tree = fit_tree(features_of(["L"]), shapes, table, leaves=2, costs=costs)
    assert [choose(tree, s) for s in shapes] == [0] * 14 + [1] * 15


def test_the_classifier_exports_the_same_choices() -> None:
    labels = [best_kernel(s) for s in SHAPES]
    tree = fit_classifier(FEATURES, SHAPES, labels)
    assert [choose(tree, s) for s in SHAPES] == labels
    assert fit_classifier(features_of(["L"]), [{"L": 3}], [7]) == Leaf(7)
    big = [{"L": (1 << 40) + n} for n in range(20)]  # beyond float32
    exact = fit_classifier(features_of(["L"]), big, [int(n > 12) for n in range(20)])
    assert [choose(exact, s) for s in big] == [int(n > 12) for n in range(20)]
