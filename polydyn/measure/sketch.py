"""Kernels with only those micro-kernels that an exploration runs.

A tuple is explored at sizes that its register tile divides, and with one, three and all rows, one vector and all
vectors of a tile. Where rows and columns are dynamic a whole kernel has a micro-kernel for every other count too,
several times the text; only finalists need them.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen.cpu.product import ContractKernel

FEW_ROWS = (1, 3)
"""Rows of the partial register tiles that ``CpuBench.kernel`` measures."""


class Sketch(ContractKernel):
    """A whole kernel's loops around a few of its micro-kernels; what ``covers`` refuses must not be run."""

    def row_cases(self) -> list[int]:
        """Few rows and full tiles."""
        every = super().row_cases()
        return every if self.M.constant is not None else [r for r in every if r in (*FEW_ROWS, self.plan.rows)]

    def column_cases(self) -> list[int]:
        """One vector and full tiles."""
        every = super().column_cases()
        return every if self.N.constant is not None else [c for c in every if c in (self.target.width, self.nr)]

    def covers(self, params: Mapping[str, int]) -> bool:
        """Whether a launch with these parameters runs nothing but micro-kernels that are there."""
        rows, columns = self.M.evaluate(params), self.N.evaluate(params)
        tiles = max(1, -(-rows // self.plan.rows))
        live_rows = {rows // tiles, -(-rows // tiles)} - {0}
        live_columns = {min(columns, self.nr), columns % self.nr} - {0}
        return live_rows <= set(self.row_cases()) and (
            self.N.constant is not None or live_columns <= set(self.column_cases())
        )
