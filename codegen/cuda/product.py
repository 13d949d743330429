"""One version of a product on the GPU: a tile with copies of one width, from the GPU tree through mark-directed passes.

Both operands are loaded through a ring of ``stages`` tiles in shared memory. A tile keeps the layout of global memory
(unit stride along the reduction or along its own iterator), so copies stay wide. It is XOR-swizzled against bank
conflicts (``copies``). Elements outside the operand are zeros, so M, N and K are arbitrary. ``instructions`` has the
instructions, ``sums`` the path of the sums to the epilogues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from polydyn.codegen.cuda.copies import Copy, Operand, copy_of
from polydyn.codegen.cuda.emit import bound_names, emit
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import multiply
from polydyn.codegen.cuda.sharing import IS_LAST_BLOCK, K_SLICE, RANK, Counted, blocks_step
from polydyn.codegen.cuda.sums import Sums, lane_points
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.work import WARP, product_work, with_epilogues
from polydyn.codegen.family import Family, Rule, Variant, build, keep
from polydyn.codegen.indices import node_indices, substitute
from polydyn.codegen.ir import Alloc, Body, Call, For, Inst, Mark, Node, consume, rewrite, walk
from polydyn.codegen.kernel import Block, Kernel, Work
from polydyn.codegen.lower import Lowering, lower
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.hoist import costly_divisions, divide_before, hoist_rows
from polydyn.codegen.passes.registers import unroll
from polydyn.codegen.passes.steady import PipelinedLoop, software_pipeline
from polydyn.codegen.passes.threads import one_of_each, rasterise, spread
from polydyn.codegen.passes.tiles import balance
from polydyn.codegen.places import Places
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, minimum
from polydyn.schedules.tree.gpu import COPY_A, COPY_B, FRAG_A, FRAG_B, SLAB, STAGE, STAGED, gpu_parts, gpu_product
from polydyn.schedules.tree.names import MarkName, b, e, extent, f, g, p, s, w
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT

V = Index.of
THREAD_MAPPED_LOOPS = tuple(map(extent, (s("i"), s("j"), s("k"), e("i"), e("j"), e("v"))))
"""Sizes of loops that are mapped to threads and lanes by vectors: the passes of the marks bind them."""
MAX_COPY_BYTES = 16
"""Bytes of the widest copies."""
MOST_SUMS, MOST_TILES = 64, 8
"""Maximum sums of a thread that copies a row of its own; maximum tiles of steps that are unrolled then, because taps
are numbers."""
MAX_BLOCKS_OF_COMPUTED_COPIES = 3
"""Maximum blocks per multiprocessor if copies compute vectors."""
RASTER = 8
"""Rows of blocks that run next to each other, so that concurrent blocks share operands in the L2 cache."""
UNROLL_HINTS = dict.fromkeys(
    (f("i"), f("j"), f("k"), g("i"), g("j"), e("s"), e("f"), "row_half", "column_of_pair"), "unroll"
)


def schedule_tile(product: ProductGroup, tile: CudaTile, parts: int = 1) -> Scheduled:
    """Return tree and tile map of a tile. ``parts``: the number of blocks that K is split over."""
    if parts > 1:
        return gpu_parts(product.group, product.roles, tile.sizes(), parts)
    return gpu_product(product.group, product.roles, tile.sizes(), product.shares != ONE)


class TiledProduct(Variant):
    """One tile with one width of copies; ``wide``: epilogues store 16 bytes at once.

    ``in_pairs``: even and odd columns are in separate fragments. ``parts``: the number of blocks that K is split over.
    They store their sums in the workspace and are counted.
    """

    def __init__(self, product: ProductGroup, tile: CudaTile, width: int, wide: bool, parts: int = 1) -> None:
        self.of, self.tile, self.group, self.extents = product, tile, product.group, product.extents
        one = tile.bm * tile.bn
        self.sharing = Counted(parts, elements=one, dtype=product.sums) if parts > 1 else product.sharing
        self.parts = parts
        if not set(product.dtypes) <= set(tile.kind.dtypes):
            remedy = (
                "mma for floats of 16 bits, qmma for those of 8, imma for int8 and uint8, fma for float32 and int32"
            )
            raise CodegenError(f"{tile.instruction} of {product.dtype} is not built", remedy=remedy)
        self.schedule = schedule_tile(product, tile, parts)
        self.places = Places(self.schedule)
        operands = (
            Operand("tile_a", "a_frag", product.values[0], "i", "k", (tile.bm, tile.bk), COPY_A, FRAG_A,
                    (s("i"), s("k")), self.places, b("k"), False),
            Operand("tile_b", "b_frag", product.values[1], "j", "k", (tile.bn, tile.bk), COPY_B, FRAG_B,
                    (s("j"), s("k")), self.places, b("k"), True),
        )  # fmt: skip
        row, column = (copy_of(self.group, x, tile.stages, width, tile.kind) for x in operands)
        self.copies, self.in_pairs = (row, column), tile.kind.of_bytes and not column.along_k
        self.sums = Sums(product, tile.kind, self.places, wide, in_pairs=self.in_pairs, slabs=self._slabs(),
                         sharing=self.sharing)  # fmt: skip

    def _slabs(self) -> int:
        """Return the number of slabs that a warp stages at once: all of its sums if they leave the block."""
        return 1 if self.parts == 1 else self.tile.wm // STAGED * (self.tile.wn // SLAB)

    def accumulate(self, a: Mapping[str, Index]) -> Body:
        """Issue one instruction."""
        return products(self.sums, self.copies, ACC, a, self._set(a))

    def load(self, copy: Copy, a: Mapping[str, Index]) -> Body:
        """Load the operand fragments of 16 rows or columns."""
        return copy.load(self.tile.kind, a, first=self._set(a) * self.tile.loads[copy.operand.column])

    # -- marks ---------------------------------------------------------------------------------------------------

    def instruction(self, body: Body) -> Body:
        """Tensorize: an accumulation's point band is one instruction; for other statements a lane takes its own points.
        """
        if not self.tile.kind.warp:
            return body
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        if inst.statement == ACC:
            trips = [n.hi for n in walk(body) if isinstance(n, For)]
            if trips != [V(x) for x in self.tile.shape]:
                raise CodegenError(f"points {trips} are not the instruction {self.tile.shape}")
            points = [n.var for n in walk(body) if isinstance(n, For)]
            return substitute((inst,), dict.fromkeys(points, ZERO))
        if inst.statement == STAGE and self.in_pairs:
            return substitute((inst,), {p("i"): ZERO, p("j"): ZERO})
        return lane_points(inst, (p("i"), p("j")))

    def copy(self, body: Body, whole: bool = False) -> Body:
        """Copy from global to shared memory, by all threads of the block, the unit-stride side innermost.

        ``whole``: all steps exist. Rows and columns past the end are multiplied too, but not stored.
        """

        # registers of many loads in flight would spill, as would those of many addresses next to byte pairs
        def at_once(c: Copy) -> bool:
            return c.bytes == 16 or (not self.in_pairs and c.elements // c.vector <= 8 * self.tile.threads)

        issue = partial(Copy.issue, whole=whole, repeat=True)
        return deal_copies(body, self.copies, self.tile.threads, at_once, issue, self.row_each)

    def epilogue(self, body: Body) -> Body:
        """Stage the sums in shared memory, in place of the ring."""
        if not self.tile.kind.warp or self.parts > 1:
            return body
        meet = () if self.tile.sets > 1 else (Call("pd_syncthreads"),)  # else a barrier follows the last load
        return (*meet, *self.sums.stage_rows(body, self.tile.threads // WARP))

    def ring(self, body: Body) -> Body:
        """Build the pipelined loop in its shared memory."""
        (loop,) = body
        assert isinstance(loop, For)
        copies, uses = split_copies(loop.body)
        some, whole = (consume(copies, MarkName.COPY, partial(self.copy, whole=x)) for x in (False, True))
        full = self.of.K // self.tile.bk  # a block has every N-th tile
        full = full if self.parts == 1 else (full - V(K_SLICE)).ceildiv(self.parts)
        body = software_pipeline(loop, self.tile.stages, PipelinedLoop(
            lambda at, is_whole: substitute(whole if is_whole else some, {loop.var: at}),
            lambda at: [(substitute(x, {loop.var: at}), substitute(y, {loop.var: at})) for x, y in self._by_step(uses)],
            full if self.of.shares == ONE and self.parts == 1 else minimum(loop.hi, full),
        ))  # fmt: skip
        body = hoist_rows(body, "row_")
        for c in self.copies:
            body = (Alloc(c.name, c.dtype, V(c.elements * c.stages), "shared", body),)
        return body

    @property
    def row_each(self) -> bool:
        """Whether a thread copies the elements of one row, while columns are copied as whole vectors.

        All threads then copy the same step at a time, so that values that depend on its tap are numbers, or computed
        once per warp. All loads of a tile are in flight, so this requires that a thread has few sums.
        """
        row, column = self.copies
        few = self.tile.bm * self.tile.bn <= MOST_SUMS * self.tile.threads
        return row.by_element and column.bytes == MAX_COPY_BYTES and self.tile.bm == self.tile.threads and few

    def _set(self, a: Mapping[str, Index]) -> Index:
        """Return the set of fragment registers that an instance uses."""
        return a[f("k")] % self.tile.sets

    def _by_step(self, uses: Body) -> list[tuple[Body, Body]]:
        """Return (loads, products) of each instruction step of a tile, or of the whole tile if loads are not pipelined.
        """
        if self.tile.sets == 1:
            return [((), uses)]

        def part(step: int, loads: bool) -> Body:
            def selected(n: Node) -> Node | Body:
                if not (isinstance(n, For) and n.var == f("k")):
                    return n
                return substitute(tuple(x for x in n.body if _loads(x) == loads), {n.var: V(step)})

            return rewrite(uses, selected)

        return [(part(n, True), part(n, False)) for n in range(self.tile.bk // self.tile.shape[2])]

    # -- the whole kernel ----------------------------------------------------------------------------------------

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        return f"{self.of.name}_{self.version}"

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths."""
        product, t = self.of, self.tile
        body, count = build(PRODUCT, self)
        wide = tuple(dict.fromkeys((*self.required_multiples, *self.sums.multiples)))
        work = self.work.shared_by(product.shares * self.parts)
        block = Block(t.threads, t.kind.arch, work=work)
        kernel = Kernel(self.name, self.symbols, count, version=self.version, multiples=wide, block=block)
        return emit(kernel, body, self.group.arrays, block_limits(product, t, count), self.blocks, self.sharing)

    def sizes(self) -> dict[str, Index]:
        """Return the numbers of all loops, except those that are mapped to threads."""
        sizes = {n: e for n, e in self.schedule.parameters().items() if n not in THREAD_MAPPED_LOOPS}
        return sizes | ({extent(b("s")): self.of.shares} if self.of.shares != ONE else {})

    def units(self) -> dict[str, Index]:
        """Return the indices of warps or threads of a tile, and of the blocks that K is split over."""
        unit, columns = V("warp") if self.tile.kind.warp else V("tid"), self.schedule.extents()[w("j")]
        units: dict[str, Index] = {w("i"): unit // columns, w("j"): unit % columns}
        return units | ({K_SLICE: V(RANK), e("w"): units[w("i")], e("u"): units[w("j")]} if self.parts > 1 else {})

    def split(self, body: Body) -> Body:
        """Distribute the reduction over slices."""
        return balance(body, b("k"), self.schedule.extents()[b("k")], self.of.shares, b("s"))

    def rings(self) -> tuple[str, ...]:
        """Return the buffers of the copies."""
        return tuple(c.name for c in self.copies)

    def opened(self) -> tuple[str, ...]:
        """Return the names that instructions introduce."""
        return ("stage", self.sums.acc, *(c.operand.fragment for c in self.copies))

    def unrolled(self) -> dict[str, str]:
        """Return the unroll pragmas of loops over registers."""
        return UNROLL_HINTS | self._reduction_unroll(self.schedule.extents()[b("k")])

    def _reduction_unroll(self, tiles: Index) -> dict[str, str]:
        """Return the unroll pragmas of loops of the reduction.

        Larger factors would keep too many operands in registers.
        """
        steps: dict[str, str] = {}
        if self.in_pairs or not self.tile.kind.warp:
            steps[f("k")] = "unroll1" if self.in_pairs else "unroll2"
        if self.tile.kind.of_bytes and tiles.constant is not None and self.of.shares == ONE:
            steps[b("k")] = "unroll1"  # if the compiler knows their number
        if self.row_each and self.of.shares == ONE and tiles.constant is not None and tiles.constant <= MOST_TILES:
            steps[b("k")] = "unroll"
        return steps

    @property
    def required_multiples(self) -> tuple[tuple[Index, int], ...]:
        """Alignment required by copies of this width."""
        return tuple(x for c in self.copies for x in c.multiples)

    @property
    def version(self) -> str:
        """The name of the version: instruction, tile, stages, bytes of the copies."""
        t, product, label = self.tile, self.of, self.sharing.label
        version = f"{label}_" if label else ""
        version += f"{t.instruction}_{t.bm}x{t.bn}x{t.bk}_{t.stages}_{'_'.join(str(c.bytes) for c in self.copies)}"
        return version + "_wide" * (max(map(self.sums.vector, product.epilogues)) > 1)

    def table(self) -> dict[str, Lowering]:
        """Return the lowering of each statement."""
        row, column = self.copies
        table: dict[str, Lowering] = {
            INIT: partial(self.sums.init, INIT),
            FRAG_A: partial(self.load, row),
            FRAG_B: partial(self.load, column),
            ACC: self.accumulate,
            STAGE: self.sums.stage,
        }
        return table | {x.name: partial(self.sums.epilogue, x) for x in self.of.epilogues}

    def allocate(self, body: Body) -> Body:
        """Allocate the registers of a thread."""
        body = (Alloc(self.sums.acc, self.of.sums, V(self.sums.registers), "register", body),)
        for c, n in zip(self.copies, self.tile.kind.registers, strict=True):
            dtype, pieces = self.tile.kind.register or self.of.sums, self.sums.fragments[c.operand.column]
            body = (Alloc(c.operand.fragment, dtype, V(pieces * n * self.tile.sets), "register", body),)
        return body

    @property
    def blocks(self) -> int:
        """The targeted number of blocks per multiprocessor.

        Many narrow copies need more registers than two blocks of the largest tile leave, and computed vectors more than
        four of the smallest.
        """
        blocks = self.tile.blocks
        if any(c.vector > 1 and not c.asynchronous for c in self.copies):
            blocks = min(blocks, MAX_BLOCKS_OF_COMPUTED_COPIES)
        return blocks if min(c.bytes for c in self.copies) >= 8 else max(1, blocks // 2)

    @property
    def work(self) -> Work:
        """The work of a block with the whole reduction."""
        work = product_work(self.tile, self.copies, self.of.K.ceildiv(self.tile.bk), self.blocks, self.row_each)
        return self.sharing.work(with_epilogues(replace(work, strip=RASTER), self.group, self.of.epilogues))


def block_limits(product: ProductGroup, tile: CudaTile, count: Index) -> dict[str, IndexLike]:
    """Return upper bounds of the numbers of blocks and of their parts."""
    rows, columns = product.M.ceildiv(tile.bm), product.N.ceildiv(tile.bn)
    strips = {"block": rows * columns, "strip": rows + RASTER, "strip_rows": Index.of(RASTER), "task": count}
    batch = {x: product.extents[x] for x in product.roles.batch}
    return {b("i"): rows, b("j"): columns, b("s"): product.shares, **strips, **batch}


def products(sums: Sums, copies: tuple[Copy, Copy], statement: str, a: Mapping[str, Index], turn: Index = ZERO) -> Body:
    """Issue one instruction on the fragments of both operands; ``turn``: the set of fragments."""
    row, column = sums.fragment(statement, a)
    frags = (copies[0].operand.fragment, copies[1].operand.fragment)
    fragment = row * sums.fragments[1] + column
    row, column = (x + turn * n for x, n in zip((row, column), sums.fragments, strict=True))
    return multiply(sums.kind, sums.of.dtypes, copies[1].along_k, sums.acc, frags, fragment, row, column)


def _loads(n: Node) -> bool:
    """Whether a node loads fragments."""
    return any(isinstance(x, Inst) and x.statement in (FRAG_A, FRAG_B) for x in walk((n,)))


def deal_copies(
    body: Body, copies: Iterable[Copy], threads: int, at_once: Callable[[Copy], bool],
    issue: Callable[[Copy, Mapping[str, Index]], Body] = Copy.issue, row_each: bool = False,
) -> Body:  # fmt: skip
    """Distribute a copy's loops over the threads of a block, the unit-stride side innermost.

    ``at_once``: all loads are in flight. ``row_each``: each thread has a row of an operand that is copied element by
    element. Such operands compute their divisions before the loop, because compilers do not move a division out of a
    guard. Vectors of pixels are so few that ``hoist_rows`` moves all computations of their rows out of the loop over
    the steps.
    """
    inst = next(n for n in walk(body) if isinstance(n, Inst))
    c = next(x for x in copies if x.operand.copy == inst.statement)
    body = lower(bind(body, c.trips()), {inst.statement: partial(issue, c)})
    if row_each and c.by_element:
        return divide_before(one_of_each(body, c.innermost), "q_")
    body = spread(body, c.innermost, threads, "unroll" if c.asynchronous and at_once(c) else "unroll2")
    if c.vector == 1:
        return divide_before(body, "q_")
    rows = any(True for n in walk(body) for i in node_indices(n) for _ in costly_divisions(i))
    return unroll(body, ("u",)) if rows else body  # each of a thread's rows has its own numbers


def split_copies(body: Body) -> tuple[Body, Body]:
    """Return (copies, uses) of a K tile."""
    uses = tuple(n for n in body if isinstance(n, Mark) and n.name == MarkName.MULTIPLY)
    return tuple(n for n in body if n not in uses), uses


PRODUCT: Family[TiledProduct] = Family(
    names=bound_names,
    first=(
        Rule("balance", "slices of the reduction", TiledProduct.split, where=lambda x: x.of.shares != ONE),
        Rule("pipeline", "copies run ahead in a ring", lambda x, body: x.ring(body), MarkName.PIPELINE,
             opens=TiledProduct.rings),
    ),
    sizes=TiledProduct.sizes,
    units=TiledProduct.units,
    marks=(
        Rule("combine", "blocks are counted", lambda x, _: x.sharing.meet(), MarkName.COMBINE, opens=(IS_LAST_BLOCK,)),
        Rule("instruction", "points become an instruction", TiledProduct.instruction, MarkName.INSTRUCTION),
        Rule("store", "epilogues on staged rows", lambda x, body: x.sums.store(body), MarkName.STORE,
             opens=("stage",)),
        Rule("epilogue", "rows are staged in the memory of the ring", lambda x, body: x.epilogue(body),
             MarkName.EPILOGUE),
        Rule("multiply", "the mark of the arithmetic is removed", keep, MarkName.MULTIPLY),
    ),
    statements=TiledProduct.table,
    opened=TiledProduct.opened,
    registers=TiledProduct.unrolled,
    order=(Rule("rasterise", "blocks that share operands run together",
                lambda _, body: rasterise(body, b("i"), b("j"), RASTER)),),
    band=lambda x, _: (blocks_step(x.sharing),),
    around=(Rule("registers", "registers of a thread", TiledProduct.allocate),),
)  # fmt: skip
