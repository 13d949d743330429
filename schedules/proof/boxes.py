"""Check packed panels and copied rows: they are large enough for any part of a product's tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ZERO, Atom, Index
from polydyn.schedules.isl_util import (
    at_least,
    below,
    between,
    frame,
    sample,
)
from polydyn.schedules.proof.footprints import Strip
from polydyn.schedules.ranges import is_nonnegative


@dataclass(frozen=True)
class ContractTiles:
    """The sizes that a matmul-like kernel is built for.

    ``rows``, ``columns``: the register tile; ``width``: lanes; ``block``: reduction steps per block (P_k); ``blocks``:
    the number of blocks (B_k). ``panels``: vectors that PACK fills, over ``N`` and the range ``[c_lo, c_hi)`` of column
    tiles; ``panel_size``: elements allocated for at most ``S`` column tiles; ``vector_size``: elements of one vector of
    columns, over all steps of a block. These three matter only with ``promote``. ``fill``: FILL copies the row operand.
    It copies ``filled`` rows over the range ``[r_lo, r_hi)`` of rows, ``pitch`` elements apart, and uses ``steps``
    elements of each. ``fill_size``: elements allocated for at most ``S`` row tiles.
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
    strip: Strip | None = None


def _arguments(x: Index) -> tuple[Index, ...]:
    """Return the arguments of a minimum, or the expression itself."""
    ((m, c),) = list(x.terms.items())[:1] or [((), 0)]
    if len(x.terms) == 1 and c == 1 and len(m) == 1 and isinstance(m[0], Atom) and m[0].kind == "min":
        return m[0].args
    return (x,)


def check_panel_box(tiles: ContractTiles) -> None:
    """Check that packed panels are large enough for any range ``[c_lo, c_hi)`` of column tiles.

    Every vector that contains a live column of a tile in the range is packed. The allocation for ``S`` column tiles
    holds them all, including the vectors that a wider variant of the micro-kernel reads.
    """
    vectors = tiles.columns // tiles.width
    _check_packed(tiles.columns, tiles.width, tiles.panels)
    slack = tiles.panel_size - Index.of("S") * vectors * tiles.vector_size
    if not is_nonnegative(slack):
        raise LegalityError(
            f"{tiles.panel_size} elements do not hold {vectors}*S vectors of {tiles.vector_size} elements",
            tensor="panel", rule="panel boxes",
        )  # fmt: skip


def check_fill_box(tiles: ContractTiles) -> None:
    """Check that the allocation for ``S`` row tiles holds all their rows, and a row its steps.

    A tile has at most ``rows`` rows.
    """
    for slack, subject in (
        (tiles.fill_size - Index.of("S") * tiles.rows * tiles.pitch, f"{tiles.fill_size} elements for S row tiles"),
        (tiles.pitch - tiles.steps, f"rows {tiles.pitch} elements apart"),
    ):
        if not is_nonnegative(slack):
            raise LegalityError(
                f"{subject} do not hold {tiles.rows}*S rows of {tiles.steps} steps, {tiles.pitch} elements apart",
                tensor="rows", rule="panel boxes",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def _check_packed(columns: int, width: int, panels: Index) -> None:
    """Check that every live column of a range is in a packed vector."""
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
