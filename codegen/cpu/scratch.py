"""The operands that a CPU product copies: where panels of columns and rows lie in scratch, and what fills them."""

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
from polydyn.codegen.passes.tiles import clip
from polydyn.codegen.passes.transpose import has_transposes, transpose_copies
from polydyn.codegen.passes.vectorise import tile_in_vectors, vectorise_loop
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
    """Panels ``[vector][reduction][lane]`` of columns, rows ``[row][reduction]``. ``notes``: what a copy cannot do."""

    def __init__(self, product: Contraction, plan: Plan, places: Places) -> None:
        self.product, self.plan, self.places, self.notes = product, plan, places, list[str]()

    @property
    def steps(self) -> Index:
        """Reduction steps of a block, of all reductions as one."""
        return self.plan.block * self.product.inner_steps

    @property
    def pitch(self) -> Index:
        """Elements from one row to the next: not a power of two, which would meet in few sets of a cache."""
        return self.steps + self.plan.lanes

    # -- where elements lie --------------------------------------------------------------------------------------

    def panel(self, statement: str, at: Coordinates) -> Index:
        """Where a panel holds the column that an instance writes or reads."""
        cell, lane = self.places.cell(statement, PANEL, at, LANE), self.places.digit(statement, "j", LANE, at)
        return (cell["j"] * self.steps + self._step(cell)) * self.plan.lanes + lane

    def row(self, statement: str, at: Coordinates) -> Index:
        """Where the rows hold the element that an instance writes or reads."""
        cell = self.places.cell(statement, ROWS, at)
        return cell["i"] * self.pitch + self._step(cell)

    def _step(self, cell: Mapping[str, Index]) -> Index:
        k, axes = cell["k"], self.places.map.iterators
        for x, e in self.product.inner:
            k = k * e + cell[axes[self.product.accumulation.name, x]]
        return k

    # -- how much they take --------------------------------------------------------------------------------------

    def panels(self, columns: Index, end: Index) -> Index:
        """Vectors of columns that PACK fills for the share [c_lo, end) of column tiles."""
        lo = V(SHARE_COLUMNS)
        return minimum((columns - lo * self.plan.columns).ceildiv(self.plan.lanes), (end - lo) * self.plan.vectors)

    def rows(self) -> Index:
        """Rows that FILL copies for the share [r_lo, r_hi)."""
        return V(SHARE_ROWS_END) - SHARE_ROWS

    def panel_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` column tiles."""
        return share * self.plan.columns * self.steps

    def rows_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` row tiles."""
        return share * self.plan.rows * self.pitch

    def rows_parts(self) -> tuple[str, int]:
        """The dtype of the elements of rows, and how many of them make a step: a word's parts lie one by one."""
        row = self.product.operands[0]
        return part_of(row) or (row.dtype, 1)

    def tiles(self) -> ContractTiles:
        """The sizes as the check of the boxes wants them."""
        p, share = self.plan, V("S")
        return ContractTiles(
            p.rows, p.columns, p.lanes, p.block, p.blocks, p.promote, self.panels(V("N"), V(SHARE_COLUMNS_END)),
            self.panel_size(share), self.steps * p.lanes, p.fill, self.rows(), self.rows_size(share), self.pitch,
            self.steps,
        )  # fmt: skip

    def box(self) -> dict[str, Index]:
        """Sizes of loops that the copy of rows runs beside those of the product: none."""
        return {}

    def around(self, body: Body) -> Body:
        """What a share knows besides its rows: nothing."""
        return body

    def following(self) -> dict[str, Index]:
        """What the copy of rows asks for while it copies: nothing."""
        return {}

    def next_strip(self, at: Coordinates) -> tuple[FlatLoad, ...]:
        """What the next share's copy reads first of every plane: of rows nothing."""
        return ()

    def lines(self) -> Index:
        """Lines of the cache that it reads of every plane."""
        return ZERO

    def taps(self, rows: int) -> dict[str, tuple[Index, Index]]:
        """Reduction -> the steps that a tile of so many rows needs, where not all: none."""
        return {}

    # -- what fills them -----------------------------------------------------------------------------------------

    def pack(self, body: Body) -> Body:
        """The promotion statement, vectorised along the panel's lanes; lanes beyond the last column hold anything."""
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
        """The promotion statement of the rows: the operand with its prologue, vectors along the last reduction."""

        def vector(n: Node) -> Node | Body:
            if not isinstance(n, For) or any(isinstance(x, For) for x in walk(n.body)):
                return n
            vectors = vectorise_loop(n, self.product.target.width)
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
        """Where FILL stores, and what."""
        return self.row(FILL, at), self._element(FILL, at, self.product.operands[0])

    def packed(self, at: Coordinates) -> tuple[Index, Value]:
        """Where PACK stores, and what."""
        return self.panel(PACK, at), self._element(PACK, at, self.product.operands[1])

    def _element(self, statement: str, at: Coordinates, value: Value) -> Value:
        return flat(self.product.group, value, self.places.env(statement, at), lambda x: None)

    def _copied(
        self, body: Body, statement: str, buffer: str, copied: Callable[[Coordinates], tuple[Index, Value]]
    ) -> Body:
        """A promotion statement as stores; the last block ends with the reduction."""

        def store(at: Coordinates) -> Body:
            return (Store(buffer, *copied(at)),)

        body = lower(body, {statement: store})
        if self.plan.blocks == ONE:
            return body
        return clip(body, (a("k"),), self.places.remaining(statement, "k", a("k")))

    # -- what reads them -----------------------------------------------------------------------------------------

    def operands(self, statement: str, at: Coordinates) -> tuple[Value, Value]:
        """The row operand, in place or from its copy, and the column operand, in place, as packed, or from its copy."""
        (row, column), env = self.product.operands, self.places.env(statement, at)
        return (
            FlatLoad(row.dtype, ROWS, self.row(statement, at) * self.rows_parts()[1])
            if self.plan.fill else read_word(flat(self.product.group, row, env, lambda x: None)),
            FlatLoad(column.dtype, PANEL, self.panel(statement, at))
            if self.plan.promote else flat(self.product.group, column, env, lambda x: None),
        )  # fmt: skip
