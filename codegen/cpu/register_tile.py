"""The register tile of a CPU product: a micro-kernel for every number of live rows and columns (docs/cpu.md 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from polydyn.codegen.cpu.contraction import Contraction
from polydyn.codegen.cpu.plan import Plan
from polydyn.codegen.cpu.scratch import Scratch
from polydyn.codegen.cpu.streaming import CACHE
from polydyn.codegen.cpu.strips import FIRST_LINE, LINES
from polydyn.codegen.ir import Alloc, Body, Compare, Def, FlatLoad, For, If, Let, Node, Store, consume, walk
from polydyn.codegen.lower import Lowering, flat, lower
from polydyn.codegen.operands import multiplied
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.blocks_of_sums import sum_in_blocks
from polydyn.codegen.passes.columns import Columns, vector_columns
from polydyn.codegen.passes.epilogues import COLUMN, ROW, finished, finished_across, instances
from polydyn.codegen.passes.pointers import row_pointers
from polydyn.codegen.passes.prefetch import (
    END,
    FIRST,
    LINE,
    PREFETCH_RANGE,
    STREAM,
    prefetch_ahead,
    prefetch_lines,
    prefetch_next,
    prefetch_results,
    share_lines,
)
from polydyn.codegen.passes.registers import Copies, partial_unroll, registers, share_loads, split_chains, unroll
from polydyn.codegen.passes.tiles import clip, flatten_loops, shorten
from polydyn.codegen.passes.transpose import has_transposes
from polydyn.codegen.pipeline import Step, names_of, run
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import ITEMSIZE, neutral
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import MarkName, b, c, extent, it, p
from polydyn.schedules.tree.strategies import (
    FIRST_ROW,
    LOAD,
    PANEL,
    ROWS,
    SAVE,
    SHARE_COLUMNS,
    SHARE_ROWS,
    SUMS,
)

CHAINS = 4
"""Number of chains that hide the latency of an addition. Narrow vectors need twice as many. Tiles with fewer
accumulators are split into this many chains in all."""
RUN_FIRST, RUN_ROWS = "run_first", "run_rows"
"""The first row of a run of register tiles, and the rows of the run."""
RUN = 48
"""Rows of a run: three blocks of vectors."""
LONG_STEPS = 128
"""Minimum reduction steps of a tile that hide prefetches of results into L2. Shorter tiles prefetch only what is in
no cache."""
V = Index.of


class RegisterTile:
    """Builds the micro-kernels of one product."""

    def __init__(
        self, name: str, product: Contraction, plan: Plan, scratch: Scratch,
        label: str = "", streams: bool = False,
    ) -> None:  # fmt: skip
        """Set up the tile. ``label`` distinguishes the registers of two products in one kernel.

        ``streams``: panels of columns do not fit the cache.
        """
        self.product, self.plan, self.scratch, self.places = product, plan, scratch, scratch.places
        self.streams = streams
        self.name, self.shared, self.sums = f"{SUMS}{label}", f"t{label}_", f"sums{label}"
        self.part = f"{name}{label and '/'}{label}"
        self.step = product.column_step(plan.lanes)
        self.long = plan.lanes == product.target.width and product.long_epilogues
        self.dtype = product.accumulation.value.dtype
        self.copies: Copies = {}
        self.across: Body = ()
        self.in_pieces = False
        self.results: tuple[Store, ...] = ()
        self.waiting = self.dtype
        self.planes: tuple[FlatLoad, ...] = ()

    # -- sizes ---------------------------------------------------------------------------------------------------

    def column_cases(self) -> list[int]:
        """Return the column counts of the micro-kernels. A tile uses the smallest that holds its live columns."""
        n, full = self.product.columns.constant, self.plan.columns
        if n is None:
            return list(range(self.step, full + 1, self.step))
        tail = -(-(n % full) // self.step) * self.step
        return sorted({tail or full, full if n >= full else tail or full})

    def row_cases(self) -> list[int]:
        """Return the numbers of live rows that occur."""
        m, r = self.product.rows.constant, self.plan.rows
        return sorted({m // -(-m // r), -(-m // -(-m // r))}) if m else list(range(1, r + 1))

    def live_case(self) -> Index:
        """Return what ``row_cases`` counts, of the current register tile."""
        return self.places.map.origin("i", V(c("i")) + 1) - V(FIRST_ROW)

    def live_columns(self) -> Index:
        """Return the columns of the current register tile."""
        return minimum(self.plan.columns, self._columns_left())

    def _columns_left(self) -> Index:
        axis = self._axis(self.product.roles.col)
        return self.places.remaining(self.product.accumulation.name, axis, p("j"))

    def next_rows(self, rows: int, tiles: int = 1) -> dict[str, Index]:
        """Return the first row of a tile further on, clamped to the bounds."""
        return {FIRST_ROW: minimum(V(FIRST_ROW) + tiles * rows, self.product.rows - rows)}

    # -- statements ----------------------------------------------------------------------------------------------

    def _axis(self, iterator: str) -> str:
        """Return the axis of an iterator of the accumulation."""
        return self.places.map.iterators[self.product.accumulation.name, iterator]

    def _table(self, columns: int) -> dict[str, Lowering]:
        """Return the lowering of each statement, for a tile of ``columns`` columns."""
        x, acc, init = self.product, self.product.accumulation.name, self.product.group.init.name
        dtype = x.accumulation.value.dtype

        def local(n: str, at: Mapping[str, Index], columns: int = columns) -> FlatLoad:
            return FlatLoad(dtype, self.name, self._cell(n, at, columns))

        def accumulate(at: Mapping[str, Index]) -> Body:
            product = multiplied(x.accumulation, *self.scratch.operands(acc, at))
            return (Store(self.name, self._cell(acc, at, columns), product, x.accumulation.reduce),)

        def done(s: Statement) -> Lowering:
            return lambda at: (self._done(s, at, local(s.name, at)),)

        table: dict[str, Lowering] = {
            init: lambda at: (Store(self.name, self._cell(init, at, columns), neutral("sum", dtype)),),
            acc: accumulate,
        }
        if self.plan.accumulator_output is not None:
            e = self.plan.accumulator_output
            table[LOAD] = lambda at: (
                Store(self.name, self._cell(LOAD, at, columns), FlatLoad(dtype, e.array, self._address(e, LOAD, at))),
            )
            table[SAVE] = lambda at: (Store(e.array, self._address(e, SAVE, at), local(SAVE, at)),)
        if not (self.long or self.across):
            return table | {s.name: done(s) for s in x.group.epilogues}
        table |= {s.name: lambda at: () for s in x.group.epilogues}
        first = x.group.epilogues[0]
        before = (V(FIRST_ROW) - RUN_FIRST) * self.plan.columns if self.across or self.in_pieces else ZERO

        def wait(at: Mapping[str, Index]) -> Body:
            value = local(first.name, at)
            made = self._done(first, at, value).value if self.waiting != dtype else value
            return (Store(self.sums, self._cell(first.name, at, self.plan.columns) + before, made),)

        return table | {first.name: wait}

    def _cell(self, statement: str, at: Mapping[str, Index], columns: int) -> Index:
        """Return the offset of an instance's sum in a tile of ``columns`` columns."""
        cell, roles = self.places.cell(statement, self.name, at), self.product.roles
        return cell[self._axis(roles.row)] * columns + cell[self._axis(roles.col)]

    def _address(self, s: Statement, name: str, at: Mapping[str, Index]) -> Index:
        """Return the address of an epilogue's store, at the coordinates of the statement ``name``."""
        env = self.places.env(name, at)
        return self.product.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))

    def _done(self, s: Statement, at: Mapping[str, Index], total: FlatLoad) -> Store:
        """Return the store of an epilogue, applied to a sum."""
        x, name = self.product, s.name
        value = flat(x.group, s.value, self.places.env(name, at),
                     lambda y: total if y.buffer == x.accumulation.array else None)  # fmt: skip
        return Store(s.array, self._address(s, name, at), value)

    def finished(self, tile: Body, micro: Body, rows: Index) -> Body:
        """Return a tile followed by its epilogues, if these are long.

        ``micro``: the tree's body; ``rows``: live rows.
        """
        if not self.long or self.across:
            return tile
        stores, when = self._epilogue_stores(micro, V(ROW) + RUN_FIRST - FIRST_ROW if self.in_pieces else V(ROW))
        sizes = self.plan.rows, self.plan.columns, self.plan.lanes
        return finished(tile, (self.sums, self.dtype), stores, when, rows, self.stored_columns(), sizes)

    def turn(self, micro: Body) -> None:
        """Decide how results are stored: by columns, or, if they are contiguous along rows, by runs of tiles.

        Memory holds the sums until the end of a run. If the sums are integers, it holds the results, computed in
        registers.
        """
        x = self.product
        arrays = [x.group.arrays[s.array] for s in x.group.epilogues]
        at = [a.address(s.index) for a, s in zip(arrays, x.group.epilogues, strict=True)]
        planes = all(i.split(x.roles.row)[0] == ONE != i.split(x.roles.col)[0] for i in at)
        floats = all(a.dtype == "float32" for a in arrays)
        whole = self.plan.blocks == ONE and self.plan.lanes == x.target.width and has_transposes(x.target)
        if not (planes and floats and whole) or (self.dtype != "float32" and (self.long or len(arrays) > 1)):
            return
        stores, when = self._epilogue_stores(micro, V(ROW) + RUN_FIRST - FIRST_ROW)
        self.results = stores
        if self.dtype != "float32":
            stores = tuple(replace(s, value=FlatLoad("float32", self.sums, self._sum_offset())) for s in stores)
        made = finished_across((self.sums, "float32"), stores, V(RUN_ROWS), self.stored_columns(), self.plan.lanes)
        if all(c.decided() for c in when) and not isinstance(made, Declined):
            self.across, self.waiting = made, "float32"

    def run(self, loop: For, origin: Callable[[Index], Index]) -> Node:
        """Return the loop over row tiles, in runs. Memory holds the sums or results of a run until it is complete."""
        tiles = max(1, RUN // self.plan.rows)
        low, high = V("run_lo"), V("run_hi")
        memory = V(tiles * self.plan.rows * self.plan.columns)
        body: Body = (
            replace(loop, lo=low, hi=high, body=(*self._prefetch_results(V(c("i")) - low, high - low), *loop.body)),
            *self.across,
        )
        body = (Alloc(self.sums, self.waiting, memory, "stack", body),)
        first = origin(low)
        names = {"run_lo": loop.lo + V("run") * tiles, "run_hi": minimum(low + tiles, loop.hi), RUN_FIRST: first,
                 RUN_ROWS: origin(high) - V(RUN_FIRST)}  # fmt: skip
        for name, value in reversed(names.items()):
            body = (Let(name, value, body),)
        return For("run", ZERO, (loop.hi - loop.lo).ceildiv(tiles), body)

    def _prefetch_results(self, number: Index, tiles: Index) -> Body:
        """Prefetch part of the result lines of a run, if the results exceed the cache.

        Prefetch into L2 if a tile has enough steps to hide it; otherwise into at most half of the
        last-level cache.
        """
        x = self.product
        results = sum((product(x.group.arrays[s.array].shape) for s in x.group.epilogues), ZERO)
        calls = prefetch_results(self.results, V(RUN_ROWS), self.stored_columns(), number, tiles)
        held = V(x.target.core.floats) if self._long_steps() else CACHE // (2 * ITEMSIZE["float32"])
        return (If((Compare(">", results, held),), calls),)

    def _long_steps(self) -> bool:
        """Whether a tile takes long enough to hide prefetches."""
        return ((self.product.steps * self.product.inner_steps).constant or LONG_STEPS) >= LONG_STEPS

    def _prefetch_symbols(self) -> tuple[str, ...]:
        """Return the symbols in the addresses of the next footprint's planes."""
        return (*PREFETCH_RANGE, *(x for v in self.planes for x in v.address.symbols())) if self.planes else ()

    def prefetch_next_footprint(self, tile: Body) -> Body:
        """Prefetch part of the next footprint during a task's last column panel, if the image exceeds the cache."""
        x, tm = self.product, self.places.map
        if not self.planes or x.footprint is None:
            return tile
        lo, hi = (tm.share("i", V(b("i")) + n) for n in (0, 1))
        image = x.batches * x.footprint.elements(x.footprint.pixels[0][1])
        far = minimum(1, maximum(0, image - x.target.core.floats))
        last = 1 - minimum(1, tm.share("j", V(b("j")) + 1) - 1 - c("j"))
        return share_lines(tile, V(c("i")) - lo, hi - lo, self.scratch.lines() * far * last)

    def stored_columns(self) -> Index:
        """Return the columns of the current tile, as a number if known."""
        n, wide = self.product.columns.constant, self.plan.columns
        return V(wide) if n is not None and n % wide == 0 else self.live_columns()

    def _epilogue_stores(self, micro: Body, row: Index) -> tuple[tuple[Store, ...], tuple[Compare, ...]]:
        """Return the stores of the epilogues, of sums in memory, and their conditions. ``row``: the row of the tile."""
        epilogues = {s.name: s for s in self.product.group.epilogues}
        done, when = instances(micro, epilogues)
        total = FlatLoad(self.dtype, self.sums, self._sum_offset())
        places = ({**i.at, p("i"): row, p("j"): V(COLUMN)} for i in done)
        return tuple(self._done(epilogues[i.statement], at, total) for i, at in zip(done, places, strict=True)), when

    def _sum_offset(self) -> Index:
        """Return the offset in memory of a sum or result, for the loop after a tile or run."""
        return V(ROW) * self.plan.columns + COLUMN

    # -- passes --------------------------------------------------------------------------------------------------

    def micro_kernels(self, body: Body) -> Callable[[int, int], Body]:
        """Return (rows, columns) -> the micro-kernel for that many live ones; the debug output shows the full tile."""
        cases, names = self.column_cases(), names_of(self.product.group)
        if self.product.footprint and self._long_steps():
            (acc, *_), _ = instances(body, {self.product.accumulation.name})
            self.planes = self.scratch.next_strip(acc.at)
        full = max(cases)
        wide = {c: run(self.part, body, self.column_steps(c), names, c == full) for c in cases}

        def kernel(rows: int, columns: int) -> Body:
            shown = (rows, columns) == (max(self.row_cases()), full)
            return run(self.part, wide[columns], self.row_steps(rows), names, shown)

        return kernel

    def column_steps(self, width: int) -> tuple[Step, ...]:
        """Return the steps of the micro-kernel for a number of columns, its row count still a symbol."""
        acc = self.product.accumulation.name
        clipped = Step("clip", "the last reduction block ends with the reduction",
                       lambda b: clip(b, (p("k"),), self.places.remaining(acc, "k", p("k"))))  # fmt: skip
        columns = self.places.schedule.parameter(acc, p("j"))
        names = (self.name, self.sums, FIRST_ROW, RUN_FIRST, SHARE_COLUMNS, PANEL, SHARE_ROWS, ROWS, FIRST_LINE, LINES)
        return (
            Step("columns", "the number of columns becomes a constant", lambda b: bind(b, {columns: width})),
            *((clipped,) if self.plan.blocks != ONE else ()),
            Step("lower", "statements become stores", lambda b: lower(b, self._table(width)), names),
            Step("reduce", "the mark of the reduction goes", lambda b: consume(b, MarkName.REDUCE)),
            Step("vectorise", "columns become vectors", lambda b: self.masked(b, width)),
            Step("unroll_columns", "one copy for each vector", lambda b: unroll(b, (p("j"),))),
        )

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """Return the steps of the micro-kernel for a number of live rows: registers and shared loads."""
        flat_loops = Step("flatten", "loops of the reduction are fused if addresses allow it", self._flattened)
        unrolled, in_registers, shared = self._register_steps(rows)
        steps = (p("k"), *self.product.roles.inner)
        pointers = Step("pointers", "pointers to the start of each row",
                        lambda b: row_pointers(b, ROWS, steps, self.product.short))  # fmt: skip
        needed = Step("taps", "taps that read only zeros are skipped", lambda b: self._needed(b, rows))
        return (
            unrolled,
            in_registers,
            *((flat_loops,) if self.product.inner else ()),
            shared,
            Step(
                "reduction",
                "several steps in flight, the next tile prefetched",
                lambda b: self._reduction(b, rows),
                (*((FIRST, END) if self.streams else ()), *self._prefetch_symbols()),
            ),
            *((needed, pointers) if self.product.footprint else ()),
            Step("blocks", "long sums begin again after some steps", self._in_blocks),
        )

    def _in_blocks(self, body: Body) -> Body:
        inner = self.product.inner_steps.constant or 1
        return sum_in_blocks(body, f"{self.sums}_total", inner, began=self.plan.blocks != ONE)

    def _flattened(self, body: Body) -> Body:
        for x in reversed((p("k"), *map(it, self.product.roles.inner[:-1]))):
            body = flatten_loops(body, x)
        return body

    def _needed(self, body: Body, rows: int) -> Body:
        """Shorten loops over taps to those that read nonzero elements.

        With few steps the test would cost as much as the taps.
        """
        x = self.product
        extents = dict(x.inner) | {x.roles.block: x.steps}
        for step, ends in (self.scratch.taps(rows) if not x.short else {}).items():
            body = shorten(body, p("k") if step == x.roles.block else it(step), extents[step], ends)
        return body

    def _register_steps(self, rows: int) -> tuple[Step, Step, Step]:
        dtype = self.product.accumulation.value.dtype
        return (
            Step("unroll_rows", "one copy for each row",
                 lambda b: unroll(bind(b, {extent(p("i")): rows}), (p("i"),), self.copies)),
            Step("registers", "the tile lives in registers", lambda b: registers(b, self.name, dtype)),
            Step("share_loads", "what is loaded twice is loaded once", lambda b: share_loads(b, self.shared)),
        )  # fmt: skip

    def masked(self, body: Body, width: int) -> Body:
        """Vectorise the columns of a micro-kernel for ``width`` columns."""
        n, lanes, wide = self.product.columns.constant, self.plan.lanes, self.plan.columns
        last = width % lanes or lanes
        tail = None if n is None else n % wide
        full = n is None or (width == wide and n >= wide)
        partial = tail is None or (tail > 0 and width - self.step < tail)
        exact = n is not None and n % last == 0
        safe = frozenset({self.name, self.sums, PANEL, ROWS, *self.product.panels_of_constants})
        live = self._columns_left() - (width - last)
        return vector_columns(body, Columns(lanes, width, live, full, partial, exact, self.name, safe))

    def _reduction(self, body: Body, rows: int) -> Body:
        """Split few sums into chains; otherwise unroll the loop and prefetch."""
        x, plan = self.product, self.plan
        steps = [n.var for n in walk(body) if isinstance(n, For) and n.var in (p("k"), *x.roles.inner)]
        lanes = [n.lanes for n in body if isinstance(n, Def) and n.reg.startswith(f"{self.name}_")]
        chains = -(-(CHAINS if max(lanes) == plan.lanes else 2 * CHAINS) // len(lanes))
        stream = self.streams and x.panel_vectors > 1
        if chains > 1 and len(steps) == 1:
            split = split_chains(body, steps[-1], chains)
            return prefetch_ahead(split, p("k"), STREAM) if stream else split
        body = prefetch_ahead(body, p("k"), STREAM) if stream else body
        if self.planes:
            body = prefetch_lines(body, p("k"), self.planes)
        body = partial_unroll(body, steps[-1] if steps else p("k"), plan.unroll)
        near = plan.fill or (x.steps.constant or LINE) < 2 * LINE  # in the cache, or rows are one stream
        panel: dict[str, Index] = {}
        words = x.accumulation.value.dtype == "int32"  # a word is several K steps: panels are needed sooner
        if x.columns.constant is None or (near and not words):  # computed columns: K is short, variants are many
            return body
        if self.streams:
            panel[c("j")] = minimum(V(c("j")) + 1, x.columns.ceildiv(plan.columns) - 1)
        whole = (x.steps % LINE) == ZERO == (plan.block % LINE)
        return prefetch_next(body, p("k"), {} if near else self.next_rows(rows), panel, whole)
