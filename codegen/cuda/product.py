"""One version of a product on the GPU: a tile with copies of one width, from the GPU tree through mark-directed passes.

Instructions: ``cuda_instructions``. Both operands come through a ring of ``stages`` tiles in shared memory;
a tile lies there as it lies in global memory (unit stride along the reduction or along its own iterator), so copies
stay wide, XOR-swizzled against bank conflicts. Elements outside the operand arrive as zeros, which makes M, N and K
arbitrary. Sums of tensor cores pass through shared memory once more, so that epilogues load and store whole rows, 16
bytes a lane where addresses allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from polydyn.codegen.cuda.copies import Operand, copy_of
from polydyn.codegen.cuda.emit import bound_names, emit
from polydyn.codegen.cuda.instructions import (
    COLUMN,
    HALVES,
    LANE,
    PAIR,
    ROW,
    load,
    multiply,
)
from polydyn.codegen.cuda.kernel import CudaKernel
from polydyn.codegen.cuda.split import SHARE
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.work import Work, product_work
from polydyn.codegen.ir import (
    Alloc,
    Body,
    Call,
    Compare,
    FlatLoad,
    For,
    If,
    Inst,
    Let,
    Mark,
    Pointer,
    Store,
    Tile,
    consume,
    substitute,
    walk,
)  # fmt: skip
from polydyn.codegen.lower import Lowering, flat, lower
from polydyn.codegen.operands import operands
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.threads import WARP, assign, one_each, pipeline, rasterise, spread, unrolled
from polydyn.codegen.passes.tiles import balance, task_count
from polydyn.codegen.passes.widen import widen
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import ITEMSIZE, Const, Op, Value, cast, const, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, product
from polydyn.schedules.model import Group, Statement, stored
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.gpu import (
    COPY_A,
    COPY_B,
    FRAG_A,
    FRAG_B,
    SLAB,
    STAGE,
    STAGED,
    gpu_product,
    staged,
)
from polydyn.schedules.tree.names import b, e, extent, g, p, s, w
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT

V = Index.of
_DEALT = tuple(map(extent, (s("i"), s("j"), s("k"), e("i"), e("j"), e("v"))))
"""Sizes of loops that are dealt to threads and lanes by the vector: the marks' passes bind them."""
RASTER = 8
"""Rows of blocks that run next to each other, so that blocks in flight share operands in the L2 cache."""
UNROLLED = dict.fromkeys(
    ("f_i", "f_j", "f_k", "g_i", "g_j", "e_s", "e_f", "row_half", "column_of_pair"), "unroll"
)


def product_declined(group: Group, roles: Roles) -> Declined | None:
    """Why a product is not built for CUDA; None when it is."""
    row, col = _narrow(operands(group.backbone, roles))
    alike = row.dtype == col.dtype or {row.dtype, col.dtype} <= set(BYTES)
    if alike and row.dtype in ("float32", "int32", *HALF, *BYTES):
        return None
    return Declined(f"a product of {row.dtype} and {col.dtype} is not built for CUDA")


class ProductGroup:
    """A matmul-like group: its operands as they are stored, its extents; ``shares``: parts of the reduction.

    ``dtypes``: of the stored operands, ``dtype`` that of the rows; ``sums``: of what is accumulated, float32 or int32.
    """

    def __init__(self, name: str, group: Group, roles: Roles, shares: Index = ONE) -> None:
        self.name, self.group, self.roles, self.shares = name, group, roles, shares
        self.acc, self.epilogues = group.backbone, group.epilogues
        self.extents = dict(self.acc.iters)
        self.M, self.N = self.extents[roles.row], self.extents[roles.col]
        self.K = product(self.extents[x] for x in (roles.block, *roles.inner))
        row, col = _narrow(operands(self.acc, roles))
        self.sums = self.acc.value.dtype
        self.dtype, self.dtypes, self.values = row.dtype, (row.dtype, col.dtype), (row, col)
        if refused := product_declined(group, roles):
            raise CodegenError(str(refused))  # whoever builds has asked before

    def schedule(self, tile: CudaTile) -> Scheduled:
        """Tree and tile map of a tile."""
        return gpu_product(self.group, self.roles, tile.sizes(), self.shares != ONE)

    def epilogue_value(self, s: Statement, env: Mapping[str, IndexLike], total: Value) -> Value:
        """What an epilogue stores, ``total`` being the sum of the products."""
        return flat(self.group, s.value, env, lambda x: total if x.buffer == self.acc.array else None)

    def term(self, a: Value, b: Value) -> Value:
        """What is accumulated, of two elements as they are stored."""
        return op("mul", cast(a, self.sums), cast(b, self.sums))


