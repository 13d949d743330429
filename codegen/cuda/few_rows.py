"""CUDA kernels for GEMV and skinny GEMM (up to eight rows). They are bound by the bandwidth of the column operand.

Each lane loads 16 bytes of the column operand at a time (8 bytes for 8-bit types along N), along K or N, whichever is
contiguous. Eight lanes of a warp cover K and four cover N. The row operand stays in registers, so each element is
loaded once. The partial sums of a column are added by warp shuffles, then through shared memory, in a fixed order. If
the columns give too few blocks, K is split over blocks. On sm_90a the blocks form a cluster: each keeps its partial
sums in shared memory and finishes part of the results. On other devices the partial sums go to a workspace, and the
last block to arrive finishes all results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from polydyn.codegen import ir
from polydyn.codegen.cuda.emit import bound_names, emit
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import TENSOR
from polydyn.codegen.cuda.sharing import RANK, Cluster, Counted, blocks_step
from polydyn.codegen.cuda.work import split_k_factor, with_epilogues
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.indices import substitute
from polydyn.codegen.kernel import BASE, WORKSPACE, Block, Kernel, Work
from polydyn.codegen.lower import Lowering, flat
from polydyn.codegen.passes.threads import spread
from polydyn.codegen.passes.widen import Multiples, multiples, widen
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import BYTES
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import ITEMSIZE, Load, Value, const, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, minimum
from polydyn.schedules.model import Statement, stored
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tree.few_rows import GemvTile, gemv_schedule
from polydyn.schedules.tree.names import MarkName, b, c, e, lanes, p, w
from polydyn.schedules.tree.rewrites import CLEAR, SUM
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT

V = Index.of
ROW_VARIANTS = (2, 8)
"""Rows that each version holds in registers. A launch may have at most that many rows."""
K_LANES = 8
"""Lanes of a warp along K. With 16 bytes each they load a full 128-byte line."""
N_LANES = 4
"""Lanes of a warp along N. Each has one column or one vector of columns."""
MAX_COLUMNS_PER_LANE = 8
"""Maximum columns per lane. A load holds 16 int8 columns, but the accumulators of all rows for 16 columns would
spill."""
WORDS_PER_LOAD = 4
"""32-bit words in one 16-byte load."""
BLOCKS_PER_SM = 2
"""Occupancy target: the registers of a thread are chosen for this number of blocks per SM."""
REGISTERS_PER_THREAD = {2: 96, 8: 128}
"""Registers of a thread, by rows, rounded up to the allocation granularity (``docs/adr/0005-cuda.md``)."""
LOADS_IN_FLIGHT = {(2, True): 8, (2, False): 8, (8, True): 2, (8, False): 3}
"""Unroll factor of the load loop, by (rows, loads along K). For loads along K the row operand is loaded as vectors
too. Larger factors would exceed the registers of two blocks per SM."""
TRIP_COUNT, EARLY_TRIPS = "trips", "early"
"""Loop symbols: loads per lane along K, and loads that are prefetched before the previous launch ends."""


def gemv_versions(product: ProductGroup, hopper: bool = False) -> list[Kernel]:
    """Return the GEMV kernels, fewest rows first; an empty list if the column operand has no vector loads.

    A split-K kernel has 32-bit indices only; the other kernels handle larger sizes. ``hopper``: split K over a cluster
    (sm_90a) instead of the grid.
    """
    along_k = loads_along_k(product)
    if isinstance(along_k, Declined):
        return []
    whole = [k for r in ROW_VARIANTS for k in _GemvKernel(product, r, along_k).build()]
    blocks = _split_k_factor(product, along_k)
    shared = (_GemvKernel(product, r, along_k, blocks, hopper).build()[:1] for r in ROW_VARIANTS if blocks > 1)
    return [*(k for x in shared for k in x), *whole]


def loads_along_k(product: ProductGroup) -> bool | Declined:
    """Return whether vectors of the column operand are loaded along K, else along columns; declined if it has none, or
    if there are too many rows.
    """
    column, rows = product.values[1], product.M.constant
    if product.roles.inner:
        return Declined("it has several reductions")
    if rows is not None and rows > ROW_VARIANTS[-1]:
        return Declined(f"{rows} rows are more than {ROW_VARIANTS[-1]}")
    if not isinstance(column, Load):
        return Declined("its columns are more than loads")
    address = product.group.arrays[column.buffer].address(column.index)
    for along_k, x in ((True, product.roles.block), (False, product.roles.col)):
        stride, rest = address.split(x)
        if stride == 1 and x not in rest.symbols():
            return along_k
    return Declined("its columns have no vectors")


def _split_k_factor(product: ProductGroup, along_k: bool) -> int:
    """Return the number of blocks that K is split over."""
    one = _GemvKernel(product, ROW_VARIANTS[0], along_k)
    return split_k_factor(product.N.ceildiv(one.block), product.K.ceildiv(one.step))


class _GemvKernel(Variant):
    """One version. ``along_k``: vector loads run along K.

    ``blocks``: blocks that K is split over, as a ``cluster`` or not.
    """

    def __init__(self, product: ProductGroup, rows: int, along_k: bool, blocks: int = 1, cluster: bool = False) -> None:
        self.product, self.rows, self.along_k, self.blocks = product, rows, along_k, blocks
        self.group, self.roles, self.extents = product.group, product.roles, product.extents
        self.M, self.N, self.K, self.sums = product.M, product.N, product.K, product.sums
        vector = 16 // ITEMSIZE[product.values[1].dtype]
        self.vector = vector if along_k else min(vector, MAX_COLUMNS_PER_LANE)
        self.columns = 1 if along_k else self.vector
        self.warps = (4, 2) if along_k else (1, 8)  # along columns, along steps
        self.step = K_LANES * self.warps[1] * (self.vector if along_k else 1) * blocks
        self.block = N_LANES * self.warps[0] * self.columns
        if blocks > 1:
            counted = Counted(blocks, elements=self._elements, dtype=self.sums)
            self.sharing = Cluster(blocks) if cluster else counted
        self.schedule = self._schedule()
        self.places = Places(self.schedule)
        self.multiples: dict[tuple[Index, int], None] = {}
        along = self.K if along_k else self.N
        if along.constant is None:
            self.multiples[along, self.vector] = None

    @cached_property
    def proven(self) -> Proven:
        """The schedule with its proof; the kernel binds the number of steps of a lane."""
        return Proven(self.schedule, free=(self._rounds,))

    @property
    def _rounds(self) -> str:
        """The parameter for the number of steps of a lane."""
        return self.schedule.parameter(ACC, b("k"))

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths; return nothing if the addresses do not allow vectors."""
        if ((self.K if self.along_k else self.N).constant or 0) % self.vector:
            return ()
        body, count = build(GEMV, self)
        blocks = self.schedule.extents()
        limits: dict[str, IndexLike] = {b("i"): blocks[b("i")], b("j"): blocks[b("j")], "task": count}
        limits |= {x: self.extents[x] for x in self.roles.batch}
        few = () if self.M.constant else (ir.Compare("<=", self.M, V(self.rows)),)
        arch, cluster = ("sm_90a", self.blocks) if self.sharing.cluster else (BASE, 1)
        kernel = Kernel(
            self.name, self.symbols, count, version=self.version, multiples=tuple(self.multiples), conditions=few,
            block=Block(self._threads(), arch, work=self._work(), cluster=cluster),
        )  # fmt: skip
        return emit(kernel, body, self.group.arrays, limits, BLOCKS_PER_SM, self.sharing)

    @property
    def version(self) -> str:
        """The name of the version: maximum rows, direction and length of its vectors, blocks that K is split over."""
        several = f"_{self.sharing.label}" if self.sharing.label else ""
        return f"gemv_{self.rows}_{'k' if self.along_k else 'n'}{self.vector}{several}"

    def _schedule(self) -> Scheduled:
        """Tree and tile map."""
        points = (self.columns, self.vector if self.along_k else 1)
        return gemv_schedule(
            self.group, self.roles, GemvTile(self.rows, self.warps, (N_LANES, K_LANES), points, self.blocks)
        )

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        return f"{self.product.name}_{self.version}"

    def sizes(self) -> dict[str, Index]:
        """Return the numbers of all loops."""
        trips = self._trip_count()
        return self.schedule.parameters() | {self._rounds: V(TRIP_COUNT) if trips.constant is None else trips}

    def units(self) -> dict[str, Index]:
        """Return the coordinates of a lane in its block."""
        lane, warp, warp_j = V("lane"), V("warp"), self.warps[0]
        pair = (lane // K_LANES, lane % K_LANES) if self.along_k else (lane % N_LANES, lane // N_LANES)
        return {
            c("k"): V(RANK), w("j"): warp % warp_j, w("k"): warp // warp_j, lanes("j"): pair[0], lanes("k"): pair[1],
        }  # fmt: skip

    def table(self) -> dict[str, Lowering]:
        """Return the lowering of the statements other than the accumulation."""
        table: dict[str, Lowering] = {INIT: self.init}
        return table | {s.name: partial(self.epilogue, s) for s in self.product.epilogues}

    def opened(self) -> tuple[str, ...]:
        """Return the names that the leaf introduces."""
        rows = (f"row{r}" for r in range(self.rows))
        return (*self.units(), *map(b, "ijk"), RANK, TRIP_COUNT, "acc", "j_vec", *rows)

    def bind_coordinates(self, body: ir.Body) -> ir.Body:
        """Bind the coordinates of lanes. Loops with a single block or step are dropped."""
        extents = {**self.schedule.extents(), b("k"): self._trip_count()}
        return substitute(body, self.units() | {x: ZERO for x in map(b, "ijk") if extents[x] == ONE})

    def _threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    @property
    def _elements(self) -> int:
        """The number of sums of a block."""
        return self.rows * self.block

    def allocate(self, body: ir.Body) -> ir.Body:
        body = (ir.Alloc("acc", self.sums, V(self.rows * self.columns), "register", body),)
        return (ir.Alloc("sums", self.sums, V(self._elements * self.warps[1]), "shared", body),)

    def _work(self) -> Work:
        elements, item = self.block * self.step // self.blocks, ITEMSIZE[self.product.values[1].dtype]
        at_once = WORDS_PER_LOAD if item == 1 else 1  # four bytes by one instruction
        instructions = elements * (self.rows + 1) // (32 * at_once) + elements * (self.rows + 1) // (32 * self.vector)
        traffic, cluster = elements * item, self.blocks if self.sharing.cluster else 1
        work = Work(
            self.K.ceildiv(self.step), REGISTERS_PER_THREAD[self.rows], traffic=traffic, instructions=instructions,
            flight=LOADS_IN_FLIGHT[self.rows, self.along_k], elements=self._elements, by_warps=False,
            cluster=cluster,
        )  # fmt: skip
        return self.sharing.work(with_epilogues(work, self.product.group, self.product.epilogues, cluster))

    # -- coordinates -------------------------------------------------------------------------------------------------

    def _index_along(self, axis: str, **point: IndexLike) -> Index:
        """Return the element of an axis at a lane's point; coordinates that are not given are 0."""
        loops: dict[str, Index] = {x.coord: V(x.coord) for x in self.schedule.view(ACC).loops}
        points: dict[str, Index] = dict.fromkeys((p("i"), p("j"), p("k")), ZERO)
        return self.places.element(ACC, axis, {**loops, **points, **{f"p_{x}": V(i) for x, i in point.items()}})

    def _first_k(self) -> Index:
        """Return the lane's first step of the reduction, in vectors along it."""
        return self._index_along("k").subs({b("k"): ZERO}) // self._k_per_load

    @property
    def _k_per_load(self) -> int:
        """The number of K steps of a vector."""
        return self.vector if self.along_k else 1

    def _trip_count(self) -> Index:
        """Return the number of vectors along the reduction that a lane loads."""
        vectors, rest = self.K // self._k_per_load, (self._index_along("k") // self._k_per_load).split(b("k"))[0]
        if self.K.constant is not None and self.K.constant % self.step == 0:
            return vectors // rest  # the same for all lanes
        return (vectors - self._first_k()).ceildiv(rest)

    def _live(self) -> ir.Compare:
        return ir.Compare("<", self._index_along("j"), self.N)

    def _env(self, row: Index, point: str, k: Index) -> dict[str, Index]:
        column = V("j_vec") if self.along_k else V("j_vec") * self.vector + point
        axes = {self.roles.row: row, self.roles.col: column, self.roles.block: k}
        return {x: V(x) for x in self.roles.batch} | axes

    def _register(self, row: int, column: IndexLike) -> Index:
        return V(row * self.columns) + column

    # -- pieces --------------------------------------------------------------------------------------------------

    def init(self, a: Mapping[str, Index]) -> ir.Body:
        """Set the sums to zero."""
        return (ir.Store("acc", a[p("i")] * self.columns + a[p("j")], const(0, self.sums)),)

    def leaf(self, body: ir.Body) -> ir.Body:
        """Multiply one vector of the column operand by the matching elements of all rows.

        Rows past the end repeat the last row; their sums are not stored.
        """
        inst = next(n for n in ir.walk(body) if isinstance(n, ir.Inst))
        assert inst.statement == ACC
        k = V("k_vec") * self.vector + "p" if self.along_k else V("k_vec")
        symbols = (*self.roles.batch, "k_vec", "j_vec", "p", *(f"row{r}" for r in range(self.rows)))
        vectors = self._by_words(k, symbols) or self._by_elements(k, symbols)
        self.multiples |= dict.fromkeys(vectors[1])
        return (ir.Let("k_vec", self._index_along("k") // self._k_per_load, vectors[0]),)

    def _by_elements(self, k: Index, symbols: tuple[str, ...]) -> tuple[ir.Body, Multiples]:
        """Return one product per point."""
        points: ir.Body = ()
        for r in range(self.rows):
            env = self._env(V(f"row{r}"), "p", k)
            pair = [flat(self.group, v, env, lambda x: None) for v in self.product.values]
            register = self._register(r, ZERO if self.along_k else V("p"))
            points += (ir.Store("acc", register, self.product.term(*pair), "sum"),)
        vectors = widen(points, "p", self.vector, stored(self.group.arrays), symbols)
        assert vectors is not None, "nothing is stored to memory here"
        return vectors

    def _by_words(self, k: Index, symbols: tuple[str, ...]) -> tuple[ir.Body, Multiples] | None:
        """Return four byte products at once, if both operands are contiguous along the reduction; otherwise None."""
        if not self.along_k or not set(self.product.dtypes) <= set(BYTES):
            return None
        a, b = self.product.values
        pairs = [(b, V("row0")), *((a, V(f"row{r}")) for r in range(self.rows))]
        reads: ir.Body = ()
        alignment: Multiples = ()
        for n, (v, row) in enumerate(pairs):
            x = flat(self.group, v, self._env(row, "p", k), lambda x: None)
            stride, first = x.address.split("p") if isinstance(x, ir.FlatLoad) else (ZERO, ZERO)
            more = multiples(first, self.vector, symbols)
            if not isinstance(x, ir.FlatLoad) or stride != ONE or "p" in first.symbols() or more is None:
                return None
            alignment += more
            words = ir.Pointer("uint32", "words", V(n * WORDS_PER_LOAD))
            reads += (ir.Call(f"pd_ldg_wide<{WORDS_PER_LOAD}>", (words, ir.Pointer("uint32", x.buffer, first))),)
        dots = tuple(self._dot(r) for r in range(self.rows))
        body: ir.Body = (*reads, ir.For("word", ZERO, V(WORDS_PER_LOAD), dots, "unroll"))
        return (ir.Alloc("words", "uint32", V(len(pairs) * WORDS_PER_LOAD), "register", body),), alignment

    def _dot(self, row: int) -> ir.Store:
        """Return the product of a word of a row and a word of the column."""
        total = ir.FlatLoad("int32", "acc", self._register(row, ZERO))
        a, b = (ir.FlatLoad("uint32", "words", V("word") + n * WORDS_PER_LOAD) for n in (row + 1, 0))
        return ir.Store(
            "acc", total.address, ir.Apply("int32", f"pd_dp4a_{TENSOR[self.product.dtypes]}", (a, b, total))
        )

    def reduce(self, body: ir.Body) -> ir.Body:
        """Build the loop of a lane, for columns that exist."""
        trips = self._trip_count()
        loop: ir.Body = unroll_by(body, b("k"), LOADS_IN_FLIGHT[self.rows, self.along_k])
        if trips.constant is None:  # compilers do not unroll a loop whose condition divides
            loop = (ir.Let(TRIP_COUNT, trips, loop),)
        for r in range(self.rows):
            loop = (ir.Let(f"row{r}", minimum(self._index_along("i", i=r), self.M - 1), loop),)
        loop = (ir.Let("j_vec", self._index_along("j") // self.columns, loop),)
        return (*self._prefetch_weights(), ir.If((self._live(),), loop))

    def _prefetch_weights(self) -> ir.Body:
        """Prefetch the first vectors of a lane to L2 while the previous launch ends, if no launch writes them."""
        if not self.product.fixed:
            return ()
        k = (self._index_along("k") // self._k_per_load).subs({b("k"): V(EARLY_TRIPS)}) * self._k_per_load
        column = flat(self.group, self.product.values[1], {**self._env(ZERO, "p", k), "p": ZERO}, lambda x: None)
        if not isinstance(column, ir.FlatLoad):
            return ()
        at = column.address.subs({"p": ZERO, "j_vec": self._index_along("j") // self.columns})
        fetch = ir.Call("pd_fetch", (ir.Pointer(column.dtype, column.buffer, at),))
        mine = (self._live(), ir.Compare("<", V(EARLY_TRIPS), self._trip_count()))
        vectors = ir.For(
            EARLY_TRIPS, ZERO, V(LOADS_IN_FLIGHT[self.rows, self.along_k]), (ir.If(mine, (fetch,)),), "unroll"
        )
        return (vectors, ir.Call("pd_grid_begin"))

    def combine(self, body: ir.Body) -> ir.Body:
        """Add all lanes of a column by shuffles, then store a warp's sums in shared memory for the epilogues."""
        assert {n.statement for n in ir.walk(body) if isinstance(n, ir.Inst)} == {CLEAR, SUM}
        total = ir.FlatLoad(self.sums, "acc", V("r"))
        steps = [s if self.along_k else s * N_LANES for s in (4, 2, 1)]
        across = tuple(
            ir.Store("acc", V("r"), ir.Apply(self.sums, "pd_shfl_xor", (total, const(s, "int32"))), "sum")
            for s in steps
        )
        keep = tuple(
            ir.Store(
                "sums", self._partial_offset(V(w("k")), V(r), col), ir.FlatLoad(self.sums, "acc", self._register(r, c))
            )
            for r in range(self.rows)
            for c, col in enumerate(self._columns())
        )
        sums = ir.For("r", ZERO, V(self.rows * self.columns), across, "unroll")
        out: ir.Body = (sums, ir.If((ir.Compare("==", V(lanes("k")), ZERO),), keep), ir.Call("pd_syncthreads"))
        if self.blocks == 1:
            return out
        element = V("tid")
        assert self._elements <= self._threads()
        whole = self._sum_in_order([self._load_partial(n, element) for n in range(self.warps[1])])
        first = ir.If((ir.Compare("<", element, V(self._elements)),), (self._store_partial(element, whole),))
        return (*out, first, *self.sharing.meet())

    def _store_partial(self, element: Index, whole: Value) -> ir.Node:
        """Store a block's sum of an element for the block that finishes it."""
        if self.sharing.cluster:
            return ir.Store("sums", element, whole)
        place = ir.Pointer(self.sums, WORKSPACE, V("bid") * self._elements + element)
        return ir.Alloc("whole", self.sums, ONE, "register", (
            ir.Store("whole", ZERO, whole), ir.Call("pd_leave<1>", (place, ir.Pointer(self.sums, "whole", ZERO))),
        ))  # fmt: skip

    def _columns(self) -> list[Index]:
        """Return the lane's columns in the block."""
        at: dict[str, Index] = {x.coord: V(x.coord) for x in self.schedule.view(ACC).loops}
        return [self.places.cell(ACC, "acc", {**at, p("j"): V(c)})["j"] for c in range(self.columns)]

    def _partial_offset(self, warp: Index, row: Index, column: Index) -> Index:
        """Return the offset of a warp's sum of an element of the block."""
        return (warp * self.rows + row) * self.block + column

    def distribute_epilogues(self, body: ir.Body) -> ir.Body:
        """Distribute the epilogues over threads.

        Each block of a cluster finishes a part; otherwise the last block finishes all.
        """
        if not self.sharing.cluster:
            return self.sharing.finish(spread(body, e("j"), self._threads(), "unroll"))
        mine = self._elements // self.blocks
        body = substitute(spread(body, e("j"), self._elements, "unroll", "thread"), {"thread": V(RANK) * mine + "tid"})
        return (ir.If((ir.Compare("<", V("tid"), V(mine)),), body),)

    def _load_partial(self, warp: int, element: Index) -> Value:
        """Return a warp's partial sum of an element of the block."""
        return ir.FlatLoad(self.sums, "sums", element + warp * self._elements)

    def _sum_in_order(self, parts: Sequence[Value]) -> Value:
        """Add partial sums in order."""
        total = parts[0]
        for x in parts[1:]:
            total = op("add", total, x)
        return total

    def epilogue(self, s: Statement, a: Mapping[str, Index]) -> ir.Body:
        """Lower an element of the block: add the sums of warps or blocks in order, then apply the epilogue."""
        row, column = a[e("i")], a[e("j")]
        element = self._partial_offset(ZERO, row, column)
        parts = [self._load_partial(n, element) for n in range(self.warps[1])]
        if self.blocks > 1:
            own = ir.Pointer(self.sums, "sums", element)
            parts = [ir.Apply(self.sums, "pd_lds_at", (own, const(n, "int32"))) for n in range(self.blocks)]
        if self.blocks > 1 and not self.sharing.cluster:
            first = V("bid") // self.blocks * (self.blocks * self._elements) + element
            places = (ir.Pointer(self.sums, WORKSPACE, first + n * self._elements) for n in range(self.blocks))
            parts = [ir.Apply(self.sums, "pd_left", (x,)) for x in places]
        env = self.places.env(s.name, {**a, e("i"): V("e_row"), e("j"): V("e_column")})
        value = self.product.epilogue_value(s, env, ir.Reg(self.sums, "total"))
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        live = (ir.Compare("<", env[self.roles.row], self.M), ir.Compare("<", env[self.roles.col], self.N))
        body: ir.Body = (ir.If(live, (ir.Def("total", self._sum_in_order(parts)), ir.Store(s.array, address, value))),)
        return (ir.Let("e_row", row, (ir.Let("e_column", column, body),)),)


def unroll_by(body: ir.Body, var: str, factor: int) -> ir.Body:
    """Unroll loop ``var`` by a factor."""
    return tuple(
        ir.For(n.var, n.lo, n.hi, n.body, f"unroll{factor}") if isinstance(n, ir.For) and n.var == var else n
        for n in body
    )


GEMV: Family[_GemvKernel] = Family(
    names=bound_names,
    sizes=_GemvKernel.sizes,
    units=_GemvKernel.units,
    marks=(
        Rule("leaf", "a vector of a column times all rows", lambda x, body: x.leaf(body), MarkName.INSTRUCTION,
             opens=_GemvKernel.opened),
        Rule("reduce", "the loop of a lane over its steps", lambda x, body: x.reduce(body), MarkName.REDUCE),
        Rule("combine", "lanes and warps are added up", lambda x, body: x.combine(body), MarkName.COMBINE,
             opens=("sums",)),
        Rule("store", "epilogues are distributed over threads", lambda x, body: x.distribute_epilogues(body),
             MarkName.STORE),
    ),
    statements=_GemvKernel.table,
    stores=(Rule("places", "coordinates of lanes", _GemvKernel.bind_coordinates),),
    registers=lambda _: dict.fromkeys((p("i"), p("j")), "unroll"),
    band=lambda x, _: (blocks_step(x.sharing),),
    around=(Rule("registers", "registers for the sums of a lane", _GemvKernel.allocate),),
)  # fmt: skip
