"""The tiles that products of warpgroups are built for, and which of them numbers of rows and columns want."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.codegen.cuda.work import ENOUGH, bounded_registers
from polydyn.codegen.passes.warpgroups import WARPGROUP
from polydyn.schedules.tree.warpgroups import CLUSTER

ROWS = 64
"""Rows of an instruction."""
POINTS = 32
"""Bytes of the reduction in an instruction."""
PANEL = 64
"""Columns of a panel, when the column operand is contiguous along them."""
AXES = ("", "i", "j")
"""No axis, rows, columns."""


@dataclass(frozen=True)
class WgmmaTile:
    """Columns of a tile, slots of the ring, warpgroups that consume, blocks of a multiprocessor.

    Consumers have 64 rows of a tile each; ``in_turn``: 128 rows, a whole tile, and blocks are persistent. ``cluster``:
    two blocks, whose tiles are neighbours along rows ("i") or columns ("j"), bring half of the operand that they share
    each, to both; empty: every block is alone. ``parts``: blocks of a cluster that share the reduction of a tile.
    """

    columns: int
    stages: int
    consumers: int = 2
    blocks: int = 1
    in_turn: bool = False
    cluster: str = ""
    parts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Consumers that share a tile, and instructions that the rows of each are."""
        return (1, 2) if self.in_turn else (self.consumers, 1)

    @property
    def rows(self) -> int:
        """Of a tile."""
        return self.shape[0] * self.shape[1] * ROWS

    @property
    def together(self) -> int:
        """Blocks of a cluster."""
        return CLUSTER if self.cluster else 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return (self.consumers + 1) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a thread: when a block begins, then of the producer and of consumers, which ``setmaxnreg`` deals."""
        start, least = bounded_registers(self.threads, self.blocks), 40 if self.blocks == 1 else 24
        return start, least, min(240, (start * (self.consumers + 1) - least) // self.consumers // 8 * 8)


TILES = (WgmmaTile(256, 4), WgmmaTile(192, 5), WgmmaTile(128, 4), WgmmaTile(128, 4, 1, 2), WgmmaTile(64, 4, 2, 2),
         WgmmaTile(64, 4, 1, 3), WgmmaTile(192, 3, in_turn=True), WgmmaTile(128, 5, in_turn=True),
         WgmmaTile(64, 8, in_turn=True), WgmmaTile(256, 4, cluster="i"),
         WgmmaTile(192, 3, in_turn=True, cluster="i"), WgmmaTile(128, 5, in_turn=True, cluster="i"))  # fmt: skip
"""Those of 64 rows are for few tiles, and blocks that are beside each other; those in turn for more tiles than
multiprocessors; of 64 columns and more rows for columns that leave the last 128 half empty; clusters share columns, of
which a tile has no fewer than rows."""
PARTS = (WgmmaTile(128, 4, parts=4), WgmmaTile(128, 4, 1, 2, parts=4), WgmmaTile(64, 4, 1, 3, parts=8))
"""Those whose reduction blocks of a cluster share, for few tiles."""
FLOAT8_TILES = (WgmmaTile(128, 4), WgmmaTile(128, 4, cluster="i"), WgmmaTile(128, 4, 1), WgmmaTile(64, 4, 1, 2))
"""For floats of 8 bits, whose sums of a step are beside those of all steps in registers: in turn, a tile would have 64
columns, and nobody would multiply while a step's sums are added.
"""
SPLIT = TILES[2]
"""For shares of a reduction."""
STEP = 128
"""Bytes of the reduction in a tile: the swizzle's width."""
EXACT = 192
"""Columns that serve where they divide a known number: 768 of them are four blocks where 256 leave a quarter idle."""
FEW = 1024
"""Rows up to which tiles of 64 rows are wanted, where their number is known."""


SHARED, RESERVED, SPARE = 227 << 10, 1 << 10, 24
"""Bytes of shared memory for the blocks of a multiprocessor of sm_90, and those that the system takes for each of
several; registers of a consumer besides its sums."""


def broken_rule(t: WgmmaTile) -> str | None:
    """The rule that a tile breaks, by name; None when it can be built."""
    start, least, registers = t.registers if 0 < t.threads * t.blocks <= 2048 else (0, 0, 0)
    sums = t.columns // 2 * t.shape[1]
    ring = (t.rows + t.columns) * STEP * t.stages + (t.consumers * ROWS * t.columns * 4 if t.in_turn else 0)
    rules = {
        "columns are 64, 128, 192 or 256": t.columns not in (64, 128, 192, 256),
        "a ring has at least two slots": t.stages < 2,
        "one or two warpgroups consume, two in turn": t.consumers not in (1, 2) or (t.in_turn and t.consumers == 1),
        "a cluster shares an operand or the reduction": t.cluster not in AXES or (t.cluster != "" and t.parts > 1),
        "2, 4 or 8 blocks share a reduction, not in turn": t.parts not in (1, 2, 4, 8) or (t.parts > 1 and t.in_turn),
        "blocks have equal shares of 32 columns' sums": t.parts > 1 and t.columns == 192,
        "a cluster has two consumers a block": t.cluster != "" and t.consumers == 1,
        "blocks in turn are alone on a multiprocessor": t.blocks < 1 or (t.in_turn and t.blocks > 1),
        "sums fit the registers": start < least or sums + SPARE > registers,
        "blocks fit shared memory": (ring + RESERVED) * t.blocks > SHARED + RESERVED,
    }
    return next((rule for rule, broken in rules.items() if broken), None)


def part_tiles(n: int | None, steps: int | None) -> tuple[WgmmaTile, ...]:
    """Those of ``PARTS`` that so many columns and steps of the reduction want (None: not known now): each block has a
    step, and columns alone do not make so many blocks that nothing is idle.
    """

    def wanted(t: WgmmaTile) -> bool:
        return (steps is None or steps >= t.parts) and (n is None or 2 * -(-n // t.columns) < ENOUGH)

    return tuple(filter(wanted, PARTS))


def useful(t: WgmmaTile, m: int | None, n: int | None) -> bool:
    """Whether so many rows and columns (None: not known now) want this tile."""
    exact = n is not None and n % EXACT == 0
    if (t.cluster == "i" and m is not None and m <= t.rows) or (t.cluster == "j" and n is not None and n <= t.columns):
        return False
    if t.columns == EXACT or (t.in_turn and exact):
        return exact and t.columns == EXACT
    if t.columns < t.rows:
        return n is not None and 0 < n % t.rows <= t.columns
    few = t.consumers > 1 or m is None or m <= FEW
    return few and (n is None or 2 * n > t.columns or t == TILES[2])
