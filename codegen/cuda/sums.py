"""The sums of a product: where they are in registers, and their way to the epilogues.

Sums of tensor cores pass through shared memory once more, so that epilogues load and store whole rows, 16 bytes a lane
where addresses allow it. What is where is asked of the schedule's tile map, whatever the schedule is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import COLUMN, HALVES, LANE, PAIR, ROW, Instruction
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Alloc, Body, Call, Compare, FlatLoad, For, If, Inst, Let, Pointer, Store, Tile, walk
from polydyn.codegen.lower import lower
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.threads import WARP, spread
from polydyn.codegen.passes.widen import widen
from polydyn.codegen.places import Places
from polydyn.schedules.expr import ITEMSIZE, Const, Value, const
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.model import Statement, stored
from polydyn.schedules.tree.gpu import SHARE, SLAB, STAGE, STAGED, place_of_row
from polydyn.schedules.tree.names import b, e, extent

V = Index.of


class Sums:
    """The sums of a product in buffer ``acc`` of a schedule, by an instruction ``kind``.

    ``axes``: of rows and columns. ``wide``: epilogues store 16 bytes at once. ``unit``: the number of the warp that
    stages rows; ``slabs``: of columns that it stages at once, ``buffer``: where. ``in_pairs``: even and odd columns are
    in fragments of their own. ``multiples``: what addresses must be multiples of.
    """

    def __init__(
        self, of: ProductGroup, kind: Instruction, places: Places, wide: bool, acc: str = "acc",
        axes: tuple[str, str] = ("i", "j"), unit: IndexLike = "warp", in_pairs: bool = False, slabs: int = 1,
        buffer: str = "stage",
    ) -> None:  # fmt: skip
        self.of, self.kind, self.places, self.wide, self.acc, self.axes = of, kind, places, wide, acc, axes
        self.unit, self.in_pairs, self.group, self.roles = V(unit), in_pairs, of.group, of.roles
        self.slabs, self.buffer = slabs, buffer
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
        column = self.places.cell(STAGE, "stage", {**a, e("g"): ZERO})[self.axes[1]]
        place = self._row_place(place_of_row(LANE // 4) + HALVES * 8, column, a.get(e("g"), ZERO))
        first = self.register(*self.fragment(STAGE, a)).subs({"column_of_pair": 0})
        return (Call("pd_sts_wide<2>", (place, Pointer(self.of.sums, self.acc, first))),)

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
        first = (self.unit * self.slabs + slab) * (STAGED * SLAB)
        return Tile(self.of.sums, self.buffer, first, row, column, SLAB, 4)

    def epilogue(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An epilogue on registers, stored where the element exists (CUDA cores: a thread has one)."""
        env = self.places.env(s.name, a)
        total = FlatLoad(self.of.sums, self.acc, self.register(*self.fragment(s.name, a)))
        value = self.of.epilogue_value(s, env, total)
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        return (If(self.live(env), (Store(s.array, address, value),)),)

    def epilogue_of_rows(self, s: Statement, a: Mapping[str, Index]) -> Body:
        """An epilogue on a vector of a row that lies in shared memory."""
        v, part, slab = self.vector(s), a[e("j")], a[e("s")] if self.slabs > 1 else ZERO
        row = self.places.element(s.name, self.axes[0], a)
        vector = self.places.element(s.name, self.axes[1], {**a, e("j"): part * v}) // v
        at = {**self.places.env(s.name, a), self.roles.row: V("e_row"), self.roles.col: V("e_vec") * v + e("v")}
        value = self.of.epilogue_value(s, at, FlatLoad(self.of.sums, "sum", V(e("v"))))
        address = self.group.arrays[s.array].address(tuple(i.subs(at) for i in s.index))
        element: Body = (Store(s.array, address, value),)
        if v > 1:
            vectors = widen(element, e("v"), v, self._global(), (*self.roles.batch, "e_row", "e_vec", e("v"), b("s")))
            assert vectors is not None, "vector has tried"
            element = vectors[0]
            self.multiples |= dict.fromkeys((*vectors[1], *(((self.of.N, v),) if self.of.N.constant is None else ())))
        else:
            element = substitute(element, {e("v"): 0})
        piece = min(v, 4)
        pieces = ((V(x), self._row_place(a[e("i")], part * v + x, slab)) for x in range(0, v, piece))
        loads = tuple(Call(f"pd_lds_wide<{piece}>", (Pointer(self.of.sums, "sum", x), at)) for x, at in pieces)
        live = self.live({k: i.subs({e("v"): 0}) for k, i in at.items()})
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
        env = {self.roles.col: V("e_vec") * v + e("v")}
        address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        symbols = frozenset((*self.of.extents, "e_vec", e("v"), SHARE))
        vectors = widen((Store(s.array, address, Const(s.value.dtype, 0.0)),), e("v"), v, self._global(), symbols)
        return v if vectors is not None else 1

    # -- marks ---------------------------------------------------------------------------------------------------

    def store(self, body: Body) -> Body:
        """An epilogue's rows in shared memory -> global memory, dealt to the lanes of the warp that put them there."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        s = self.group.statement(inst.statement)
        v = self.vector(s)
        # the point band is one access
        body = bind(body, {extent(e("i")): STAGED, extent(e("j")): SLAB // v, extent(e("v")): 1})
        body = lower(body, {inst.statement: partial(self.epilogue_of_rows, s)})
        sync = Call("pd_syncwarp")
        return (sync, *spread(body, e("j"), WARP, "unroll" if v > 1 else "unroll2", "lane"), sync)

    def stage_rows(self, body: Body, warps: int) -> Body:
        """The sums' way through shared memory: where rows are staged."""
        return (Alloc("stage", self.of.sums, V(warps * STAGED * SLAB), "shared", body),)


def lane_points(inst: Inst, points: Sequence[str], column: Index = COLUMN) -> Body:
    """A statement over the points (row, column) of a fragment, of which a lane takes its own."""
    leaf = substitute((inst,), {points[0]: ROW, points[1]: column})
    if inst.statement == STAGE:  # both columns move at once
        return (For("row_half", ZERO, V(2), substitute(leaf, {"column_of_pair": 0})),)
    return (For("row_half", ZERO, V(2), (For("column_of_pair", ZERO, V(2), leaf),)),)
