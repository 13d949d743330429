"""CPU kernels for matmul-like groups: from the tile-space tree to register-tiled C (CPU.md 1 and 2).

Constants come in panels as wide as a vector, ``[col/W][reduction][W]``; a column operand that is neither such a
constant nor of unit stride is packed by the promotion statement PACK. A row operand that is more than a load (a padded
image, seen as a matrix of pixels) is computed into rows of scratch by the promotion statement FILL.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from polydyn.codegen.cpu_emit import bound_names, emit
from polydyn.codegen.cpu_micro import RegisterTile
from polydyn.codegen.cpu_plan import ROW_UNROLL
from polydyn.codegen.ir import Body, For, Let, Node, Store, consume, rewrite, walk
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import flat, lower, scratch_bytes
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.hoist import hoist_divisions, hoist_guards, hoist_masks
from polydyn.codegen.passes.prefetch import share_panel
from polydyn.codegen.passes.registers import partial_unroll
from polydyn.codegen.passes.tiles import allocated, balance, clip, task_count, tasks, variants
from polydyn.codegen.passes.transpose import has_transposes, transpose_copies
from polydyn.codegen.passes.vectorise import vectorise_loop, vectorise_tile
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.shares import (
    STREAMED,
    even_shares,
    in_pieces,
    row_blocks,
    rows_for_all,
    rows_that_stay,
)
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import ONE, Index, maximum, minimum, product
from polydyn.schedules.tile_flow import ContractTiles
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree.names import LANE, a, b, c, extent, p
from polydyn.schedules.tree.strategies import (
    FILL,
    PACK,
    PANEL,
    ROWS,
    VECTOR,
)

_KNOWN = (b("k"), p("k"), a("k"), LANE)
"""Loops whose extents are known when the kernel is built, for all its variants."""
V = Index.of


class ContractKernel(RegisterTile):
    """Builds the kernel of one matmul-like group."""

    def tiles(self) -> ContractTiles:
        """The sizes that the kernel is built for, as proofs want them."""
        p, w = self.plan, self.width
        panels, vector = self._panels(V("N"), V("c_hi")), p.block * self.R * w
        return ContractTiles(
            p.rows, self.nr, w, p.block, p.blocks, p.promote, panels, self._panel_size(V("S")), vector,
            p.fill, self._filled(), self._fill_size(V("S")), self._pitch(), p.block * self.R,
        )  # fmt: skip

    def _filled(self) -> Index:
        """Rows that FILL copies for the share [r_lo, r_hi) of rows."""
        return V("r_hi") - "r_lo"

    def _fill_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` row tiles."""
        return share * self.plan.rows * self._pitch()

    def _panels(self, columns: Index, c_hi: Index) -> Index:
        """Vectors of columns that PACK fills for the share [c_lo, c_hi) of column tiles."""
        lo = V("c_lo")
        return minimum((columns - lo * self.nr).ceildiv(self.width), (c_hi - lo) * self.plan.vectors)

    def _panel_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` column tiles."""
        return share * self.nr * self.plan.block * self.R

    def pack(self, body: Body) -> Body:
        """The promotion statement, vectorised along the panel's lanes; lanes beyond the last column hold anything."""
        w = self.width

        def f(a: Mapping[str, Index]) -> Body:
            value = flat(self.group, self.col_value, self.places.env(PACK, a), lambda x: None)
            return (Store(PANEL, self._panel(PACK, a), value),)

        body = lower(body, {PACK: f})
        if self.plan.blocks != ONE:
            body = clip(body, (a("k"),), self._left(PACK, "k", a("k")))
        body = vectorise_tile(body, LANE, w, mask_extent=self._left(PACK, "j", LANE))
        whole = rewrite(body, lambda n: Store(n.buffer, n.address, n.value, None, w) if isinstance(n, Store) else n)
        return transpose_copies(fold(whole), a("k"), w) if has_transposes(self.target) else fold(whole)

    def fill(self, body: Body) -> Body:
        """The promotion statement of the rows: the operand with its prologue, vectors along the last reduction."""

        def f(a: Mapping[str, Index]) -> Body:
            value = flat(self.group, self.row_value, self.places.env(FILL, a), lambda x: None)
            return (Store(ROWS, self._copied(FILL, a), value),)

        body = lower(body, {FILL: f})
        if self.plan.blocks != ONE:
            body = clip(body, (a("k"),), self._left(FILL, "k", a("k")))

        def vector(n: Node) -> Node | Body:
            if not isinstance(n, For) or any(isinstance(x, For) for x in walk(n.body)):
                return n
            made = vectorise_loop(n, self.target.width)
            if isinstance(made, Declined):
                self.notes.append(f"rows are copied element by element: {made}")
                return n
            return partial_unroll(made, n.var, ROW_UNROLL)

        body = rewrite(body, lambda n: hoist_guards(n) if isinstance(n, For) else n)
        body = rewrite(body, vector)
        body = tuple(hoist_masks(n, "m_") if isinstance(n, For) else n for n in body)
        return hoist_divisions(body, "q_")

    def tree(self) -> TiledGroup:
        """The tile-space tree that the kernel is generated from."""
        return self.schedule.tiled()

    def build(self) -> Kernel:
        """The kernel."""
        symbols = (*self.group.params, "B_i", "B_j")
        names = bound_names(self.group.arrays, symbols)
        body = run(self.part, loops(self.part, self.tree()), self.steps(), names)
        ranges = Step("tasks", "the coincident band becomes a range of tasks", partial(tasks, runs=True))
        count, body = task_count(body), run(self.part, body, (ranges,), names)
        p = self.plan
        note = f"register tile {p.rows}x{self.nr}, reduction block {p.block}"
        note += ", columns packed" * p.promote + ", rows copied" * p.fill + ", epilogue apart" * self.long
        return emit(
            self.name, body, self.group.arrays, symbols, self._launch(*self._register_tiles()), count,
            scratch_bytes(body), (note, *dict.fromkeys(self.notes)), width=self.target.width,
        )  # fmt: skip

    def steps(self) -> tuple[Step, ...]:
        """The passes up to the coincident band."""
        p, (nt, mt) = self.plan, self._register_tiles()
        sizes = {extent(x): e for x, e in self.schedule.extents().items() if x in _KNOWN}
        pack = Step("pack", "columns are packed into panels", lambda b: consume(b, "promote", self.pack),
                    ("c_lo", PANEL))  # fmt: skip
        fill = Step("fill", "rows are copied", lambda b: consume(b, "fill", self.fill), ("r_lo", ROWS))
        return (
            Step("bind", "sizes become constants", lambda b: bind(b, sizes)),
            *((pack,) if p.promote else ()),
            *((fill,) if p.fill else ()),
            Step("balance_columns", "columns in equal shares", lambda b: balance(b, "c_j", nt, "B_j", "b_j")),
            Step("balance_rows", "rows in equal shares", lambda b: balance(b, "c_i", mt, "B_i", "b_i")),
            Step("micro", "a micro-kernel for each size of a tile", lambda b: consume(b, "micro", self._variants),
                 ("c_lo", PANEL, "r_lo", ROWS, self.tile_name)),
            Step("shares", "a share's scratch", lambda b: consume(b, "kblock", self._shares)),
            Step("fold", "decided guards and single trips go", fold),
        )  # fmt: skip

    def _register_tiles(self) -> tuple[Index, Index]:
        """Register tiles along the columns and along the rows."""
        return self.schedule.map.tiles("j"), self.schedule.map.tiles("i")

    def _shares(self, body: Body) -> Body:
        """The scratch of a share, and where its columns and rows begin."""
        tm, (nt, mt) = self.schedule.map, self._register_tiles()
        if self.plan.promote:
            lo, hi = (tm.share("j", V(b("j")) + n) for n in (0, 1))
            panel = (PANEL, self.col_value.dtype, self._panel_size(nt.ceildiv("B_j")))
            body = (Let("c_lo", lo, allocated(bind(body, {extent(VECTOR): self._panels(self.N, hi)}), *panel)),)
        if self.plan.fill:
            first, end = (tm.first("i", V(b("i")) + n) for n in (0, 1))
            rows = (ROWS, self.row_value.dtype, self._fill_size(mt.ceildiv("B_i")))
            body = bind(body, {extent(a("i")): self._filled()})
            body = (Let("r_lo", first, (Let("r_hi", end, allocated(body, *rows)),)),)
        return body

    def _variants(self, body: Body) -> Body:
        """A switch over exact row counts, inside it over live columns, around outlined micro-kernels."""
        tm = self.schedule.map
        first, following = (tm.origin("i", V(c("i")) + n) for n in (0, 1))
        kernel = self.micro_kernels(body)

        def columns(r: int) -> Body:
            return variants(self.live_columns(), {c: kernel(r, c) for c in self.column_cases()}, f"{self.name}_{r}")

        tile: Body = variants(following - V("o_i"), {r: columns(r) for r in self.row_cases()})
        tile = self.finished(tile, body, following - V("o_i"))
        if not self.streams():
            return (Let("o_i", first, tile),)
        lo, hi = (tm.share("i", V(b("i")) + n) for n in (0, 1))
        return share_panel((Let("o_i", first, tile),), V(c("i")) - lo, hi - lo)

    def shares(self, rows: int, columns: int) -> dict[str, Index]:
        """The launch-time tile: tasks of about ``rows`` x ``columns`` results, in whole register tiles."""
        nt, mt = self.N.ceildiv(self.nr), self.M.ceildiv(self.plan.rows)
        height, width = max(1, rows // self.plan.rows), max(1, columns // self.nr)
        return {"B_i": maximum(1, mt.ceildiv(height)), "B_j": maximum(1, nt.ceildiv(width))}

    def _launch(self, nt: Index, mt: Index) -> dict[str, Index]:
        """Shares for the threads: whole batches first, then column panels or rows."""
        batch = product(self.extents[x] for x in self.roles.batch)
        need = maximum(1, V("nth").ceildiv(maximum(1, batch)))
        if self.plan.fill:
            return row_blocks(mt, nt, rows_that_stay(self.plan.rows, self.plan.block * self.R), need, cheap_rows=False)
        columns, steps = self.N.constant, (self.K * self.R).constant
        most = rows_for_all(self.plan.rows, columns, steps) if columns and steps and columns > self.nr else 0
        if most:
            blocks = row_blocks(mt, nt, most, need, cheap_rows=True)
        else:
            blocks = even_shares(mt, nt, need, self.N, (self.plan.rows, self.nr))
        work = batch * maximum(self.M, STREAMED) * self.N * self.K * self.R
        return in_pieces(blocks, mt, nt, V("nth"), batch, work, self.plan.promote)
