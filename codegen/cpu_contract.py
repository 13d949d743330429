"""CPU kernels for matmul-like groups: from the tile-space tree to register-tiled C (CPU.md 1 and 2).

Constants come in panels as wide as a vector, ``[col/W][reduction][W]``; a column operand that is neither such a
constant nor of unit stride is packed by the promotion statement PACK. A row operand that is more than a load (a padded
image, seen as a matrix of pixels) is computed into rows of scratch by the promotion statement FILL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polydyn.codegen.check import verify_body
from polydyn.codegen.ir import (
    Body,
    Compare,
    Def,
    FlatLoad,
    For,
    If,
    Let,
    Node,
    Set,
    Store,
    consume,
    node_indices,
    rewrite,
    walk,
    walk_value,
)  # fmt: skip
from polydyn.codegen.isl_ast import generate
from polydyn.codegen.kernel import CpuTarget, Kernel
from polydyn.codegen.lower import Lowering, flat, lower, scratch_bytes
from polydyn.codegen.operands import operands
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.hoist import hoist_divisions, hoist_guards, hoist_masks
from polydyn.codegen.passes.registers import Copies, partial_unroll, registers, share_loads, unroll
from polydyn.codegen.passes.tiles import (
    allocated,
    balance,
    clip,
    first_columns,
    flatten_loops,
    mark_parallel,
    one_vector,
    tasks,
    unswitch,
    variants,
)  # fmt: skip
from polydyn.codegen.passes.transpose import has_transposes, transpose_copies
from polydyn.codegen.passes.vectorise import vectorise_loop, vectorise_tile
from polydyn.codegen.printers.c import KernelPrinter
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Const, Load, Op, Value, loads
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.model import Group, Statement, stored
from polydyn.schedules.tile_flow import ContractTiles
from polydyn.schedules.tiling import Roles, TiledGroup, contract_tree

REDUCTION_BLOCK = 768
"""Reduction steps per block: a panel of 768 x 48 floats stays in a 1 MB L2 (CPU.md 2)."""
ROW_UNROLL = 4
"""Reduction steps unrolled: with few rows the loop overhead shows otherwise (CPU.md 2)."""
FILL_ELEMENTS = 1 << 16
"""Elements of rows that FILL copies at a time: a quarter of a 1 MB L2."""
V = Index.of


@dataclass(frozen=True)
class ContractTuple:
    """The compile-time part of a tile tuple: register tile ``rows`` x ``vectors``, steps of a reduction block, unroll.

    The launch-time part, rows and columns of a task, is an argument of ``ContractKernel.shares``. CodegenError: a size
    below 1.
    """

    rows: int
    vectors: int
    block: int = REDUCTION_BLOCK
    unroll: int = ROW_UNROLL

    def __post_init__(self) -> None:
        if min(self.rows, self.vectors, self.block, self.unroll) < 1:
            raise CodegenError(f"{self} has a size below 1", rule="tiles are not empty")


@dataclass(frozen=True)
class _Plan:
    """Decisions for one kernel: register tile, reduction block, packing of columns, copying of rows."""

    rows: int
    vectors: int
    block: Index
    blocks: Index
    promote: bool
    fill: bool
    carrier: Statement | None
    unroll: int = ROW_UNROLL


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
    ) -> None:
        """``packed``: arrays already laid out in panels along the column iterator. ``chosen``: tuned sizes. ``fill``:
        FILL copies the rows.

        ``rows``: the register tile's rows when the kernel is a part of an attention, which also means one block.
        ``label``: tells the registers of such parts apart.
        """
        self.width = self.lanes(target)
        self.tile_name, self.shared_name = f"acc{label}", f"t{label}_"
        self.name, self.group, self.roles, self.target = name, group, roles, target
        self.acc = next(s for s in group.statements if s.reduce)
        self.epilogues = [s for s in group.statements if s.role == "epilogue"]
        self.extents = dict(self.acc.iters)
        self.M, self.N, self.K = (self.extents[x] for x in (roles.row, roles.col, roles.block))
        self.R = product(self.extents[x] for x in roles.inner)
        self.row_value, self.col_value = operands(self.acc, roles)
        self.chosen, self.notes = chosen, list[str]()
        self.copies: Copies = {}
        self.plan = self._plan(packed, fill) if rows is None else self._part(self._plan(packed, fill), rows)

    @staticmethod
    def lanes(target: CpuTarget) -> int:
        """Columns that one register of the tile holds."""
        return target.width

    # -- decisions -----------------------------------------------------------------------------------------------

    def _plan(self, packed: frozenset[str], fill: bool) -> _Plan:
        rows, vectors = self.tile()
        columns = [x for x in loads(self.col_value) if self.roles.col in _symbols(x)]
        in_place = all(x.buffer in packed or self._stride(x) == ONE for x in columns)
        carrier = next((s for s in self.epilogues if s.value.dtype == "float32"), None)
        k, r = self.K.constant, self.R.constant
        steps, unroll = (self.chosen.block, self.chosen.unroll) if self.chosen else (REDUCTION_BLOCK, ROW_UNROLL)
        block = max(1 if fill else 16, steps // r) if r else steps
        if carrier is None or self.acc.value.dtype != "float32" or (k is not None and k <= block * 4 // 3):
            return _Plan(rows, vectors, self.K, ONE, not in_place, fill, carrier, unroll)
        return _Plan(rows, vectors, V(block), maximum(1, self.K.ceildiv(block)), not in_place, fill, carrier, unroll)

    def _part(self, p: _Plan, rows: int) -> _Plan:
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
            rows, vectors, _ = max(self.target.tiles, key=lambda t: (t[1] <= 4, t[1]))
            return rows, vectors

        def useful(tile: tuple[int, int, float]) -> float:
            full, rest = divmod(-(-n // w), tile[1])
            return (n / w) / (full * tile[1] / tile[2] + rest / (tile[2] * (0.75 if rest == 1 else 0.95)) + 1e-9)

        rows, vectors, _ = max(self.target.tiles, key=useful)
        return rows, min(vectors, max(1, -(-n // w)))

    def _stride(self, x: Load) -> Index | None:
        address = self.group.arrays[x.buffer].address(x.index)
        stride, rest = address.split(self.roles.col)
        return None if self.roles.col in rest.symbols() else stride

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

    def _pitch(self) -> Index:
        """Elements from one row of scratch to the next: not a power of two, which would meet in few sets of a cache."""
        return self.plan.block * self.R + self.width

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

    # -- lowering ------------------------------------------------------------------------------------------------

    def _env(self, a: Mapping[str, Index]) -> dict[str, Index]:
        r = self.roles
        env = {x: a[x] for x in (*r.batch, *r.inner) if x in a}
        env[r.row] = V("o_i") + a.get("p_i", ZERO)
        env[r.col] = a["c_j"] * self.nr + a["p_j"]
        env[r.block] = a.get("b_k", ZERO) * self.plan.block + a.get("p_k", ZERO)
        return env

    @property
    def nr(self) -> int:
        """Columns of a full register tile."""
        return self.plan.vectors * self.width

    def _table(self, nr: int) -> dict[str, Lowering]:
        dtype = self.acc.value.dtype

        def acc(a: Mapping[str, Index]) -> Index:
            return a["p_i"] * nr + a["p_j"]

        def local(a: Mapping[str, Index]) -> FlatLoad:
            return FlatLoad(dtype, self.tile_name, acc(a))

        def value(v: Value, a: Mapping[str, Index]) -> Value:
            own = self.acc.array
            return flat(self.group, v, self._env(a), lambda x: local(a) if x.buffer == own else None)

        def carried(a: Mapping[str, Index]) -> Index:
            assert self.plan.carrier is not None
            c = self.plan.carrier
            return self.group.arrays[c.array].address(tuple(i.subs(self._env(a)) for i in c.index))

        def accumulate(a: Mapping[str, Index]) -> Body:
            row = self._row(a) if self.plan.fill else value(self.row_value, a)
            col = self._column(a)
            return (Store(self.tile_name, acc(a), Op(dtype, "mul", (row, col)), self.acc.reduce),)

        def done(s: Statement) -> Lowering:
            def f(a: Mapping[str, Index]) -> Body:
                env = self._env(a)
                address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
                return (Store(s.array, address, value(s.value, a)),)

            return f

        table: dict[str, Lowering] = {
            "INIT": lambda a: (Store(self.tile_name, acc(a), Const(dtype, 0.0)),),
            "ACC": accumulate,
        }
        if self.plan.carrier is not None:
            e = self.plan.carrier.array
            table["LOAD"] = lambda a: (Store(self.tile_name, acc(a), FlatLoad(dtype, e, carried(a))),)
            table["SAVE"] = lambda a: (Store(e, carried(a), local(a)),)
        table |= {f"DONE{n}": done(s) for n, s in enumerate(self.epilogues)}
        return table

    def _column(self, a: Mapping[str, Index]) -> Value:
        """The column operand: in place, from packed panels, or from the promoted buffer."""
        if not self.plan.promote:
            return flat(self.group, self.col_value, self._env(a), lambda x: None)
        w = self.width
        j = (a["c_j"] - V("c_lo")) * self.nr + a["p_j"]
        address = ((j // w) * (self.plan.block * self.R) + self._step(a, a["p_k"])) * w + j % w
        return FlatLoad(self.col_value.dtype, "panel", address)

    def _row(self, a: Mapping[str, Index]) -> Value:
        """The row operand from scratch."""
        address = (V("o_i") + a["p_i"] - "r_lo") * self._pitch() + self._step(a, a["p_k"])
        return FlatLoad(self.row_value.dtype, "rows", address)

    def _step(self, a: Mapping[str, Index], k: Index) -> Index:
        for x in self.roles.inner:
            k = k * self.extents[x] + a[x]
        return k

    def pack(self, body: Body, coordinates: Mapping[str, tuple[str, ...]]) -> Body:
        """The promotion statement, vectorised along the panel's lanes; lanes beyond the last column hold anything."""
        w, r = self.width, self.roles

        def f(a: Mapping[str, Index]) -> Body:
            env = {x: a[x] for x in (*r.batch, *r.inner)}
            env[r.col] = V("c_lo") * self.nr + a["v"] * w + a["lane"]
            env[r.block] = a.get("b_k", ZERO) * self.plan.block + a["a_k"]
            address = (a["v"] * (self.plan.block * self.R) + self._step(a, a["a_k"])) * w + a["lane"]
            return (Store("panel", address, flat(self.group, self.col_value, env, lambda x: None)),)

        body = lower(body, coordinates, {"PACK": f})
        if self.plan.blocks != ONE:
            body = clip(body, ("a_k",), self._live_reduction())
        live = self.N - V("c_lo") * self.nr - V("v") * w
        body = vectorise_tile(body, "lane", w, mask_extent=live)
        whole = rewrite(body, lambda n: Store(n.buffer, n.address, n.value, None, w) if isinstance(n, Store) else n)
        return transpose_copies(fold(whole), "a_k", w) if has_transposes(self.target) else fold(whole)

    def fill(self, body: Body, coordinates: Mapping[str, tuple[str, ...]]) -> Body:
        """The promotion statement of the rows: the operand with its prologue, vectors along the last reduction."""
        r = self.roles

        def f(a: Mapping[str, Index]) -> Body:
            env = {x: a[x] for x in (*r.batch, *r.inner)}
            env[r.row] = V("r_lo") + a["a_i"]
            env[r.block] = a.get("b_k", ZERO) * self.plan.block + a["a_k"]
            address = a["a_i"] * self._pitch() + self._step(a, a["a_k"])
            return (Store("rows", address, flat(self.group, self.row_value, env, lambda x: None)),)

        body = lower(body, coordinates, {"FILL": f})
        if self.plan.blocks != ONE:
            body = clip(body, ("a_k",), self._live_reduction())

        def vector(n: Node) -> Node | Body:
            if not isinstance(n, For) or any(isinstance(x, For) for x in walk(n.body)):
                return n
            try:
                return partial_unroll(vectorise_loop(n, self.target.width), n.var, ROW_UNROLL)
            except CodegenError as e:
                self.notes.append(f"rows are copied element by element: {e}")
                return n

        body = rewrite(body, lambda n: hoist_guards(n) if isinstance(n, For) else n)
        body = rewrite(body, vector)
        body = tuple(hoist_masks(n, "m_") if isinstance(n, For) else n for n in body)
        return hoist_divisions(body, "q_")

    def _live_reduction(self) -> Index:
        return self.K - V("b_k") * self.plan.block

    # -- the micro-kernel ----------------------------------------------------------------------------------------

    def vectors(self, body: Body, vectors: int, coordinates: Mapping[str, tuple[str, ...]]) -> Body:
        """The micro-kernel for a number of live vectors, its row count still a symbol."""
        width = vectors * self.width
        body = bind(body, {"P_j": width})
        if self.plan.blocks != ONE:
            body = clip(body, ("p_k",), self._live_reduction())
        body = consume(lower(body, coordinates, self._table(width)), "reduce", lambda b: b)
        return unroll(self.masked(body, width), ("p_j",))

    def rows(self, body: Body, rows: int) -> Body:
        """The micro-kernel for a number of live rows: registers and shared loads."""
        body = unroll(bind(body, {"P_i": rows}), ("p_i",), self.copies)
        body = registers(body, self.tile_name, self.acc.value.dtype)
        for _ in self.roles.inner:
            body = flatten_loops(body, "p_k")
        steps = [n.var for n in walk(body) if isinstance(n, For) and n.var in ("p_k", *self.roles.inner)]
        return partial_unroll(share_loads(body, self.shared_name), steps[-1] if steps else "p_k", self.plan.unroll)

    def masked(self, body: Body, width: int) -> Body:
        """Vectorises the columns; nests that touch memory by column get a twin for the last tile, whose last vector is
        masked (only that one: micro-kernels are exact in vectors). The choice is made outside of the reduction.
        """
        w, n = self.width, self.N.constant
        start, before = V("c_j") * self.nr, Index.of(width - self.width)
        exact = n is not None and n % w == 0

        def f(x: Node) -> Node | Body:
            if not (isinstance(x, For) and x.var == "p_i"):
                return x
            full = vectorise_tile((x,), "p_j", w)
            if exact or not self._touches_columns(x, {self.tile_name, "panel", "rows"}):
                return full
            (last,) = vectorise_tile(one_vector(x, before, w), "p_j", w, self.N - start - before)
            head = vectorise_tile(first_columns(x, before), "p_j", w) if width > w else ()
            assert isinstance(last, For)
            inner = tuple(y for z in head if isinstance(z, For) for y in z.body)
            return If((Compare("<=", start + width, self.N),), full, (replace(last, body=(*inner, *last.body)),))

        return unswitch(rewrite(body, f))

    def _touches_columns(self, x: For, safe: set[str]) -> bool:
        """Whether an address in memory depends on the column (panels hold whole vectors)."""
        packed = {b for b, a in self.group.arrays.items() if a.role == "constant" and a.shape[-1] == self.width}
        for n in walk((x,)):
            if not isinstance(n, (Store, Def, Set)):
                continue
            at = [(v.buffer, v.address) for v in walk_value(n.value) if isinstance(v, FlatLoad)]
            at += [(n.buffer, n.address)] if isinstance(n, Store) else []
            at += [(f.name, x) for i in node_indices(n) for f in i.fetches() for x in f.args]
            if any(name not in safe | packed and "p_j" in i.symbols() for name, i in at):
                return True
        return False

    # -- the whole kernel ----------------------------------------------------------------------------------------

    def tree(self) -> TiledGroup:
        """The tile-space tree that the kernel is generated from."""
        return contract_tree(self.group, self.roles, self.plan.promote, self.plan.fill)

    def build(self) -> Kernel:
        """The kernel."""
        p, w = self.plan, self.width
        tiled = self.tree()
        coordinates = tiled.coordinates()
        body = mark_parallel(generate(tiled), tiled.coincident)
        body = bind(body, {"B_k": p.blocks, "P_k": p.block, "W": w})
        if p.promote:
            body = consume(body, "promote", lambda b: self.pack(b, coordinates))
        if p.fill:
            body = consume(body, "fill", lambda b: self.fill(b, coordinates))
        nt, mt = self.N.ceildiv(self.nr), self.M.ceildiv(p.rows)
        body = balance(balance(body, "c_j", nt, "B_j", "b_j"), "c_i", mt, "B_i", "b_i")
        body = self._variants(body, coordinates)
        lo, hi = nt * "b_j" // "B_j", nt * (V("b_j") + 1) // "B_j"
        panels, size = self._panels(self.N, hi), self._panel_size(nt.ceildiv("B_j"))

        first, end = (mt * (V("b_i") + k) // "B_i" * self.M // maximum(1, mt) for k in (0, 1))

        def shares(b: Body) -> Body:
            if p.promote:
                panel = ("panel", self.col_value.dtype, size)
                b = (Let("c_lo", lo, allocated(bind(b, {"V_j": panels}), *panel)),)
            if p.fill:
                rows = ("rows", self.row_value.dtype, self._fill_size(mt.ceildiv("B_i")))
                b = (Let("r_lo", first, (Let("r_hi", end, allocated(bind(b, {"A_i": self._filled()}), *rows)),)),)
            return b

        body = consume(body, "kblock", shares)
        body, count = tasks(fold(body), runs=True)
        symbols = (*self.group.params, "B_i", "B_j")
        buffers = stored(self.group.arrays)
        verify_body(body, (*symbols, "begin", "end"), (*buffers, self.tile_name))
        outputs = [n for n, a in self.group.arrays.items() if a.role == "output"]
        text = KernelPrinter(self.name, buffers, outputs, symbols).kernel(body)
        note = f"register tile {p.rows}x{self.nr}, reduction block {p.block}"
        note += ", columns packed" * p.promote + ", rows copied" * p.fill
        return Kernel(
            self.name, text, tuple(buffers), symbols, self._launch(nt, mt), count, scratch_bytes(body),
            (note, *dict.fromkeys(self.notes)),
        )  # fmt: skip

    def _variants(self, body: Body, coordinates: Mapping[str, tuple[str, ...]]) -> Body:
        """A switch over exact row counts, inside it over live vectors, around outlined micro-kernels."""
        mt = self.M.ceildiv(self.plan.rows)
        first, following = V("c_i") * self.M // mt, (V("c_i") + 1) * self.M // mt
        def micro(b: Body) -> Body:
            wide = {c: self.vectors(b, c, coordinates) for c in self.vector_cases()}

            def columns(r: int) -> Body:
                cases = {c: self.rows(x, r) for c, x in wide.items()}
                return variants(self.live_vectors(), cases, f"{self.name}_{r}")

            return (Let("o_i", first, variants(following - V("o_i"), {r: columns(r) for r in self.row_cases()})),)

        return consume(body, "micro", micro)

    def vector_cases(self) -> list[int]:
        """Numbers of live vectors that occur; each gets a micro-kernel of its own."""
        n, w, v = self.N.constant, self.width, self.plan.vectors
        if n is None:
            return list(range(1, v + 1))
        whole = -(-n // w)
        return sorted({v, whole % v or v}) if whole >= v else [whole]

    def row_cases(self) -> list[int]:
        """Numbers of live rows that occur."""
        m, r = self.M.constant, self.plan.rows
        return sorted({m // -(-m // r), -(-m // -(-m // r))}) if m else list(range(1, r + 1))

    def live_vectors(self) -> Index:
        """Vectors of the current register tile that hold columns."""
        return minimum(self.plan.vectors, (self.N - V("c_j") * self.nr).ceildiv(self.width))

    def shares(self, rows: int, columns: int) -> dict[str, Index]:
        """The launch-time tile: tasks of about ``rows`` x ``columns`` results, in whole register tiles."""
        nt, mt = self.N.ceildiv(self.nr), self.M.ceildiv(self.plan.rows)
        height, width = max(1, rows // self.plan.rows), max(1, columns // self.nr)
        return {"B_i": maximum(1, mt.ceildiv(height)), "B_j": maximum(1, nt.ceildiv(width))}

    def _launch(self, nt: Index, mt: Index) -> dict[str, Index]:
        """Equal shares for the threads: whole batches first, then column panels, then rows."""
        batch = product(self.extents[x] for x in self.roles.batch)
        need = maximum(1, V("nth").ceildiv(maximum(1, batch)))
        if self.plan.fill:  # rows first, in blocks that stay in the cache: copying them again for other columns costs
            steps = self.plan.block * self.R
            most = 16 if steps.constant is None else max(1, FILL_ELEMENTS // (self.plan.rows * max(1, int(steps))))
            bi = minimum(mt, mt.ceildiv(most).ceildiv(need) * need)
            return {"B_i": maximum(1, bi), "B_j": maximum(1, minimum(nt, need.ceildiv(maximum(1, mt))))}
        bj = maximum(1, minimum(nt, need))
        return {"B_i": maximum(1, minimum(mt, need.ceildiv(bj))), "B_j": bj}


def _symbols(x: Load) -> frozenset[str]:
    return frozenset(s for i in x.index for s in i.symbols())
