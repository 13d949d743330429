"""How a launch divides a product into tasks: blocks of rows and columns in whole register tiles."""

from __future__ import annotations

from polydyn.codegen.cpu.contraction import Contraction
from polydyn.codegen.cpu.plan import REDUCTION_BLOCK, Plan
from polydyn.codegen.cpu.target import Core
from polydyn.codegen.kernel import WORKERS
from polydyn.codegen.passes.prefetch import LINE
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.group.footprint import Footprint
from polydyn.schedules.index import ONE, Index, IndexLike, maximum, minimum
from polydyn.schedules.model import SHARES
from polydyn.schedules.tree.names import b, extent

ROW_BLOCKS, COLUMN_BLOCKS = extent(b("i")), extent(b("j"))
"""Launch-time symbols: blocks of rows and of columns, in register tiles."""
SHORT = 4
"""Reduction steps for each row of a tile up to which its results outweigh what it reads."""
IN_RUNS = 8
"""The same up to which results should be written in long runs, where columns are more than stay in the cache."""
FEW_BLOCKS = 8
"""Blocks of rows for each thread from which one more for some of them does not matter."""
PIECES = 8
"""Tasks for each of several threads, so that another one can take what a thread without a core has not come to."""
PIECE = 10000
"""Vectors of multiply-adds of a task below which more of them do not pay: about 3 us of a core (docs/adr/0026)."""
STREAMED = 8
"""Rows up to which a product takes as long as reading its columns: fewer rows make no less work."""
TALL, LOW = 16, 4
"""Row tiles of a task from which reading all columns once more for them does not matter; and from which it matters less
than one thread in two with a task more than the others."""
FEW_TASKS = 4
"""Tasks of each thread from which one more for some of them is a small part."""
FEW_TILES, LEAST_SHARES = 32, 4
"""Tiles of a result up to which a long reduction is split, where it has so many shares, or a multiple of that."""
SHARE_STEPS = 2 * REDUCTION_BLOCK
"""Steps of a share: its columns stay in a 1 MB L2, and to add a share takes a hundredth of its products."""


