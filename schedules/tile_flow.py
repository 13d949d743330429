"""Data flow inside tile space: what registers, carried sums and packed panels hold when they are read.

Depends on the form of a tree and on its tile sizes only, not on the group, so each is proven once for all groups of
one form and for all sizes ``M``, ``N``, ``K``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ZERO, Atom, Index
from polydyn.schedules.isl_util import (
    at_least,
    below,
    between,
    frame,
    maps,
    pair,
    sample,
    union_maps,
)
from polydyn.schedules.ranges import is_nonnegative
from polydyn.schedules.tree import TileStatement, Tree, to_isl
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


SHARE = {"i": 3, "j": 2}
"""Register tiles per block of a task in proofs; the launch chooses others, legal too as the band is coincident."""

Accesses = dict[str, dict[str, list[Index]]]
"""Array -> statement -> subscripts."""


def forget_flows() -> None:
    """Forgets what was proven so far, for measuring."""
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


def _arguments(x: Index) -> tuple[Index, ...]:
    """The arguments of a minimum; the expression itself when it is none."""
    ((m, c),) = list(x.terms.items())[:1] or [((), 0)]
    if len(x.terms) == 1 and c == 1 and len(m) == 1 and isinstance(m[0], Atom) and m[0].kind == "min":
        return m[0].args
    return (x,)


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
