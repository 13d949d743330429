"""The sizes that a CPU kernel of a matmul-like group is built for."""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.model import Statement

REDUCTION_BLOCK = 768
"""Reduction steps per block: a panel of 768 x 48 floats stays in a 1 MB L2 (docs/cpu.md 2)."""
ROW_UNROLL = 4
"""Reduction steps unrolled: with few rows the loop overhead shows otherwise (docs/cpu.md 2)."""


@dataclass(frozen=True)
class ContractTuple:
    """The compile-time part of a tile tuple: register tile ``rows`` x ``vectors``, steps of a reduction block, unroll.

    The launch-time part, rows and columns of a task, is an argument of ``ContractKernel.shares``. ScheduleError: a size
    below 1.
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
    """Decisions for one kernel: register tile, reduction block, packing of columns, copying of rows."""

    rows: int
    vectors: int
    block: Index
    blocks: Index
    promote: bool
    fill: bool
    carrier: Statement | None
    unroll: int = ROW_UNROLL
