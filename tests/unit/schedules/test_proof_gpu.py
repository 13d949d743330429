"""Bound GPU trees are proven: for every tile of the built binaries, and a control for each kind of mistake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.versions import (
    FMA_TILES,
    IMMA_TILES,
    MMA_TILES,
    MORE_FMA_TILES,
    MORE_TILES,
    TF32_TILES,
)
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import FromIndex, const, op
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.isl_util import below
from polydyn.schedules.laws.masks import Axis, Logits, check_conditions, tile_conditions
from polydyn.schedules.model import Group
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.gpu import gpu_product
from tests.support.polyhedral_groups import F, array, group, ld, statement

V = Index.of


def batched(k: IndexLike = "K") -> Group:
    """Build {batched MatMul, Bias + Relu, and the sums themselves}, the reduction in two iterators."""
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


G = batched()
ROLES = Roles(("b",), "i", "j", "k", ("r",))


@pytest.mark.parametrize(
    "tile", [*FMA_TILES, *MORE_FMA_TILES, *MMA_TILES, *IMMA_TILES, *MORE_TILES, *TF32_TILES], ids=str
)
def test_every_tile_is_proven_for_all_sizes(tile: CudaTile) -> None:
    prove(gpu_product(G, ROLES, tile.sizes()))


def test_constant_extents_share_the_proof_of_their_skeleton() -> None:
    g = batched(64)
    prove(gpu_product(g, ROLES, FMA_TILES[0].sizes()))


# -- rejections, with a witness ----------------------------------------------------------------------------------------


# -- attention -------------------------------------------------------------------------------------------------------

CAUSAL = Logits(
    op("where", op("le", FromIndex("int64", V("j")), FromIndex("int64", V("i"))), ld("S", "i", "j"),
       const(float("-inf"), F)),
    ("b",), Axis("i", V("M"), 64, "b_i"), Axis("j", V("N"), 64, "b_l"), ("B", "M", "N", "K"),
)  # fmt: skip


@pytest.mark.parametrize("keys", [32, 64])
def test_visible_tiles_must_be_visited(keys: int) -> None:
    logits = replace(CAUSAL, key=replace(CAUSAL.key, size=keys))
    live = tile_conditions(logits, logits.hidden())
    assert live
    check_conditions(logits, live, logits.hidden())
    with pytest.raises(LegalityError, match=r"a tile with a visible key is not visited: ACC1(.|\n)*for example"):
        check_conditions(logits, (below(V("b_l"), V("b_i")),), logits.hidden())


def test_padding_must_be_neutral() -> None:
    largest = replace(G, statements=tuple(replace(s, reduce="max") if s.name == "ACC" else s for s in G.statements))
    with pytest.raises(LegalityError, match="padding is not neutral for ACC"):
        sunk = (("INIT", "first"), ("DONE0", "last"), ("DONE1", "last"))
        prove(gpu_product(largest, replace(ROLES, sunk=sunk), FMA_TILES[0].sizes()))
    with pytest.raises(ScheduleError, match="is not a sum of products"):
        prove(gpu_product(largest, ROLES, FMA_TILES[0].sizes()))
