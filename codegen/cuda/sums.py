"""The sums of a product: their registers, and their path to the epilogues.

Sums of tensor cores pass through shared memory, so that epilogues load and store whole rows, 16 bytes per lane if
addresses allow it. All positions come from the schedule's tile map, for any schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from polydyn.codegen.cuda.boxes import TensorOperand
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import COLUMN, HALVES, LANE, PAIR, ROW, Instruction
from polydyn.codegen.cuda.sharing import RANK, Counted
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Alloc, Body, Call, Compare, FlatLoad, For, If, Inst, Let, Pointer, Store, Tile, walk
from polydyn.codegen.kernel import WORKSPACE
from polydyn.codegen.lower import lower
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.threads import WARP, spread
from polydyn.codegen.passes.widen import stored_value, widen
from polydyn.codegen.places import Places
from polydyn.codegen.sharing import UNSHARED, Sharing
from polydyn.schedules.expr import ITEMSIZE, Const, FromIndex, Value, const, op
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.model import SHARE, Statement, stored
from polydyn.schedules.tree.gpu import SLAB, STAGE, STAGED, place_of_row
from polydyn.schedules.tree.names import Meets, b, e, extent, f, w
from polydyn.schedules.tree.rewrites import SUM
from polydyn.schedules.tree.scheduled import Scheduled

V = Index.of
LINE = 128
"""Bytes of a row of a box: the width of the swizzle."""
RESULT, WORDS, TRIP = "result", "words", V("u")
"""A vector of results in registers, and its 16 bytes as 32-bit words. The words of each of a lane's iterations over
a slab (``spread``) are kept until they may be stored to a box."""


class Sums:
    """The sums of a product in buffer ``acc`` of a schedule, by an instruction ``kind``.

    ``axes``: the axes of rows and columns. ``wide``: epilogues store 16 bytes at once. ``unit``: the number of the warp
    that stages rows; ``slabs``: slabs of columns that it stages at once, in ``buffer``. ``in_pairs``: even and odd
    columns are in separate fragments. ``box``: columns of a result box, 0 if lanes store their results. ``sharing``:
    how blocks add their staged sums (``tree.gpu.add_parts``). ``multiples``: the required multiples of addresses.
    """

    def __init__(
        self, product: ProductGroup, kind: Instruction, places: Places, wide: bool, acc: str = "acc",
        axes: tuple[str, str] = ("i", "j"), unit: IndexLike = "warp", in_pairs: bool = False, slabs: int = 1,
        buffer: str = "stage", box: int = 0, sharing: Sharing = UNSHARED,
    ) -> None:  # fmt: skip
        self.of, self.kind, self.places, self.wide, self.acc, self.axes = product, kind, places, wide, acc, axes
        self.unit, self.in_pairs, self.group, self.roles = V(unit), in_pairs, product.group, product.roles
        self.slabs, self.box, self.sharing, self.parts = slabs, box, sharing, sharing.parts
        self.left = sharing.elements if isinstance(sharing, Counted) else 0  # sums of a block in the workspace
        self.buffer = WORKSPACE if self.left else buffer
        self.multiples: dict[tuple[Index, int], None] = {}
        self.fragments = tuple(places.pieces(acc, x, n) for x, n in zip(axes, kind.shape, strict=False))

    # -- positions ---------------------------------------------------------------------------------------------------

    def fragment(self, statement: str, a: Mapping[str, Index]) -> tuple[Index, Index]:
        """Return the fragment that an instance accesses: along rows, along columns."""
        row, column = (
            self.places.number(statement, self.acc, x, a, n) for x, n in zip(self.axes, self.kind.shape, strict=False)
        )
        return row, column

    def register(self, row: Index, column: Index) -> Index:
        """Return the accumulator of a point of a fragment: a lane holds rows g, g+8 and two columns of an m16n8 one."""
        fragment = row * self.fragments[1] + column
        return fragment * 4 + HALVES * 2 + PAIR if self.kind.warp else fragment

    @property
    def registers(self) -> int:
        """The number of sum registers of a thread."""
        return self.fragments[0] * self.fragments[1] * (4 if self.kind.warp else 1)

    # -- statements ----------------------------------------------------------------------------------------------

    def init(self, statement: str, a: Mapping[str, Index]) -> Body:
        """Set the accumulators to zero."""
        return (Store(self.acc, self.register(*self.fragment(statement, a)), const(0, self.of.sums)),)

    def stage(self, a: Mapping[str, Index]) -> Body:
        """Store a lane's two columns of a fragment in shared memory.

        Rows of a group of eight are stored in bit-reversed order, to avoid bank conflicts. This holds for the writes
        (half-warps: four rows, two chunks of 16 bytes each; quarters, when ``in_pairs``: two rows, four chunks) and for
        the reads (quarters: two rows, every other chunk).
        """
        if self.in_pairs:
            return self._stage_pair(a)
        column = self.places.cell(STAGE, "stage", {**a, e("g"): ZERO, w("j"): ZERO})[self.axes[1]]
        slab = self._slab_of_part(a, a.get(e("g"), ZERO))
        place = self._row_place(place_of_row(LANE // 4) + HALVES * 8, column, slab)
        first = self.register(*self.fragment(STAGE, a)).subs({"column_of_pair": 0})
        if self.left:
            place = self._in_block(V("bid"), place)
        return (
            Call("pd_leave<2>" if self.left else "pd_sts_wide<2>", (place, Pointer(self.of.sums, self.acc, first))),
        )

    def _stage_pair(self, a: Mapping[str, Index]) -> Body:
        """Store a lane's four columns of one of its rows, if two fragments share 16 columns.

        The pair's first fragment stands for row g, the second one for row g + 8.
        """
        number = a[e("f")]
        half, first = number % 2, a[e("s")] * (SLAB // 8) + number // 2 * 2
        place = self._row_place(place_of_row(LANE // 4) + half * 8, number // 2 * 16 + LANE % 4 * 4)
        row, _ = self.fragment(STAGE, a)

        def value(e: int) -> Value:
            at = self.register(row, first + e % 2).subs({"row_half": half, "column_of_pair": e // 2})
            return FlatLoad(self.of.sums, self.acc, at)

        four = tuple(Store("four", V(e), value(e)) for e in range(4))
        move = Call("pd_sts_wide<4>", (place, Pointer(self.of.sums, "four", ZERO)))
        return (Alloc("four", self.of.sums, V(4), "register", (*four, move)),)

    def _row_place(self, row: Index, column: Index, slab: Index = ZERO) -> Tile:
        """Return a position in the rows that the warp has staged."""
        return Tile(self.of.sums, self.buffer, self._first(slab), row, column, SLAB, 4)

    def _first(self, slab: Index) -> Index:
        """Return the offset of the staged sums of a slab."""
        return (self.unit * self.slabs + slab) * (STAGED * SLAB)

    def _in_block(self, block: Index, place: Tile) -> Tile:
        """Return the position of another block's sums in the grid that corresponds to an own position."""
        return replace(place, start=place.start + block * self.left)

    def _slab_of_box(self, a: Mapping[str, Index]) -> Index:
        return a[e("p")] * (self.box // SLAB) if self.box else ZERO

    def _slab_of_part(self, a: Mapping[str, Index], slab: Index) -> Index:
        """Return the number of a slab among those of a unit; partial sums have the slabs of all fragments staged."""
        return slab if self.parts == 1 else a[f("i")] * (self.slabs // self.fragments[0]) + slab

    def _rows(self) -> int:
        """Return the staged rows of a fragment that a block finishes."""
        return STAGED if self.parts == 1 else STAGED // int(_row_splits(self.places.schedule))

    def _staged(self, a: Mapping[str, Index]) -> tuple[Index, Index]:
        """Return the staged row and the slab of an instance of an epilogue."""
        if self.parts == 1:
            return a[e("i")], a[e("s")] + self._slab_of_box(a) if self.slabs > 1 else ZERO
        slab = self.places.cell(SUM, "stage", {x: a[x] for x in (e("c"), e("s"))})[self.axes[1]] // SLAB
        return a[e("r")] * self._rows() + a[e("i")], self._slab_of_part(a, slab)

    def _load(self, v: int, place: Callable[[int], Tile]) -> Body:
        """Load a vector of sums, adding all parts in order if there are several."""
        piece = min(v, 4)
        if self.parts == 1:
            at = ((Pointer(self.of.sums, "sum", V(x)), place(x)) for x in range(0, v, piece))
            return tuple(Call(f"pd_lds_wide<{piece}>", x) for x in at)
        reads: Body = ()
        for n in range(self.parts):
            at = ((Pointer(self.of.sums, "of_parts", V(n * v + x)), place(x)) for x in range(0, v, piece))
            block = V("bid") // self.parts * self.parts + n
            if self.left:
                reads += tuple(Call(f"pd_left<{piece}>", (r, self._in_block(block, x))) for r, x in at)
            else:
                reads += tuple(Call(f"pd_lds_wide_at<{piece}>", (*x, FromIndex("int32", V(n)))) for x in at)
        total: Value = FlatLoad(self.of.sums, "of_parts", V("element"))
        for n in range(1, self.parts):
            total = op("add", total, FlatLoad(self.of.sums, "of_parts", V("element") + n * v))
        added = For("element", ZERO, V(v), (Store("sum", V("element"), total),), "unroll")
        return (Alloc("of_parts", self.of.sums, V(self.parts * v), "register", (*reads, added)),)

    def _box_place(self, s: Statement, a: Mapping[str, Index]) -> Tile:
        """Return a position in the box of results: 128-byte rows, swizzled as in TMA, in place of its first slab.

        The box has no more bytes than the slab, and the warp has read all of the slab's sums by then.
        """
        item = ITEMSIZE[s.value.dtype]
        out = next(f.buffer for f in self.places.schedule.flow if f.statement == s.name and f.meets is Meets.WRITES)
        cell = self.places.cell(s.name, out, a)
        first = self._first(self._slab_of_box(a)) * ITEMSIZE[self.of.sums] // item
        row, column = (cell[x] for x in self.axes)
        return Tile(s.value.dtype, self.buffer, first, row, column, LINE // item, 16 // item)

    def epilogue(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """Apply an epilogue in registers and store it if the element exists (CUDA cores: a thread has one element)."""
        env = self.places.env(s.name, a)
        total = FlatLoad(self.of.sums, self.acc, self.register(*self.fragment(s.name, a)))
        value = self.of.epilogue_value(s, env, total)
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        return (If(self.live(env), (Store(s.array, address, value),)),)

    def epilogue_of_rows(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """Apply an epilogue to a vector of a row in shared memory; store it to memory, or in registers for a box."""
        v, part = self.vector(s), a[e("j")]
        row, slab = self._staged(a)
        at = self._vector(s, a)
        value = self.of.epilogue_value(s, at, FlatLoad(self.of.sums, "sum", V(e("v"))))
        address = self.group.arrays[s.array].address(tuple(i.subs(at) for i in s.index))
        element: Body = (Store(s.array, address, value),)
        if self.box:
            element = (Store(RESULT, V(e("v")), stored_value(value)),)
        if v > 1:
            vectors = widen(element, e("v"), v, self._global(), (*self.roles.batch, "e_row", "e_vec", e("v"), b("s")))
            assert vectors is not None, "vector has tried"
            element = vectors[0]
            self.multiples |= dict.fromkeys((*vectors[1], *(((self.of.N, v),) if self.of.N.constant is None else ())))
        else:
            element = substitute(element, {e("v"): 0})
        loads = self._load(v, lambda x: self._row_place(row, part * v + x, slab))
        if self.box:
            of_type, result = (Pointer(s.value.dtype, x, ZERO) for x in (s.array, RESULT))
            pack = Call(f"pd_pack<{v}>", (of_type, Pointer("uint32", WORDS, TRIP * 4), result))
            element = (Alloc(RESULT, s.value.dtype, V(v), "register", (*element, pack)),)
        body: Body = (*loads, If(self._vector_exists(at), element))
        return self._named(s, a, (Alloc("sum", self.of.sums, V(v), "register", body),))

    def result_to_box(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """Store the vector that ``epilogue_of_rows`` has computed in registers to its position in a box."""
        place = self._box_place(s, {**a, e("j"): a[e("j")] * self.vector(s)})
        move = Call("pd_sts_wide<4>", (place, Pointer("uint32", WORDS, TRIP * 4)))
        return self._named(s, a, (If(self._vector_exists(self._vector(s, a)), (move,)),))

    def _named(self, s: Statement, a: Mapping[str, Index], body: Body) -> Body:
        """Bind names for the row and the vector of an instance."""
        v = self.vector(s)
        row = self.places.element(s.name, self.axes[0], a)
        vector = self.places.element(s.name, self.axes[1], {**a, e("j"): a[e("j")] * v}) // v
        return (Let("e_row", row, (Let("e_vec", vector, body),)),)

    def _vector(self, s: Statement, a: Mapping[str, Index]) -> dict[str, Index]:
        """Return the iterators of element ``e_v`` of the vector with those names."""
        column = V("e_vec") * self.vector(s) + e("v")
        return {**self.places.env(s.name, a), self.roles.row: V("e_row"), self.roles.col: column}

    def _vector_exists(self, at: Mapping[str, Index]) -> tuple[Compare, ...]:
        return self.live({k: i.subs({e("v"): 0}) for k, i in at.items()})

    def live(self, env: Mapping[str, Index]) -> tuple[Compare, ...]:
        """Return the conditions under which an element exists."""
        return (Compare("<", env[self.roles.row], self.of.M), Compare("<", env[self.roles.col], self.of.N))

    def _global(self) -> dict[str, str]:
        return stored(self.group.arrays)

    def vector(self, s: Statement) -> int:
        """Return the columns that an epilogue loads and stores at once: 16 bytes of its result, or one."""
        v = 16 // ITEMSIZE[s.value.dtype]
        if self.box:
            return v
        if not self.wide or v not in (4, 8, 16) or (self.of.N.constant or 0) % v:
            return 1
        env = {self.roles.col: V("e_vec") * v + e("v")}
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        symbols = frozenset((*self.of.extents, "e_vec", e("v"), SHARE))
        vectors = widen((Store(s.array, address, Const(s.value.dtype, 0.0)),), e("v"), v, self._global(), symbols)
        return v if vectors is not None else 1

    def send(self, s: Statement, sender: str, to: TensorOperand, a: Mapping[str, Index]) -> Body:
        """Send a box of results to memory. Only one warp writes a warp's box, so a warp barrier suffices."""
        row, column = (self.places.element(sender, x, a) for x in self.axes)
        place = Pointer(self.of.sums, self.buffer, self._first(self._slab_of_box(a)))
        store = to.store(f"map_{s.array}", place, row, column, self.places.env(sender, a))
        first = If((Compare("==", LANE, ZERO),), (store, Call("pd_tma_store_commit")))
        return (Call("pd_fence_proxy_async"), Call("pd_syncwarp"), first)

    # -- marks ---------------------------------------------------------------------------------------------------

    def store(self, body: Body) -> Body:
        """Copy an epilogue's rows from shared to global memory, by the lanes of the warp that staged them."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        s = self.group.statement(inst.statement)
        v = self.vector(s)
        # the point band is one access
        body = bind(body, {extent(e("i")): self._rows(), extent(e("j")): SLAB // v, extent(e("v")): 1})
        sync, kind = Call("pd_syncwarp"), "unroll" if v > 1 else "unroll2"

        def dealt(f: Callable[[Statement, Mapping[str, Index]], Body]) -> Body:
            return spread(lower(body, {s.name: partial(f, s)}), e("j"), WARP, kind, "lane")

        if self.left:
            return self.sharing.finish(dealt(self.epilogue_of_rows))
        if not self.box:
            return (sync, *dealt(self.epilogue_of_rows), sync)
        rows = (sync, *dealt(self.epilogue_of_rows), sync, *dealt(self.result_to_box))
        return (Alloc(WORDS, "uint32", V(STAGED * SLAB // v // WARP * 4), "register", rows),)

    def stage_rows(self, body: Body, warps: int) -> Body:
        """Allocate the shared memory in which rows are staged."""
        return (Alloc("stage", self.of.sums, V(warps * STAGED * SLAB), "shared", body),)


def lane_points(inst: Inst, points: Sequence[str], column: Index = COLUMN) -> Body:
    """Lower a statement over a lane's points (row, column) of a fragment."""
    leaf = substitute((inst,), {points[0]: ROW, points[1]: column})
    if inst.statement == STAGE:  # both columns are stored at once
        return (For("row_half", ZERO, V(2), substitute(leaf, {"column_of_pair": 0})),)
    return (For("row_half", ZERO, V(2), (For("column_of_pair", ZERO, V(2), leaf),)),)


def block_parts(schedule: Scheduled) -> dict[str, Index]:
    """Return the slabs and rows that a block of a cluster finishes, by its number."""
    rows = _row_splits(schedule)
    return {e("c"): V(RANK) // rows, e("r"): V(RANK) % rows}


def _row_splits(schedule: Scheduled) -> Index:
    """Return the number of blocks of a cluster that split the rows of a slab."""
    loop = schedule.view(SUM).loop(e("r"))
    assert loop is not None
    return loop.extent
