"""The laws of algebraic rewrites, which no schedule proof covers (docs/adr/0004), for any split of the elements.

Split reductions: lane-partial sums, independent chains, predicated tails, split-K. Online softmax: a row's maximum, sum
and weighted values over the keys so far, rescaled when the maximum grows.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydyn.schedules.expr import OPS, REDUCTIONS, neutral

F32 = npt.NDArray[np.float32]
NUMBERS = st.one_of(st.floats(-80, 80, width=32), st.sampled_from([0.0, -0.0, 1.0, float("-inf")]))


@st.composite
def cut(draw: st.DrawFn, numbers: st.SearchStrategy[float], limit: int = 24) -> list[F32]:
    """Draw elements in chunks of any sizes, 0 included, in any order."""
    x = draw(st.lists(numbers, max_size=limit))
    ends = sorted(draw(st.lists(st.integers(0, len(x)), max_size=5)))
    bounds = [0, *ends, len(x)]
    return [np.array(x[a:b], np.float32) for a, b in itertools.pairwise(bounds)]


def reduced(reduction: str, x: F32, start: float) -> np.float32:
    total = np.float32(start)
    for v in x:
        total = np.float32(OPS[REDUCTIONS[reduction]].numpy(total, v))
    return total


# -- split reductions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
@given(chunks=cut(st.floats(-4, 4, width=32)), backwards=st.booleans())
def test_a_split_reduction_is_the_reduction(reduction: str, chunks: list[F32], backwards: bool) -> None:
    """Every slice starts at the neutral element; slices are combined in any order; empty ones change nothing."""
    start = float(neutral(reduction, "float32").value)
    whole = np.concatenate(chunks)
    parts = np.array([reduced(reduction, c, start) for c in chunks], np.float32)
    got, want = reduced(reduction, parts[::-1] if backwards else parts, start), reduced(reduction, whole, start)
    if reduction in ("max", "min"):
        assert got == want
    else:  # sums may cancel: errors are relative to the terms
        size = np.abs(whole).sum() if reduction == "sum" else abs(want)
        assert abs(float(got) - float(want)) <= 1e-5 * float(size) + 1e-30


@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_a_split_reduction_hands_on_what_is_not_finite(reduction: str, special: float) -> None:
    start = float(neutral(reduction, "float32").value)
    x = np.array([1.5, special, 2.0], np.float32)
    for at in range(4):
        parts = np.array([reduced(reduction, c, start) for c in (x[:at], x[at:])], np.float32)
        np.testing.assert_array_equal(reduced(reduction, parts, start), reduced(reduction, x, start))


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), st.integers(0, 20))
def test_split_integer_sums_have_the_same_bits(x: list[int], at: int) -> None:
    whole = np.array(x, np.int32)
    with np.errstate(over="ignore"):
        parts = whole[:at].sum(dtype=np.int32) + whole[at:].sum(dtype=np.int32)
        assert parts == whole.sum(dtype=np.int32)


# -- online softmax --------------------------------------------------------------------------------------------------

State = tuple[np.float32, np.float32, np.float32]
"""Maximum so far, sum of exp(x - maximum), sum of exp(x - maximum) * value."""
FIRST: State = (np.float32("-inf"), np.float32(0), np.float32(0))


def finite(peak: np.float32) -> np.float32:
    """Return the number to subtract: 0 while every key is masked, so that nothing becomes -inf - -inf."""
    return np.float32(0) if peak == -np.inf else peak


def updated(state: State, x: F32, v: F32, guarded: bool = True) -> State:
    """Return the state after a chunk of keys with logits ``x`` and values ``v``."""
    m, z, a = state
    peak = np.float32(max(m, x.max(initial=np.float32("-inf"))))
    off = finite(peak) if guarded else peak
    with np.errstate(invalid="ignore"):
        scale, p = np.exp(m - off), np.exp(x - off)
    return peak, np.float32(z * scale + p.sum()), np.float32(a * scale + (p * v).sum())


def direct(x: F32, v: F32) -> np.float32:
    with np.errstate(invalid="ignore", divide="ignore"):
        p = np.exp(x - finite(x.max(initial=np.float32("-inf"))))
        return np.float32((p / p.sum() * v).sum()) if len(x) else np.float32("nan")


@given(cut(NUMBERS), st.integers(0, 2**32 - 1))
def test_online_softmax_is_softmax(chunks: list[F32], seed: int) -> None:
    """Any split, including empty and completely masked chunks; a row with every key masked gives NaN, as 0 / 0 does."""
    whole = np.concatenate(chunks)
    values = np.random.default_rng(seed).standard_normal(len(whole), np.float32)
    state, at = FIRST, 0
    for x in chunks:
        state, at = updated(state, x, values[at : at + len(x)]), at + len(x)
    with np.errstate(invalid="ignore"):
        got = state[2] / state[1]
    if not np.isfinite(whole).any():
        assert np.isnan(got) and np.isnan(direct(whole, values))
        return
    assert abs(got - direct(whole, values)) <= 1e-4 * max(1.0, float(np.abs(values).max()))


@given(cut(NUMBERS), cut(NUMBERS))
def test_states_of_two_shares_of_the_keys_combine(first: list[F32], second: list[F32]) -> None:
    """Split keys: two states combine like a state and a chunk; the order does not matter."""
    x, y = np.concatenate(first), np.concatenate(second)
    a, b = (updated(FIRST, s, np.ones_like(s)) for s in (x, y))

    def joined(p: State, q: State) -> tuple[float, float]:
        off = finite(np.float32(max(p[0], q[0])))
        return tuple(float(p[k] * np.exp(p[0] - off) + q[k] * np.exp(q[0] - off)) for k in (1, 2))  # type: ignore[return-value]

    both = updated(FIRST, np.concatenate([x, y]), np.ones(len(x) + len(y), np.float32))
    assert joined(a, b) == joined(b, a)
    np.testing.assert_allclose(joined(a, b), both[1:], rtol=1e-5, atol=1e-30)


def test_without_the_guard_a_masked_first_chunk_would_spoil_the_row() -> None:
    masked, one = np.array([-np.inf], np.float32), np.ones(1, np.float32)
    assert np.isnan(updated(updated(FIRST, masked, one, guarded=False), one, one, guarded=False)[1])
    assert updated(updated(FIRST, masked, one), one, one)[1] == 1
