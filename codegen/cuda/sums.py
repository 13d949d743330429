"""The sums of a product: where they are in registers, and their way to the epilogues.

Sums of tensor cores pass through shared memory once more, so that epilogues load and store whole rows, 16 bytes a lane
where addresses allow it. What is where is asked of the schedule's tile map, whatever the schedule is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from polydyn.codegen.cuda.boxes import TensorOperand
from polydyn.codegen.cuda.carriers import LAST
from polydyn.codegen.cuda.emit import RANK
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import COLUMN, HALVES, LANE, PAIR, ROW, Instruction
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Alloc, Body, Call, Compare, FlatLoad, For, If, Inst, Let, Pointer, Store, Tile, walk
from polydyn.codegen.kernel import WORKSPACE
from polydyn.codegen.lower import lower
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.threads import WARP, spread
from polydyn.codegen.passes.widen import stored_value, widen
from polydyn.codegen.places import Places
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
"""A vector of results in registers, and the 16 bytes that it is: those of each of a lane's trips over a slab
(``spread``) are kept until they may go to a box."""


class Sums:
    """The sums of a product in buffer ``acc`` of a schedule, by an instruction ``kind``.

    ``axes``: of rows and columns. ``wide``: epilogues store 16 bytes at once. ``unit``: the number of the warp that
    stages rows; ``slabs``: of columns that it stages at once, ``buffer``: where. ``in_pairs``: even and odd columns are
    in fragments of their own. ``box``: columns that leave as a box, 0 where lanes store what they have computed.
    ``parts``: blocks that have staged sums each, which are added (``tree.gpu.add_parts``): in shared memory those of a
    cluster; in the workspace all that share a task, where each has ``left`` sums, and the last one adds them.
    ``multiples``: what addresses must be multiples of.
    """

    def __init__(
        self, of: ProductGroup, kind: Instruction, places: Places, wide: bool, acc: str = "acc",
        axes: tuple[str, str] = ("i", "j"), unit: IndexLike = "warp", in_pairs: bool = False, slabs: int = 1,
        buffer: str = "stage", box: int = 0, parts: int = 1, left: int = 0,
    ) -> None:  # fmt: skip
        self.of, self.kind, self.places, self.wide, self.acc, self.axes = of, kind, places, wide, acc, axes
        self.unit, self.in_pairs, self.group, self.roles = V(unit), in_pairs, of.group, of.roles
        self.slabs, self.box, self.parts, self.left = slabs, box, parts, left
        self.buffer = WORKSPACE if left else buffer
        self.multiples: dict[tuple[Index, int], None] = {}
        self.fragments = tuple(places.pieces(acc, x, n) for x, n in zip(axes, kind.shape, strict=False))

    # -- where they are ------------------------------------------------------------------------------------------

    def fragment(self, statement: str, a: Mapping[str, Index]) -> tuple[Index, Index]:
        """The fragment that an instance meets: along rows, along columns."""
        row, column = (
            self.places.number(statement, self.acc, x, a, n) for x, n in zip(self.axes, self.kind.shape, strict=False)
        )
        return row, column

    def register(self, row: Index, column: Index) -> Index:
        """The accumulator of a point of a fragment: a lane holds rows g, g+8 and two columns of an m16n8 one."""
        fragment = row * self.fragments[1] + column
        return fragment * 4 + HALVES * 2 + PAIR if self.kind.warp else fragment

    @property
    def registers(self) -> int:
        """How many a thread holds."""
        return self.fragments[0] * self.fragments[1] * (4 if self.kind.warp else 1)

    # -- statements ----------------------------------------------------------------------------------------------

    def init(self, statement: str, a: Mapping[str, Index]) -> Body:
        """Accumulators start at zero."""
        return (Store(self.acc, self.register(*self.fragment(statement, a)), const(0, self.of.sums)),)

    def stage(self, a: Mapping[str, Index]) -> Body:
        """A lane's two columns of a fragment to shared memory.

        Rows of a group of eight lie in bit-reversed order: then neither those that write (half-warps: four rows, two
        chunks of 16 bytes each; quarters, when ``in_pairs``: two rows, four chunks) nor the reading quarters (two rows,
        every other chunk) meet in a bank.
        """
        if self.in_pairs:
            return self._stage_pair(a)
        column = self.places.cell(STAGE, "stage", {**a, e("g"): ZERO, w("j"): ZERO})[self.axes[1]]
        slab = self._slab_of_part(a, a.get(e("g"), ZERO))
        place = self._row_place(place_of_row(LANE // 4) + HALVES * 8, column, slab)
        first = self.register(*self.fragment(STAGE, a)).subs({"column_of_pair": 0})
        if self.left:
            place = self._left_by(V("bid"), place)
        return (
            Call("pd_leave<2>" if self.left else "pd_sts_wide<2>", (place, Pointer(self.of.sums, self.acc, first))),
        )

    def _stage_pair(self, a: Mapping[str, Index]) -> Body:
        """The same where two fragments share 16 columns: a lane's four columns of one of its rows.

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
        """A place of the rows that the warp has staged."""
        return Tile(self.of.sums, self.buffer, self._first(slab), row, column, SLAB, 4)

    def _first(self, slab: Index) -> Index:
        """The first of the staged sums of a slab."""
        return (self.unit * self.slabs + slab) * (STAGED * SLAB)

    def _left_by(self, block: Index, place: Tile) -> Tile:
        """Where a block of the grid has left what is at a place of its own."""
        return replace(place, start=place.start + block * self.left)

    def _slab_of_box(self, a: Mapping[str, Index]) -> Index:
        return a[e("p")] * (self.box // SLAB) if self.box else ZERO

    def _slab_of_part(self, a: Mapping[str, Index], slab: Index) -> Index:
        """The number of a slab among those of a unit: of a part of the sums those of all fragments are staged."""
        return slab if self.parts == 1 else a[f("i")] * (self.slabs // self.fragments[0]) + slab

    def _rows(self) -> int:
        """Staged rows that a block finishes, of a fragment."""
        return STAGED if self.parts == 1 else STAGED // int(_rows_dealt(self.places.schedule))

    def _staged(self, a: Mapping[str, Index]) -> tuple[Index, Index]:
        """The place of a row among staged ones, and the slab, of an instance of an epilogue."""
        if self.parts == 1:
            return a[e("i")], a[e("s")] + self._slab_of_box(a) if self.slabs > 1 else ZERO
        slab = self.places.cell(SUM, "stage", {x: a[x] for x in (e("c"), e("s"))})[self.axes[1]] // SLAB
        return a[e("r")] * self._rows() + a[e("i")], self._slab_of_part(a, slab)

    def _load(self, v: int, place: Callable[[int], Tile]) -> Body:
        """A vector of sums from its place: of all parts in their order, where there are several."""
        piece = min(v, 4)
        if self.parts == 1:
            at = ((Pointer(self.of.sums, "sum", V(x)), place(x)) for x in range(0, v, piece))
            return tuple(Call(f"pd_lds_wide<{piece}>", x) for x in at)
        reads: Body = ()
        for n in range(self.parts):
            at = ((Pointer(self.of.sums, "of_parts", V(n * v + x)), place(x)) for x in range(0, v, piece))
            block = V("bid") // self.parts * self.parts + n
            if self.left:
                reads += tuple(Call(f"pd_left<{piece}>", (r, self._left_by(block, x))) for r, x in at)
            else:
                reads += tuple(Call(f"pd_lds_wide_at<{piece}>", (*x, FromIndex("int32", V(n)))) for x in at)
        total: Value = FlatLoad(self.of.sums, "of_parts", V("element"))
        for n in range(1, self.parts):
            total = op("add", total, FlatLoad(self.of.sums, "of_parts", V("element") + n * v))
        added = For("element", ZERO, V(v), (Store("sum", V("element"), total),), "unroll")
        return (Alloc("of_parts", self.of.sums, V(self.parts * v), "register", (*reads, added)),)

    def _box_place(self, s: Statement, a: Mapping[str, Index]) -> Tile:
        """A place of the box of results: rows of 128 bytes, swizzled as TMA does, where the box's first slab was.

        It has no more bytes than that, and the warp has read all of the slab's sums by then.
        """
        item = ITEMSIZE[s.value.dtype]
        out = next(f.buffer for f in self.places.schedule.flow if f.statement == s.name and f.meets is Meets.WRITES)
        cell = self.places.cell(s.name, out, a)
        first = self._first(self._slab_of_box(a)) * ITEMSIZE[self.of.sums] // item
        row, column = (cell[x] for x in self.axes)
        return Tile(s.value.dtype, self.buffer, first, row, column, LINE // item, 16 // item)

    def epilogue(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An epilogue on registers, stored where the element exists (CUDA cores: a thread has one)."""
        env = self.places.env(s.name, a)
        total = FlatLoad(self.of.sums, self.acc, self.register(*self.fragment(s.name, a)))
        value = self.of.epilogue_value(s, env, total)
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        return (If(self.live(env), (Store(s.array, address, value),)),)

    def epilogue_of_rows(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An epilogue on a vector of a row that lies in shared memory: to memory, or where it leaves as a box to
        registers.
        """
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
        body: Body = (*loads, If(self._live_vector(at), element))
        return self._named(s, a, (Alloc("sum", self.of.sums, V(v), "register", body),))

    def result_to_box(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """The vector that ``epilogue_of_rows`` has left in registers to its place in a box."""
        place = self._box_place(s, {**a, e("j"): a[e("j")] * self.vector(s)})
        move = Call("pd_sts_wide<4>", (place, Pointer("uint32", WORDS, TRIP * 4)))
        return self._named(s, a, (If(self._live_vector(self._vector(s, a)), (move,)),))

    def _named(self, s: Statement, a: Mapping[str, Index], body: Body) -> Body:
        """With names for the row and the vector of an instance."""
        v = self.vector(s)
        row = self.places.element(s.name, self.axes[0], a)
        vector = self.places.element(s.name, self.axes[1], {**a, e("j"): a[e("j")] * v}) // v
        return (Let("e_row", row, (Let("e_vec", vector, body),)),)

    def _vector(self, s: Statement, a: Mapping[str, Index]) -> dict[str, Index]:
        """The iterators of element ``e_v`` of the vector that has those names."""
        column = V("e_vec") * self.vector(s) + e("v")
        return {**self.places.env(s.name, a), self.roles.row: V("e_row"), self.roles.col: column}

    def _live_vector(self, at: Mapping[str, Index]) -> tuple[Compare, ...]:
        return self.live({k: i.subs({e("v"): 0}) for k, i in at.items()})

    def live(self, env: Mapping[str, Index]) -> tuple[Compare, ...]:
        """Whether an element exists."""
        return (Compare("<", env[self.roles.row], self.of.M), Compare("<", env[self.roles.col], self.of.N))

    def _global(self) -> dict[str, str]:
        return stored(self.group.arrays)

    def vector(self, s: Statement) -> int:
        """Columns that an epilogue loads and stores at once: 16 bytes of its result, or one."""
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
        """A box of results to memory. A warp's box is nobody else's, so the warp alone has to be there."""
        row, column = (self.places.element(sender, x, a) for x in self.axes)
        place = Pointer(self.of.sums, self.buffer, self._first(self._slab_of_box(a)))
        store = to.store(f"map_{s.array}", place, row, column, self.places.env(sender, a))
        first = If((Compare("==", LANE, ZERO),), (store, Call("pd_tma_store_commit")))
        return (Call("pd_fence_proxy_async"), Call("pd_syncwarp"), first)

    # -- marks ---------------------------------------------------------------------------------------------------

    def store(self, body: Body) -> Body:
        """An epilogue's rows in shared memory -> global memory, dealt to the lanes of the warp that put them there."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        s = self.group.statement(inst.statement)
        v = self.vector(s)
        # the point band is one access
        body = bind(body, {extent(e("i")): self._rows(), extent(e("j")): SLAB // v, extent(e("v")): 1})
        sync, kind = Call("pd_syncwarp"), "unroll" if v > 1 else "unroll2"

        def dealt(f: Callable[[Statement, Mapping[str, Index]], Body]) -> Body:
            return spread(lower(body, {s.name: partial(f, s)}), e("j"), WARP, kind, "lane")

        if self.left:
            return (If((LAST,), dealt(self.epilogue_of_rows)),)
        if not self.box:
            return (sync, *dealt(self.epilogue_of_rows), sync)
        rows = (sync, *dealt(self.epilogue_of_rows), sync, *dealt(self.result_to_box))
        return (Alloc(WORDS, "uint32", V(STAGED * SLAB // v // WARP * 4), "register", rows),)

    def stage_rows(self, body: Body, warps: int) -> Body:
        """The sums' way through shared memory: where rows are staged."""
        return (Alloc("stage", self.of.sums, V(warps * STAGED * SLAB), "shared", body),)


def lane_points(inst: Inst, points: Sequence[str], column: Index = COLUMN) -> Body:
    """A statement over the points (row, column) of a fragment, of which a lane takes its own."""
    leaf = substitute((inst,), {points[0]: ROW, points[1]: column})
    if inst.statement == STAGE:  # both columns move at once
        return (For("row_half", ZERO, V(2), substitute(leaf, {"column_of_pair": 0})),)
    return (For("row_half", ZERO, V(2), (For("column_of_pair", ZERO, V(2), leaf),)),)


def share_places(schedule: Scheduled) -> dict[str, Index]:
    """Which slabs and rows a block of a cluster finishes, by its number."""
    rows = _rows_dealt(schedule)
    return {e("c"): V(RANK) // rows, e("r"): V(RANK) % rows}


def _rows_dealt(schedule: Scheduled) -> Index:
    """Blocks of a cluster that have rows each of a slab."""
    loop = schedule.view(SUM).loop(e("r"))
    assert loop is not None
    return loop.extent
