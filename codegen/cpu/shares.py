"""The division of a product into tasks: blocks of rows and columns in whole register tiles."""

from __future__ import annotations

from polydyn.codegen.cpu.contraction import Contraction
from polydyn.codegen.cpu.plan import REDUCTION_BLOCK, Plan
from polydyn.codegen.cpu.target import Core
from polydyn.codegen.kernel import WORKERS
from polydyn.codegen.passes.prefetch import LINE
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.group.footprint import Footprint
from polydyn.schedules.index import ONE, Index, IndexLike, maximum, minimum
from polydyn.schedules.model import SHARES
from polydyn.schedules.tree.names import b, extent

ROW_BLOCKS, COLUMN_BLOCKS = extent(b("i")), extent(b("j"))
"""Launch-time symbols: blocks of rows and of columns, in register tiles."""
SHORT_REDUCTION = 4
"""Maximum reduction steps per row of a tile for which writing its results costs more than reading its operands."""
IN_RUNS = 8
"""Maximum reduction steps per row of a tile for which results should be written in long runs, if the columns do not
fit the cache."""
FEW_BLOCKS = 8
"""With this many row blocks per thread, an uneven split costs little."""
TASKS_PER_THREAD = 8
"""Tasks per thread, if there are several threads. Other threads can take the tasks of a thread that lost its core."""
MIN_TASK_VECTORS = 10000
"""Minimum vector multiply-adds of a task, about 3 us of a core (docs/adr/0026). Smaller tasks do not pay."""
MEMORY_BOUND_ROWS = 8
"""Maximum rows of a product that is bound by reading its columns: fewer rows do not take less time."""
MANY_ROW_TILES, FEW_ROW_TILES = 16, 4
"""Row tiles of a task.

From MANY_ROW_TILES on, reading all columns once more for a task is negligible. From FEW_ROW_TILES on, it costs less
than an uneven split in which one of two threads has an additional task.
"""
FEW_TASKS = 4
"""With this many tasks per thread, an additional task for some threads is a small part."""
FEW_TILES, LEAST_SHARES = 32, 4
"""Maximum tiles of a result whose long reduction is split, and the number of K splits, or a divisor of it."""
SHARE_STEPS = 2 * REDUCTION_BLOCK
"""Minimum steps of a K slice. Its columns stay in a 1 MB L2, and adding the slice takes 1 % of the time of its
products."""


