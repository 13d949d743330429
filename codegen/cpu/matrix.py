"""Products of packed words on a processor's matrix unit (AMX): register tiles of 2 x 2 tiles of 16 rows and 16 columns.

Panels, copies of rows, tasks and epilogues are those of other products of words. A micro-kernel stores its sums in
memory, and the loop after it computes the results (``codegen/passes/epilogues.py``). One micro-kernel serves 16 rows
and one 17 to 32: balanced tiles never have fewer rows if there are 16.
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
from polydyn.codegen.passes.matrix import SIDE, TILE_PRODUCT_LEAF, Unit, matrix_tiles
from polydyn.codegen.pipeline import Step
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.expr import FromIndex, Op, read_of
from polydyn.schedules.group.words import stored_parts
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.tree.names import c, extent, p
from polydyn.schedules.tree.strategies import FIRST_ROW

TILES_DOWN = TILES_ACROSS = 2
"""Tiles of sums in a register tile, down and across. With two more for each operand, all eight tiles are used."""
LEAST_WORDS = 8
"""Minimum words of K steps per instruction. With fewer, the unit is no faster than vectors."""
LIVE_ROWS = "live_rows"
"""Rows of a register tile."""
V = Index.of


def words_of(x: Contraction) -> int:
    """Return the largest number of words per instruction that divides the steps; 0 if it is too small or unknown."""
    steps = (x.steps * x.inner_steps).constant
    return next((w for w in range(SIDE, LEAST_WORDS - 1, -1) if steps and steps % w == 0), 0)


class MatrixTiles(RegisterTile):
    """A register tile in tiles of the matrix unit. Its sums are always stored to memory before the epilogues."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.long = True

    def row_cases(self) -> list[int]:
        """Return the rows of one or two tiles."""
        return sorted({-(-r // SIDE) * SIDE for r in self._rows()})

    def _rows(self) -> list[int]:
        """Return the numbers of live rows that occur, from 16 on."""
        return [r for r in super().row_cases() if r >= SIDE]

    def column_steps(self, width: int) -> tuple[Step, ...]:
        """Return the steps of ``RegisterTile`` without vectorisation."""
        return tuple(s for s in super().column_steps(width) if s.name not in ("vectorise", "unroll_columns"))

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """Lower the points of the tile to instructions."""
        exact = [r for r in self._rows() if r > SIDE]
        live = V(SIDE) if rows == SIDE else V(exact[0]) if len(exact) == 1 else V(LIVE_ROWS)
        first = (ZERO,) if rows == SIDE else (ZERO, live - SIDE)

        def tiles(body: Body) -> Body:
            width = max(int(n.hi) for n in walk(body) if isinstance(n, For) and n.var == p("j"))
            made = matrix_tiles(body, Unit(self.name, first, tuple(range(0, width, SIDE)), words_of(self.product)))
            following = self.places.map.origin("i", V(c("i")) + 1)
            return (Let(LIVE_ROWS, following - V(FIRST_ROW), made),) if live == V(LIVE_ROWS) else made

        return (
            Step("rows", "the tile's rows", lambda b: bind(b, {extent(p("i")): live}), (LIVE_ROWS,)),
            Step("flatten", "loops of the reduction become one where they walk alike", self._flattened),
            Step("tiles", "the matrix unit computes the tile", tiles, (c("i"),)),
        )


class MatrixKernel(ContractKernel):
    """Builds the kernel of a product of packed words with at least 16 rows."""

    tile_kind = MatrixTiles
    streams = False

    @staticmethod
    def refusal(x: Contraction, fill: bool) -> Declined | None:
        """Return why the unit cannot compute a product; None if it multiplies such words and their layout suits its
        tiles. ``fill``: rows are copied.
        """
        value, rows = x.accumulation.value, x.rows.constant
        if not x.target.amx:
            return Declined("the processor has none")
        if not (isinstance(value, Op) and value.name in TILE_PRODUCT_LEAF):
            return Declined("its operands are not packed words of 8 or 16 bits")
        column = read_of(x.operands[1])
        return first_refusal(
            (not words_of(x), f"its steps are not a known multiple of {LEAST_WORDS} to {SIDE} words"),
            (x.footprint is not None, "its rows are copied as a part of an image"),
            (rows is not None and rows < SIDE, f"{rows} rows are fewer than the {SIDE} of a tile"),
            (column is None or column.buffer not in x.packed, "its columns are not packed"),
            (not fill and not _in_lines(x), "the addresses of its rows have no constant pitch"),
        )

    def sizes(self, chosen: ContractTuple | None, fill: bool) -> Plan:
        """Return a plan with the whole reduction in one block, so that sums stay in their tiles."""
        plan, n = super().sizes(chosen, fill), self.product.columns.constant
        across = TILES_ACROSS if n is None else min(TILES_ACROSS, -(-n // SIDE))
        plan = replace(plan, rows=TILES_DOWN * SIDE, vectors=across)
        return replace(plan, block=self.product.steps, blocks=ONE, accumulator_output=None)

    def emitted(self, kernel: Kernel, body: Body) -> Kernel:
        """Emit as in ``ContractKernel``, between the calls that configure and release the tiles."""
        begin = Call("pd_amx_begin", (FromIndex("int64", V(words_of(self.product))),))
        notes = (*kernel.notes, "in tiles of the matrix unit (AMX)")
        return super().emitted(replace(kernel, amx=True, notes=notes), (begin, *body, Call("pd_amx_end")))


def _in_lines(x: Contraction) -> bool:
    """Whether rows that are not copied have a constant pitch, and the words of a row are contiguous."""
    row = stored_parts(x.operands[0])
    if row is None or x.roles.inner:
        return False
    _, rest = x.group.arrays[row.buffer].address(row.index).split(x.roles.row)
    return x.roles.row not in rest.symbols()
