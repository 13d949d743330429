"""The operands that a CPU product copies: the layout of panels of columns and rows in scratch, and the copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polydyn.codegen.cpu.contraction import Contraction
from polydyn.codegen.cpu.plan import ROW_UNROLL, Plan
from polydyn.codegen.ir import Body, FlatLoad, For, Node, Store, rewrite, walk
from polydyn.codegen.lower import flat, lower
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.hoist import hoist_divisions, hoist_guards, hoist_masks, split_guards
from polydyn.codegen.passes.parts import part_of, read_word, store_parts
from polydyn.codegen.passes.prefetch import prefetch_next
from polydyn.codegen.passes.registers import partial_unroll
from polydyn.codegen.passes.segments import vectorise
from polydyn.codegen.passes.tiles import clip
from polydyn.codegen.passes.transpose import has_transposes, transpose_copies
from polydyn.codegen.passes.vectorise import tile_in_vectors
from polydyn.codegen.places import Coordinates, Places
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import NIBBLES, Value, loads, symbols_of
from polydyn.schedules.index import ONE, ZERO, Index, minimum
from polydyn.schedules.proof.boxes import ContractTiles
from polydyn.schedules.tree.names import LANE, a, it
from polydyn.schedules.tree.strategies import (
    FILL,
    PACK,
    PANEL,
    ROWS,
    SHARE_COLUMNS,
    SHARE_COLUMNS_END,
    SHARE_ROWS,
    SHARE_ROWS_END,
)

V = Index.of


class Scratch:
    """Panels ``[vector][reduction][lane]`` of columns, rows ``[row][reduction]``. ``notes``: loops that stay scalar."""

    def __init__(self, product: Contraction, plan: Plan, places: Places) -> None:
        self.product, self.plan, self.places, self.notes = product, plan, places, list[str]()

    @property
    def steps(self) -> Index:
        """Reduction steps of a block, over all reductions."""
        return self.plan.block * self.product.inner_steps

    @property
    def pitch(self) -> Index:
        """Row pitch in elements. It is not a power of two, which would cause cache set conflicts."""
        return self.steps + self.plan.lanes

    # -- layout ------------------------------------------------------------------------------------------------------

    def panel(self, statement: str, at: Coordinates) -> Index:
        """Return the offset in a panel of the column that an instance writes or reads."""
        cell, lane = self.places.cell(statement, PANEL, at, LANE), self.places.digit(statement, "j", LANE, at)
        return (cell["j"] * self.steps + self._step(cell)) * self.plan.lanes + lane

    def row(self, statement: str, at: Coordinates) -> Index:
        """Return the offset among the rows of the element that an instance writes or reads."""
        cell = self.places.cell(statement, ROWS, at)
        return cell["i"] * self.pitch + self._step(cell)

    def _step(self, cell: Mapping[str, Index]) -> Index:
        k, axes = cell["k"], self.places.map.iterators
        for x, e in self.product.inner:
            k = k * e + cell[axes[self.product.accumulation.name, x]]
        return k

    # -- sizes -------------------------------------------------------------------------------------------------------

    def panels(self, columns: Index, end: Index) -> Index:
        """Return the vectors of columns that PACK fills for the range [c_lo, end) of column tiles."""
        lo = V(SHARE_COLUMNS)
        return minimum((columns - lo * self.plan.columns).ceildiv(self.plan.lanes), (end - lo) * self.plan.vectors)

    def rows(self) -> Index:
        """Return the number of rows that FILL copies for the range [r_lo, r_hi)."""
        return V(SHARE_ROWS_END) - SHARE_ROWS

    def panel_size(self, share: Index) -> Index:
        """Return the elements allocated for at most ``share`` column tiles."""
        return share * self.plan.columns * self.steps

    def rows_size(self, share: Index) -> Index:
        """Return the elements allocated for at most ``share`` row tiles."""
        return share * self.plan.rows * self.pitch

    def rows_parts(self) -> tuple[str, int]:
        """Return the dtype of the elements of rows, and the number of elements of a packed step."""
        row = self.product.operands[0]
        return part_of(row) or (row.dtype, 1)

    def tiles(self) -> ContractTiles:
        """Return the sizes as input of the box checks."""
        p, share = self.plan, V("S")
        return ContractTiles(
            p.rows, p.columns, p.lanes, p.block, p.blocks, p.promote, self.panels(V("N"), V(SHARE_COLUMNS_END)),
            self.panel_size(share), self.steps * p.lanes, p.fill, self.rows(), self.rows_size(share), self.pitch,
            self.steps,
        )  # fmt: skip

    def box(self) -> dict[str, Index]:
        """Return the sizes of further loops of the copy of rows. None here."""
        return {}

    def around(self, body: Body) -> Body:
        """Bind further bounds that the loops of a task need. None here."""
        return body

    def following(self) -> dict[str, Index]:
        """Return the coordinates that the copy of rows prefetches. None here."""
        return {}

    def next_strip(self, at: Coordinates) -> tuple[FlatLoad, ...]:
        """Return the loads that the next task's copy begins with in every plane. None for rows."""
        return ()

    def lines(self) -> Index:
        """Return the cache lines that the copy reads of every plane."""
        return ZERO

    def taps(self, rows: int) -> dict[str, tuple[Index, Index]]:
        """Return reduction -> the needed steps of a tile with ``rows`` rows, if some can be skipped. None here."""
        return {}

    # -- copies ------------------------------------------------------------------------------------------------------

    def pack(self, body: Body) -> Body:
        """Lower PACK, vectorised along the panel's lanes; lanes past the last column may have any value."""
        x, w = self.product, self.plan.lanes
        body = self._copied(body, PACK, PANEL, self.packed)
        columns = {y.buffer for y in loads(x.operands[1]) if x.roles.col in symbols_of(y)}
        live = None if columns <= x.panels_of_constants else self.places.remaining(PACK, "j", LANE)
        vectors = tile_in_vectors(body, LANE, w, mask_extent=live)
        if isinstance(vectors, Declined):
            self.notes.append(f"columns are packed element by element: {vectors}")
            return fold(clip(body, {LANE}, Index.of(w) if live is None else live))
        if x.decodes:
            vectors = partial_unroll(vectors, it(x.roles.inner[-1]), NIBBLES)
        whole = rewrite(vectors, lambda n: Store(n.buffer, n.address, n.value, None, w) if isinstance(n, Store) else n)
        return transpose_copies(fold(whole), a("k"), w) if has_transposes(self.product.target) else fold(whole)

    def fill(self, body: Body) -> Body:
        """Lower FILL: the operand with its prologue, vectorised along the last reduction."""

        def vector(n: Node) -> Node | Body:
            if not isinstance(n, For) or any(isinstance(x, For) for x in walk(n.body)):
                return n
            vectors = vectorise(n, self.product.target.width)
            if isinstance(vectors, Declined):
                self.notes.append(f"rows are copied element by element: {vectors}")
                return n
            vectors = prefetch_next(vectors, n.var, self.following())
            parts = (split_guards(x) if isinstance(x, For) else (x,) for x in vectors)
            return partial_unroll(tuple(x for part in parts for x in part), n.var, ROW_UNROLL)

        body = store_parts(self._copied(body, FILL, ROWS, self.filled), ROWS)
        body = rewrite(body, lambda n: hoist_guards(n) if isinstance(n, For) else n)
        body = rewrite(body, vector)
        body = tuple(hoist_masks(n, "m_") if isinstance(n, For) else n for n in body)
        return hoist_divisions(body, "q_")

    def filled(self, at: Coordinates) -> tuple[Index, Value]:
        """Return the address and the value of FILL's store."""
        return self.row(FILL, at), self._element(FILL, at, self.product.operands[0])

    def packed(self, at: Coordinates) -> tuple[Index, Value]:
        """Return the address and the value of PACK's store."""
        return self.panel(PACK, at), self._element(PACK, at, self.product.operands[1])

    def _element(self, statement: str, at: Coordinates, value: Value) -> Value:
        return flat(self.product.group, value, self.places.env(statement, at), lambda x: None)

    def _copied(
        self, body: Body, statement: str, buffer: str, copied: Callable[[Coordinates], tuple[Index, Value]]
    ) -> Body:
        """Lower a promotion statement to stores; the last block ends with the reduction."""

        def store(at: Coordinates) -> Body:
            return (Store(buffer, *copied(at)),)

        body = lower(body, {statement: store})
        if self.plan.blocks == ONE:
            return body
        return clip(body, (a("k"),), self.places.remaining(statement, "k", a("k")))

    # -- reads -------------------------------------------------------------------------------------------------------

    def operands(self, statement: str, at: Coordinates) -> tuple[Value, Value]:
        """Return the operands: rows in place or copied, columns in place, packed, or copied."""
        (row, column), env = self.product.operands, self.places.env(statement, at)
        return (
            FlatLoad(row.dtype, ROWS, self.row(statement, at) * self.rows_parts()[1])
            if self.plan.fill else read_word(flat(self.product.group, row, env, lambda x: None)),
            FlatLoad(column.dtype, PANEL, self.panel(statement, at))
            if self.plan.promote else flat(self.product.group, column, env, lambda x: None),
        )  # fmt: skip
