"""Decisions from ranges of iterators: never a wrong value, and the addresses of folded images in particular."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.schedules.index import Index
from polydyn.schedules.ranges import is_nonnegative, simplify, upper_bound

ITERATORS = tuple(map(Index.of, "ijk"))
EXTENTS = {"i": 4, "j": 6, "k": 3}
RANGES = {v: Index.of(n) for v, n in EXTENTS.items()}
SIZE = Index.of("S")
SIZES = (0, 1, 7)
POINTS = [dict(zip(EXTENTS, p, strict=True)) for p in product(*map(range, EXTENTS.values()))]


@st.composite
def quasi_affine(draw: st.DrawFn, depth: int = 2) -> Index:
    """Draw sums of iterators, a size, and divisions of such sums by small constants times one of these; remainders too.
    """
    out = Index.of(draw(st.integers(-6, 6)))
    for v in (*ITERATORS, SIZE):
        out = out + v * draw(st.integers(-8, 8))
    for _ in range(draw(st.integers(0, 2)) if depth else 0):
        x, n, k = draw(quasi_affine(depth=depth - 1)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
        c = draw(st.sampled_from((Index.of(1), *ITERATORS, SIZE))) * draw(st.integers(-8, 8))
        out = out + (x // n) * c - (x // (n * k)) * (c * k * draw(st.booleans()))
    return out


@settings(max_examples=60, deadline=None)
@given(quasi_affine(), st.integers(1, 24))
def test_ranges_decide_nothing_wrongly(p: Index, n: int) -> None:
    high = upper_bound(p, RANGES)
    for size in ({"S": s} for s in SIZES):
        values = [p.evaluate(at | size) for at in POINTS]
        assert [simplify(p // n, RANGES).evaluate(at | size) for at in POINTS] == [v // n for v in values]
        assert high is None or max(values) <= high.evaluate(size)
        assert not is_nonnegative(p, RANGES) or min(values) >= 0


def test_a_negative_factor_turns_a_bound_around() -> None:
    """Offsets of padded rows: 512 * b for each ``-(-L // 512)``."""
    down, b = -SIZE // 512, ITERATORS[0]
    ranges = {"i": Index.of("B")}
    assert upper_bound(b * down * -512, ranges) == (Index.of("B") - 1) * down * -512
    assert is_nonnegative(b * down * -1, ranges) and not is_nonnegative(b * down, ranges)


def test_digits_of_folded_images_stay_inside_them() -> None:
    """A patch's offset in its image: digits of the batch and of the row index, never the next channel's."""
    ranges = {"b": Index.of("B"), "r": Index.of(16), "c": Index.of(24)}
    b, r, c = map(Index.of, "brc")
    place = b // 2 - (b // 4) * 2 + (r // 4) * 2  # (b // 2) % 2 + 2 * (r // 4)
    assert upper_bound(place, ranges) == Index.of(7)
    assert simplify((c * 8 + place) // 192, ranges) == Index.of(0)
    assert simplify((c * 8 + place + 1) // 192, ranges) != Index.of(0)  # 184 + 8 is the next one's


def test_expressions_of_shared_parts_are_walked_part_by_part() -> None:
    """Each level reads the one below it twice: visiting every path would take 2**80 steps."""

    def deep(last: int) -> Index:
        x = Index.of("i")
        for n in range(80):
            x = x // 3 + x // (5 if n else last)
        return x

    assert deep(5) == deep(5) and hash(deep(5)) == hash(deep(5))
    assert deep(5) != deep(7)
    assert deep(5).rebuild(lambda a: Index({(a,): 1})) == deep(5)
    assert deep(5).evaluate({"i": 2}) == 0


def test_quotients_of_sizes_alone_cancel() -> None:
    """``i*P + j`` with P a length padded to whole blocks: its remainder is equal everywhere."""
    padded = (Index.of("L") + 511) // 512 * 512
    place = Index.of("i") * padded + Index.of("j")
    assert upper_bound(place, {"i": Index.of("B"), "j": padded}) == padded * "B" - 1


def test_what_is_left_of_a_size_is_not_negative() -> None:
    assert is_nonnegative(Index.of("L") - Index.of("L") // 512 * 512)
