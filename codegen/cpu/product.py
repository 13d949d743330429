"""CPU kernels for matmul-like groups: from the tile-space tree to register-tiled C (docs/cpu.md 1 and 2).

Constants are stored in panels as wide as a vector, ``[col/W][reduction][W]``. The promotion statement PACK packs a
column operand that is neither such a constant nor of unit stride. The promotion statement FILL computes a row operand
that is more than a load (a padded image, seen as a matrix of pixels) into rows of scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property, partial
from typing import Any

from polydyn.codegen.cpu.contraction import Contraction, plan_product
from polydyn.codegen.cpu.emit import bound_names, emit, ranges
from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.register_tile import RUN_FIRST, RegisterTile
from polydyn.codegen.cpu.scratch import Scratch
from polydyn.codegen.cpu.shares import COLUMN_BLOCKS, ROW_BLOCKS, columns_first, product_blocks
from polydyn.codegen.cpu.strips import FIRST_LINE, LINES, FootprintBuffer
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.ir import Body, For, Let, rewrite
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import scratch_bytes
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.prefetch import share_panel
from polydyn.codegen.passes.tiles import allocated, balance, in_pieces, variants
from polydyn.codegen.places import Places
from polydyn.schedules.group.footprint import Footprint
from polydyn.schedules.index import Index, IndexLike, maximum
from polydyn.schedules.model import Group
from polydyn.schedules.proof.boxes import ContractTiles
from polydyn.schedules.proof.obligations import boxes
from polydyn.schedules.proof.proven import Obligation
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.names import LANE, MarkName, a, b, c, extent, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import (
    FIRST_ROW,
    PANEL,
    ROWS,
    SHARE_COLUMNS,
    SHARE_ROWS,
    SHARE_ROWS_END,
    VECTOR,
    cpu_product,
)
from polydyn.schedules.tree.tilemap import Lines

BUILD_TIME = tuple(map(extent, (b("k"), p("k"), LANE)))
"""Sizes that are numbers when the kernel is built, for all its variants."""
SHORT_PANEL = 1 << 14
"""Maximum elements of a panel of columns that two pieces of a tile read one after the other. With 12000 the pieces take
up to 1.08 times as long as one tile; with 37000, as in BERT-base, 5, 9 and 11 rows took 1.1 to 1.3 times as long."""
V = Index.of


class ContractKernel(Variant):
    """Builds the kernel of one matmul-like group."""

    tile_kind: type[RegisterTile] = RegisterTile
    scratch_kind: type[Scratch] = Scratch

    def __init__(
        self, name: str, group: Group, roles: Roles, target: CpuTarget, packed: frozenset[str],
        chosen: ContractTuple | None = None, fill: bool = False, footprint: Footprint | None = None,
    ) -> None:  # fmt: skip
        """Plan the kernel.

        ``packed``: arrays that are stored in panels along the column iterator. ``chosen``: tuned sizes. ``fill``: FILL
        copies the rows, or their ``footprint`` if they have one.
        """
        self.name, self.target = name, target
        self.product = Contraction(group, roles, target, packed, footprint)
        self.plan = self.sizes(chosen, fill)

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """Return the sizes that the kernel is built for."""
        return plan_product(self.product, fill, chosen)

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map: the loops, and each instance's coordinates in the group and in the kernel's buffers."""
        x, p = self.product, self.plan
        places = [n for n, _ in x.footprint.places] if x.footprint else ()
        return cpu_product(x.group, x.roles, p.sizes, p.promote, p.fill, places, lines=self.lines)

    @property
    def lines(self) -> Lines | None:
        """The lines that no tile of rows crosses, except between its runs; None if tiles may cross them."""
        return None

    @cached_property
    def scratch(self) -> Scratch:
        """The operands that are copied."""
        kind = FootprintBuffer if self.product.footprint else self.scratch_kind
        return kind(self.product, self.plan, Places(self.schedule))

    @cached_property
    def tile(self) -> RegisterTile:
        """The micro-kernels."""
        return self.tile_kind(self.name, self.product, self.plan, self.scratch, streams=self.streams)

    @property
    def streams(self) -> bool:
        """Whether panels do not fit the cache and each serves all row tiles of a task."""
        x = self.product
        if x.decodes:  # their kernels read what PACK has just written, or prefetch themselves
            return False
        size = (x.columns * x.steps * x.inner_steps).constant
        return bool(x.panels_of_constants) and size is not None and size > x.target.core.shared

    def tiles(self) -> ContractTiles:
        """Return the sizes that the kernel is built for, as input of the box checks."""
        return self.scratch.tiles()

    def obligations(self) -> tuple[Obligation, ...]:
        """Copies fit their buffers."""
        return (boxes(self.tiles()),)

    @property
    def group(self) -> Group:
        """The computation of the kernel."""
        return self.product.group

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernel's parameters."""
        return (*self.group.params, ROW_BLOCKS, COLUMN_BLOCKS)

    @property
    def family(self) -> Family[Any]:
        """The tables of the kernel."""
        return PRODUCT

    def build(self) -> Kernel:
        """Build the kernel."""
        x, p = self.product, self.plan
        body, count = build(self.family, self)
        note = f"register tile {p.rows}x{p.columns}, reduction block {p.block}"
        copied = ", footprint copied" if x.footprint else ", rows copied"
        note += ", columns packed" * p.promote + copied * p.fill + ", epilogue apart" * self.tile.long
        notes = (note, *dict.fromkeys(self.scratch.notes))
        return self.emitted(Kernel(self.name, self.symbols, count, scratch_bytes(body), self.launch, notes), body)

    def emitted(self, kernel: Kernel, body: Body) -> Kernel:
        """Return the kernel with its text."""
        return emit(kernel, body, self.product.group.arrays, width=self.target.width)

    @property
    def launch(self) -> dict[str, Index]:
        """The default launch-time tile, over the group's parameters and the number of threads."""
        return product_blocks(self.product, self.plan, (self.schedule.map.tiles("i"), self.schedule.map.tiles("j")))

    def numbers(self) -> Mapping[str, IndexLike]:
        """Return the sizes that are numbers when the kernel is built."""
        sizes = {n: e for n, e in self.schedule.parameters().items() if n in BUILD_TIME}
        return sizes | self.scratch.box()

    def balance_columns(self, body: Body) -> Body:
        """Distribute the columns nearly equally over blocks."""
        return balance(body, c("j"), self._register_tiles()[0], COLUMN_BLOCKS, b("j"))

    def balance_rows(self, body: Body) -> Body:
        """Distribute the rows nearly equally over blocks."""
        return balance(body, c("i"), self._register_tiles()[1], ROW_BLOCKS, b("i"))

    def task_order(self) -> tuple[str, ...]:
        """Return the loops of the tasks, outermost first, if they differ from the tree's order."""
        return (b("j"), b("i")) if columns_first(self.product, self.plan) else ()

    def opened(self) -> tuple[str, ...]:
        """Return the names that micro-kernels introduce."""
        begins = (SHARE_COLUMNS, PANEL, SHARE_ROWS, SHARE_ROWS_END, ROWS, FIRST_LINE, LINES, RUN_FIRST)
        return (*begins, self.tile.name, self.tile.sums)

    def _register_tiles(self) -> tuple[Index, Index]:
        """Return the numbers of register tiles along the columns and along the rows."""
        return self.schedule.map.tiles("j"), self.schedule.map.tiles("i")

    def share(self, body: Body) -> Body:
        """Bind the scratch of a task, and the starts of its columns and rows."""
        tm, (nt, mt), (_, col) = self.schedule.map, self._register_tiles(), self.product.operands
        if self.plan.promote:
            lo, hi = (tm.share("j", V(b("j")) + n) for n in (0, 1))
            body = bind(body, {extent(VECTOR): self.scratch.panels(self.product.columns, hi)})
            body = allocated(body, PANEL, col.dtype, self.scratch.panel_size(nt.ceildiv(COLUMN_BLOCKS)))
            body = (Let(SHARE_COLUMNS, lo, body),)
        if self.plan.fill:
            first, end = (tm.first("i", V(b("i")) + n) for n in (0, 1))
            body = bind(body, {extent(a("i")): self.scratch.rows()})
            dtype, parts = self.scratch.rows_parts()
            body = allocated(body, ROWS, dtype, self.scratch.rows_size(mt.ceildiv(ROW_BLOCKS)) * parts)
            body = (Let(SHARE_ROWS, first, (Let(SHARE_ROWS_END, end, self.scratch.around(body)),)),)
        return body

    def micro(self, body: Body) -> Body:
        """Build a switch over exact row counts and, inside it, over live columns, around outlined micro-kernels."""
        tm, tile = self.schedule.map, self.tile
        first, following = (tm.origin("i", V(c("i")) + n) for n in (0, 1))
        tile.in_pieces = self.few_functions
        tile.turn(body)
        kernel = tile.micro_kernels(body)

        @cache
        def columns(r: int) -> Body:
            return variants(tile.live_columns(), {c: kernel(r, c) for c in tile.column_cases()}, f"{self.name}_{r}")

        rows = tile.row_cases()
        if tile.in_pieces:
            cases = in_pieces(rows, first, lambda start, r: (Let(FIRST_ROW, start, columns(r)),))
            switch: Body = tile.finished(variants(following - first, cases), body, following - V(RUN_FIRST))
            switch = (Let(RUN_FIRST, first, switch),) if tile.long and not tile.across else switch
        else:
            switch = variants(tile.live_case(), {r: columns(r) for r in rows})
            switch = (Let(FIRST_ROW, first, tile.finished(switch, body, following - V(FIRST_ROW))),)
        switch = tile.prefetch_next_footprint(switch)
        if not self.streams:
            return switch
        lo, hi = (tm.share("i", V(b("i")) + n) for n in (0, 1))
        return share_panel(switch, V(c("i")) - lo, hi - lo)

    @property
    def few_functions(self) -> bool:
        """Whether some numbers of rows are computed in pieces.

        Not if the pieces would read a long panel of columns again, nor if sums in memory are counted from the first
        row of the tile.
        """
        panel = (self.product.steps * self.product.inner_steps * self.plan.columns).constant
        return panel is not None and panel <= SHORT_PANEL

    def runs(self, body: Body) -> Body:
        """Build runs of row tiles, if results are contiguous along rows."""
        if not self.tile.across:
            return body
        origin = partial(self.schedule.map.origin, "i")
        return rewrite(body, lambda n: self.tile.run(n, origin) if isinstance(n, For) and n.var == c("i") else n)

    def shares(self, rows: int, columns: int) -> dict[str, Index]:
        """Return the launch-time tile: tasks of about ``rows`` x ``columns`` results, in whole register tiles."""
        x, p = self.product, self.plan
        nt, mt = x.columns.ceildiv(p.columns), x.rows.ceildiv(p.rows)
        height, width = max(1, rows // p.rows), max(1, columns // p.columns)
        return {ROW_BLOCKS: maximum(1, mt.ceildiv(height)), COLUMN_BLOCKS: maximum(1, nt.ceildiv(width))}


PRODUCT: Family[ContractKernel] = Family(
    names=bound_names,
    sizes=ContractKernel.numbers,
    marks=(
        Rule("pack", "columns are packed into panels", lambda x, body: x.scratch.pack(body), MarkName.PROMOTE,
             opens=(SHARE_COLUMNS, PANEL), where=lambda x: x.plan.promote),
        Rule("fill", "rows are copied", lambda x, body: x.scratch.fill(body), MarkName.FILL,
             opens=(SHARE_ROWS, ROWS, FIRST_LINE, LINES), where=lambda x: x.plan.fill),
        Rule("balance_columns", "columns are distributed equally", ContractKernel.balance_columns),
        Rule("balance_rows", "rows are distributed equally", ContractKernel.balance_rows),
        Rule("micro", "a micro-kernel for each size of a tile", lambda x, body: x.micro(body), MarkName.MICRO,
             opens=lambda x: x.opened()),
        Rule("runs", "results of several tiles are stored together", lambda x, body: x.runs(body)),
        Rule("shares", "scratch of a task", lambda x, body: x.share(body), MarkName.KBLOCK),
    ),
    band=lambda x, _: ranges(x.task_order()),
)  # fmt: skip
