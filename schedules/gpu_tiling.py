"""The GPU's trees that are not yet compositions of transformations: warpgroups, few rows, online softmax.

``tree.gpu`` has the product of warps and threads; statements, levels and marks mean the same here.

Coordinates: batch iterators keep their names; ``b_s`` share of the reduction's tiles, ``b_x`` tile of the block,
``w_x`` unit, ``f_x`` fragment of the unit, ``p_x`` point of the instruction; ``s_x`` row and column of a copied tile;
``e_s``, ``e_f`` slab of staged columns and fragment in it, ``e_i``, ``e_j``, ``e_v`` row, vector and element of an
epilogue. Upper-case parameters are their extents; ``G_x``
counts loads of fragments (one load may fill several). ``q_x``: point of a warpgroup's instruction.
"""

from __future__ import annotations

from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import Condition, between
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree import Band, Leaf, Mark, TileStatement, Tree, sequence

PAIRS = tuple((x, x[0].upper() + x[1:]) for x in (
    "b_s", "b_i", "b_j", "b_k", "w_i", "w_j", "f_i", "f_j", "f_k", "g_i", "g_j", "p_i", "p_j", "p_k", "s_i", "s_j",
    "s_k", "e_s", "e_f", "e_i", "e_j", "e_v", "w_k", "l_j", "l_k", "q_i", "q_j",
))  # fmt: skip
EXTENTS = tuple(p for _, p in PAIRS)


def gpu_wgmma_tree(group: Group, roles: Roles) -> TiledGroup:
    """The GPU tree of a product whose instructions read shared memory and are issued by warpgroups.

    Statements: INIT; COPY_A, COPY_B (TMA boxes, ``s_j`` panels of B); ACC, whose leaf is the whole step of a warpgroup
    (``g_i``); STAGE and DONE<n> as in ``tree.gpu``, by warps (``w_i``). Marks: ``task``, ``roles`` (what
    producer and consumers share), ``multiply``, ``instruction``, ``epilogue``, ``store``.
    """
    accumulation = next(s for s in group.statements if s.reduce)
    done = [f"DONE{n}" for n in range(sum(s.role == "epilogue" for s in group.statements))]
    extents = dict(accumulation.iters)
    named = {f"N_{n}": extents[n] for n in roles.batch}
    bounds = {n: Index.of(f"N_{n}") for n in roles.batch} | {c: Index.of(e) for c, e in PAIRS}
    block, point = (*roles.batch, "b_i", "b_j"), ("p_i", "p_j")

    def statement(name: str, *coords: str) -> TileStatement:
        conditions = tuple(c for x in (*block, *coords) for c in between(0, x, bounds[x]))
        return TileStatement(name, (*block, *coords), conditions)

    statements = [
        statement("INIT", "w_i", "f_j", *point),
        statement("COPY_A", "b_k"), statement("COPY_B", "b_k", "s_j"),
        statement("ACC", "b_k", "g_i", "f_k", "q_i", "q_j", "p_k"),
        statement("STAGE", "w_i", "e_s", "e_f", *point),
        *(statement(d, "w_i", "e_s", "e_i", "e_j", "e_v") for d in done),
    ]  # fmt: skip
    step = Mark("multiply", Band(("g_i",), Mark("instruction", Band(("f_k", "q_i", "q_j", "p_k")))))
    loop = sequence(("COPY_A", Leaf()), ("COPY_B", Band(("s_j",))), ("ACC", step))
    rows = sequence(
        ("STAGE", Band(("e_f",), Mark("instruction", Band(point)))),
        *((d, Mark("store", Band(("e_i", "e_j", "e_v")))) for d in done),
    )  # fmt: skip
    whole = sequence(
        ("INIT", Band(("w_i", "f_j"), Mark("instruction", Band(point)))),
        (["COPY_A", "COPY_B", "ACC"], Band(("b_k",), loop)),
        (["STAGE", *done], Mark("epilogue", Band(("w_i", "e_s"), rows))),
    )  # fmt: skip
    tree = Mark("task", Band(block, Mark("roles", whole)))
    return TiledGroup(tree, tuple(statements), (*named, *EXTENTS), block, named)


def gpu_gemv_tree(group: Group, roles: Roles) -> TiledGroup:
    """The GPU tree of a product with few rows, whose reduction is dealt to lanes as well as its columns.

    Statements: INIT, ACC, DONE<n>. Columns are dealt to blocks, warps and lanes (``b_j``, ``w_j``, ``l_j``), steps of
    the reduction to warps and lanes (``w_k``, ``l_k``) and then in turn (``b_k``); a lane has ``p_i x p_j x p_k``
    points. The block's sums are ``e_i x e_j``. Marks: ``task``, ``reduce`` (ends in the combination of lanes),
    ``leaf``, ``store``.
    """
    accumulation = next(s for s in group.statements if s.reduce)
    done = [f"DONE{n}" for n in range(sum(s.role == "epilogue" for s in group.statements))]
    extents = dict(accumulation.iters)
    named = {f"N_{n}": extents[n] for n in roles.batch}
    bounds = {n: Index.of(f"N_{n}") for n in roles.batch} | {c: Index.of(e) for c, e in PAIRS}
    block, lanes = (*roles.batch, "b_i", "b_j"), ("w_j", "l_j", "w_k", "l_k")

    def statement(name: str, *coords: str) -> TileStatement:
        return TileStatement(name, coords, tuple(c for x in coords for c in between(0, x, bounds[x])))

    statements = [
        statement("INIT", *block, *lanes, "p_i", "p_j"),
        statement("ACC", *block, *lanes, "b_k", "p_i", "p_j", "p_k"),
        *(statement(d, *block, "e_i", "e_j") for d in done),
    ]
    reduce = Mark("reduce", Band(("b_k",), Mark("leaf", Band(("p_i", "p_j", "p_k")))))
    body = sequence(
        (["INIT", "ACC"], Band(lanes, sequence(("INIT", Band(("p_i", "p_j"))), ("ACC", reduce)))),
        *((d, Mark("store", Band(("e_i", "e_j")))) for d in done),
    )  # fmt: skip
    return TiledGroup(Mark("task", Band(block, body)), tuple(statements), (*named, *EXTENTS), block, named)


