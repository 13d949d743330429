"""Data flow inside tile space: what registers, carried sums and packed panels hold when they are read.

Depends on the form of a tree and on its tile sizes only, not on the group, so each is proven once for all groups of
one form and for all sizes ``M``, ``N``, ``K``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ONE, ZERO, Atom, Index, IndexLike
from polydyn.schedules.isl_util import (
    Condition,
    at_least,
    below,
    between,
    frame,
    maps,
    pair,
    param_set,
    sample,
    union_maps,
)
from polydyn.schedules.ranges import is_nonnegative
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree import TileStatement, Tree, bind_statement, to_isl
from polydyn.schedules.witness import flow_error


@dataclass(frozen=True)
class ContractTiles:
    """The sizes that a matmul-like kernel is built for.

    ``rows``, ``columns``: the register tile; ``width``: lanes; ``block``: reduction steps per block (P_k), ``blocks``
    their number (B_k). ``panels``: vectors that PACK fills, over ``N`` and the share ``[c_lo, c_hi)`` of column tiles;
    ``panel_size``: elements allocated for a share of at most ``S`` column tiles; ``vector_size``: elements of one
    vector of columns, over all steps of a block. They matter with ``promote`` only. ``fill``: FILL copies the row
    operand: ``filled`` rows over the share ``[r_lo, r_hi)`` of rows, ``pitch`` elements apart, in ``fill_size``
    elements for a share of at most ``S`` row tiles, ``steps`` elements of each are used.
    """

    rows: int
    columns: int
    width: int
    block: Index
    blocks: Index
    promote: bool
    panels: Index = ZERO
    panel_size: Index = ZERO
    vector_size: Index = ZERO
    fill: bool = False
    filled: Index = ZERO
    fill_size: Index = ZERO
    pitch: Index = ZERO
    steps: Index = ZERO

    def row(self, share: Mapping[str, int]) -> Index:
        """The row of a tile-space instance, when blocks have ``share["i"]`` register tiles."""
        return (Index.of("b_i") * share["i"] + "c_i") * self.rows + "p_i"

    def col(self, share: Mapping[str, int]) -> Index:
        """The column of a tile-space instance."""
        return (Index.of("b_j") * share["j"] + "c_j") * self.columns + "p_j"

    def step(self, point: str) -> Index:
        """The reduction step; one block alone has any size."""
        return Index.of(point) if self.blocks == ONE else Index.of("b_k") * self.block + point


SHARE = {"i": 3, "j": 2}
"""Register tiles per block of a task in proofs; the launch chooses others, legal too as the band is coincident."""

Accesses = dict[str, dict[str, list[Index]]]
"""Array -> statement -> subscripts."""


def check_tile_flow(
    tree: Tree, statements: tuple[TileStatement, ...], params: tuple[str, ...], tiles: ContractTiles, roles: Roles
) -> None:
    """Registers, carried sums and panels hold the element that is wanted whenever they are read.

    Proves, for all extents: every read of an accumulator has a source of the same element; SAVE of a block comes after
    all its accumulations, LOAD before them, and LOAD of block b reads what SAVE of block b-1 wrote; every panel element
    that ACC reads for a live column was packed in the same block of the same task, from the same column and reduction
    step. LegalityError with a witness otherwise.
    """
    whole = tiles.blocks == ONE  # one block of any size: the proof is the same for all
    free = replace(tiles, block=Index.of("K")) if whole else tiles
    free = replace(free, panel_size=ONE, vector_size=ONE, fill_size=ONE, pitch=ONE, steps=ONE)
    _check(tree, statements, params, free, roles.batch, roles.inner)


@lru_cache(maxsize=1024)
def _check(
    tree: Tree,
    statements: tuple[TileStatement, ...],
    params: tuple[str, ...],
    tiles: ContractTiles,
    batch: tuple[str, ...],
    inner: tuple[str, ...],
) -> None:
    fixed = _sizes(tiles)
    names = (*(p for p in params if p not in fixed), "M", "N", "K")
    cover = () if tiles.blocks == ONE else (at_least("B_k", 1), at_least(Index.of("B_k") * tiles.block, "K"))
    ctx = param_set(names, [*cover, *(at_least(p, 0) for p in names)], positive=False)
    live = [bind_statement(_live(s, tiles), fixed) for s in statements]
    coords = {s.name: s.coords for s in statements}
    reads, writes, elements = _accesses(coords, tiles, batch, inner)
    order = check_flow(tree, live, names, ctx, (reads, writes, elements))
    _check_sums(order, elements, coords, names, ctx)


def forget_flows() -> None:
    """Forgets what was proven so far, for measuring."""
    _check.cache_clear()
    _check_packed.cache_clear()


def check_flow(
    tree: Tree,
    statements: Sequence[TileStatement],
    names: tuple[str, ...],
    ctx: isl.Set,
    accesses: tuple[Accesses, Accesses, Accesses],
) -> isl.UnionMap:
    """Every read gets the element that it wants; returns the order of the instances.

    ``accesses``: (reads, writes, elements); the element that a statement writes is under its name, that it reads under
    ``<statement> reads``. LegalityError with a witness otherwise.
    """
    reads, writes, elements = accesses
    schedule = to_isl(tree, statements, names)
    coords = {s.name: s.coords for s in statements}
    domain = schedule.get_domain().intersect_params(ctx)

    def relation(accesses: Accesses) -> isl.UnionMap:
        parts = [
            frame(n, coords[n], names).map_to(array, index)
            for array, by in accesses.items()
            for n, index in by.items()
            if n in coords
        ]
        return union_maps(parts, names).intersect_domain(domain)

    order = schedule.get_map().intersect_domain(domain)
    info = isl.UnionAccessInfo.from_sink(relation(reads)).set_must_source(relation(writes))
    flow = info.set_schedule_map(order).compute_flow()
    for m in maps(flow.get_must_no_source()):
        if not m.is_empty():
            s, array = pair(m)
            raise flow_error(f"{s} reads {array} where nothing was written", m, s, array, ctx)
    for m in maps(flow.get_full_must_dependence()):
        _check_source(m, elements, coords, names, ctx)
    return order


def _check_sums(
    order: isl.UnionMap, elements: Accesses, coords: Mapping[str, tuple[str, ...]], names: tuple[str, ...], ctx: isl.Set
) -> None:
    """In every register tile LOAD comes before the accumulations of its block and SAVE after them."""
    time = {pair(m)[0]: m for m in maps(order)}
    for s, t in (("LOAD", "ACC"), ("LOAD", "SAVE"), ("INIT", "SAVE"), ("ACC", "SAVE")):
        if s not in time or t not in time:
            continue
        key = [*elements["acc"][f"{t} reads"], Index.of("b_k")]
        before, after = (frame(n, coords[n], names).map_to("", key) for n in (s, t))
        same = before.apply_range(after.reverse())
        bad = same.intersect(time[s].lex_ge_map(time[t]))
        if not bad.is_empty():
            what = f"{t} runs before {s} of the same block and register tile"
            raise flow_error(what, bad, f"{s} -> {t}", "acc", ctx)


def _check_source(
    m: isl.Map, elements: Accesses, coords: Mapping[str, tuple[str, ...]], names: tuple[str, ...], ctx: isl.Set
) -> None:
    """Every read of a full dependence (source -> [sink -> array element]) gets the element that it wants."""
    sink = m.range().unwrap()
    array, (s, t) = pair(sink)[1], (pair(m)[0], pair(sink)[0])
    edge = m.range_factor_domain()
    made, wanted = (
        frame(n, coords[n], names).map_to("", elements[array][key]) for n, key in ((s, s), (t, f"{t} reads"))
    )
    bad = edge.subtract(made.apply_range(wanted.reverse()))
    if not bad.is_empty():
        what = f"{t} reads {array} of another element, which {s} wrote"
        raise flow_error(what, bad, f"{s} -> {t}", array, ctx)


def _sizes(tiles: ContractTiles) -> dict[str, Index]:
    """What the parameters of the tree stand for; the number of reduction blocks stays open unless there is one."""
    sizes: dict[str, IndexLike] = {"P_i": tiles.rows, "P_j": tiles.columns, "P_k": tiles.block, "W": tiles.width}
    sizes |= {"C_i": SHARE["i"], "C_j": SHARE["j"], "V_j": SHARE["j"] * (tiles.columns // tiles.width)}
    sizes |= {"B_k": 1} if tiles.blocks == ONE else {}
    sizes |= {"A_i": SHARE["i"] * tiles.rows} if tiles.fill else {}
    return {n: Index.of(v) for n, v in sizes.items()}


def _live(s: TileStatement, tiles: ContractTiles) -> TileStatement:
    """The statement on the live part of its tiles, which is what the kernel's exact loops and masks leave."""
    conditions: list[Condition] = []
    if "p_i" in s.coords:
        conditions += [below(tiles.row(SHARE), "M"), below(tiles.col(SHARE), "N")]
    if "p_k" in s.coords:
        conditions.append(below(tiles.step("p_k"), "K"))
    if "a_k" in s.coords:
        conditions.append(below(tiles.step("a_k"), "K"))
    if "a_i" in s.coords:
        first = Index.of("b_i") * (SHARE["i"] * tiles.rows)
        ends = ("M", first + SHARE["i"] * tiles.rows)  # the share ends at the last row or after its last tile
        conditions += [below("a_i", tiles.filled.subs({"r_lo": first, "r_hi": end})) for end in ends]
    if "v" in s.coords:
        low = Index.of("b_j") * SHARE["j"]
        count = tiles.panels.subs({"c_lo": low, "c_hi": low + SHARE["j"]})
        conditions += [below("v", x) for x in _arguments(count)]
    return replace(s, conditions=(*s.conditions, *conditions))


