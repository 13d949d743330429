"""Bound GPU trees are proven: for every tile that binaries are built for, and a control for each kind of mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import FMA_TILES, IMMA_TILES, MMA_TILES, MORE_TILES, TF32_TILES
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import FromIndex, const, op
from polydyn.schedules.gpu_tiling import gpu_attention_tree, gpu_gemv_tree, gpu_wgmma_tree
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.isl_util import Condition, at_least, below
from polydyn.schedules.laws.masks import Axis, Logits, tile_conditions
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.gpu_attention import AttentionTiles, prove_gpu_attention
from polydyn.schedules.proof.gpu_rows import FewRows, Warpgroups, prove_few_rows, prove_warpgroups
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree import Band, Mark, Sequence, Tree
from polydyn.schedules.tree.gpu import gpu_product
from tests.support.polyhedral_groups import F, array, group, ld, statement

V = Index.of


def batched(k: IndexLike = "K") -> Group:
    """{batched MatMul, Bias + Relu, and the sums themselves}, the reduction in two iterators."""
    o: dict[str, IndexLike] = {"b": "B", "i": "M", "j": "N"}
    x = op("add", ld("D", "b", "i", "j"), ld("C", "j"))
    g = group(
        "product", "B M N K R",
        [array("A", "input", "B", "M", k, "R"), array("W", "input", k, "R", "N"), array("C", "constant", "N"),
         array("D", "local", "B", "M", "N"), array("E", "output", "B", "M", "N"), array("G", "output", "B", "M", "N")],
        [statement("INIT", o, "D", "b i j", const(0, F)),
         statement("ACC", {**o, "k": k, "r": "R"}, "D", "b i j",
                   op("mul", ld("A", "b", "i", "k", "r"), ld("W", "k", "r", "j")), "sum"),
         statement("DONE0", o, "E", "b i j", op("max", x, const(0, F))),
         statement("DONE1", o, "G", "b i j", ld("D", "b", "i", "j"))],
    )  # fmt: skip
    roles = ("init", "backbone", "epilogue", "epilogue")
    return replace(g, statements=tuple(replace(s, role=r) for s, r in zip(g.statements, roles, strict=True)))


def single() -> Group:
    """The same with one reduction iterator."""
    g = batched()
    a, w = (array(n, "input", *shape) for n, shape in (("A", ("B", "M", "K")), ("W", ("K", "N"))))
    product = op("mul", ld("A", "b", "i", "k"), ld("W", "k", "j"))

    def one(s: Statement) -> Statement:
        return replace(s, iters=tuple(x for x in s.iters if x[0] != "r"), value=product) if s.reduce else s

    arrays = {**g.arrays, "A": a, "W": w}
    return replace(g, params=("B", "M", "N", "K"), arrays=arrays, statements=tuple(map(one, g.statements)))


G = batched()
ROLES = Roles(("b",), "i", "j", "k", ("r",))


@pytest.mark.parametrize("tile", [*FMA_TILES, *MMA_TILES, *IMMA_TILES, *MORE_TILES, *TF32_TILES], ids=str)
def test_every_tile_is_proven_for_all_sizes(tile: CudaTile) -> None:
    prove(gpu_product(G, ROLES, tile.sizes()))


def test_constant_extents_share_the_proof_of_their_skeleton() -> None:
    g = batched(64)
    prove(gpu_product(g, ROLES, FMA_TILES[0].sizes()))


# -- what is wrong is refused, with a witness ------------------------------------------------------------------------


def refused(what: str) -> pytest.RaisesExc[LegalityError]:
    return pytest.raises(LegalityError, match=rf"{what}(.|\n)*for example")


def swapped(t: Tree, first: str, then: str) -> Tree:
    """The tree with the sequence children that hold these statements exchanged."""
    if isinstance(t, Sequence):
        at = {n: k for k, (part, _) in enumerate(t.children) for n in part}
        children = [(part, swapped(below, first, then)) for part, below in t.children]
        if at.get(first) is not None and at.get(then) is not None and at[first] != at[then]:
            children[at[first]], children[at[then]] = children[at[then]], children[at[first]]
        return Sequence(tuple(children))
    return replace(t, child=swapped(t.child, first, then)) if isinstance(t, (Band, Mark)) else t


# -- few rows, warpgroups --------------------------------------------------------------------------------------------

ONE = single()
SINGLE = Roles(("b",), "i", "j", "k", ())
SHARED = (FewRows(8, (4, 2), (4, 8), (1, 8)), FewRows(2, (1, 8), (4, 8), (4, 1)))
WARPS = (Warpgroups(64, 2, 256, 64, 1), Warpgroups(64, 2, 128, 64, 2))


@pytest.mark.parametrize("sizes", SHARED, ids=str)
def test_few_rows_are_proven(sizes: FewRows) -> None:
    t = gpu_gemv_tree(ONE, SINGLE)
    prove_few_rows(ONE, SINGLE, t, sizes)
    only = tuple(
        replace(s, conditions=(*s.conditions, at_least(0, "w_k"))) if s.name == "ACC" else s for s in t.statements
    )
    with refused("instances are not covered by the tiles: ACC"):
        prove_few_rows(ONE, SINGLE, replace(t, statements=only), sizes)
    with refused("backwards: ACC -> DONE0"):
        prove_few_rows(ONE, SINGLE, replace(t, tree=swapped(t.tree, "ACC", "DONE0")), sizes)


def test_every_lane_of_a_column_is_summed() -> None:
    class OneWarp(FewRows):
        def summed(self) -> tuple[tuple[IndexLike, ...], list[Condition]]:
            cell, inside = super().summed()
            return cell, [*inside, at_least(0, "wk")]

    class Neighbour(FewRows):
        def summed(self) -> tuple[tuple[IndexLike, ...], list[Condition]]:
            cell, inside = super().summed()
            return (cell[0], (V("e_j") // self.vector[0] + 1) % self.lanes[0], *cell[2:]), inside

    t = gpu_gemv_tree(ONE, SINGLE)
    with refused("ACC is not summed for DONE0"):
        prove_few_rows(ONE, SINGLE, t, OneWarp(*vars(SHARED[0]).values()))
    with refused("ACC of another element is summed for DONE0"):
        prove_few_rows(ONE, SINGLE, t, Neighbour(*vars(SHARED[0]).values()))


@pytest.mark.parametrize("sizes", WARPS, ids=str)
def test_warpgroups_are_proven(sizes: Warpgroups) -> None:
    prove_warpgroups(ONE, SINGLE, gpu_wgmma_tree(ONE, SINGLE), sizes)


def test_warpgroups_that_are_wrong() -> None:
    t, sizes = gpu_wgmma_tree(ONE, SINGLE), WARPS[1]
    first = tuple(
        replace(s, conditions=(*s.conditions, at_least(0, "s_j"))) if s.name == "COPY_B" else s for s in t.statements
    )
    with refused("ACC reads tile_b where nothing was written"):
        prove_warpgroups(ONE, SINGLE, replace(t, statements=first), sizes)
    with refused("ACC reads tile_a (where nothing|of another tile)"):
        prove_warpgroups(ONE, SINGLE, replace(t, tree=swapped(t.tree, "COPY_A", "ACC")), sizes)
    with refused("DONE. reads stage"):
        prove_warpgroups(ONE, SINGLE, replace(t, tree=swapped(t.tree, "STAGE", "DONE0")), sizes)


# -- attention -------------------------------------------------------------------------------------------------------

CAUSAL = Logits(
    op("where", op("le", FromIndex("int64", V("j")), FromIndex("int64", V("i"))), ld("S", "i", "j"),
       const(float("-inf"), F)),
    ("b",), Axis("i", V("M"), 64, "b_i"), Axis("j", V("N"), 64, "b_l"), ("B", "M", "N", "K"),
)  # fmt: skip
TILES = AttentionTiles(64, 64, 64, 128, 16)


def attention_tree(live: tuple[Condition, ...] = ()) -> TiledGroup:
    return gpu_attention_tree(ONE, SINGLE, 2, live)


SMALLER = (AttentionTiles(64, 32, 32, 64, 8), AttentionTiles(64, 32, 128, 32, 4))


@pytest.mark.parametrize("tiles", [TILES, *SMALLER], ids=str)
def test_attention_is_proven(tiles: AttentionTiles) -> None:
    logits = replace(CAUSAL, key=replace(CAUSAL.key, size=tiles.keys))
    live = tile_conditions(logits, logits.hidden())
    assert live
    prove_gpu_attention(attention_tree(live), logits, live, tiles)
    prove_gpu_attention(attention_tree(), logits, (), tiles)


def test_visible_tiles_must_be_visited() -> None:
    diagonal = (below(V("b_l"), V("b_i")),)
    with refused("a tile with a visible key is not visited: ACC1"):
        prove_gpu_attention(attention_tree(diagonal), CAUSAL, diagonal, TILES)


def first_only(t: TiledGroup, statement: str, *coords: str) -> TiledGroup:
    """The tree with a statement that runs at 0 of some coordinates only."""
    conditions = tuple(at_least(0, c) for c in coords)
    return replace(t, statements=tuple(
        replace(s, conditions=(*s.conditions, *conditions)) if s.name == statement else s for s in t.statements
    ))  # fmt: skip


@pytest.mark.parametrize(("statement", "coordinate", "what"), [
    ("COPY_V", "b_l", "FRAG_V reads tile_v of another tile or step"),
    ("COPY_Q", "s_k", "FRAG_Q reads tile_q where nothing was written"),
    ("FRAG_W", "f_k2", "ACC2 reads w_frag of another tile or step"),
    ("ACC1", "f_k1", "instances are not covered by the tiles: ACC1"),
    ("STAGE", "e_s", "DONE. reads stage of another"),
])  # fmt: skip
def test_attention_that_does_too_little(statement: str, coordinate: str, what: str) -> None:
    with refused(what):
        prove_gpu_attention(first_only(attention_tree(), statement, coordinate), CAUSAL, (), TILES)


@pytest.mark.parametrize(("first", "then", "what"), [
    ("ACC1", "LOGIT", "ACC1 runs after LOGIT"), ("LOGIT", "ROWS", "LOGIT runs after ROWS"),
    ("ROWS", "ACC2", "ROWS runs after FRAG_W"), ("COPY_K", "FRAG_K", "FRAG_K reads tile_k"),
])  # fmt: skip
def test_attention_in_another_order(first: str, then: str, what: str) -> None:
    t = attention_tree()
    with refused(what):
        prove_gpu_attention(replace(t, tree=swapped(t.tree, first, then)), CAUSAL, (), TILES)


def test_padding_must_be_neutral() -> None:
    largest = replace(G, statements=tuple(replace(s, reduce="max") if s.name == "ACC" else s for s in G.statements))
    with pytest.raises(LegalityError, match="padding is not neutral for ACC"):
        sunk = (("INIT", "first"), ("DONE0", "last"), ("DONE1", "last"))
        prove(gpu_product(largest, replace(ROLES, sunk=sunk), FMA_TILES[0].sizes()))
    with pytest.raises(ScheduleError, match="is not a sum of products"):
        prove(gpu_product(largest, ROLES, FMA_TILES[0].sizes()))
