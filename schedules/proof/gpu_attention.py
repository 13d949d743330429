"""Proof of the GPU's tree of an attention with online softmax (``gpu_tiling.gpu_attention_tree``).

That any partition of the rows into blocks is legal is proven on the group (``prove_row_blocks``), that the maximum and
the sum may be computed online is a law of its own (``online_softmax``). Here, for every size of every dim: every
product of scores and of values is made exactly once, but for keys that a mask hides (``masks``); every output is stored
exactly once; logits follow all steps of their scores, the statistics all logits of their tile, the weights the
statistics, the division all tiles; and what shared memory and registers hold is of the reader's own tile and step. Not
proven: the ring and its barriers, the lanes' exchange of weights (the emulation runs them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.isl_util import Condition, at_least, below, between, frame, param_set, sets
from polydyn.schedules.laws.masks import Logits, check_conditions
from polydyn.schedules.proof.gpu_flow import Storage
from polydyn.schedules.proof.witness import set_error
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree import TileStatement, Tree, bind_statement
from polydyn.schedules.tree.gpu import SLAB, STAGED, staged

V = Index.of
ROWS, KEYS, DEPTH, WIDTH, BATCH = "rows", "keys", "depth", "width", "batches"
"""Parameters of the proof: extents of the group."""


@dataclass(frozen=True)
class AttentionTiles:
    """Sizes of a kernel: rows and keys of a tile, head sizes of its scores and values, steps of an instruction."""

    rows: int
    keys: int
    depth: int
    width: int
    step: int

    @property
    def warps(self) -> int:
        """Warps of a block, each with the rows of a fragment."""
        return self.rows // STAGED


def prove_gpu_attention(tiled: TiledGroup, logits: Logits, live: tuple[Condition, ...], tiles: AttentionTiles) -> None:
    """The tree of any attention with these batch iterators, for these tiles, is right; made once.

    ``live``: what the tree asks of tiles of keys (``masks.tile_conditions``). LegalityError with a witness.
    """
    if live:
        check_conditions(logits, live, logits.hidden())
    whole = tuple(replace(s, conditions=tuple(c for c in s.conditions if c not in live)) for s in tiled.statements)
    names = {n: V(f"{BATCH}_{i}") for i, n in enumerate(tiled.extents)}
    _prove(tiled.tree, whole, logits.batch, tuple(names.items()), tiles)


@lru_cache(maxsize=32)
def _prove(
    tree: Tree, statements: tuple[TileStatement, ...], batch: tuple[str, ...], named: tuple[tuple[str, Index], ...],
    t: AttentionTiles,
) -> None:  # fmt: skip
    params = (ROWS, KEYS, DEPTH, WIDTH, "B_i", "B_l", *(str(v) for _, v in named))
    ctx = param_set(params, [*(at_least(p, 0) for p in params), below(DEPTH, t.depth + 1), below(WIDTH, t.width + 1)],
                    positive=False)  # fmt: skip
    for count, extent, size in (("B_i", ROWS, t.rows), ("B_l", KEYS, t.keys)):
        ctx = ctx.intersect(param_set(params, [at_least(V(count) * size, extent),
                                               below(V(count) * size, V(extent) + size)], positive=False))  # fmt: skip
    sizes: dict[str, IndexLike] = {
        "W_i": t.warps, "P_i": STAGED, "F_j1": t.keys // 8, "G_j1": t.keys // 16, "F_k1": t.depth // t.step, "P_j1": 8,
        "P_k1": t.step, "F_j2": t.width // 8, "G_j2": t.width // 16, "F_k2": t.keys // t.step, "P_j2": 8,
        "P_k2": t.step, "E_s": t.width // SLAB, "E_f": SLAB // 8, "E_i": STAGED, "E_j": SLAB, "E_v": 1,
    }  # fmt: skip
    copied = {"COPY_Q": (t.rows, t.depth), "COPY_K": (t.keys, t.depth), "COPY_V": (t.width, t.keys)}
    bound = []
    for s in statements:
        own = dict(named) | {n: V(v) for n, v in sizes.items()}
        if s.name in copied:
            own |= dict(zip(("S_i" if s.name == "COPY_Q" else "S_j", "S_k"), map(V, copied[s.name]), strict=True))
        s = bind_statement(s, own)
        if s.name.startswith("DONE"):
            row = V("b_i") * t.rows + V("w_i") * STAGED + staged("e_i")
            exists = (below(row, ROWS), below(V("e_s") * SLAB + "e_j" + "e_v", WIDTH))
            s = replace(s, conditions=(*s.conditions, *exists))
        bound.append(s)
    flow = Storage(tree, bound, params, ctx)
    counts = [(x, v) for x, v in zip(batch, (V(str(v)) for _, v in named), strict=True)]
    _check_once(flow, batch, counts, t)
    _check_order(flow, batch)
    _declare(flow, batch, t)
    flow.check()


def _check_once(
    flow: Storage, batch: tuple[str, ...], counts: list[tuple[str, Index]], t: AttentionTiles
) -> None:
    """Products and outputs: an image for each, no two the same; of outputs no other instance."""
    row, col, k = V("i"), V("j"), V("k")
    lead: dict[str, IndexLike] = {**{x: x for x in batch}, "b_i": row // t.rows, "w_i": row % t.rows // STAGED}
    point = {"p_i": row % STAGED}
    first = {"b_l": col // t.keys, "f_j1": col % t.keys // 8, "p_j1": col % 8, "f_k1": k // t.step, "p_k1": k % t.step}
    second = {"b_l": k // t.keys, "f_k2": k % t.keys // t.step, "p_k2": k % t.step, "f_j2": col // 8, "p_j2": col % 8}
    done = {"e_s": col // SLAB, "e_i": staged(row % STAGED), "e_j": col % SLAB, "e_v": ZERO}
    wanted: dict[str, tuple[Mapping[str, IndexLike], list[tuple[str, Index]]]] = {
        "ACC1": ({**lead, **point, **first}, [("i", V(ROWS)), ("j", V(KEYS)), ("k", V(DEPTH))]),
        "ACC2": ({**lead, **point, **second}, [("i", V(ROWS)), ("j", V(WIDTH)), ("k", V(KEYS))]),
    }
    wanted |= {n: ({**lead, **done}, [("i", V(ROWS)), ("j", V(WIDTH))]) for n in flow.coords if n.startswith("DONE")}
    present = {s.get_tuple_name(): s for s in sets(flow.domain)}
    for name, (table, extents) in wanted.items():
        box = [*counts, *extents]
        points = frame(name, tuple(x for x, _ in box), flow.names)
        instances = points.where([c for x, e in box for c in between(0, x, e)]).intersect_params(flow.ctx)
        image = points.map_to(name, [table[c] for c in flow.coords[name]]).intersect_domain(instances)
        runs = present.get(name, isl.Set.empty(frame(name, flow.coords[name], flow.names).space))
        lost = image.subtract_range(runs).domain()
        if not lost.is_empty():
            raise set_error("instances are not covered by the tiles", lost, name, flow.ctx)
        if not image.is_injective():
            raise LegalityError(f"two instances of {name} have one tile-space image", node=name, rule="coverage")
        extra = runs.subtract(image.range())
        if name.startswith("DONE") and not extra.is_empty():
            raise set_error("tile-space instances run that the group does not have", extra, name, flow.ctx)


def _check_order(flow: Storage, batch: tuple[str, ...]) -> None:
    """What online softmax asks for."""
    block = (*batch, "b_i", "w_i")
    tile = (*block, "b_l")
    for first, then, key in (
        ("START", "ROWS", block), ("ACC1", "LOGIT", tile), ("LOGIT", "ROWS", tile), ("ROWS", "FRAG_W", tile),
        ("ACC2", "FINISH", block), ("ROWS", "FINISH", block),
    ):  # fmt: skip
        flow.check_before(first, then, key)


def _declare(flow: Storage, batch: tuple[str, ...], t: AttentionTiles) -> None:
    """Shared memory of the block, registers of a warp."""
    block = (*batch, "b_i")
    tile, own = (*block, "b_l"), (*block, "w_i")
    first, second = (*tile, "w_i", "f_k1"), (*tile, "w_i", "f_k2")
    flow.epoch = {"tile_q": block, "tile_k": tile, "tile_v": tile, "q_frag": first, "k_frag": first, "w_frag": second}
    flow.epoch |= {"v_frag": second, "scores": (*tile, "w_i"), "values": own, "rows": own, "stage": (*own, "e_s")}
    flow.writes("COPY_Q", "tile_q", ("s_i", "s_k"))
    flow.writes("COPY_K", "tile_k", ("s_j", "s_k"))
    flow.writes("COPY_V", "tile_v", ("s_j", "s_k"))
    load = [*between(0, "r", 16), *between(0, "k", t.step)]
    for n, side, at in (("Q", V("w_i") * STAGED + "r", "f_k1"), ("K", V("g_j1") * 16 + "r", "f_k1"),
                        ("V", V("g_j2") * 16 + "r", "f_k2")):  # fmt: skip
        flow.reads(f"FRAG_{n}", f"tile_{n.lower()}", (side, V(at) * t.step + "k"), ("r", "k"), load)
    flow.writes("FRAG_Q", "q_frag", ("w_i",))
    flow.writes("FRAG_K", "k_frag", ("w_i", "g_j1"))
    flow.writes("FRAG_V", "v_frag", ("w_i", "g_j2"))
    flow.reads("FRAG_W", "scores", ("w_i", "r", V("f_k2") * t.step + "k"), ("r", "k"), load)
    flow.writes("FRAG_W", "w_frag", ("w_i",))
    score, value = ("w_i", "p_i", V("f_j1") * 8 + "p_j1"), ("w_i", "p_i", V("f_j2") * 8 + "p_j2")
    flow.writes("INIT", "scores", score)
    flow.updates("ACC1", "scores", score)
    flow.reads("ACC1", "q_frag", ("w_i",))
    flow.reads("ACC1", "k_frag", ("w_i", V("f_j1") // 2))
    flow.updates("LOGIT", "scores", score)
    rows = between(0, "r", STAGED)
    keys, columns = [*rows, *between(0, "c", t.keys)], [*rows, *between(0, "c", t.width)]
    flow.updates("ROWS", "scores", ("w_i", "r", "c"), ("r", "c"), keys)
    flow.updates("ROWS", "values", ("w_i", "r", "c"), ("r", "c"), columns)
    flow.updates("ROWS", "rows", ("w_i",))
    flow.writes("START", "values", ("w_i", "r", "c"), ("r", "c"), columns)
    flow.writes("START", "rows", ("w_i",))
    flow.updates("ACC2", "values", value)
    flow.reads("ACC2", "w_frag", ("w_i",))
    flow.reads("ACC2", "v_frag", ("w_i", V("f_j2") // 2))
    flow.reads("FINISH", "rows", ("w_i",))
    flow.updates("FINISH", "values", ("w_i", "r", "c"), ("r", "c"), columns)
    staged_column = V("e_f") * 8 + "p_j2"
    flow.reads("STAGE", "values", ("w_i", "p_i", V("e_s") * SLAB + staged_column))
    flow.writes("STAGE", "stage", ("w_i", "p_i", staged_column))
    for n in flow.coords:
        if n.startswith("DONE"):
            flow.reads(n, "stage", ("w_i", staged("e_i"), V("e_j") + "e_v"))
