"""The tiles of warpgroup products, and their selection by numbers of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.codegen.cuda.work import MIN_BLOCKS_TO_FILL_GPU, bounded_registers
from polydyn.codegen.passes.warpgroups import WARPGROUP
from polydyn.schedules.tree.warpgroups import CLUSTER

ROWS = 64
"""Rows of an instruction."""
POINTS = 32
"""Bytes of the reduction in an instruction."""
PANEL = 64
"""Columns of a panel, if the column operand is contiguous along them."""
AXES = ("", "i", "j")
"""No axis, rows, columns."""


@dataclass(frozen=True)
class WgmmaTile:
    """Columns of a tile, slots of the ring, consumer warpgroups, blocks per multiprocessor.

    Consumers have 64 rows of a tile each. ``in_turn`` (ping-pong): each has 128 rows, a whole tile, and blocks are
    persistent. ``cluster``: two blocks, whose tiles are adjacent along rows ("i") or columns ("j"), each load half of
    the shared operand, into both; empty: no cluster. ``parts``: blocks of a cluster that K of a tile is split over.
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
        """Consumers of one tile, and instructions along the rows of each."""
        return (1, 2) if self.in_turn else (self.consumers, 1)

    @property
    def rows(self) -> int:
        """The number of rows of a tile."""
        return self.shape[0] * self.shape[1] * ROWS

    @property
    def cluster_size(self) -> int:
        """The number of blocks of a cluster."""
        return CLUSTER if self.cluster else 1

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return (self.consumers + 1) * WARPGROUP

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread: at launch, then of the producer and of consumers, which ``setmaxnreg`` redistributes.
        """
        start, least = bounded_registers(self.threads, self.blocks), 40 if self.blocks == 1 else 24
        return start, least, min(240, (start * (self.consumers + 1) - least) // self.consumers // 8 * 8)


TILES = (WgmmaTile(256, 4), WgmmaTile(192, 5), WgmmaTile(128, 4), WgmmaTile(128, 4, 1, 2), WgmmaTile(64, 4, 2, 2),
         WgmmaTile(64, 4, 1, 3), WgmmaTile(192, 3, in_turn=True), WgmmaTile(128, 5, in_turn=True),
         WgmmaTile(64, 8, in_turn=True), WgmmaTile(256, 4, cluster="i"),
         WgmmaTile(192, 3, in_turn=True, cluster="i"), WgmmaTile(128, 5, in_turn=True, cluster="i"))  # fmt: skip
"""Default tiles. 64-row tiles serve small results, with several blocks per SM. Ping-pong tiles serve results with
more tiles than SMs. 64-column tiles with more rows avoid a half-empty last tile of 128 columns. Clusters multicast
the column operand, because a tile has at least as many columns as rows."""
CLUSTER_SPLIT_K_TILES = (WgmmaTile(128, 4, parts=4), WgmmaTile(128, 4, 1, 2, parts=4), WgmmaTile(64, 4, 1, 3, parts=8))
"""Tiles with K split over a cluster, for few tiles."""
FLOAT8_TILES = (WgmmaTile(128, 4), WgmmaTile(128, 4, cluster="i"), WgmmaTile(128, 4, 1), WgmmaTile(64, 4, 1, 2))
"""Tiles for 8-bit floats. Registers hold the sums of one K step and the running sums. A ping-pong tile would have
only 64 columns, and the tensor cores would idle while sums are added."""
GRID_SPLIT_K_TILE = TILES[2]
"""The tile for K split over the grid."""
STEP = 128
"""Bytes of the reduction in a tile: the swizzle's width."""
EXACT_FIT_COLUMNS = 192
"""Columns of tiles that are used only if they divide the number of columns: 768 columns are four such blocks, where
tiles of 256 leave a quarter idle."""
MAX_ROWS_OF_64_ROW_TILES = 1024
"""Maximum rows for which 64-row tiles are preferred, if the number is known."""


SHARED_BYTES, RESERVED_BYTES, SPARE_REGISTERS = 227 << 10, 1 << 10, 24
"""Bytes of shared memory for the blocks of an SM of sm_90, and bytes that the system reserves for each of several;
registers of a consumer in addition to its sums."""


def broken_rule(t: WgmmaTile) -> str | None:
    """Return the name of the rule that a tile breaks, or None if it can be built."""
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
        "sums fit the registers": start < least or sums + SPARE_REGISTERS > registers,
        "blocks fit shared memory": (ring + RESERVED_BYTES) * t.blocks > SHARED_BYTES + RESERVED_BYTES,
    }
    return next((rule for rule, broken in rules.items() if broken), None)


def cluster_split_k_tiles(n: int | None, steps: int | None) -> tuple[WgmmaTile, ...]:
    """Return the cluster split-K tiles that suit n columns and k steps (None means unknown).

    Each block must get at least one step, and the column tiles alone must not fill the GPU.
    """

    def fits(t: WgmmaTile) -> bool:
        return (steps is None or steps >= t.parts) and (n is None or 2 * -(-n // t.columns) < MIN_BLOCKS_TO_FILL_GPU)

    return tuple(filter(fits, CLUSTER_SPLIT_K_TILES))


def suits(t: WgmmaTile, m: int | None, n: int | None) -> bool:
    """Whether the tile suits an m x n result. None means that the extent is unknown."""
    exact = n is not None and n % EXACT_FIT_COLUMNS == 0
    if (t.cluster == "i" and m is not None and m <= t.rows) or (t.cluster == "j" and n is not None and n <= t.columns):
        return False
    if t.columns == EXACT_FIT_COLUMNS or (t.in_turn and exact):
        return exact and t.columns == EXACT_FIT_COLUMNS
    if t.columns < t.rows:
        return n is not None and 0 < n % t.rows <= t.columns
    few = t.consumers > 1 or m is None or m <= MAX_ROWS_OF_64_ROW_TILES
    return few and (n is None or 2 * n > t.columns or t == TILES[2])