def _arguments(x: Index) -> tuple[Index, ...]:
    """The arguments of a minimum; the expression itself when it is none."""
    ((m, c),) = list(x.terms.items())[:1] or [((), 0)]
    if len(x.terms) == 1 and c == 1 and len(m) == 1 and isinstance(m[0], Atom) and m[0].kind == "min":
        return m[0].args
    return (x,)


def _accesses(
    coords: Mapping[str, tuple[str, ...]], tiles: ContractTiles, batch: tuple[str, ...], inner: tuple[str, ...]
) -> tuple[Accesses, Accesses, Accesses]:
    """(reads, writes, elements): what each tile-space statement touches and which element of the group that stands for.

    A read's element is under ``<statement> reads``. Elements of ``mem``, the output that carries sums between blocks,
    have the block whose sum they are as their last coordinate; a finished element has -1.
    """

    def at(*names: str) -> list[Index]:
        return [Index.of(n) for n in names]

    done = [n for n in coords if n not in ("INIT", "LOAD", "ACC", "SAVE", "PACK", "FILL")]
    tile = at(*batch, "b_i", "b_j", "c_j", "c_i", "p_i", "p_j")
    point, block = at("p_i", "p_j"), Index.of("b_k")
    reads: Accesses = {"acc": dict.fromkeys(("ACC", "SAVE", *done), point), "mem": {"LOAD": tile}}
    writes: Accesses = {
        "acc": dict.fromkeys(("INIT", "LOAD", "ACC"), point),
        "mem": dict.fromkeys(("SAVE", *done), tile),
    }
    elements: Accesses = {"acc": dict.fromkeys(writes["acc"], tile), "mem": {"SAVE": [*tile, block + 1]}}
    elements["acc"] |= {f"{n} reads": tile for n in reads["acc"]}
    elements["mem"] |= {"LOAD reads": [*tile, block]} | {n: [*tile, Index.of(-1)] for n in done}
    if tiles.promote:
        w = tiles.width
        j = Index.of("c_j") * tiles.columns + "p_j"
        reads["panel"] = {"ACC": [j // w, *at("p_k", *inner), j % w]}
        writes["panel"] = {"PACK": at("v", "a_k", *inner, "lane")}
        packed = Index.of("b_j") * SHARE["j"] * tiles.columns + Index.of("v") * w + "lane"
        elements["panel"] = {
            "PACK": [*at(*batch), packed, tiles.step("a_k"), *at(*inner)],
            "ACC reads": [*at(*batch), tiles.col(SHARE), tiles.step("p_k"), *at(*inner)],
        }
    if tiles.fill:
        first = Index.of("b_i") * (SHARE["i"] * tiles.rows)
        reads["rows"] = {"ACC": [tiles.row(SHARE) - first, *at("p_k", *inner)]}
        writes["rows"] = {"FILL": at("a_i", "a_k", *inner)}
        elements["rows"] = {
            "FILL": [*at(*batch), first + "a_i", tiles.step("a_k"), *at(*inner)],
            "ACC reads": [*at(*batch), tiles.row(SHARE), tiles.step("p_k"), *at(*inner)],
        }
    return reads, writes, elements


def check_panel_box(tiles: ContractTiles) -> None:
    """Packed panels are large enough for any share ``[c_lo, c_hi)`` of column tiles.

    Every vector that holds a live column of a tile in the share is packed, and what is allocated for ``S`` column
    tiles holds them all, those that a wider variant of the micro-kernel reads besides included.
    """
    vectors = tiles.columns // tiles.width
    _check_packed(tiles.columns, tiles.width, tiles.panels)
    missing = tiles.panel_size - Index.of("S") * vectors * tiles.vector_size
    if not is_nonnegative(missing):
        raise LegalityError(
            f"{tiles.panel_size} elements do not hold {vectors}*S vectors of {tiles.vector_size} elements",
            tensor="panel", rule="panel boxes",
        )  # fmt: skip


def check_fill_box(tiles: ContractTiles) -> None:
    """What is allocated for ``S`` row tiles holds all their rows, and a row its steps (a tile has at most ``rows``)."""
    for missing, what in (
        (tiles.fill_size - Index.of("S") * tiles.rows * tiles.pitch, f"{tiles.fill_size} elements for S row tiles"),
        (tiles.pitch - tiles.steps, f"rows {tiles.pitch} elements apart"),
    ):
        if not is_nonnegative(missing):
            raise LegalityError(
                f"{what} do not hold {tiles.rows}*S rows of {tiles.steps} steps, {tiles.pitch} elements apart",
                tensor="rows", rule="panel boxes",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def _check_packed(columns: int, width: int, panels: Index) -> None:
    """Every live column of a share is in a packed vector."""
    vectors = columns // width
    dims = ("N", "c_lo", "c_hi", "c_j", "q")
    f = frame("read", dims, ())
    start = Index.of("N") - Index.of("c_j") * columns
    inside = [*between("c_lo", "c_j", "c_hi"), *between(0, "q", vectors), below(Index.of("q") * width, start)]
    inside += [at_least("c_lo", 0), at_least("N", 0)]
    vector = (Index.of("c_j") - "c_lo") * vectors + "q"
    for x in _arguments(panels):
        bad = f.where([*inside, at_least(vector, x)])
        if not bad.is_empty():
            raise LegalityError(
                f"a live column is read from a panel that is not packed: vector {vector} of {panels}\n"
                f"  violated: {bad.coalesce()}\n  for example {sample(bad)}",
                tensor="panel", rule="panel boxes",
            )  # fmt: skip
