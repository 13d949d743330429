"""ShapeContext: proven facts must be true at every size, and a fact learned late holds everywhere."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polydyn.errors import ShapeError
from polydyn.schedules.index import Atom, Index, maximum, minimum
from polydyn.schedules.ranges import divide
from polydyn.shapes.context import ShapeContext, Undecided

SIZES = (0, 1, 2, 5, 10, 127, 128)
NAMES = ("A", "B", "C")
EXAMPLES = int(os.environ.get("POLYDYN_EXAMPLES", "100"))
"""``make fuzz-shapes`` sets a larger number."""


def exact(p: Index, env: dict[str, int]) -> int | None:
    """Return the value, or None for a division by 0 (such values are never used: no element is addressed)."""

    def divides(q: Index) -> bool:
        inner = [a for a in q.atoms() if isinstance(a, Atom)]
        return all(map(divides, (x for a in inner for x in a.args))) and all(
            a.kind != "floordiv" or a.args[1].evaluate(env) != 0 for a in inner
        )

    return p.evaluate(env) if divides(p) else None


atoms = st.one_of(st.sampled_from(NAMES).map(Index.of), st.integers(-3, 130).map(Index.of))


def grow(inner: st.SearchStrategy[Index]) -> st.SearchStrategy[Index]:
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda t: t[0] + t[1]),
        two.map(lambda t: t[0] - t[1]),
        two.map(lambda t: t[0] * t[1]),
        two.map(lambda t: minimum(*t)),
        two.map(lambda t: maximum(*t)),
        st.tuples(inner, st.sampled_from([1, 2, 3, 64])).map(lambda t: t[0] // t[1]),
        st.tuples(inner, st.sampled_from(NAMES)).map(lambda t: t[0] // t[1]),
        st.tuples(inner, st.sampled_from([2, 128])).map(lambda t: t[0] % t[1]),
    )


expressions = st.recursive(atoms, grow, max_leaves=6)


def context(**ranges: tuple[int, int | None]) -> ShapeContext:
    c = ShapeContext(ranges)
    for n in NAMES:
        c.declare(n, "x")
    return c


def points(**ranges: tuple[int, int | None]) -> list[dict[str, int]]:
    bounds = [ranges.get(n, (0, None)) for n in NAMES]
    allowed = [[s for s in SIZES if lo <= s <= (hi if hi is not None else s)] for lo, hi in bounds]
    return [dict(zip(NAMES, p, strict=True)) for p in itertools.product(*allowed)]


@settings(max_examples=EXAMPLES, deadline=None)
@given(expressions, st.sampled_from([{}, {"A": (1, 128)}, {"A": (2, None), "B": (0, 1)}]))
def test_canonical_keeps_the_value_and_proofs_are_true(p: Index, ranges: dict[str, tuple[int, int | None]]) -> None:
    c = context(**ranges)
    q = c.canonical(p)
    values = [(v, q.evaluate(env)) for env in points(**ranges) if (v := exact(p, env)) is not None]
    assert all(a == b for a, b in values), (p, q)
    if c.nonnegative(p):
        assert all(a >= 0 for a, _ in values), p


@settings(max_examples=EXAMPLES, deadline=None)
@given(expressions, expressions)
def test_equal_is_never_wrong(a: Index, b: Index) -> None:
    known = context().equal(a, b)
    values = [(exact(a, env), exact(b, env)) for env in points()]
    same = [x == y for x, y in values if x is not None and y is not None]
    assert known is None or not same or (all(same) if known else not any(same)), (a, b, known)


@settings(max_examples=EXAMPLES, deadline=None)
@given(expressions, expressions, expressions)
def test_what_follows_from_a_learned_equality_holds_wherever_the_guards_hold(a: Index, b: Index, p: Index) -> None:
    c = context()
    try:
        c.unify(a, b, "test")
    except ShapeError:
        assert not any(exact(a, env) == exact(b, env) != None for env in points())  # noqa: E711
        return
    q = c.canonical(p)
    for env in points():
        if None in (exact(a, env), exact(b, env), exact(p, env), exact(q, env)):
            continue
        met = all(
            {"==": x == y, "<=": x <= y, "%==": (x % y if y else x) == 0}[g.relation]
            for g in c.guards()
            for x, y in [(g.left.evaluate(env), g.right.evaluate(env))]
        )
        assert met == (a.evaluate(env) == b.evaluate(env)), (a, b, c.guards())
        if met:
            assert p.evaluate(env) == q.evaluate(env), (a, b, p, q, env)


def test_late_facts_change_what_was_read_before() -> None:
    c = context()
    before = Index.of("B") * 12 + Index.of("C")
    c.unify("B", "A", "matmul")
    c.unify("C", 3, "bias")
    assert str(c.canonical(before)) == "(3 + 12*A)" or c.canonical(before) == Index.of("A") * 12 + 3
    assert [(str(g.left), str(g.right)) for g in c.guards()] == [("B", "A"), ("C", "3")]
    assert c.unify(Index.of("B") * 4, Index.of("A") * 4, "again") == Index.of("A") * 4
    assert len(c.guards()) == 2, "what is known needs no guard"


def test_constants_then_earlier_inputs_represent() -> None:
    c = context()
    assert str(c.unify("A", "C", "x")) == "A" and str(c.unify("C", "B", "y")) == "A"
    assert c.unify("B", 7, "z") == 7 and c.canonical("C") == 7


def test_products_are_equal_without_their_factors() -> None:
    c = context()
    d = c.declare("D")
    c.unify(Index.of("A") * "B", d * "C", "reshape")
    assert c.equal(Index.of("A") * "B" * 64, d * "C" * 64) is True
    assert c.equal("A", d) is None
    c.unify("D", "A", "late")  # the product rule is stated again in the new terms
    assert c.equal(Index.of("A") * "B", Index.of("A") * "C") is True


def test_clamped_sizes_teach_bounds() -> None:
    c = context()
    assert str(c.unify("A", minimum("A", 512), "positions")) == "A"
    assert [(str(g.left), g.relation, str(g.right)) for g in c.guards()] == [("A", "<=", "512")]
    assert c.canonical(minimum("A", 1000)) == Index.of("A")
    assert str(c.canonical(minimum("A", 1))) == "min(1, A)", "0 and 1 are ordinary sizes"


def test_contradictions_name_the_chain() -> None:
    c = context(A=(1, 64))
    c.unify("B", "A", "MatMul m1: inner dims")
    with pytest.raises(ShapeError, match="because: MatMul m1: inner dims") as e:
        c.unify("B", 100, "Add a2: axis 0")
    assert e.value.rule == "Add a2: axis 0"
    with pytest.raises(ShapeError, match="does not have"):
        ShapeContext({"Q": (0, 1)}).check_dims()
    with pytest.raises(ShapeError, match="holds no size"):
        context(A=(5, 4))


def test_broadcast_never_guesses_silently() -> None:
    c = context(C=(2, None))
    assert str(c.broadcast("A", 1, "add")) == "A" and not c.guards()[1:]
    with pytest.raises(Undecided):
        c.broadcast("A", "B", "add", assume=False)
    assert not c.notes
    c.broadcast("A", "B", "Add a1", assume=True)
    assert "Add a1" in c.notes[0] and c.guards()[-1].message == "Add a1"
    assert str(c.broadcast("A", "C", "mul", assume=False)) == "A"  # C >= 2: nothing later could decide more
    assert "mul" in c.notes[1]


def test_divisibility() -> None:
    c = context()
    assert not c.is_multiple("A", 4)
    c.assume_multiple("A", 4, "heads")
    assert c.is_multiple("A", 4) and c.canonical(Index.of("A") // 4 * 4) == Index.of("A")
    assert [(str(g.left), g.relation, str(g.right)) for g in c.guards()] == [("A", "%==", "4")]
    c.unify(Index.of("B") // 8 * 8, "B", "the same, said as an equation")
    assert c.guards()[-1].relation == "%==" and c.is_multiple("B", 8)


@pytest.mark.parametrize("sizes", [(0, 3, 2), (3, 0, 5), (1, 1, 1), (2, 7, 3), (5, 4, 0)])
def test_nested_divisions_by_sizes_become_one(sizes: tuple[int, int, int]) -> None:
    a, b, c = map(Index.of, "abc")
    x = Index.of("x") + a
    assert str((x // b) // c) == str(x // (b * c))
    env = dict(zip("abc", sizes, strict=True))
    for v in range(40):
        whole = v + env["a"]
        by_hand = (whole // env["b"] if env["b"] else 0) // env["c"] if env["c"] else 0
        assert ((x // b) // c).evaluate(env | {"x": v}) == by_hand


def test_a_place_inside_an_image_does_not_move_its_channel() -> None:
    h, w = map(Index.of, "HW")
    c, i, j = map(Index.of, "cij")
    ranges = {"c": Index.of(8), "i": h, "j": w}
    assert divide(c * h * w + i * w + j, 4 * h * w, ranges) == c // 4
    assert divide(c * h + i, 4 * h, ranges) == c // 4
    assert divide(c * h + i + 1, 4 * h, ranges) != c // 4, "the last row of an image carries over"


def test_rounded_halves_that_double_to_the_size_make_it_even() -> None:
    """Skip connections around strided convolutions: the fitting sizes are one divisibility each, in any order."""
    for order in ((0, 1), (1, 0)):
        for up in (0, 1):
            c = ShapeContext()
            h = c.declare("H", "x")
            half = (h + up) // 2
            quarter = (half + up) // 2
            equations = [(half * 2, h), (quarter * 2, half)]
            for k in order:
                c.unify(*equations[k], reason=f"level {k}")
            assert c.is_multiple(h, 4) and c.canonical(quarter * 4) == h and c.canonical(half) == c.canonical(h // 2)
            assert {g.relation for g in c.guards()} == {"%=="}
            for size in range(1, 17):
                holds = all(
                    g.left.evaluate({"H": size}) % g.right.evaluate({"H": size}) == 0 for g in c.guards()
                )  # fmt: skip
                assert holds == all(a.evaluate({"H": size}) == b.evaluate({"H": size}) for a, b in equations), size


def test_the_first_of_something_broadcasts_beside_what_may_be_more() -> None:
    """There ``min(1, N)``, the size of a slice, is 1; 0 is rejected. Two of them are equal like other sizes."""
    c = context()
    first = minimum(1, Index.of("A"))
    assert str(c.broadcast("B", first, "Expand e1")) == "B"
    assert [(str(g.left), g.relation, str(g.right)) for g in c.guards()] == [("1", "<=", "A")]
