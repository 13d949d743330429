"""CPU kernels for matmul-like groups: from the tile-space tree to register-tiled C (docs/cpu.md 1 and 2).

Constants come in panels as wide as a vector, ``[col/W][reduction][W]``; a column operand that is neither such a
constant nor of unit stride is packed by the promotion statement PACK. A row operand that is more than a load (a padded
image, seen as a matrix of pixels) is computed into rows of scratch by the promotion statement FILL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from polydyn.codegen.cpu.emit import bound_names, emit
from polydyn.codegen.cpu.kernel import CpuTarget, Kernel
from polydyn.codegen.cpu.plan import REDUCTION_BLOCK, ROW_UNROLL, ContractTuple, Plan
from polydyn.codegen.cpu.scratch import Scratch
from polydyn.codegen.cpu.shares import SHARED_ELEMENTS, product_blocks
from polydyn.codegen.ir import Body, Def, FlatLoad, For, Let, Node, Store, consume, rewrite, walk
from polydyn.codegen.lower import Lowering, flat, lower, scratch_bytes
from polydyn.codegen.operands import multiplied, operands
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.columns import Columns, vector_columns
from polydyn.codegen.passes.epilogues import COLUMN, ROW, finished, instances, is_long
from polydyn.codegen.passes.hoist import hoist_divisions, hoist_guards, hoist_masks
from polydyn.codegen.passes.prefetch import LINE, prefetch_next, share_panel
from polydyn.codegen.passes.registers import Copies, partial_unroll, registers, share_loads, split_chains, unroll
from polydyn.codegen.passes.tiles import allocated, balance, clip, flatten_loops, task_count, tasks, variants
from polydyn.codegen.passes.transpose import has_transposes, transpose_copies
from polydyn.codegen.passes.vectorise import vectorise_loop, vectorise_tile
from polydyn.codegen.pipeline import Step, loops, names_of, run
from polydyn.codegen.places import Places
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Load, Value, loads, neutral, symbols_of
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.boxes import ContractTiles
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree.names import LANE, Coord, a, b, c, extent, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import (
    ACC,
    FILL,
    INIT,
    LOAD,
    PACK,
    PANEL,
    ROWS,
    SAVE,
    VECTOR,
    CpuTile,
    cpu_product,
)

CHAINS = 4
"""Sums that hide the latency of an addition, twice as many of narrow vectors; fewer accumulators get so many in all."""
_KNOWN = tuple(map(extent, (b("k"), p("k"), LANE)))
"""Sizes that are known when the kernel is built, for all its variants."""
V = Index.of


class ContractKernel:
    """Builds the kernel of one matmul-like group."""

    def __init__(
        self,
        name: str,
        group: Group,
        roles: Roles,
        target: CpuTarget,
        packed: frozenset[str],
        rows: int | None = None,
        label: str = "",
        chosen: ContractTuple | None = None,
        fill: bool = False,
        schedule: Callable[[], Scheduled] | None = None,
        statements: str = "",
    ) -> None:
        """``packed``: arrays already laid out in panels along the column iterator. ``chosen``: tuned sizes. ``fill``:
        FILL copies the rows.

        ``rows``: the register tile's rows when the kernel is a part of an attention, which also means one block.
        ``label``: tells the registers of such parts apart, ``statements`` their statements in the ``schedule`` of all.
        """
        self.inside, self.prefix = schedule, statements
        self.width = self.lanes(target)
        self.tile_name, self.shared_name, self.held = f"acc{label}", f"t{label}_", f"sums{label}"
        self.name, self.group, self.roles, self.target = name, group, roles, target
        self.part = f"{name}{label and '/'}{label}"
        self.acc, self.epilogues = group.backbone, group.epilogues
        self.extents = dict(self.acc.iters)
        self.M, self.N, self.K = (self.extents[x] for x in (roles.row, roles.col, roles.block))
        self.R = product(self.extents[x] for x in roles.inner)
        self.row_value, self.col_value = operands(self.acc, roles)
        self.chosen, self.notes = chosen, list[str]()
        self.copies: Copies = {}
        self.whole = rows is None
        self.long = self.width == target.width and is_long(self.epilogues)
        self.plan = self._plan(packed, fill) if rows is None else self._part(self._plan(packed, fill), rows)

    @staticmethod
    def lanes(target: CpuTarget) -> int:
        """Columns that one register of the tile holds."""
        return target.width

    # -- decisions -----------------------------------------------------------------------------------------------

    def _plan(self, packed: frozenset[str], fill: bool) -> Plan:
        columns = [x for x in loads(self.col_value) if self.roles.col in symbols_of(x)]
        dense = isinstance(self.col_value, Load) and all(x.buffer in packed or self._stride(x) == ONE for x in columns)
        promote = not dense
        rows, vectors = self.tile()
        carrier = next((s for s in self.epilogues if s.value.dtype == self.acc.value.dtype), None)
        k, r = self.K.constant, self.R.constant
        steps, unroll = (self.chosen.block, self.chosen.unroll) if self.chosen else (REDUCTION_BLOCK, ROW_UNROLL)
        block = max(1 if fill else 16, steps // r) if r else steps
        if carrier is None or (k is not None and k <= block * 4 // 3):
            return Plan(rows, vectors, self.K, ONE, promote, fill, carrier, unroll)
        return Plan(rows, vectors, V(block), maximum(1, self.K.ceildiv(block)), promote, fill, carrier, unroll)

    def _part(self, p: Plan, rows: int) -> Plan:
        most = max((v for r, v, _ in self.target.tiles if r >= rows), default=1)
        n = self.N.constant
        vectors = most if n is None else min(most, max(1, -(-n // self.width)))
        return replace(p, rows=rows, vectors=vectors, block=self.K, blocks=ONE)

    def tile(self) -> tuple[int, int]:
        """The register tile with the best share of useful lanes; symbolic columns get the widest: tails are exact."""
        n, w = self.N.constant, self.width
        if self.chosen:
            return self.chosen.rows, min(self.chosen.vectors, self.chosen.vectors if n is None else max(1, -(-n // w)))
        if n is None:
            rows, vectors, _ = self.target.tiles[0]
            return rows, vectors

        step = self.step

        def useful(tile: tuple[int, int, float]) -> float:
            full, rest = divmod(-(-n // step) * step / w, tile[1])
            return (n / w) / (full * tile[1] / tile[2] + rest / (tile[2] * 0.95) + 1e-9)

        rows, vectors, _ = max(self.target.tiles, key=useful)
        return rows, min(vectors, max(1, -(-n // w)))

    def _stride(self, x: Load) -> Index | None:
        address = self.group.arrays[x.buffer].address(x.index)
        stride, rest = address.split(self.roles.col)
        return None if self.roles.col in rest.symbols() else stride

    def tiles(self) -> ContractTiles:
        """The sizes that the kernel is built for, as proofs want them."""
        return self.scratch.tiles()

    # -- lowering ------------------------------------------------------------------------------------------------

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map: what the loops are, and where an instance is in the group and in the kernel's buffers."""
        p = self.plan
        return self.inside() if self.inside else cpu_product(self.group, self.roles, self.sizes, p.promote, p.fill)

    @property
    def sizes(self) -> CpuTile:
        """The sizes as schedules want them."""
        p = self.plan
        return CpuTile(p.rows, p.vectors, self.width, p.block, 1 if p.blocks == ONE else "B_k")

    def named(self, statement: str) -> str:
        """The name of one of its statements in the schedule."""
        return self.prefix + statement

    def axis(self, iterator: str) -> str:
        """The axis that an iterator of the accumulation runs."""
        return self.schedule.map.iterators[self.named(ACC), iterator]

    @cached_property
    def places(self) -> Places:
        """Where instances are."""
        return Places(self.schedule)

    @cached_property
    def scratch(self) -> Scratch:
        """The operands that are copied."""
        inner = [(x, self.extents[x]) for x in self.roles.inner]
        return Scratch(self.plan, self.width, inner, self.places)

    @property
    def nr(self) -> int:
        """Columns of a full register tile."""
        return self.plan.vectors * self.width

    def _table(self, nr: int) -> dict[str, Lowering]:
        dtype = self.acc.value.dtype

        def acc(n: str, a: Mapping[str, Index], columns: int = nr) -> Index:
            cell = self.places.cell(n, self.tile_name, a)
            return cell[self.axis(self.roles.row)] * columns + cell[self.axis(self.roles.col)]

        def local(n: str, a: Mapping[str, Index]) -> FlatLoad:
            return FlatLoad(dtype, self.tile_name, acc(n, a))

        def carried(n: str, a: Mapping[str, Index]) -> Index:
            assert self.plan.carrier is not None
            c, env = self.plan.carrier, self.places.env(n, a)
            return self.group.arrays[c.array].address(tuple(i.subs(env) for i in c.index))

        def accumulate(a: Mapping[str, Index]) -> Body:
            made = multiplied(self.acc, self._row(a), self._column(a))
            return (Store(self.tile_name, acc(self.named(ACC), a), made, self.acc.reduce),)

        def done(s: Statement) -> Lowering:
            return lambda a: (self._done(s, a, local(self.named(s.name), a)),)

        init = self.named(INIT)
        table: dict[str, Lowering] = {
            init: lambda a: (Store(self.tile_name, acc(init, a), neutral("sum", dtype)),),
            self.named(ACC): accumulate,
        }
        if self.plan.carrier is not None:
            e = self.plan.carrier.array
            table[LOAD] = lambda a: (Store(self.tile_name, acc(LOAD, a), FlatLoad(dtype, e, carried(LOAD, a))),)
            table[SAVE] = lambda a: (Store(e, carried(SAVE, a), local(SAVE, a)),)
        if not self.long:
            return table | {self.named(s.name): done(s) for s in self.epilogues}
        table |= {self.named(s.name): lambda a: () for s in self.epilogues}
        first = self.named(self.epilogues[0].name)
        table[first] = lambda a: (Store(self.held, acc(first, a, self.nr), local(first, a)),)
        return table

    def _done(self, s: Statement, a: Mapping[str, Index], total: FlatLoad) -> Store:
        """The store of an epilogue, of a sum."""
        env, own = self.places.env(self.named(s.name), a), self.acc.array
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        return Store(s.array, address, flat(self.group, s.value, env, lambda x: total if x.buffer == own else None))

    def finished(self, tile: Body, micro: Body, rows: Index) -> Body:
        """A tile with its epilogues behind it, where they are long. ``micro``: as the tree has it; ``rows``: live."""
        if not self.long:
            return tile
        done, when = instances(micro, self.named("DONE"))
        stores = []
        for i in done:
            a = {**i.at, p("i"): V(ROW), p("j"): V(COLUMN)}
            total = FlatLoad(self.acc.value.dtype, self.held, V(ROW) * self.nr + COLUMN)
            stores.append(self._done(self.group.statement(i.statement.removeprefix(self.prefix)), a, total))
        n = self.N.constant
        columns = V(self.nr) if n is not None and n % self.nr == 0 else self.live_columns()
        sizes = self.plan.rows, self.nr, self.width
        return finished(tile, (self.held, self.acc.value.dtype), tuple(stores), when, rows, columns, sizes)

    def _column(self, a: Mapping[str, Index]) -> Value:
        """The column operand: in place, from packed panels, or from the promoted buffer."""
        if not self.plan.promote:
            return flat(self.group, self.col_value, self.places.env(self.named(ACC), a), lambda x: None)
        return FlatLoad(self.col_value.dtype, PANEL, self.scratch.panel(self.named(ACC), a))

    def _row(self, a: Mapping[str, Index]) -> Value:
        """The row operand: in place, or from scratch."""
        if not self.plan.fill:
            return flat(self.group, self.row_value, self.places.env(self.named(ACC), a), lambda x: None)
        return FlatLoad(self.row_value.dtype, ROWS, self.scratch.row(self.named(ACC), a))

    def _left(self, statement: str, axis: str, loop: Coord) -> Index:
        """Elements of an axis from the first step of a loop on, in the coordinates of the loops around it."""
        at: dict[str, Index] = {x.coord: V(x.coord) for x in self.schedule.view(statement).loops if x.coord != loop}
        return self.places.left(statement, axis, at)

    def pack(self, body: Body) -> Body:
        """The promotion statement, vectorised along the panel's lanes; lanes beyond the last column hold anything."""
        w = self.width

        def f(a: Mapping[str, Index]) -> Body:
            value = flat(self.group, self.col_value, self.places.env(PACK, a), lambda x: None)
            return (Store(PANEL, self.scratch.panel(PACK, a), value),)

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
            return (Store(ROWS, self.scratch.row(FILL, a), value),)

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

    # -- the micro-kernel ----------------------------------------------------------------------------------------

    def column_steps(self, width: int) -> tuple[Step, ...]:
        """The micro-kernel for a number of columns, its row count still a symbol."""
        clipped = Step("clip", "the last reduction block ends with the reduction",
                       lambda b: clip(b, (p("k"),), self._left(self.named(ACC), "k", p("k"))))  # fmt: skip
        columns = self.schedule.parameter(self.named(ACC), p("j"))
        names = (self.tile_name, self.held, "o_i", "c_lo", PANEL, "r_lo", ROWS)
        return (
            Step("columns", "the number of columns becomes a constant", lambda b: bind(b, {columns: width})),
            *((clipped,) if self.plan.blocks != ONE else ()),
            Step("lower", "statements become stores", lambda b: lower(b, self._table(width)), names),
            Step("reduce", "the mark of the reduction goes", lambda b: consume(b, "reduce")),
            Step("vectorise", "columns become vectors", lambda b: self.masked(b, width)),
            Step("unroll_columns", "one copy for each vector", lambda b: unroll(b, ("p_j",))),
        )

    def row_steps(self, rows: int) -> tuple[Step, ...]:
        """The micro-kernel for a number of live rows: registers and shared loads."""
        dtype = self.acc.value.dtype
        flat_loops = Step("flatten", "two loops of the reduction become one", lambda b: flatten_loops(b, "p_k"))
        return (
            self._unrolled_rows(rows),
            Step("registers", "the tile lives in registers", lambda b: registers(b, self.tile_name, dtype)),
            *(flat_loops for _ in self.roles.inner),
            Step("share_loads", "what is loaded twice is loaded once", lambda b: share_loads(b, self.shared_name)),
            Step("reduction", "several steps in flight, the next tile prefetched", lambda b: self._reduction(b, rows)),
        )

    def _unrolled_rows(self, rows: int) -> Step:
        def f(body: Body) -> Body:
            return unroll(bind(body, {"P_i": rows}), ("p_i",), self.copies)

        return Step("unroll_rows", "one copy for each row", f)

    def _reduction(self, body: Body, rows: int) -> Body:
        """Few sums are split into chains, others have their loop unrolled and ask for what comes next."""
        steps = [n.var for n in walk(body) if isinstance(n, For) and n.var in ("p_k", *self.roles.inner)]
        lanes = [n.lanes for n in body if isinstance(n, Def) and n.reg.startswith(f"{self.tile_name}_")]
        chains = -(-(CHAINS if max(lanes) == self.target.width else 2 * CHAINS) // len(lanes))
        if chains > 1 and len(steps) == 1:
            return split_chains(body, steps[-1], chains)
        body = partial_unroll(body, steps[-1] if steps else "p_k", self.plan.unroll)
        near = self.plan.fill or (self.K.constant or LINE) < 2 * LINE  # in the cache, or rows are one stream
        if near or self.N.constant is None:  # K is short where both operands are computed, and variants are many
            return body
        panel = {"c_j": minimum(V("c_j") + 1, self.N.ceildiv(self.nr) - 1)} if self.streams() else None
        whole = (self.K % LINE) == ZERO == (self.plan.block % LINE)
        return prefetch_next(body, "p_k", self.next_rows(rows), panel, whole)

    def micro_kernels(self, body: Body) -> Callable[[int, int], Body]:
        """(rows, columns) -> the micro-kernel of a tile for so many live ones; the debug ladder shows the full tile."""
        full, names = max(self.column_cases()), names_of(self.group)
        wide = {c: run(self.part, body, self.column_steps(c), names, c == full) for c in self.column_cases()}

        def kernel(rows: int, columns: int) -> Body:
            shown = (rows, columns) == (max(self.row_cases()), full)
            return run(self.part, wide[columns], self.row_steps(rows), names, shown)

        return kernel

    def streams(self) -> bool:
        """Whether panels come from beyond the cache, each for all row tiles of a share."""
        size = (self.N * self.K * self.R).constant
        return self.whole and bool(self._panels_of_constants()) and size is not None and size > SHARED_ELEMENTS

    def _panels_of_constants(self) -> set[str]:
        return {b for b, a in self.group.arrays.items() if a.role == "constant" and a.shape[-1] == self.width}

    def next_rows(self, rows: int, tiles: int = 1) -> dict[str, Index]:
        """The first row of a tile further on, in bounds."""
        return {"o_i": minimum(V("o_i") + tiles * rows, self.M - rows)}

    def masked(self, body: Body, width: int) -> Body:
        """Vectorises the columns of a micro-kernel for ``width`` of them."""
        n, last = self.N.constant, width % self.width or self.width
        tail = None if n is None else n % self.nr
        full = n is None or (width == self.nr and n >= self.nr)
        partial = tail is None or (tail > 0 and width - self.step < tail)
        live = self._left(self.named(ACC), self.axis(self.roles.col), p("j")) - (width - last)
        exact = n is not None and n % last == 0
        panels = frozenset({self.tile_name, self.held, "panel", "rows", *self._panels_of_constants()})
        return vector_columns(body, Columns(self.width, width, live, full, partial, exact, self.tile_name, panels))

    # -- the whole kernel ----------------------------------------------------------------------------------------

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
        sizes = {n: e for n, e in self.schedule.parameters().items() if n in _KNOWN}
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
            panel = (PANEL, self.col_value.dtype, self.scratch.panel_size(nt.ceildiv("B_j")))
            body = (Let("c_lo", lo, allocated(bind(body, {extent(VECTOR): self.scratch.panels(self.N, hi)}), *panel)),)
        if self.plan.fill:
            first, end = (tm.first("i", V(b("i")) + n) for n in (0, 1))
            rows = (ROWS, self.row_value.dtype, self.scratch.rows_size(mt.ceildiv("B_i")))
            body = bind(body, {extent(a("i")): self.scratch.rows()})
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

    @property
    def step(self) -> int:
        """Micro-kernels exist for every multiple of so many columns: the last vector may be a narrow one."""
        narrow = self.width == self.target.width and self.acc.value.dtype == "float32"
        return self.target.narrow if narrow and self.target.narrow else self.width

    def column_cases(self) -> list[int]:
        """Numbers of columns that micro-kernels are for; a tile takes the least that holds its live columns."""
        n = self.N.constant
        if n is None:
            return list(range(self.step, self.nr + 1, self.step))
        tail = -(-(n % self.nr) // self.step) * self.step
        return sorted({tail or self.nr, self.nr if n >= self.nr else tail or self.nr})

    def row_cases(self) -> list[int]:
        """Numbers of live rows that occur."""
        m, r = self.M.constant, self.plan.rows
        return sorted({m // -(-m // r), -(-m // -(-m // r))}) if m else list(range(1, r + 1))

    def live_columns(self) -> Index:
        """Columns of the current register tile."""
        return minimum(self.nr, self._left(self.named(ACC), self.axis(self.roles.col), p("j")))

    def shares(self, rows: int, columns: int) -> dict[str, Index]:
        """The launch-time tile: tasks of about ``rows`` x ``columns`` results, in whole register tiles."""
        nt, mt = self.N.ceildiv(self.nr), self.M.ceildiv(self.plan.rows)
        height, width = max(1, rows // self.plan.rows), max(1, columns // self.nr)
        return {"B_i": maximum(1, mt.ceildiv(height)), "B_j": maximum(1, nt.ceildiv(width))}

    def _launch(self, nt: Index, mt: Index) -> dict[str, Index]:
        """Shares for the threads."""
        batch, sizes = product(self.extents[x] for x in self.roles.batch), (self.M, self.N, self.K * self.R)
        return product_blocks(self.plan, self.width, (mt, nt), sizes, batch, self.scratch.steps)
