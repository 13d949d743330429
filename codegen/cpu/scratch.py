"""The operands that a CPU product copies: where panels of columns and rows lie in scratch, and how much they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polydyn.codegen.cpu.plan import Plan
from polydyn.codegen.places import Coordinates, Places
from polydyn.schedules.index import Index, minimum, product
from polydyn.schedules.proof.boxes import ContractTiles
from polydyn.schedules.tree.names import LANE
from polydyn.schedules.tree.strategies import PANEL, ROWS

V = Index.of


@dataclass(frozen=True, eq=False)
class Scratch:
    """Panels ``[vector][reduction][lane]`` of columns, rows ``[row][reduction]``.

    ``width``: lanes of a vector; ``inner``: (iterator, extent) of the reductions inside a block.
    """

    plan: Plan
    width: int
    inner: Sequence[tuple[str, Index]]
    places: Places

    @property
    def steps(self) -> Index:
        """Reduction steps of a block, of all reductions as one."""
        return self.plan.block * product(e for _, e in self.inner)

    @property
    def columns(self) -> int:
        """Columns of a full register tile."""
        return self.plan.vectors * self.width

    @property
    def pitch(self) -> Index:
        """Elements from one row to the next: not a power of two, which would meet in few sets of a cache."""
        return self.steps + self.width

    def panel(self, statement: str, a: Coordinates) -> Index:
        """Where a panel holds the column that an instance writes or reads."""
        cell = self.places.cell(statement, PANEL, a, LANE)
        return (cell["j"] * self.steps + self._step(cell)) * self.width + self.places.digit(statement, "j", LANE, a)

    def row(self, statement: str, a: Coordinates) -> Index:
        """Where the rows hold the element that an instance writes or reads."""
        cell = self.places.cell(statement, ROWS, a)
        return cell["i"] * self.pitch + self._step(cell)

    def _step(self, cell: Mapping[str, Index]) -> Index:
        k = cell["k"]
        for x, e in self.inner:
            k = k * e + cell[x]
        return k

    def panels(self, columns: Index, end: Index) -> Index:
        """Vectors of columns that PACK fills for the share [c_lo, end) of column tiles."""
        lo = V("c_lo")
        return minimum((columns - lo * self.columns).ceildiv(self.width), (end - lo) * self.plan.vectors)

    def rows(self) -> Index:
        """Rows that FILL copies for the share [r_lo, r_hi)."""
        return V("r_hi") - "r_lo"

    def panel_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` column tiles."""
        return share * self.columns * self.steps

    def rows_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` row tiles."""
        return share * self.plan.rows * self.pitch

    def tiles(self) -> ContractTiles:
        """The sizes as the check of the boxes wants them."""
        p, share = self.plan, V("S")
        return ContractTiles(
            p.rows, self.columns, self.width, p.block, p.blocks, p.promote, self.panels(V("N"), V("c_hi")),
            self.panel_size(share), self.steps * self.width, p.fill, self.rows(), self.rows_size(share), self.pitch,
            self.steps,
        )  # fmt: skip
