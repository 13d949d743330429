"""Products of packed words on a processor's matrix unit (AMX): register tiles of 2 x 2 tiles of 16 rows and 16 columns.

Panels, copies of rows, tasks and epilogues are those of other products of words. A micro-kernel stores its sums in
memory, and the loop after it computes the results (``codegen/passes/epilogues.py``). One micro-kernel serves one tile
of rows and one serves two. If there are 16 rows, balanced register tiles never have fewer; if there are not, tiles have
as many rows as there are.

The rows of a convolution are pixels of a copied part of an image. The rows of a tile need a constant pitch, so they
are a run of pixels of one image row: a register tile is two runs (``tilemap.Lines``), of at most 16 pixels each.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cpu.contraction import Contraction
from polydyn.codegen.cpu.plan import ContractTuple, Plan
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.register_tile import RegisterTile
from polydyn.codegen.ir import Body, Call, For, Let, walk
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.matrix import SIDE, TILE_PRODUCT_LEAF, TILE_ROWS, Unit, matrix_tiles
from polydyn.codegen.pipeline import Step
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.expr import FromIndex, Op, read_of
from polydyn.schedules.group.words import stored_parts
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum
from polydyn.schedules.tree.names import c, extent, p
from polydyn.schedules.tree.strategies import FIRST_ROW
from polydyn.schedules.tree.tilemap import Lines

TILES_DOWN = TILES_ACROSS = 2
"""Tiles of sums in a register tile, down and across. With two more for each operand, all eight tiles are used."""
LEAST_WORDS = 8
"""Minimum words of K steps per instruction. With fewer, the unit is no faster than vectors."""
LIVE_ROWS, SECOND_ROW = "live_rows", "second_row"
"""Rows of a register tile, and the first row of its second tile."""
V = Index.of


def words_of(x: Contraction) -> int:
    """Return the largest number of words per instruction that divides the steps; 0 if it is too small or unknown.

    Steps of an image are contiguous only along its innermost place.
    """
    steps = (x.inner[-1][1] if x.footprint and x.inner else x.steps * x.inner_steps).constant
    return next((w for w in range(SIDE, LEAST_WORDS - 1, -1) if steps and steps % w == 0), 0)


def lines_of(x: Contraction) -> Lines | None:
    """Return the image rows of a footprint; None if rows are not pixels of several image rows."""
    if x.footprint is None or len(x.footprint.pixels) < 2:
        return None
    _, length = x.footprint.pixels[-1]
    return Lines(x.rows, length, SIDE, TILES_DOWN)


class MatrixTiles(RegisterTile):
    """A register tile in tiles of the matrix unit. Its sums are always stored to memory before the epilogues."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.long = True

    def row_cases(self) -> list[int]:
        """Return the rows of one or two tiles."""
        lines = lines_of(self.product)
        if lines is None:
            return sorted({min(-(-r // SIDE), TILES_DOWN) * SIDE for r in super().row_cases()})
        runs = lines.all_runs.constant
        every = range(1, TILES_DOWN + 1)
        return sorted({min(runs, TILES_DOWN), runs % TILES_DOWN or TILES_DOWN} if runs else set(every))

    def live_case(self) -> Index:
        """Return the live rows of the current register tile, or its live runs."""
        lines = lines_of(self.product)
        if lines is None:
            return super().live_case()
        return minimum(lines.runs, lines.all_runs - V(c("i")) * lines.runs)

    def column_steps(self, width: int) -> tuple[Step, ...]:
        """Return the steps of ``RegisterTile`` without vectorisation."""
        return tuple(s for s in super().column_steps(width) if s.name not in ("vectorise", "unroll_columns"))

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """Lower the points of the tile to instructions."""
        lines = lines_of(self.product)
        one = rows == (1 if lines else SIDE)
        first = (ZERO,) if one else (ZERO, V(SECOND_ROW))
        line = lines.length if lines else None
        following = self.places.map.origin("i", V(c("i")) + 1)
        second = lines.start(V(c("i")) * lines.runs + 1) - V(FIRST_ROW) if lines else V(LIVE_ROWS) - SIDE

        def tiles(body: Body) -> Body:
            width = max(int(n.hi) for n in walk(body) if isinstance(n, For) and n.var == p("j"))
            unit = Unit(self.name, first, tuple(range(0, width, SIDE)), words_of(self.product), line)
            made = matrix_tiles(body, unit)
            if one:
                return made
            made = (Let(SECOND_ROW, second, made),)
            return made if lines else (Let(LIVE_ROWS, following - V(FIRST_ROW), made),)

        def live_rows(body: Body) -> Body:
            return bind(body, {extent(p("i")): following - V(FIRST_ROW)})

        return (
            Step("rows", "the tile's rows", live_rows, (c("i"), FIRST_ROW)),
            Step("flatten", "loops of the reduction become one where they walk alike", self._flattened),
            Step("tiles", "the matrix unit computes the tile", tiles, (c("i"), TILE_ROWS)),
        )


class MatrixKernel(ContractKernel):
    """Builds the kernel of a product of packed words."""

    tile_kind = MatrixTiles
    streams = False
    few_functions = False

    @staticmethod
    def refusal(x: Contraction, fill: bool) -> Declined | None:
        """Return why the unit cannot compute a product; None if it multiplies such words and their layout suits its
        tiles. ``fill``: rows are copied.
        """
        value = x.accumulation.value
        if not x.target.amx:
            return Declined("the processor has none")
        if not (isinstance(value, Op) and value.name in TILE_PRODUCT_LEAF):
            return Declined("its operands are not packed words of 8 or 16 bits")
        column = read_of(x.operands[1])
        return first_refusal(
            (not words_of(x), f"its steps are not a known multiple of {LEAST_WORDS} to {SIDE} words"),
            (column is None or column.buffer not in x.packed, "its columns are not packed"),
            (not fill and not _in_lines(x), "the addresses of its rows have no constant pitch"),
        )

    @property
    def lines(self) -> Lines | None:
        """See ``ContractKernel``."""
        return lines_of(self.product)

    def opened(self) -> tuple[str, ...]:
        """See ``ContractKernel``; ``emitted`` binds the rows of a tile."""
        return (*super().opened(), TILE_ROWS)

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """Return a plan with the whole reduction in one block, so that sums stay in their tiles."""
        plan, n = super().sizes(chosen, fill), self.product.columns.constant
        across = TILES_ACROSS if n is None else min(TILES_ACROSS, -(-n // SIDE))
        plan = replace(plan, rows=TILES_DOWN * SIDE, vectors=across)
        return replace(plan, block=self.product.steps, blocks=ONE, accumulator_output=None)

    def emitted(self, kernel: Kernel, body: Body) -> Kernel:
        """Emit as in ``ContractKernel``, between the calls that configure and release the tiles."""
        x = self.product
        rows = self.lines.longest if self.lines else x.rows
        shape = (FromIndex("int64", i) for i in (V(TILE_ROWS), V(words_of(x))))
        notes = (*kernel.notes, "in tiles of the matrix unit (AMX)")
        body = (Call("pd_amx_begin", tuple(shape)), *body, Call("pd_amx_end"))
        body = (Let(TILE_ROWS, maximum(1, minimum(SIDE, rows)), body),)  # tiles without rows are invalid
        return super().emitted(replace(kernel, amx=True, notes=notes), body)


def _in_lines(x: Contraction) -> bool:
    """Whether rows that are not copied have a constant pitch, and the words of a row are contiguous."""
    row = stored_parts(x.operands[0])
    if row is None or x.roles.inner:
        return False
    _, rest = x.group.arrays[row.buffer].address(row.index).split(x.roles.row)
    return x.roles.row not in rest.symbols()