def gpu_attention_tree(
    scores: Group, score_roles: Roles, epilogues: int, live: tuple[Condition, ...] = ()
) -> TiledGroup:
    """The GPU tree of an attention with online softmax; ``epilogues``: of the values.

    ``live``: holds of every tile of keys that matters (``masks.tile_conditions``); others are not visited.

    A block has rows ``b_i`` of queries, a warp (``w_i``) 16 of them, and walks over tiles of keys ``b_l``. Coordinates
    of scores end in ``1``, those of values in ``2``. Statements: COPY_Q, COPY_K, COPY_V (global -> shared); START;
    INIT, FRAG_Q, FRAG_K, ACC1 and LOGIT (scores); ROWS (maximum, sum and weights of the keys so far, all of a warp's
    rows); FRAG_W, FRAG_V, ACC2 (values); FINISH (division by the sum), STAGE, DONE<n>. Marks as in
    ``tree.gpu``.
    """
    batch = score_roles.batch
    extents = dict(next(s for s in scores.statements if s.reduce).iters)
    named = {f"N_{n}": extents[n] for n in batch}
    block, rows, keys = (*batch, "b_i"), ("w_i",), ("b_l", "w_i")
    statements: list[TileStatement] = []

    def bound(x: str) -> Index:
        return Index.of(f"N_{x}" if x in batch else x[0].upper() + x[1:])

    def add(name: str, *coords: str) -> str:
        conditions = tuple(c for x in (*block, *coords) for c in between(0, x, bound(x)))
        conditions += live if "b_l" in coords else ()
        statements.append(TileStatement(name, (*block, *coords), conditions))
        return name

    def points(n: str) -> Tree:
        return Band((f"f_j{n}",), Mark("instruction", Band(("p_i", f"p_j{n}"))))

    def product(n: str, fragments: tuple[str, str]) -> tuple[list[str], Tree]:
        row, column = fragments
        acc = (f"f_j{n}", "p_i", f"p_j{n}", f"p_k{n}")
        names = [add(row, *keys, f"f_k{n}"), add(column, *keys, f"f_k{n}", f"g_j{n}")]
        names.append(add(f"ACC{n}", *keys, f"f_k{n}", *acc))
        leaf = Band(acc[:1], Mark("instruction", Band(acc[1:])))
        return names, Band((f"f_k{n}",), sequence((row, Leaf()), (column, Band((f"g_j{n}",))), (names[2], leaf)))

    copies = [(add(n, "b_l", "s_j", "s_k"), Mark("copy", Band(("s_j", "s_k")))) for n in ("COPY_K", "COPY_V")]
    first, second = product("1", ("FRAG_Q", "FRAG_K")), product("2", ("FRAG_W", "FRAG_V"))
    used = sequence(
        (add("INIT", *keys, "f_j1", "p_i", "p_j1"), points("1")), first,
        (add("LOGIT", *keys, "f_j1", "p_i", "p_j1"), points("1")), (add("ROWS", *keys), Leaf()), second,
    )  # fmt: skip
    inside = ["INIT", *first[0], "LOGIT", "ROWS", *second[0]]
    loop = sequence(*copies, (inside, Mark("multiply", Band(rows, used))))
    done = [add(f"DONE{n}", *rows, "e_s", "e_i", "e_j", "e_v") for n in range(epilogues)]
    stage = add("STAGE", *rows, "e_s", "e_f", "p_i", "p_j2")
    slab = sequence(
        (stage, Band(("e_f",), Mark("instruction", Band(("p_i", "p_j2"))))),
        *((d, Mark("store", Band(("e_i", "e_j", "e_v")))) for d in done),
    )  # fmt: skip
    ends = sequence((add("FINISH", *rows), Leaf()), ([stage, *done], Band(("e_s",), slab)))
    whole = sequence(
        (add("COPY_Q", "s_i", "s_k"), Mark("copy", Band(("s_i", "s_k")))), (add("START", *rows), Band(rows)),
        (["COPY_K", "COPY_V", *inside], Mark("pipeline", Band(("b_l",), loop))),
        (["FINISH", "STAGE", *done], Mark("epilogue", Band(rows, ends))),
    )  # fmt: skip
    sizes = dict.fromkeys(str(bound(x)) for s in statements for x in s.coords if x not in batch)
    sizes |= dict.fromkeys(x for c in live for x in sorted(c.expr.symbols() & {*scores.params}))
    return TiledGroup(Mark("task", Band(block, whole)), tuple(statements), (*named, *sizes), block, named)
