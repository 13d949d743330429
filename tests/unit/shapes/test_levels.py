"""Late sizes: facts about them must not justify code that runs before they are known (docs/adr/0027-parts.md)."""

from __future__ import annotations

import pytest

from polydyn.schedules.index import Index, maximum, minimum
from polydyn.shapes import prove
from polydyn.shapes.context import ShapeContext


def context(*early: str) -> tuple[ShapeContext, Index]:
    """Return early symbols by name, and one late symbol."""
    facts = ShapeContext()
    for s in early:
        facts.declare(s, s)
    return facts, facts.fresh_symbol("n")


def guards(facts: ShapeContext) -> list[tuple[str, str, str]]:
    return [(str(g.left), g.relation, str(g.right)) for g in facts.guards()]


def test_a_promise_makes_no_guard_and_proves() -> None:
    facts, n = context("H", "W")
    facts.assume_at_most(n, Index.of("H") * "W", "no more elements than there are")
    facts.at_most(n, Index.of("H") * "W", "needed")
    assert guards(facts) == [] and facts.level(n) == 1 and facts.level("H") == 0


def test_an_equation_replaces_the_late_symbol() -> None:
    facts, n = context("B")
    facts.unify("B", n, "why")
    assert facts.canonical(n) == Index.of("B") and facts.canonical("B") == Index.of("B")


def test_an_equation_that_only_an_early_symbol_could_lead_replaces_nothing() -> None:
    facts, n = context("B", "N")
    facts.unify(minimum(n, Index.of("N")), "B", "one")
    facts.unify(2 * n, "N", "two")
    assert facts.canonical("B") == Index.of("B") and facts.canonical("N") == Index.of("N")


def test_two_late_equations_say_an_early_one() -> None:
    facts, n = context("B", "C")
    facts.unify(n, "B", "one")
    facts.unify(n, "C", "two")
    assert guards(facts)[1] == ("C", "==", "B")


def test_a_late_range_is_asked_of_the_early_size_that_it_turns_out_to_be() -> None:
    facts, n = context("B")
    facts.at_most(n, 10, "a table")
    facts.unify(n, "B", "equal")
    assert ("B", "<=", "10") in guards(facts), "B <= 10 is used before n is compared with B"


def test_a_late_order_is_asked_of_early_sizes() -> None:
    facts, n = context("B", "N")
    facts.unify(maximum(n, Index.of("N")), "B", "why")
    assert ("N", "<=", "B") in guards(facts)


def test_a_late_divisibility_is_asked_of_the_early_size() -> None:
    facts, n = context("B")
    facts.assume_multiple(n, 4, "blocks")
    facts.unify(n, "B", "equal")
    assert facts.is_multiple("B", 4) and ("B", "%==", "4") in guards(facts)


def test_late_facts_prove_nothing_about_early_sizes() -> None:
    facts, n = context("B", "N")
    facts.at_most("B", n, "late")
    facts.at_most(n, "N", "late")
    assert not facts.nonnegative(Index.of("N") - "B"), "B <= N holds only where the late part runs"
    assert facts.nonnegative(n - "B")


def test_a_late_equation_decides_nothing_early() -> None:
    facts, n = context("B", "C")
    facts.unify(2 * n, 3 * Index.of("B"), "late")
    facts.unify(n, "C", "late")
    assert facts.equal(2 * Index.of("C"), 3 * Index.of("B")) is None


def test_a_size_of_its_own_asks_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssdlite320 has 180 of them; repeating all checks after each took longer than an hour."""
    facts, n = context("H", "W")
    total = (Index.of("H") + 31) // 32 * ((Index.of("W") + 31) // 32) * 6
    facts.assume_at_most(n, total, "as many as there are")
    sizes = [minimum(n, 300), minimum(n, total), maximum(Index.of("H"), Index.of("W"))]
    before = [facts.canonical(x) for x in sizes]
    asked, nonnegative = list[str](), prove.nonnegative
    facts.assume_at_most(facts.fresh_symbol("m"), total, "as many as there are")
    monkeypatch.setattr(prove, "nonnegative", lambda p, *rest: asked.append(str(p)) or nonnegative(p, *rest))
    assert [facts.canonical(x) for x in sizes] == before == [sizes[0], n, sizes[2]] and not asked
    facts.at_most("W", "H", "a fact about what was asked")
    assert facts.canonical(sizes[2]) == Index.of("H"), "what a fact helps is asked again"


def test_a_fact_helps_where_what_it_adds_is_bounded() -> None:
    facts, _ = context("H", "S", "W")
    facts.at_most(Index.of("S") + 5, "H", "H is at least 5")
    assert facts.nonnegative(Index.of("H") - 5)
    facts.at_most("W", 7, "a table")
    facts.at_most("S", "W", "as many as there are")
    assert facts.nonnegative(7 - Index.of("S"))


def test_what_is_false_somewhere_is_not_looked_for_in_all_cases() -> None:
    """Boxes of 90 classes, each at most 300: two cases for each of them, three deep."""
    facts, _ = context()
    found = [facts.fresh_symbol("n") for _ in range(90)]
    for n in found[:3]:
        facts.assume_at_most(n, 2, "a fact about some")
    boxes = Index.of(0)
    for n in found:
        boxes = boxes + minimum(n, 300)
    assert not facts.nonnegative(1 - boxes) and not facts.nonnegative(boxes - 4) and facts.nonnegative(27000 - boxes)
