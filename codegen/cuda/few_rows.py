"""CUDA kernels for products with few rows: bound by the memory that the column operand comes from.

Every lane reads 16 bytes of the column operand at a time (8 where they are 8 columns), along the reduction or along the
columns, whichever memory has; eight lanes make up the other direction. Few rows are kept in registers, so each element
is read once. Lanes and warps that share a column are combined by shuffles, then through shared memory, in a fixed
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from polydyn.codegen.cuda.emit import bound_names, emit
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import TENSOR
from polydyn.codegen.cuda.work import UNROLLED, with_epilogues
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import (
    Alloc,
    Apply,
    Body,
    Call,
    Compare,
    Def,
    FlatLoad,
    For,
    If,
    Inst,
    Let,
    Pointer,
    Reg,
    Store,
    consume,
    walk,
)
from polydyn.codegen.kernel import Block, Kernel, Work
from polydyn.codegen.lower import Lowering, flat, lower
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.threads import assign, one_each, spread, unrolled
from polydyn.codegen.passes.tiles import task_count
from polydyn.codegen.passes.widen import Multiples, multiples, widen
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import BYTES
from polydyn.schedules.expr import ITEMSIZE, Load, Value, const, op
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, minimum
from polydyn.schedules.model import Statement, stored
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree.few_rows import FewRows, few_rows_product
from polydyn.schedules.tree.names import MarkName, b, e, lanes, p, w
from polydyn.schedules.tree.rewrites import CLEAR, SUM
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT

V = Index.of
ROWS = (2, 8)
"""Rows that a version keeps in registers, and the most it is launched for."""
STEPS = 8
"""Lanes that share the reduction: with 16 bytes each they read whole lines of 128 bytes."""
COLUMNS = 4
"""Lanes of a warp on different columns, or vectors of columns."""
MOST_COLUMNS = 8
"""Most columns of a lane: of bytes 16 would fit, whose sums, for all rows, would not stay in registers."""
WORDS = 4
"""Of four bytes, in what a lane reads at a time."""
REGISTERS = {2: 48, 8: 120}
"""Registers of a thread, by rows (``docs/adr/0005-cuda.md``, rounded up to what is allocated)."""


def gemv_versions(product: ProductGroup) -> list[Kernel]:
    """The versions for few rows, fewest first; none when the column operand cannot be read in vectors."""
    column = product.values[1]
    if product.roles.inner or not isinstance(column, Load) or (product.M.constant or 1) > ROWS[-1]:
        return []
    address = product.group.arrays[column.buffer].address(column.index)
    for along_k, x in ((True, product.roles.block), (False, product.roles.col)):
        stride, rest = address.split(x)
        if stride == 1 and x not in rest.symbols():
            return [k for r in ROWS for k in _Gemv(product, r, along_k).build()]
    return []


class _Gemv:
    """One version; ``along_k``: vectors run along the reduction."""

    def __init__(self, product: ProductGroup, rows: int, along_k: bool) -> None:
        self.name, self.product, self.rows, self.along_k = product.name, product, rows, along_k
        self.group, self.roles, self.extents = product.group, product.roles, product.extents
        self.M, self.N, self.K, self.sums = product.M, product.N, product.K, product.sums
        vector = 16 // ITEMSIZE[product.values[1].dtype]
        self.vector = vector if along_k else min(vector, MOST_COLUMNS)
        self.columns = 1 if along_k else self.vector
        self.warps = (4, 2) if along_k else (1, 8)  # on columns, on steps
        self.step = STEPS * self.warps[1] * (self.vector if along_k else 1)
        self.block = COLUMNS * self.warps[0] * self.columns
        self.schedule = self._schedule()
        self.places = Places(self.schedule)
        self.multiples: dict[tuple[Index, int], None] = {}
        along = self.K if along_k else self.N
        if along.constant is None:
            self.multiples[along, self.vector] = None

    def build(self) -> tuple[Kernel, ...]:
        """The kernel, with indices of both widths; nothing when the addresses do not allow vectors."""
        if ((self.K if self.along_k else self.N).constant or 0) % self.vector:
            return ()
        name, names = f"{self.name}_{self.version}", bound_names(self.group.arrays, self.group.params)
        prove(self.schedule)
        tiled, rounds = self.schedule.tiled(), self.schedule.parameter(ACC, b("k"))
        tiled = replace(tiled, extents={**tiled.extents, rounds: self._trips()})
        body = run(name, loops(name, tiled), self.steps(), names)
        count = task_count(body)
        body = run(name, body, (
            Step("blocks", "a block is a task", one_each),
            Step("registers", "a lane's sums are registers", self._allocate),
        ), names)  # fmt: skip
        blocks = self.schedule.extents()
        limits: dict[str, IndexLike] = {b("i"): blocks[b("i")], b("j"): blocks[b("j")], "task": count}
        limits |= {x: self.extents[x] for x in self.roles.batch}
        few = () if self.M.constant else (Compare("<=", self.M, V(self.rows)),)
        kernel = Kernel(
            name, self.group.params, count, version=self.version, multiples=tuple(self.multiples), conditions=few,
            block=Block(self._threads(), work=self._work()),
        )  # fmt: skip
        return emit(kernel, body, self.group.arrays, limits)

    @property
    def version(self) -> str:
        """What the version is called: most rows, direction and length of its vectors."""
        return f"gemv_{self.rows}_{'k' if self.along_k else 'n'}{self.vector}"

    def _schedule(self) -> Scheduled:
        """Tree and tile map."""
        points = (self.columns, self.vector if self.along_k else 1)
        return few_rows_product(self.group, self.roles, FewRows(self.rows, self.warps, (COLUMNS, STEPS), points))

    def steps(self) -> tuple[Step, ...]:
        """The passes up to the coincident band."""
        places, threads = self._places(), self._threads()
        table: dict[str, Lowering] = {INIT: self.init}
        table |= {s.name: partial(self.epilogue, s) for s in self.product.epilogues}
        points: dict[str, str] = dict.fromkeys((p("i"), p("j")), "unroll")
        lane, rows = tuple(places), tuple(f"row{r}" for r in range(self.rows))
        sizes = self.schedule.parameters()
        return (
            Step("bind", "sizes become constants", lambda b: substitute(b, sizes)),
            Step("leaf", "a vector of a column times all rows",
                 lambda x: consume(x, MarkName.INSTRUCTION, self.leaf), (*lane, "acc", "j_vec", *rows)),
            Step("fold", "decided guards and single trips go", fold),
            Step("assign", "units are warps and lanes", lambda b: assign(b, places)),
            Step("reduce", "lanes walk over their steps", lambda x: consume(x, MarkName.REDUCE, self.reduce)),
            Step("combine", "lanes and warps are added up",
                 lambda x: consume(x, MarkName.COMBINE, self.combine), ("sums",)),
            Step("store", "epilogues are dealt to threads",
                 lambda x: consume(x, MarkName.STORE, lambda y: spread(y, e("j"), threads, "unroll"))),
            Step("lower", "statements become stores", lambda b: lower(b, table)),
            Step("unroll", "loops over registers", lambda b: unrolled(b, points)),
            Step("places", "places of lanes", lambda b: substitute(b, places)),
            Step("fold", "decided guards and single trips go", fold),
        )  # fmt: skip

    def _places(self) -> dict[str, Index]:
        """Of a lane in its block; a block of which there is one is 0, as it has no loop."""
        lane, warp, warp_j = V("lane"), V("warp"), self.warps[0]
        pair = (lane // STEPS, lane % STEPS) if self.along_k else (lane % COLUMNS, lane // COLUMNS)
        single: dict[str, Index] = {x: ZERO for x in (b("i"), b("j")) if self.schedule.extents()[x] == ONE}
        return {w("j"): warp % warp_j, w("k"): warp // warp_j, lanes("j"): pair[0], lanes("k"): pair[1], **single}

    def _threads(self) -> int:
        return 32 * self.warps[0] * self.warps[1]

    def _allocate(self, body: Body) -> Body:
        body = (Alloc("acc", self.sums, V(self.rows * self.columns), "register", body),)
        return (Alloc("sums", self.sums, V(self.rows * self.block * self.warps[1]), "shared", body),)

    def _work(self) -> Work:
        elements, item = self.block * self.step, ITEMSIZE[self.product.values[1].dtype]
        at_once = WORDS if item == 1 else 1  # four bytes by one instruction
        instructions = elements * (self.rows + 1) // (32 * at_once) + elements * (self.rows + 1) // (32 * self.vector)
        traffic = elements * item
        work = Work(
            self.K.ceildiv(self.step), REGISTERS[self.rows], traffic=traffic, instructions=instructions,
            flight=UNROLLED, elements=self.rows * self.block, by_warps=False,
        )  # fmt: skip
        return with_epilogues(work, self.product.group, self.product.epilogues)

    # -- places --------------------------------------------------------------------------------------------------

    def _at(self, axis: str, **point: IndexLike) -> Index:
        """The element of an axis that a lane's point is; coordinates of points that are not given are 0."""
        loops: dict[str, Index] = {x.coord: V(x.coord) for x in self.schedule.view(ACC).loops}
        points: dict[str, Index] = dict.fromkeys((p("i"), p("j"), p("k")), ZERO)
        return self.places.element(ACC, axis, {**loops, **points, **{f"p_{x}": V(i) for x, i in point.items()}})

    def _first(self) -> Index:
        """The lane's first step of the reduction, in vectors along it."""
        return self._at("k").subs({b("k"): ZERO}) // self._depth

    @property
    def _depth(self) -> int:
        """Steps of a vector."""
        return self.vector if self.along_k else 1

    def _trips(self) -> Index:
        """Vectors of the reduction that a lane has."""
        vectors, rest = self.K // self._depth, (self._at("k") // self._depth).split(b("k"))[0]
        return (vectors - self._first()).ceildiv(rest)

    def _live(self) -> Compare:
        return Compare("<", self._at("j"), self.N)

    def _env(self, row: Index, point: str, k: Index) -> dict[str, Index]:
        column = V("j_vec") if self.along_k else V("j_vec") * self.vector + point
        axes = {self.roles.row: row, self.roles.col: column, self.roles.block: k}
        return {x: V(x) for x in self.roles.batch} | axes

    def _register(self, row: int, column: IndexLike) -> Index:
        return V(row * self.columns) + column

    # -- pieces --------------------------------------------------------------------------------------------------

    def init(self, a: Mapping[str, Index]) -> Body:
        """Sums start at zero."""
        return (Store("acc", a[p("i")] * self.columns + a[p("j")], const(0, self.sums)),)

    def leaf(self, body: Body) -> Body:
        """The points of a lane: a vector of the column operand times what all rows have there.

        Rows beyond the last are the last one again; their sums are not stored.
        """
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        assert inst.statement == ACC
        k = V("k_vec") * self.vector + "p" if self.along_k else V("k_vec")
        symbols = (*self.roles.batch, "k_vec", "j_vec", "p", *(f"row{r}" for r in range(self.rows)))
        vectors = self._by_words(k, symbols) or self._by_elements(k, symbols)
        self.multiples |= dict.fromkeys(vectors[1])
        return (Let("k_vec", self._at("k") // self._depth, vectors[0]),)

    def _by_elements(self, k: Index, symbols: tuple[str, ...]) -> tuple[Body, Multiples]:
        """A product for each point."""
        points: Body = ()
        for r in range(self.rows):
            env = self._env(V(f"row{r}"), "p", k)
            pair = [flat(self.group, v, env, lambda x: None) for v in self.product.values]
            place = self._register(r, ZERO if self.along_k else V("p"))
            points += (Store("acc", place, self.product.term(*pair), "sum"),)
        vectors = widen(points, "p", self.vector, stored(self.group.arrays), symbols)
        assert vectors is not None, "nothing is stored to memory here"
        return vectors

    def _by_words(self, k: Index, symbols: tuple[str, ...]) -> tuple[Body, Multiples] | None:
        """Four products of bytes at once, where both operands have them along the reduction; None elsewhere."""
        if not self.along_k or not set(self.product.dtypes) <= set(BYTES):
            return None
        a, b = self.product.values
        pairs = [(b, V("row0")), *((a, V(f"row{r}")) for r in range(self.rows))]
        reads: Body = ()
        alignment: Multiples = ()
        for n, (v, row) in enumerate(pairs):
            x = flat(self.group, v, self._env(row, "p", k), lambda x: None)
            stride, first = x.address.split("p") if isinstance(x, FlatLoad) else (ZERO, ZERO)
            more = multiples(first, self.vector, symbols)
            if not isinstance(x, FlatLoad) or stride != ONE or "p" in first.symbols() or more is None:
                return None
            alignment += more
            words = Pointer("uint32", "words", V(n * WORDS))
            reads += (Call(f"pd_ldg_wide<{WORDS}>", (words, Pointer("uint32", x.buffer, first))),)
        dots = tuple(self._dot(r) for r in range(self.rows))
        body: Body = (*reads, For("word", ZERO, V(WORDS), dots, "unroll"))
        return (Alloc("words", "uint32", V(len(pairs) * WORDS), "register", body),), alignment

    def _dot(self, row: int) -> Store:
        """A word of a row times one of the column."""
        total = FlatLoad("int32", "acc", self._register(row, ZERO))
        a, b = (FlatLoad("uint32", "words", V("word") + n * WORDS) for n in (row + 1, 0))
        return Store("acc", total.address, Apply("int32", f"pd_dp4a_{TENSOR[self.product.dtypes]}", (a, b, total)))

    def reduce(self, body: Body) -> Body:
        """The loop of a lane, for columns that exist."""
        loop: Body = unroll_by(body, b("k"), UNROLLED)
        for r in range(self.rows):
            loop = (Let(f"row{r}", minimum(self._at("i", i=r), self.M - 1), loop),)
        return (If((self._live(),), (Let("j_vec", self._at("j") // self.columns, loop),)),)

    def combine(self, body: Body) -> Body:
        """All lanes of a column by shuffles, then a warp's sums to shared memory, where epilogues add them."""
        assert {n.statement for n in walk(body) if isinstance(n, Inst)} == {CLEAR, SUM}
        total = FlatLoad(self.sums, "acc", V("r"))
        steps = [s if self.along_k else s * COLUMNS for s in (4, 2, 1)]
        across = tuple(
            Store("acc", V("r"), Apply(self.sums, "pd_shfl_xor", (total, const(s, "int32"))), "sum") for s in steps
        )
        keep = tuple(
            Store("sums", self._sum(V(w("k")), V(r), column), FlatLoad(self.sums, "acc", self._register(r, c)))
            for r in range(self.rows)
            for c, column in enumerate(self._columns())
        )
        sums = For("r", ZERO, V(self.rows * self.columns), across, "unroll")
        return (sums, If((Compare("==", V(lanes("k")), ZERO),), keep), Call("pd_syncthreads"))

    def _columns(self) -> list[Index]:
        """The lane's columns in the block."""
        at: dict[str, Index] = {x.coord: V(x.coord) for x in self.schedule.view(ACC).loops}
        return [self.places.cell(ACC, "acc", {**at, p("j"): V(c)})["j"] for c in range(self.columns)]

    def _sum(self, warp: Index, row: Index, column: Index) -> Index:
        """Where a warp leaves its sum of an element of the block."""
        return (warp * self.rows + row) * self.block + column

    def epilogue(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An element of the block: the warps' sums in their order, then the epilogue."""
        row, column = a[e("i")], a[e("j")]
        parts = [FlatLoad(self.sums, "sums", self._sum(V(n), row, column)) for n in range(self.warps[1])]
        env = self.places.env(s.name, {**a, e("i"): V("e_row"), e("j"): V("e_column")})
        value = self.product.epilogue_value(s, env, Reg(self.sums, "total"))
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        total: Value = parts[0]
        for x in parts[1:]:
            total = op("add", total, x)
        live = (Compare("<", env[self.roles.row], self.M), Compare("<", env[self.roles.col], self.N))
        body: Body = (If(live, (Def("total", total), Store(s.array, address, value))),)
        return (Let("e_row", row, (Let("e_column", column, body),)),)


def unroll_by(body: Body, var: str, times: int) -> Body:
    """Loop ``var`` with so many iterations in flight."""
    return tuple(
        For(n.var, n.lo, n.hi, n.body, f"unroll{times}") if isinstance(n, For) and n.var == var else n for n in body
    )
