"""Legality proofs: each accepts right schedules and catches wrong ones with a witness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import islpy as isl
import pytest

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import iteration_domain
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.isl_util import Condition, at_least, below, between, equals, frame, param_set, union_maps
from polydyn.schedules.model import Group
from polydyn.schedules.proof.order import band_properties, check_parallel, check_tree
from polydyn.schedules.tree import Band, Mark, TileStatement, Tree, sequence, to_isl
from tests.support.polyhedral_groups import PAD_CONV_FACTS, matmul, pad_conv, softmax
from tests.support.schedule_checks import check_legal

G = matmul()
D = analyse(G)
K = Index.of("K")
B_K = Index.of("B_k")
FUSED_ROWS: dict[str, list[IndexLike]] = {"S2": ["i", "j", 0, 0], "S3": ["i", "j", "k", 1], "S4": ["i", "j", K - 1, 2]}


def test_fused_matmul_is_legal() -> None:
    check_legal(G, D, FUSED_ROWS)


@pytest.mark.parametrize(
    ("statement", "rows", "edge"),
    [
        ("S4", ["i", "j", K - 2, 2], "S3 -> S4"),  # wrong shift
        ("S4", ["i", "j", K - 1, 0], "S3 -> S4"),  # epilogue before the last accumulation of its element
        ("S4", [Index.of("i") - 1, "j", K - 1, 2], "S3 -> S4"),  # epilogue a row early
        ("S2", ["i", "j", 1, 0], "S2 -> S3"),  # initialiser after the first accumulation
        ("S3", ["i", "j", -Index.of("k"), 1], "S3 -> S3"),  # accumulation reversed
    ],
)
def test_wrong_schedules_are_caught(statement: str, rows: list[IndexLike], edge: str) -> None:
    with pytest.raises(LegalityError) as e:
        check_legal(G, D, {**FUSED_ROWS, statement: rows})
    text = str(e.value)
    assert edge in text and "violated: [" in text and "for example S" in text and "tensor: D" in text


def test_dependent_instances_at_one_time() -> None:
    with pytest.raises(LegalityError, match="run at the same time"):
        check_legal(G, D, {**FUSED_ROWS, "S4": ["i", "j", K - 1, 1]})
    with pytest.raises(ScheduleError, match="no rows for"):
        check_legal(G, D, {"S2": ["i"]})


def test_parallel_rows() -> None:
    check_parallel(G, D, FUSED_ROWS, [0, 1])
    with pytest.raises(LegalityError, match=r"parallel row 2 carries a dependence(.|\n)*before"):
        check_parallel(G, D, FUSED_ROWS, [1, 2])
    s = softmax()
    rows: dict[str, list[IndexLike]] = {
        "M0": ["r", 0, 0, 0], "M1": ["r", 0, "l", 1], "D0": ["r", 1, 0, 0], "D1": ["r", 1, "l", 1],
        "Y": ["r", 2, "l", 0],
    }  # fmt: skip
    d = analyse(s)
    check_parallel(s, d, rows, [0])
    with pytest.raises(LegalityError, match="carries"):
        check_parallel(s, d, rows, [2])
    lifted: dict[str, list[IndexLike]] = {"S2": ["i", "j", 0, 0], "S3": ["i", "j", 1, "k"], "S4": ["i", "j", 2, 0]}
    with pytest.raises(LegalityError, match="S3 -> S3"):
        check_parallel(G, D, lifted, [3])


def test_band_properties() -> None:
    inner: dict[str, list[IndexLike]] = {n: r[:3] for n, r in FUSED_ROWS.items()}
    assert band_properties(G, D, {}, inner) == ((True, True, False), True)
    c = pad_conv()
    d = analyse(c, PAD_CONV_FACTS)
    out: list[IndexLike] = ["n", "h", "w", "o"]
    prefix: dict[str, list[IndexLike]] = {"S1": [0], "S2": [1], "S3": [1], "S4": [1]}
    rows = {"S1": ["n", "h", "w", "c"], "S2": out, "S3": out, "S4": out}
    assert band_properties(c, d, prefix, rows) == ((True,) * 4, True)  # type: ignore[arg-type]
    flags, permutable = band_properties(c, d, {}, rows)  # type: ignore[arg-type]
    assert flags[0] and not any(flags[1:]) and not permutable, "without the phase the padding races with the windows"


# -- tile space ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coordinate:
    """One tile-space coordinate of one level: ``floor(iterator / divide)``, then modulo ``modulo`` if given."""

    iterator: str
    divide: int = 1
    modulo: int | None = None

    def expr(self) -> Index:
        x = Index.of(self.iterator) // self.divide
        return x if self.modulo is None else x % self.modulo


def expansion(group: Group, coords: Mapping[str, Sequence[Coordinate | IndexLike]]) -> isl.UnionMap:
    """Return original instance -> tile-space instance (of the same name), for numeric tile sizes.

    A coordinate that is not a tile of an iterator is an affine expression (``0``, ``B_k - 1``), which may contain
    parameters of the tile space.
    """
    parts = []
    for s in group.statements:
        if s.name in coords:
            exprs = [c.expr() if isinstance(c, Coordinate) else Index.of(c) for c in coords[s.name]]
            known = {*s.iterators, *group.params}
            tile_params = sorted(set().union(*(e.symbols() for e in exprs)) - known)
            f = frame(s.name, s.iterators, (*group.params, *tile_params))
            parts.append(f.map_to(s.name, exprs).intersect_domain(iteration_domain(group, s)))
    return union_maps(parts, group.params)


TILE = {"i": 8, "j": 6, "k": 4}
PARAMS = ("M", "N", "K", "B_i", "B_j", "B_k", "P_i", "P_j", "P_k")


def tile_statements(exact: bool = False) -> list[TileStatement]:
    def make(name: str, iterators: str, *extra: Condition) -> TileStatement:
        coords = ("b_i", "b_j", "b_k", *(f"p_{v}" for v in iterators))
        box = [c for v in coords if v != "b_k" for c in between(0, v, v[0].upper() + v[1:])]
        sizes = {"i": "M", "j": "N", "k": "K"}
        tails = [below(Index.of(f"b_{v}") * TILE[v] + f"p_{v}", sizes[v]) for v in iterators if exact]
        return TileStatement(name, coords, (*box, *tails, *extra))

    return [
        make("S2", "ij", equals("b_k", 0)),
        make("S3", "kij", *between(0, "b_k", B_K)),
        make("S4", "ij", equals("b_k", B_K - 1)),
    ]


def tile_tree(order: Sequence[str] = ("S2", "S3", "S4")) -> Tree:
    point = Band(("p_i", "p_j"))
    nests: dict[str, Tree] = {"S2": point, "S3": Band(("p_k",), point), "S4": point}
    return Mark("task", Band(("b_i", "b_j"), Band(("b_k",), sequence(*((n, nests[n]) for n in order)))))


def tile_context(short: int = 0) -> isl.Set:
    facts = [equals(f"P_{v}", TILE[v]) for v in "ijk"]
    for v, size in zip("ijk", "MNK", strict=True):
        blocks = Index.of(f"B_{v}") * TILE[v]
        facts += [at_least(blocks, Index.of(size) - short), below(blocks - TILE[v], Index.of(size) - short)]
    return param_set(PARAMS, facts)


def coordinates() -> dict[str, list[Coordinate | IndexLike]]:
    b = {v: Coordinate(v, TILE[v]) for v in "ijk"}
    p = {v: Coordinate(v, 1, TILE[v]) for v in "ijk"}
    return {
        "S2": [b["i"], b["j"], 0, p["i"], p["j"]],
        "S3": [b["i"], b["j"], b["k"], p["k"], p["i"], p["j"]],
        "S4": [b["i"], b["j"], B_K - 1, p["i"], p["j"]],
    }


def verify(
    coords: Mapping[str, Sequence[Coordinate | IndexLike]] | None = None,
    tree: Tree | None = None,
    context: isl.Set | None = None,
    exact: bool = False,
) -> None:
    s = to_isl(tree or tile_tree(), tile_statements(exact), PARAMS)
    ctx = tile_context() if context is None else context
    check_tree(G, D, expansion(G, coords or coordinates()), s, ctx)


def test_tiled_matmul() -> None:
    verify()
    verify(exact=True)


def test_a_box_one_short_does_not_cover() -> None:
    with pytest.raises(LegalityError, match=r"not covered by the tiles(.|\n)*for example"):
        verify(context=tile_context(short=1))


def test_two_instances_in_one_place() -> None:
    wrong = coordinates()
    wrong["S3"][0] = 0
    with pytest.raises(LegalityError, match="share one tile-space instance: S3"):
        verify(wrong)


def test_missing_statement() -> None:
    wrong = coordinates()
    del wrong["S2"]
    with pytest.raises(LegalityError, match="missing in tile space: S2"):
        verify(wrong)


def test_epilogue_before_the_accumulation() -> None:
    with pytest.raises(LegalityError, match=r"backwards: S3 -> S4(.|\n)*for example"):
        verify(tree=tile_tree(("S2", "S4", "S3")))


def test_epilogue_in_a_wrong_reduction_block() -> None:
    statements = [replace(s, conditions=(*s.conditions[:-1], equals("b_k", 0))) for s in tile_statements()[2:]]
    s = to_isl(tile_tree(), [*tile_statements()[:2], *statements], PARAMS)
    wrong = coordinates()
    wrong["S4"][2] = 0
    with pytest.raises(LegalityError, match="backwards: S3 -> S4"):
        check_tree(G, D, expansion(G, wrong), s, tile_context())


def test_interchanged_reduction_is_another_order() -> None:
    """Reduction blocks run last to first: fine for the mathematics, not for the bits."""
    wrong = coordinates()
    wrong["S3"][2] = B_K - 1 - Index.of("k") // TILE["k"]
    with pytest.raises(LegalityError, match=r"S2 -> S3|S3 -> S3|S3 -> S4"):
        verify(wrong)
