"""Expressions as straight lines of assignments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydyn.schedules.evaluator import evaluator
from polydyn.schedules.index import Index, fetch, floordiv, maximum, minimum

N, M = Index.of("n"), Index.of("m")


def expressions() -> st.SearchStrategy[Index]:
    leaves = st.sampled_from([N, M, Index.of(0), Index.of(7), Index.of(-3)])
    return st.recursive(
        leaves,
        lambda x: st.one_of(
            st.tuples(x, x).map(lambda p: p[0] + p[1]),
            st.tuples(x, x).map(lambda p: p[0] * p[1]),
            st.tuples(x, x).map(lambda p: minimum(*p)),
            st.tuples(x, x).map(lambda p: maximum(*p)),
            st.tuples(x, st.sampled_from([Index.of(4), N, M])).map(lambda p: floordiv(*p)),
        ),
        max_leaves=12,
    )


@given(expressions(), st.integers(0, 300), st.integers(0, 300))
def test_it_is_what_evaluate_gives(x: Index, n: int, m: int) -> None:
    env = {"n": n, "m": m}
    assert evaluator(x)(env) == x.evaluate(env)


def test_a_part_is_computed_once() -> None:
    x, asked = N, 0

    class Counting(dict[str, int]):
        def __getitem__(self, name: str) -> int:
            nonlocal asked
            asked += 1
            return super().__getitem__(name)

    for c in range(1, 9):
        x = maximum(floordiv(x + c, M), floordiv(x, M) * 2)
    assert evaluator(x)(Counting(n=10**6, m=2)) == x.evaluate({"n": 10**6, "m": 2})
    assert asked == 2


def test_what_is_missing_or_read_from_a_tensor_is_refused() -> None:
    with pytest.raises(KeyError, match="m"):
        evaluator(N + M)({"n": 1})
    with pytest.raises(ValueError, match="tensor"):
        evaluator(fetch("t", (N,)))
