"""Schedule trees: isl AST of tile-space trees, and rejected trees."""

from __future__ import annotations

import pytest

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import at_least, below, between, equals, frame, param_set, val
from polydyn.schedules.tree import Band, Leaf, Mark, TileStatement, build_ast, sequence, show, to_isl

PARAMS = ("B_i", "B_j", "B_k", "C_i", "C_j", "P_i", "P_j", "P_k")


def gemm() -> tuple[Mark, list[TileStatement]]:
    """Build the CPU tree of a matmul group: sunk statements stay in the micro tile, guarded by the reduction block."""
    outer = ("b_i", "b_j", "b_k", "c_j", "c_i")

    def statement(name: str, inner: tuple[str, ...], *extra: object) -> TileStatement:
        box = [c for v in (*outer, *inner) if v != "b_k" for c in between(0, v, v[0].upper() + v[1:])]
        return TileStatement(name, (*outer, *inner), (*box, *extra))  # type: ignore[arg-type]

    ij = ("p_i", "p_j")
    statements = [
        statement("S2", ij, equals("b_k", 0)),
        statement("LD", ij, at_least("b_k", 1), below("b_k", "B_k")),
        statement("S3", ("p_k", *ij), *between(0, "b_k", "B_k")),
        statement("ST", ij, *between(0, "b_k", Index.of("B_k") - 1)),
        statement("S4", ij, equals("b_k", Index.of("B_k") - 1)),
    ]
    point = Band(ij)
    micro = sequence(
        ("S2", point), ("LD", point), ("S3", Mark("k", Band(("p_k",), point))), ("ST", point), ("S4", point)
    )
    tree = Mark(
        "task", Band(("b_i", "b_j"), Mark("kblock", Band(("b_k",), Band(("c_j", "c_i"), Mark("micro", micro)))))
    )
    return tree, statements


def test_gemm_ast_has_one_loop_nest_with_merged_guards() -> None:
    tree, statements = gemm()
    text = build_ast(to_isl(tree, statements, PARAMS), param_set(PARAMS)).to_C_str()
    print(text)
    assert text.count("B_k; ") == 1, "the reduction block loop must not be peeled"
    assert text.count("S2(") == text.count("S3(") == text.count("S4(") == 1
    assert "c2 == 0" in text and "else" in text
    assert "band b_i, b_j" in show(tree)


def test_isl_distributes_a_band_over_the_sequence_below() -> None:
    """Known behaviour that codegen relies on: no copy of the initialiser is left inside the reduction loop."""
    init = TileStatement("S2", ("b_k", "p"), (*between(0, "p", "P"), equals("b_k", 0)))
    acc = TileStatement("S3", ("b_k", "p"), (*between(0, "p", "P"), *between(0, "b_k", "B_k")))
    tree = Band(("b_k",), Mark("micro", sequence(("S2", Band(("p",))), ("S3", Band(("p",))))))
    text = build_ast(to_isl(tree, [init, acc], ("B_k", "P")), param_set(("B_k", "P"))).to_C_str()
    assert text.count("// micro") == 2 and "if" not in text
    assert text.index("S2(0, ") < text.index("< B_k")


def test_names_that_isl_text_could_not_hold() -> None:
    s = TileStatement("max", ("mod", "and"), (*between(0, "mod", "batch size"), *between(0, "and", 3)))
    ast = build_ast(to_isl(Band(("mod", "and")), [s], ("batch size",)), param_set(("batch size",)))
    assert "batch size" in ast.to_C_str()


def test_default_places_a_statement_that_lacks_the_coordinate() -> None:
    a = TileStatement("A", ("i", "k"), (*between(0, "i", "M"), *between(0, "k", "K")))
    e = TileStatement("E", ("i",), between(0, "i", "M"))
    tree = Band(("i", "k"), sequence(("A", Leaf()), ("E", Leaf())), (("E", "k", Index.of("K") - 1),))
    text = build_ast(to_isl(tree, [a, e], ("M", "K")), param_set(("M", "K"))).to_C_str()
    assert text.index("A(") < text.index("E(")


A = TileStatement("A", ("i",), between(0, "i", "M"))
B = TileStatement("B", ("j",), between(0, "j", "M"))


@pytest.mark.parametrize(
    ("tree", "statements", "message"),
    [
        (Band(("i",)), [A, B], "not a coordinate of B"),
        (sequence(("A", Band(("i",)))), [A, B], "does not split"),
        (Band(("i",), Band(("i",))), [A], "scheduled twice"),
        (Leaf(), [A], "never scheduled"),
        (Band(("i",), Leaf(), (("B", "i", Index.of("j")),)), [A, B], "not given at a leaf"),
        (Band(("i",)), [TileStatement("A", ("i",), (at_least(Index.of("i") * "M", 0),))], "not affine"),
        (Band(("M",)), [TileStatement("A", ("M",), ())], "two dimensions"),
    ],
)
def test_tree_refuses(tree: Band, statements: list[TileStatement], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        to_isl(tree, statements, ("M",))


def test_numbers_of_any_size_reach_isl() -> None:
    n = Index.of("n")
    assert (
        frame("", (), ("n",)).holds(at_least(2**128 * n, 2**128)).is_equal(frame("", (), ("n",)).holds(at_least(n, 1)))
    )
    for x in (2**63 - 1, 2**63, -(2**63) - 1):
        assert val(x).to_python() == x
