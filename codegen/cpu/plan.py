"""The sizes that a CPU kernel of a matmul-like group is built for."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import b, extent
from polydyn.schedules.tree.strategies import CpuTile

REDUCTION_BLOCK = 768
"""Maximum reduction steps per block. The work per block is negligible compared with this many steps (docs/cpu.md 2)."""
ROW_UNROLL = 4
"""Unroll factor of the reduction. With few rows the loop overhead is visible otherwise (docs/cpu.md 2)."""


@dataclass(frozen=True)
class ContractTuple:
    """The compile-time part of a tile configuration: register tile ``rows`` x ``vectors``, block steps, unroll factor.

    The launch-time part, rows and columns of a task, is an argument of ``ContractKernel.shares``. ScheduleError: a size
    is below 1.
    """

    rows: int
    vectors: int
    block: int = REDUCTION_BLOCK
    unroll: int = ROW_UNROLL

    def __post_init__(self) -> None:
        if min(self.rows, self.vectors, self.block, self.unroll) < 1:
            raise ScheduleError(f"{self} has a size below 1", rule="tiles are not empty")


@dataclass(frozen=True)
class Plan:
    """Decisions for one kernel: register tile, reduction block, packing of columns, copying of rows.

    ``lanes``: columns that a register of the tile holds; ``accumulator_output``: the epilogue whose output holds
    the sums between two blocks.
    """

    rows: int
    vectors: int
    lanes: int
    block: Index
    blocks: Index
    promote: bool
    fill: bool = False
    accumulator_output: Statement | None = None
    unroll: int = ROW_UNROLL

    @property
    def columns(self) -> int:
        """Columns of a full register tile."""
        return self.vectors * self.lanes

    @property
    def sizes(self) -> CpuTile:
        """The sizes for the schedule."""
        return CpuTile(self.rows, self.vectors, self.lanes, self.block, 1 if self.blocks == ONE else extent(b("k")))