def rows_that_stay(core: Core, rows: int, steps: Index) -> int:
    """Tiles of ``rows`` rows, each of ``steps`` elements, that stay together in a quarter of the cache."""
    return 16 if steps.constant is None else max(1, core.floats // 4 // (rows * max(1, steps.constant)))


def rows_for_all(core: Core, rows: int, columns: int, steps: int) -> int:
    """Row tiles of a block that goes through all columns; 0: each panel of columns should go through all rows.

    Results are most of what moves when the reduction is short: they are written row by row. Columns that stay in the
    cache let rows be read once instead of once for each panel.
    """
    if steps <= SHORT * rows:
        return 1
    return rows_that_stay(core, rows, Index.of(steps)) if columns * steps <= core.shared else 0


def columns_first(x: Contraction, plan: Plan) -> bool:
    """Whether tasks are row tiles of as many columns as stay in the cache, all rows for these columns in turn.

    So columns that no cache holds are read once, and results are written in long runs. Worth it where steps are few.
    """
    n, steps = x.columns.constant, (x.steps * x.inner_steps).constant
    if n is None or steps is None or plan.fill or plan.promote or x.footprint or x.decodes:
        return False
    return steps <= IN_RUNS * plan.rows and n * steps > x.target.core.shared


def strip_tiles(core: Core, x: Footprint, rows: int, part: Index, panel: Index) -> Index:
    """Tiles of ``rows`` rows whose footprint stays in the cache, but so many that half of it is no halo.

    No more than ``part`` of them, as far as about a ninth of the footprint at most is halo then. A ``panel`` of columns
    (its elements) that the cache does not hold comes by for every tile, and no footprint stays: there a ninth is halo.
    """
    one, two = x.elements(ONE), x.elements(Index.of(2))
    line, halo = maximum(1, two - one), two - 2 * (two - one)
    least = maximum(1, 8 * halo // line)
    crowded = minimum(1, maximum(0, panel - core.shared))
    lines = maximum(1, (core.strip // ITEMSIZE[x.dtype] - halo) // line, halo // line, crowded * least)
    return maximum(1, minimum(lines * x.line // rows, maximum(least * x.line // rows, part)))


def row_blocks(mt: Index, nt: Index, most: IndexLike, need: Index, cheap_rows: bool) -> dict[str, Index]:
    """``mt`` x ``nt`` register tiles in blocks of at most ``most`` row tiles, their number a multiple of ``need``.

    Columns are divided where row tiles are fewer than ``need``, and with ``cheap_rows``, which cost nothing to be read
    again, also where few blocks are no multiple of it: three blocks would be two for one thread and one for another.
    """
    bi = minimum(mt, mt.ceildiv(most).ceildiv(need) * need)
    parts = need // maximum(1, mt)  # 10 parts of 7 rows would be two tasks for some of 64 threads, 9 are one for all
    if cheap_rows:
        parts = maximum(parts, 1 + _uneven(bi, need) * (need - 1))
    return {ROW_BLOCKS: maximum(1, bi), COLUMN_BLOCKS: maximum(1, minimum(nt, parts))}


def _uneven(blocks: Index, need: Index) -> Index:
    """1 where so few blocks are no multiple of ``need``, else 0."""
    return minimum(1, blocks % need) * minimum(1, maximum(0, FEW_BLOCKS * need - blocks))


def even_shares(mt: Index, nt: Index, need: Index, columns: Index, tile: tuple[int, int]) -> dict[str, Index]:
    """``mt`` x ``nt`` register tiles in ``need`` shares of columns, or of rows where that makes the largest cheaper.

    A share costs its ``columns``, of which the last panel may have few, for each row tile and once more to read them,
    and as much for every row that it reads. ``tile``: rows and columns of a register tile.
    """

    def cost(row_tiles: Index, width: Index) -> Index:
        return width * (row_tiles + 1) + row_tiles * tile[0]

    wide = cost(mt, minimum(columns, nt.ceildiv(need) * tile[1]))
    by_rows = minimum(1, maximum(0, wide - cost(mt.ceildiv(need), columns)))
    bj = 1 + (1 - by_rows) * (maximum(1, minimum(nt, need)) - 1)
    return {ROW_BLOCKS: maximum(1, minimum(mt, need.ceildiv(bj))), COLUMN_BLOCKS: bj}


def in_pieces(
    blocks: dict[str, Index], mt: Index, nt: Index, threads: Index, others: Index, pieces: Index, packs: bool
) -> dict[str, Index]:
    """``blocks`` in so many more parts that each of several ``threads`` has about ``pieces`` tasks.

    Columns are divided first: a task goes through all its rows for each panel of columns anyway, and packs no more of
    them than its own. Then rows, into tasks of at least TALL tiles, and of LOW ones while more threads than panels have
    few tasks each; but not where every part would pack (``packs``) columns again. ``others``: tasks for each block
    (batches).
    """
    bi, bj = blocks[ROW_BLOCKS], blocks[COLUMN_BLOCKS]
    several = minimum(1, threads - 1)
    more = 1 + several * (maximum(1, (threads * pieces).ceildiv(maximum(1, others * bi * bj))) - 1)
    columns = maximum(bj, minimum(nt, bj * more))
    if packs:
        return {ROW_BLOCKS: bi, COLUMN_BLOCKS: columns}
    crowded = minimum(1, maximum(0, threads - nt))
    few = crowded * (threads * FEW_TASKS).ceildiv(maximum(1, others * bi * columns))
    least = maximum(mt // (bi * TALL), minimum(few, mt // (bi * LOW)))
    rows = maximum(1, minimum((bj * more).ceildiv(columns), least))
    return {ROW_BLOCKS: bi * rows, COLUMN_BLOCKS: columns}


def pieces_of(steps: Index, threads: Index, width: int) -> Index:
    """Tasks of each thread, for so many multiply-adds of everything: PIECES of at least PIECE work."""
    return maximum(1, minimum(PIECES, steps // (threads * PIECE * width)))


def reduction_shares(x: Contraction, plan: Plan) -> Index:
    """The shares of the reduction, over the group's parameters; 0 where it is not split.

    Split are long reductions into few register tiles. A share has SHARE_STEPS at least, and enough work to be a piece.
    Threads are not asked: results do not depend on them.
    """
    work = x.batches * maximum(x.rows, STREAMED) * x.columns * x.steps
    shares = minimum(x.steps // SHARE_STEPS, work // (PIECE * x.target.width))
    return where_few(shares, _register_tiles(x, plan))


def where_few(shares: Index, tiles: Index) -> Index:
    """The shares where tiles of the result are few, else 0: a multiple of LEAST_SHARES, which threads divide evenly."""
    return shares // LEAST_SHARES * LEAST_SHARES * minimum(1, maximum(0, FEW_TILES + 1 - tiles))


def has_shares(x: Contraction, plan: Plan) -> bool:
    """Whether the reduction is split at some sizes. Operands that are copied, and several reductions, are not.

    Nor where no size is known: a kernel more takes its time to compile, and nothing says that results are few.
    """
    known = any(e.constant is not None for e in (x.rows, x.columns, x.steps))
    if x.inner or x.footprint or x.decodes or plan.fill or plan.promote or not known:
        return False
    least = LEAST_SHARES * SHARE_STEPS
    tiles = _register_tiles(x, plan)
    env = dict.fromkeys(tiles.symbols(), 1) | dict.fromkeys(x.steps.symbols(), least)
    return (x.steps.constant or least) >= least and tiles.evaluate(env) <= FEW_TILES


def _register_tiles(x: Contraction, plan: Plan) -> Index:
    """Register tiles of the whole result."""
    return x.batches * x.rows.ceildiv(plan.rows) * x.columns.ceildiv(plan.columns)


def share_of_steps(steps: Index, share: Index) -> tuple[Index, Index]:
    """The first step of a share of the reduction and the one behind its last: whole cache lines of a row's elements.

    The shares are consecutive and cover all steps.
    """
    lines, n = steps.ceildiv(LINE), Index.of(SHARES)
    return lines * share // n * LINE, minimum(steps, lines * (share + 1) // n * LINE)


def product_blocks(x: Contraction, plan: Plan, tiles: tuple[Index, Index]) -> dict[str, Index]:
    """Blocks of a product for the threads: whole batches first, then column panels or rows.

    ``tiles``: register tiles along rows and columns.
    """
    (mt, nt), n, steps, threads = tiles, x.columns, x.steps.ceildiv(x.shares) * x.inner_steps, Index.of(WORKERS)
    core = x.target.core
    need = maximum(1, threads.ceildiv(maximum(1, x.batches)))
    pieces = pieces_of(x.batches * maximum(x.rows, STREAMED) * n * steps, threads, x.target.width)
    if x.footprint is not None:
        several = minimum(1, threads - 1) * threads * pieces // 2  # each copies lines of its neighbours
        parts = maximum(1, several.ceildiv(maximum(1, x.batches)))
        held = steps * minimum(n, plan.columns)
        strip = strip_tiles(core, x.footprint, plan.rows, mt.ceildiv(parts), held)
        blocks = row_blocks(mt, nt, strip, need, cheap_rows=False)
        uneven = _uneven(x.batches * blocks[ROW_BLOCKS], threads)  # three images on two threads
        blocks[COLUMN_BLOCKS] = maximum(blocks[COLUMN_BLOCKS], minimum(nt, 1 + uneven))
        return blocks
    if plan.fill:
        copied = plan.block * x.inner_steps
        return row_blocks(mt, nt, rows_that_stay(core, plan.rows, copied), need, cheap_rows=False)
    if columns_first(x, plan):
        stay = max(1, core.shared // (int(steps) * plan.columns))
        tasks = minimum(1, threads - 1) * threads * pieces
        return {ROW_BLOCKS: mt, COLUMN_BLOCKS: maximum(nt.ceildiv(stay), minimum(nt, tasks.ceildiv(maximum(1, mt))))}
    long = n.constant and steps.constant and n.constant > plan.columns
    most = rows_for_all(core, plan.rows, int(n), int(steps)) if long else 0
    if most:
        blocks = row_blocks(mt, nt, most, need, cheap_rows=True)
    else:
        blocks = even_shares(mt, nt, need, n, (plan.rows, plan.columns))
    if x.decodes and plan.promote:  # what is decoded stays in the cache
        panel = int(plan.block * x.inner_steps) * plan.columns
        blocks[COLUMN_BLOCKS] = maximum(blocks[COLUMN_BLOCKS], nt.ceildiv(max(1, core.shared // panel)))
    return in_pieces(blocks, mt, nt, threads, x.batches, pieces, plan.promote)