def rows_that_stay(core: Core, rows: int, steps: Index) -> int:
    """Return the number of tiles of ``rows`` rows with ``steps`` elements that fit a quarter of the cache together."""
    return 16 if steps.constant is None else max(1, core.floats // 4 // (rows * max(1, steps.constant)))


def rows_for_all(core: Core, rows: int, columns: int, steps: int) -> int:
    """Return the row tiles of a block that runs over all columns, or 0 if each panel of columns should serve all rows.

    If the reduction is short, most of the traffic is results, which are written row by row. If columns stay in the
    cache, rows are read once instead of once per panel.
    """
    if steps <= SHORT_REDUCTION * rows:
        return 1
    return rows_that_stay(core, rows, Index.of(steps)) if columns * steps <= core.shared else 0


def columns_first(x: Contraction, plan: Plan) -> bool:
    """Whether tasks iterate over all rows for one cache-sized panel of columns before the next panel.

    Then columns that no cache holds are read once, and results are written in long runs. This pays if steps are few.
    """
    n, steps = x.columns.constant, (x.steps * x.inner_steps).constant
    if n is None or steps is None or plan.fill or plan.promote or x.footprint or x.decodes:
        return False
    return steps <= IN_RUNS * plan.rows and n * steps > x.target.core.shared


def strip_tiles(core: Core, x: Footprint, rows: int, part: Index, panel: Index) -> Index:
    """Return the number of tiles of ``rows`` rows whose footprint fits the cache and is at most half halo.

    At most ``part`` tiles are returned, as long as at most about a ninth of the footprint is halo. If the cache does
    not hold a ``panel`` of columns (its elements), the panel is read again for every tile and no footprint stays: then
    a ninth is halo.
    """
    one, two = x.elements(ONE), x.elements(Index.of(2))
    line, halo = maximum(1, two - one), two - 2 * (two - one)
    least = maximum(1, 8 * halo // line)
    crowded = minimum(1, maximum(0, panel - core.shared))
    lines = maximum(1, (core.strip // ITEMSIZE[x.dtype] - halo) // line, halo // line, crowded * least)
    return maximum(1, minimum(lines * x.line // rows, maximum(least * x.line // rows, part)))


def row_blocks(mt: Index, nt: Index, most: IndexLike, need: Index, cheap_rows: bool) -> dict[str, Index]:
    """Return ``mt`` x ``nt`` register tiles in blocks of at most ``most`` row tiles, in a multiple of ``need`` blocks.

    Columns are divided if there are fewer row tiles than ``need``. With ``cheap_rows``, which may be read again at no
    cost, they are also divided if the blocks are few and not a multiple of ``need``: with three blocks, one thread
    would have two and another thread one.
    """
    bi = minimum(mt, mt.ceildiv(most).ceildiv(need) * need)
    parts = need // maximum(1, mt)  # 10 parts of 7 rows are two tasks for some of 64 threads; 9 are one for all
    if cheap_rows:
        parts = maximum(parts, 1 + _uneven(bi, need) * (need - 1))
    return {ROW_BLOCKS: maximum(1, bi), COLUMN_BLOCKS: maximum(1, minimum(nt, parts))}


def _uneven(blocks: Index, need: Index) -> Index:
    """Return 1 if the blocks are few and not a multiple of ``need``, else 0."""
    return minimum(1, blocks % need) * minimum(1, maximum(0, FEW_BLOCKS * need - blocks))


def even_shares(mt: Index, nt: Index, need: Index, columns: Index, tile: tuple[int, int]) -> dict[str, Index]:
    """Divide ``mt`` x ``nt`` register tiles into ``need`` parts: of columns, or of rows if that is cheaper.

    A part costs its ``columns`` (the last panel may have few) for each row tile and once more to read them, and as
    much for every row that it reads. ``tile``: rows and columns of a register tile.
    """

    def cost(row_tiles: Index, width: Index) -> Index:
        return width * (row_tiles + 1) + row_tiles * tile[0]

    wide = cost(mt, minimum(columns, nt.ceildiv(need) * tile[1]))
    by_rows = minimum(1, maximum(0, wide - cost(mt.ceildiv(need), columns)))
    bj = 1 + (1 - by_rows) * (maximum(1, minimum(nt, need)) - 1)
    return {ROW_BLOCKS: maximum(1, minimum(mt, need.ceildiv(bj))), COLUMN_BLOCKS: bj}


def split_into_tasks(
    blocks: dict[str, Index], mt: Index, nt: Index, threads: Index, others: Index, per_thread: Index, packs: bool
) -> dict[str, Index]:
    """Divide ``blocks`` further, so that each of several ``threads`` has about ``per_thread`` tasks.

    Columns are divided first: a task runs over all its rows for each panel of columns anyway, and packs only its own
    columns. Then rows are divided, into tasks of at least MANY_ROW_TILES tiles, or of FEW_ROW_TILES tiles as long as
    there are more threads than panels and few tasks per thread. Rows are not divided if every part would pack
    (``packs``) columns again. ``others``: tasks per block (batches).
    """
    bi, bj = blocks[ROW_BLOCKS], blocks[COLUMN_BLOCKS]
    several = minimum(1, threads - 1)
    more = 1 + several * (maximum(1, (threads * per_thread).ceildiv(maximum(1, others * bi * bj))) - 1)
    columns = maximum(bj, minimum(nt, bj * more))
    if packs:
        return {ROW_BLOCKS: bi, COLUMN_BLOCKS: columns}
    crowded = minimum(1, maximum(0, threads - nt))
    few = crowded * (threads * FEW_TASKS).ceildiv(maximum(1, others * bi * columns))
    least = maximum(mt // (bi * MANY_ROW_TILES), minimum(few, mt // (bi * FEW_ROW_TILES)))
    rows = maximum(1, minimum((bj * more).ceildiv(columns), least))
    return {ROW_BLOCKS: bi * rows, COLUMN_BLOCKS: columns}


def tasks_per_thread(steps: Index, threads: Index, width: int) -> Index:
    """Return the tasks per thread for ``steps`` multiply-adds in all.

    There are at most TASKS_PER_THREAD of them, with at least MIN_TASK_VECTORS vectors of work each.
    """
    return maximum(1, minimum(TASKS_PER_THREAD, steps // (threads * MIN_TASK_VECTORS * width)))


def reduction_shares(x: Contraction, plan: Plan) -> Index:
    """Return the number of K splits, over the group's parameters; 0 without split-K.

    Long reductions into few register tiles are split. Each slice has at least SHARE_STEPS steps and enough work for a
    task. The split ignores the number of threads, so results do not depend on it.
    """
    work = x.batches * maximum(x.rows, MEMORY_BOUND_ROWS) * x.columns * x.steps
    shares = minimum(x.steps // SHARE_STEPS, work // (MIN_TASK_VECTORS * x.target.width))
    return where_few(shares, _register_tiles(x, plan))


def where_few(shares: Index, tiles: Index) -> Index:
    """Return the K splits, rounded down to a multiple of LEAST_SHARES, which threads divide evenly.

    Return 0 unless the result has few tiles.
    """
    return shares // LEAST_SHARES * LEAST_SHARES * minimum(1, maximum(0, FEW_TILES + 1 - tiles))


def split_refusal(x: Contraction, plan: Plan) -> Declined | None:
    """Return why the reduction is split at no size. Copied operands and several reductions are not supported.

    If no size is known, the reduction is not split: a second kernel costs compile time, and the result may be large.
    """
    known = any(e.constant is not None for e in (x.rows, x.columns, x.steps))
    least, tiles = LEAST_SHARES * SHARE_STEPS, _register_tiles(x, plan)
    env = dict.fromkeys(tiles.symbols(), 1) | dict.fromkeys(x.steps.symbols(), least)
    copied = x.footprint is not None or plan.fill or plan.promote
    return first_refusal(
        (bool(x.inner), "it has several reductions"),
        (x.decodes, "its weights are decoded"),
        (copied, "its operands are copied"),
        (not known, "no size is known"),
        ((x.steps.constant or least) < least, f"{x.steps} steps are fewer than {least}"),
        (tiles.evaluate(env) > FEW_TILES, f"it has more than {FEW_TILES} tiles"),
    )


def _register_tiles(x: Contraction, plan: Plan) -> Index:
    """Return the register tiles of the whole result."""
    return x.batches * x.rows.ceildiv(plan.rows) * x.columns.ceildiv(plan.columns)


def share_of_steps(steps: Index, share: Index) -> tuple[Index, Index]:
    """Return the first step and the end of a K slice, in whole cache lines of a row's elements.

    The slices are consecutive and cover all steps.
    """
    lines, n = steps.ceildiv(LINE), Index.of(SHARES)
    return lines * share // n * LINE, minimum(steps, lines * (share + 1) // n * LINE)


def product_blocks(x: Contraction, plan: Plan, tiles: tuple[Index, Index]) -> dict[str, Index]:
    """Return the blocks of a product for the threads: whole batches first, then column panels or rows.

    ``tiles``: register tiles along rows and columns.
    """
    (mt, nt), n, steps, threads = tiles, x.columns, x.steps.ceildiv(x.shares) * x.inner_steps, Index.of(WORKERS)
    core = x.target.core
    need = maximum(1, threads.ceildiv(maximum(1, x.batches)))
    per_thread = tasks_per_thread(x.batches * maximum(x.rows, MEMORY_BOUND_ROWS) * n * steps, threads, x.target.width)
    if x.footprint is not None:
        several = minimum(1, threads - 1) * threads * per_thread // 2  # each copies image rows of its neighbours
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
        tasks = minimum(1, threads - 1) * threads * per_thread
        return {ROW_BLOCKS: mt, COLUMN_BLOCKS: maximum(nt.ceildiv(stay), minimum(nt, tasks.ceildiv(maximum(1, mt))))}
    long = n.constant and steps.constant and n.constant > plan.columns
    most = rows_for_all(core, plan.rows, int(n), int(steps)) if long else 0
    if most:
        blocks = row_blocks(mt, nt, most, need, cheap_rows=True)
    else:
        blocks = even_shares(mt, nt, need, n, (plan.rows, plan.columns))
    if x.decodes and plan.promote:  # decoded columns stay in the cache
        panel = int(plan.block * x.inner_steps) * plan.columns
        blocks[COLUMN_BLOCKS] = maximum(blocks[COLUMN_BLOCKS], nt.ceildiv(max(1, core.shared // panel)))
    return split_into_tasks(blocks, mt, nt, threads, x.batches, per_thread, plan.promote)
