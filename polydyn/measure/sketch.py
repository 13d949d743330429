"""Sketches: kernels with only those micro-kernels that an exploration runs.

A tile is explored at sizes that its register tile divides: one, three and all rows; one vector and all vectors of a
register tile. If rows and columns are dynamic, a full kernel has a micro-kernel for every other count too, and its text
is several times as long. Only finalists need full kernels.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.register_tile import RegisterTile

PARTIAL_ROWS = (1, 3)
"""Rows of the partial register tiles that ``CpuBench.kernel`` measures."""


class MeasuredCases(RegisterTile):
    """A register tile with a few of its micro-kernels."""

    def row_cases(self) -> list[int]:
        """Return the row counts of ``PARTIAL_ROWS`` and of a full tile."""
        every = super().row_cases()
        return every if self.product.rows.constant is not None else [
            r for r in every if r in (*PARTIAL_ROWS, self.plan.rows)
        ]  # fmt: skip

    def column_cases(self) -> list[int]:
        """Return the column counts of one vector and of a full tile."""
        every = super().column_cases()
        return every if self.product.columns.constant is not None else [
            c for c in every if c in (self.plan.lanes, self.plan.columns)
        ]  # fmt: skip


class Sketch(ContractKernel):
    """The loops of a full kernel around some of its micro-kernels. Run it only for sizes that ``covers`` accepts."""

    tile_kind = MeasuredCases

    def covers(self, params: Mapping[str, int]) -> bool:
        """Whether a launch with these parameters uses only existing micro-kernels."""
        x, p = self.product, self.plan
        rows, columns = x.rows.evaluate(params), x.columns.evaluate(params)
        tiles = max(1, -(-rows // p.rows))
        live_rows = {rows // tiles, -(-rows // tiles)} - {0}
        live_columns = {min(columns, p.columns), columns % p.columns} - {0}
        return live_rows <= set(self.tile.row_cases()) and (
            x.columns.constant is not None or live_columns <= set(self.tile.column_cases())
        )