class TiledProduct:
    """One tile with one width of copies; ``wide``: epilogues store 16 bytes at once.

    ``tag`` is part of all names inside the kernel, for kernels of several products. ``keys``: columns of fragments are
    ``permuted`` (the steps of another product). ``unit``: the number of the warp that stages rows. ``paired``: even and
    odd columns are in fragments of their own.
    """

    def __init__(
        self, of: ProductGroup, tile: CudaTile, width: int, wide: bool, tag: str = "", keys: bool = False,
        unit: IndexLike = "warp",
    ) -> None:  # fmt: skip
        self.of, self.tile, self.wide, self.keys, self.unit = of, tile, wide, keys, V(unit)
        self.acc, self.frags = f"acc{tag}", (f"a_frag{tag}", f"b_frag{tag}")
        self.wanted: dict[tuple[Index, int], None] = {}
        self.group, self.roles, self.extents = of.group, of.roles, of.extents
        if not set(of.dtypes) <= set(tile.kind.dtypes):
            remedy = "mma for float16 and bfloat16, imma for int8 and uint8, fma for float32 and int32"
            raise CodegenError(f"{tile.instruction} of {of.dtype} is not built", remedy=remedy)
        m, n, _ = tile.shape
        self.frag = (tile.wm // m, tile.wn // n)
        self.schedule = of.schedule(tile)
        self.places = Places(self.schedule)
        rows = Operand(f"tile_a{tag}", of.values[0], "i", tile.bm, COPY_A, self.places)
        columns = Operand(f"tile_b{tag}", of.values[1], "j", tile.bn, COPY_B, self.places)
        self.copies = tuple(
            copy_of(self.group, x, tile.bk, width, tile.kind, x is columns) for x in (rows, columns)
        )
        self.paired = tile.instruction == "imma" and not self.copies[1].along_k

    # -- where things are ----------------------------------------------------------------------------------------

    def register(self, a: Mapping[str, Index]) -> Index:
        """The accumulator of a point: a lane holds rows g, g+8 and two columns of an m16n8 fragment."""
        fragment = a["f_i"] * self.frag[1] + a["f_j"]
        return fragment * 4 + HALVES * 2 + PAIR if self.tile.kind.warp else fragment

    # -- statements ----------------------------------------------------------------------------------------------

    def init(self, a: Mapping[str, Index]) -> Body:
        """Accumulators start at zero."""
        return (Store(self.acc, self.register(a), const(0, self.of.sums)),)

    def stage(self, a: Mapping[str, Index]) -> Body:
        """A lane's two columns of a fragment to shared memory.

        Rows of a group of eight lie in bit-reversed order: then neither those that write (half-warps: four rows, two
        chunks of 16 bytes each; quarters, when ``paired``: two rows, four chunks) nor the reading quarters (two rows,
        every other chunk) meet in a bank.
        """
        if self.paired:
            return self._stage_pair(a)
        column = self.places.cell(STAGE, "stage", {**a, p("j"): LANE % 4 * 2})["j"]
        place = self._staged(staged(LANE // 4) + HALVES * 8, column)
        fragment = self._fragment(a)
        first = self.register({"f_i": ZERO, **a, "f_j": fragment}).subs({"column_of_pair": 0})
        return (Call("pd_sts_wide<2>", (place, Pointer(self.of.sums, self.acc, first))),)

    def _fragment(self, a: Mapping[str, Index]) -> Index:
        """The fragment of columns that is staged."""
        return self.places.element(STAGE, "j", a, (b("j"), w("j"), p("j")))

    def _stage_pair(self, a: Mapping[str, Index]) -> Body:
        """The same where two fragments share 16 columns: a lane's four columns of one of its rows.

        The pair's first fragment stands for row g, the second one for row g + 8.
        """
        half, first = a["e_f"] % 2, a["e_s"] * (SLAB // 8) + a["e_f"] // 2 * 2
        place = self._staged(staged(LANE // 4) + half * 8, a["e_f"] // 2 * 16 + LANE % 4 * 4)

        def own(e: int) -> Value:
            register = self.register({"f_i": ZERO, **a, "f_j": first + e % 2})
            at = register.subs({"row_half": half, "column_of_pair": e // 2})
            return FlatLoad(self.of.sums, self.acc, at)

        four = tuple(Store("four", V(e), own(e)) for e in range(4))
        move = Call("pd_sts_wide<4>", (place, Pointer(self.of.sums, "four", ZERO)))
        return (Alloc("four", self.of.sums, V(4), "register", (*four, move)),)

    def _staged(self, row: Index, column: Index) -> Tile:
        """A place of the rows that the warp has staged."""
        return Tile(self.of.sums, "stage", self.unit * (STAGED * SLAB), row, column, SLAB, 4)

    def done(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An epilogue on registers, stored where the element exists (CUDA cores: a thread has one)."""
        env = self.places.env(s.name, a)
        value = self.of.epilogue_value(s, env, FlatLoad(self.of.sums, self.acc, self.register(a)))
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        return (If(self.live(env), (Store(s.array, address, value),)),)

    def done_staged(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An epilogue on a vector of a row that lies in shared memory."""
        v, part = self.vector(s), a["e_j"]
        row = self.places.element(s.name, "i", a)
        vector = self.places.element(s.name, "j", {**a, e("j"): part * v}) // v
        at = {**self.places.env(s.name, a), self.roles.row: V("e_row"), self.roles.col: V("e_vec") * v + "e_v"}
        value = self.of.epilogue_value(s, at, FlatLoad(self.of.sums, "sum", V("e_v")))
        address = self.group.arrays[s.array].address(tuple(i.subs(at) for i in s.index))
        element: Body = (Store(s.array, address, value),)
        if v > 1:
            made = widen(element, "e_v", v, self._global(), (*self.roles.batch, "e_row", "e_vec", "e_v", "b_s"))
            assert made is not None, "vector has tried"
            element = made[0]
            self.wanted |= dict.fromkeys((*made[1], *(((self.of.N, v),) if self.of.N.constant is None else ())))
        else:
            element = substitute(element, {"e_v": 0})
        piece = min(v, 4)
        loads = tuple(
            Call(f"pd_lds_wide<{piece}>", (Pointer(self.of.sums, "sum", V(x)), self._staged(a["e_i"], part * v + x)))
            for x in range(0, v, piece)
        )
        live = self.live({k: i.subs({"e_v": 0}) for k, i in at.items()})
        body: Body = (Alloc("sum", self.of.sums, V(v), "register", (*loads, If(live, element))),)
        return (Let("e_row", row, (Let("e_vec", vector, body),)),)

    def live(self, env: Mapping[str, Index]) -> tuple[Compare, ...]:
        """Whether an element exists."""
        return (Compare("<", env[self.roles.row], self.of.M), Compare("<", env[self.roles.col], self.of.N))

    def _global(self) -> dict[str, str]:
        return stored(self.group.arrays)

    def vector(self, s: Statement) -> int:
        """Columns that an epilogue loads and stores at once: 16 bytes of its result, or one."""
        v = 16 // ITEMSIZE[s.value.dtype]
        if not self.wide or v not in (4, 8, 16) or (self.of.N.constant or 0) % v:
            return 1
        env = {self.roles.col: V("e_vec") * v + "e_v"}
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        own = frozenset((*self.extents, "e_vec", "e_v", SHARE))
        made = widen((Store(s.array, address, Const(s.value.dtype, 0.0)),), "e_v", v, self._global(), own)
        return v if made is not None else 1

    def fragment(self, which: int, a: Mapping[str, Index]) -> Body:
        """Shared memory -> registers: a float, or what a warp's instructions need of 16 rows or columns."""
        t, c, axis = self.tile, self.copies[which], "ij"[which]
        cell = self.places.cell((FRAG_A, FRAG_B)[which], ("tile_a", "tile_b")[which], a)
        own, k, number = cell[axis], cell["k"], a[g(axis)]
        if not t.kind.warp:
            return (Store(self.frags[which], number, c.tile(a["b_k"], own, k, t.stages)),)

        def at(own: Index, k: Index) -> Tile:
            return c.tile(a["b_k"], own, k, t.stages)

        return load(t.kind, which, c.along_k, at, self.frags[which], number, own, k, self.keys)

    def accumulate(self, a: Mapping[str, Index]) -> Body:
        """One instruction."""
        fragment = a["f_i"] * self.frag[1] + a["f_j"]
        along_k = self.copies[1].along_k
        return multiply(self.tile.kind, self.of.dtypes, along_k, self.acc, self.frags, fragment, a["f_i"], a["f_j"])

    # -- marks ---------------------------------------------------------------------------------------------------

    def instruction(self, body: Body) -> Body:
        """Tensorization: an accumulation's point band is one instruction; elsewhere a lane takes its own points."""
        if not self.tile.kind.warp:
            return body
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        trips = [n.hi for n in walk(body) if isinstance(n, For)]
        if inst.statement == "ACC":
            if trips != [V(x) for x in self.tile.shape]:
                raise CodegenError(f"points {trips} are not the instruction {self.tile.shape}")
            points = [n.var for n in walk(body) if isinstance(n, For)]
            return substitute((inst,), dict.fromkeys(points, ZERO))
        if inst.statement == "STAGE" and self.paired:
            return substitute((inst,), {"p_i": ZERO, "p_j": ZERO})
        return lane_points(inst, ("p_i", "p_j"))

    def copy(self, body: Body) -> Body:
        """Global -> shared, dealt to all threads of the block, the unit-stride side innermost."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        c = self.copies[0 if inst.statement == "COPY_A" else 1]
        body = bind(body, {f"S{x[1:]}": n for x, n in c.trips().items()})
        body = lower(body, {inst.statement: lambda a: c.issue(a, self.tile.stages)})
        # registers of many loads in flight would spill, those of many addresses beside pairs of bytes too
        kind = "unroll" if c.asynchronous and (c.bytes == 16 or not self.paired) else "unroll2"
        return spread(body, "s_k" if c.along_k else c.own, self.tile.threads, kind)

    def store(self, body: Body) -> Body:
        """An epilogue's rows in shared memory -> global memory, dealt to the lanes of the warp that put them there."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        s = self.group.statement(inst.statement)
        v = self.vector(s)
        body = bind(body, {"E_i": STAGED, "E_j": SLAB // v, "E_v": 1})  # the point band is one access
        body = lower(body, {inst.statement: partial(self.done_staged, s)})
        sync = Call("pd_syncwarp")
        return (sync, *spread(body, "e_j", WARP, "unroll" if v > 1 else "unroll2", "lane"), sync)

    def epilogue(self, body: Body) -> Body:
        """The sums' way through shared memory, where the ring was."""
        if not self.tile.kind.warp:
            return body
        size = V(self.tile.threads // WARP * STAGED * SLAB)
        return (Call("pd_syncthreads"), Alloc("stage", self.of.sums, size, "shared", body))

    def ring(self, body: Body) -> Body:
        """The pipelined loop in its shared memory."""
        body = pipeline(body, "b_k", self.tile.stages, split_copies)
        for c in self.copies:
            body = (Alloc(c.name, c.dtype, V(c.elements * self.tile.stages), "shared", body),)
        return body

    # -- the whole kernel ----------------------------------------------------------------------------------------

    def build(self) -> tuple[CudaKernel, ...]:
        """The kernel, with indices of both widths."""
        of, t = self.of, self.tile
        name, names = f"{of.name}_{self.version}", bound_names(self.group.arrays, self.group.params)
        body = run(name, loops(name, self.schedule.tiled()), self.steps(), names)
        count = task_count(body)
        body = run(name, body, (
            Step("blocks", "a block is a task", one_each),
            Step("registers", "sums and fragments are registers", self._allocate),
            Step("fold", "decided guards and single trips go", fold),
        ), names)  # fmt: skip
        wide = tuple(dict.fromkeys((*(x for c in self.copies for x in c.multiples), *self.wanted)))
        rows, columns = of.M.ceildiv(t.bm), of.N.ceildiv(t.bn)
        known: dict[str, IndexLike] = {"b_i": rows, "b_j": columns, "b_s": of.shares, "block": rows * columns}
        known |= {"strip": rows + RASTER, "strip_rows": RASTER, "task": count}
        known |= {x: self.extents[x] for x in self.roles.batch}
        work = self.work.shared_by(of.shares)
        kernel = CudaKernel(name, "", (), self.group.params, t.threads, count, ZERO, self.version, wide, work=work)
        return emit(kernel, body, self.group.arrays, known, self.blocks)

    def steps(self) -> tuple[Step, ...]:
        """The passes up to the coincident band."""
        t, shares, extents = self.tile, self.of.shares, self.schedule.extents()
        sizes = {n: e for n, e in self.schedule.parameters().items() if n not in _DEALT}
        sizes |= {extent(b("s")): shares} if shares != ONE else {}
        tiles = extents[b("k")]
        unit = V("warp") if t.kind.warp else V("tid")
        units: dict[str, Index] = {w("i"): unit // extents[w("j")], w("j"): unit % extents[w("j")]}
        rings, held = tuple(c.name for c in self.copies), (self.acc, *self.frags)
        split = Step("balance", "shares of the reduction", lambda x: balance(x, b("k"), tiles, shares, b("s")))
        return (
            *((split,) if shares != ONE else ()),
            Step("copy", "copies are dealt to threads", lambda b: consume(b, "copy", self.copy), rings),
            Step("pipeline", "copies run ahead in a ring", lambda b: consume(b, "pipeline", self.ring)),
            Step("bind", "sizes become constants", lambda b: bind(b, sizes)),
            Step("assign", "units are warps or threads", lambda b: assign(b, units)),
            Step("instruction", "points become an instruction", lambda b: consume(b, "instruction", self.instruction)),
            Step("store", "epilogues on staged rows", lambda b: consume(b, "store", self.store), ("stage",)),
            Step("epilogue", "staged rows lie where the ring was", lambda b: consume(b, "epilogue", self.epilogue)),
            Step("multiply", "the mark of the arithmetic goes", lambda b: consume(b, "multiply")),
            Step("lower", "statements become instructions", lambda b: lower(b, self._table()), ("stage", *held)),
            Step("unroll", "loops over registers", lambda b: unrolled(b, UNROLLED | self._in_flight(tiles))),
            Step("fold", "decided guards and single trips go", fold),
            Step("rasterise", "blocks that share operands", lambda b: rasterise(b, "b_i", "b_j", RASTER)),
        )

    def _in_flight(self, tiles: Index) -> dict[str, str]:
        """How loops of the reduction are unrolled: more steps at once would keep too many operands in registers."""
        steps = {"f_k": "unroll1"} if self.paired else {} if self.tile.kind.warp else {"f_k": "unroll2"}
        if self.tile.instruction == "imma" and tiles.constant is not None and self.of.shares == ONE:
            steps["b_k"] = "unroll1"  # where the compiler knows how many there are
        return steps

    @property
    def version(self) -> str:
        """What the version is called: instruction, tile, stages, bytes of the copies."""
        t, of = self.tile, self.of
        version = "split_" * (of.shares != ONE)
        version += f"{t.instruction}_{t.bm}x{t.bn}x{t.bk}_{t.stages}_{'_'.join(str(c.bytes) for c in self.copies)}"
        return version + "_wide" * (max(map(self.vector, of.epilogues)) > 1)

    def _table(self) -> dict[str, Lowering]:
        table: dict[str, Lowering] = {
            INIT: self.init,
            FRAG_A: lambda a: self.fragment(0, a),
            FRAG_B: lambda a: self.fragment(1, a),
            ACC: self.accumulate,
            STAGE: self.stage,
        }
        return table | {s.name: partial(self.done, s) for s in self.of.epilogues}

    def _allocate(self, body: Body) -> Body:
        (fi, fj), kind = self.frag, self.tile.kind
        held = kind.register or self.of.sums
        registers = ((self.acc, self.of.sums, fi * fj * (4 if kind.warp else 1)),
                     (self.frags[0], held, fi * kind.registers[0]),
                     (self.frags[1], held, fj * kind.registers[1]))  # fmt: skip
        for name, dtype, size in registers:
            body = (Alloc(name, dtype, V(size), "register", body),)
        return body

    @property
    def blocks(self) -> int:
        """Blocks wanted on a multiprocessor.

        Many narrow copies need more registers than two blocks of the largest tile leave.
        """
        wanted = self.tile.blocks
        return wanted if min(c.bytes for c in self.copies) >= 8 else max(1, wanted // 2)

    @property
    def work(self) -> Work:
        """What a block does that has the whole reduction."""
        return product_work(self.tile, self.copies, self.of.K.ceildiv(self.tile.bk), self.blocks)


def _narrow(pair: tuple[Value, Value]) -> tuple[Value, Value]:
    """Operands that were stored in 16 bits or in bytes and only widened: tensor cores multiply them exactly, into
    float32 or int32. Others, bytes minus a zero point say, are what they are: float32 or int32.
    """
    wide = pair[0].dtype
    inner = [v.args[0] if isinstance(v, Op) and v.name == "cast" and v.dtype == wide else v for v in pair]
    dtypes = {v.dtype for v in inner}
    halves = wide == "float32" and len(dtypes) == 1 and dtypes <= set(HALF)
    return (inner[0], inner[1]) if halves or (wide == "int32" and dtypes <= set(BYTES)) else pair


def lane_points(inst: Inst, points: Sequence[str], column: Index = COLUMN) -> Body:
    """A statement over the points (row, column) of a fragment, of which a lane takes its own."""
    leaf = substitute((inst,), {points[0]: ROW, points[1]: column})
    if inst.statement == "STAGE":  # both columns move at once
        return (For("row_half", ZERO, V(2), substitute(leaf, {"column_of_pair": 0})),)
    return (For("row_half", ZERO, V(2), (For("column_of_pair", ZERO, V(2), leaf),)),)


def split_copies(body: Body) -> tuple[Body, Body]:
    """(copies, uses) of a k tile."""
    uses = tuple(n for n in body if isinstance(n, Mark) and n.name == "multiply")
    return tuple(n for n in body if n not in uses), uses
