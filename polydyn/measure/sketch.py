"""Kernels with only those micro-kernels that an exploration runs.

A tuple is explored at sizes that its register tile divides, and with one, three and all rows, one vector and all
vectors of a tile. Where rows and columns are dynamic a whole kernel has a micro-kernel for every other count too,
several times the text; only finalists need them.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.register_tile import RegisterTile

FEW_ROWS = (1, 3)
"""Rows of the partial register tiles that ``CpuBench.kernel`` measures."""


class FewCases(RegisterTile):
    """A register tile with a few of its micro-kernels."""

    def row_cases(self) -> list[int]:
        """Few rows and full tiles."""
        every = super().row_cases()
        return every if self.product.rows.constant is not None else [
            r for r in every if r in (*FEW_ROWS, self.plan.rows)
        ]  # fmt: skip

    def column_cases(self) -> list[int]:
        """One vector and full tiles."""
        every = super().column_cases()
        return every if self.product.columns.constant is not None else [
            c for c in every if c in (self.plan.lanes, self.plan.columns)
        ]  # fmt: skip


class Sketch(ContractKernel):
    """A whole kernel's loops around a few of its micro-kernels; what ``covers`` refuses must not be run."""

    tile_kind = FewCases

    def covers(self, params: Mapping[str, int]) -> bool:
        """Whether a launch with these parameters runs nothing but micro-kernels that are there."""
        x, p = self.product, self.plan
        rows, columns = x.rows.evaluate(params), x.columns.evaluate(params)
        tiles = max(1, -(-rows // p.rows))
        live_rows = {rows // tiles, -(-rows // tiles)} - {0}
        live_columns = {min(columns, p.columns), columns % p.columns} - {0}
        return live_rows <= set(self.tile.row_cases()) and (
            x.columns.constant is not None or live_columns <= set(self.tile.column_cases())
        )
