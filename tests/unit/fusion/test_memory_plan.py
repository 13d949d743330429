"""The memory plan never lets two live tensors share memory, and lets others share it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.program.memory import LiveRange, live_ranges, plan_slots
from polydyn.schedules.index import Index

B, L = Index.of("B"), Index.of("L")
SIZES = [B * 4, L * 4, B * L * 4, B * L * 16, B * B, Index.of(64), Index.of(0), B // 2 * L]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.sampled_from(SIZES)), max_size=40))
def test_no_two_tenants_overlap(rows) -> None:
    lives = [LiveRange(f"t{i}", size, first, first + length) for i, (first, length, size) in enumerate(rows)]
    by_name = {x.name: x for x in lives}
    slots = plan_slots(lives)
    assert sorted(t for s in slots for t in s.tenants) == sorted(by_name)
    for s in slots:
        assert {by_name[t].bytes for t in s.tenants} == set(s.sizes)
        for a in s.tenants:
            assert not any(by_name[a].overlaps(by_name[b]) for b in s.tenants if b != a)
    deepest = max((sum(x.first <= i <= x.last for x in lives) for i in range(45)), default=0)
    assert len(slots) >= deepest


def test_a_chain_needs_two_slots() -> None:
    sizes = {f"t{i}": B * L * 4 for i in range(20)}
    lives = live_ranges(sizes, [("in", "t0"), *((f"t{i}", f"t{i + 1}") for i in range(19)), ("t19", "out")])
    assert len(plan_slots(lives)) == 2


def test_an_output_never_shares_with_an_input_of_its_launch() -> None:
    lives = live_ranges({"a": L, "b": L}, [("a",), ("a", "b"), ("b",)])
    assert len(plan_slots(lives)) == 2


def test_untouched_tensors_get_no_memory() -> None:
    assert live_ranges({"a": L, "b": L}, [("a",)]) == (LiveRange("a", L, 0, 0),)
