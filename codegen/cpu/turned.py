"""CPU kernels for windows over small planes, in a blocked layout (oneDNN's nChw16c).

A vector holds the same pixel of W planes, where W is the number of lanes. The statement TURN interleaves W planes in
scratch by transposing blocks of pixels in registers. The window itself is a register tile, as for channels-last images
(``windows.py``). Its results are transposed back when they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from polydyn.codegen.cpu.emit import bound_names, emit, ranges
from polydyn.codegen.cpu.rows import live_part
from polydyn.codegen.cpu.target import INDEPENDENT_FMAS, CpuTarget
from polydyn.codegen.cpu.windows import MOST_TAPS, in_vectors
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.ir import Alloc, Body, FlatLoad, For, Node, Store, rewrite
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import Lowering, flat, scratch_bytes
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.taps import Window, specialise_guards
from polydyn.codegen.passes.tiles import flatten_loops
from polydyn.codegen.passes.transpose import by_blocks, transpose_loads
from polydyn.codegen.passes.vectorise import vectorise_loop, vectorise_tile
from polydyn.codegen.places import Coordinates, Places
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import Load, Value, loads
from polydyn.schedules.index import ONE, ZERO, Index, maximum, product
from polydyn.schedules.model import Group, Statement, row_major
from polydyn.schedules.tree.names import Coord, MarkName, b, extent, it
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.windows import LANES, OUTPUTS, TURN, blocked_window

STRIDED_LOAD_OPERATIONS = 3
"""Operations of a strided vector load: two loads and a shuffle."""
LIVE_LANES, TILE_BEGIN, LANES_BEGIN = extent(it(LANES)), f"o_{OUTPUTS}", f"o_{LANES}"
V = Index.of


class TurnedWindowKernel(Variant):
    """Builds the kernel of a window in the blocked layout (``lowering/blocked_window.py``)."""

    def __init__(self, name: str, group: Group, pixels: tuple[str, str], target: CpuTarget) -> None:
        """Plan the kernel. ``pixels``: the iterators of image rows and columns."""
        self.name, self.group, self.pixels, self.target = name, group, pixels, target
        self.core = group.backbone
        self.extents = dict(self.core.iters)
        shared = self.core.iterators.index(pixels[0])
        self.shared, self.taps = self.core.iterators[:shared], self.core.iterators[shared + 2 :]
        self.planes = self.shared[-1]
        read = next(x for x in loads(self.core.value) if x.buffer == group.statement(TURN).array)
        self.moved = read.index[-1]
        self.unrolled = tuple(x for x in self.taps if x in self.moved.symbols())
        count = product(self.extents[x] for x in self.unrolled).constant or MOST_TAPS
        columns = self.extents[pixels[1]].constant or INDEPENDENT_FMAS
        self.outputs = max(1, min(INDEPENDENT_FMAS, MOST_TAPS // count, columns))

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        order = sorted(self.taps, key=lambda x: x in self.unrolled)
        return blocked_window(self.group, self.pixels, self.target.width, self.outputs, order)

    @cached_property
    def _places(self) -> Places:
        return Places(self.schedule)

    @property
    def extra_cost(self) -> Index:
        """Positive if this kernel should not be used.

        Then the planes of a task exceed the L2 budget, or the kernel needs more vector operations than the kernel along
        image rows. Partial last vectors count in full. Packing a vector costs a load, a store and its part of a
        transpose.
        """
        w, (planes, lines, columns) = self.target.width, (self.extents[x] for x in (self.planes, *self.pixels))
        taps = product(self.extents[x] for x in self.taps)
        image = product(e for _, e in self.group.statement(TURN).iters[len(self.shared) :])
        copied = image + lines * columns
        apart = STRIDED_LOAD_OPERATIONS if self.moved.split(self.pixels[1])[0] != ONE else 1
        over_planes = taps * lines * columns + copied * (w.bit_length() + 1)
        along_lines = taps * lines * columns.ceildiv(w) * apart
        more = planes.ceildiv(w) * over_planes - planes * along_lines
        return maximum(more, copied * w - self.target.core.shared)

    # -- layout ------------------------------------------------------------------------------------------------------

    def _scratch_elements(self, array: str) -> Index:
        return product(self.group.arrays[array].shape[len(self.shared) :]) * self.target.width

    def _address(self, array: str, index: tuple[Index, ...]) -> Index:
        a, w = self.group.arrays[array], self.target.width
        if a.role != "local":
            return a.address(index)
        lane = index[len(self.shared) - 1] - V(LANES_BEGIN)
        if array == self.core.array:
            return (index[-1] - V(TILE_BEGIN)) * w + lane % w
        inner = len(self.shared)
        return sum((i * s for i, s in zip(index[inner:], row_major(a.shape[inner:]), strict=True)), ZERO) * w + lane

    def lowering(self, s: Statement) -> Lowering:
        """Return the lowering of a statement."""

        def read_local(x: Load) -> Value | None:
            local = self.group.arrays[x.buffer].role == "local"
            return FlatLoad(x.dtype, x.buffer, self._address(x.buffer, x.index)) if local else None

        def f(at: Coordinates) -> Body:
            env: Mapping[str, Index] = self._places.env(s.name, at)
            address = self._address(s.array, tuple(i.subs(env) for i in s.index))
            return (Store(s.array, address, flat(self.group, s.value, env, read_local), s.reduce),)

        return f

    # -- passes --------------------------------------------------------------------------------------------------

    def build(self) -> Kernel:
        """Build the kernel."""
        body, count = build(TURNED_WINDOW, self)
        return emit(Kernel(self.name, self.symbols, count, scratch_bytes(body)), body, self.group.arrays)

    def counts(self) -> dict[str, Index]:
        """Return the numbers of tiles, and of lanes if all vectors are full."""
        extents = self.schedule.extents()
        counts = {extent(b(x)): extents[b(x)] for x in (LANES, OUTPUTS)}
        return counts | ({LIVE_LANES: V(self.target.width)} if self._has_full_vectors else {})

    def opened(self) -> tuple[str, ...]:
        """Return the names that statements introduce: the starts of tiles, and the locals."""
        return (LANES_BEGIN, TILE_BEGIN, *(n for n, a in self.group.arrays.items() if a.role == "local"))

    def share(self, body: Body) -> Body:
        """Bind the first plane of a task and its number of planes."""
        return live_part(self.schedule, LANES, body)

    @property
    def _has_full_vectors(self) -> bool:
        """Whether every task has a full vector of planes."""
        return self.schedule.map.extents[LANES] % self.target.width == ZERO

    def fill(self, body: Body) -> Body:
        """Transpose blocks of pixels into the blocked layout, in registers."""
        width, lanes = self.target.width, it(LANES)
        (body, pixels) = _fuse_pixel_loops(body)
        loop = rewrite(body, lambda n: replace(n, hi=V(width)) if isinstance(n, For) and n.var == lanes else n)
        vectors = fold(vectorise_tile(loop, lanes, width, None if self._has_full_vectors else V(LIVE_LANES)))
        return transpose_loads(by_blocks(vectors, pixels, width), pixels, width)

    def tile(self, body: Body) -> Body:
        """Vectorise the tile's loops, in registers."""
        lanes = self.extents[self.planes].constant
        made = in_vectors(body, LANES_BEGIN, lanes, self.target.width, self._registers)
        if isinstance(made, Declined):
            raise CodegenError(f"a window over planes in lanes cannot be vectorised: {made}")
        return live_part(self.schedule, OUTPUTS, made)

    def _registers(self, body: Body, partial: bool) -> Body:
        whole = self.schedule.map.extents[OUTPUTS] % self.outputs == ZERO
        live = None if whole else V(extent(it(OUTPUTS)))
        sums, moving = {self.core.array: self.core.value.dtype}, frozenset({self.group.statement(TURN).array})
        loops = tuple(map(it, self.unrolled))
        tile = Window(it(OUTPUTS), self.outputs, live, loops, sums, moving, partial, TILE_BEGIN)
        return fold(specialise_guards(fold(body), tile))

    def store(self, body: Body) -> Body:
        """Transpose the results back and store vectors along pixels."""
        width = self.target.width
        (body, pixels) = _fuse_pixel_loops(body)

        def f(n: Node) -> Node | Body:
            made = vectorise_loop(n, width, 1) if isinstance(n, For) and n.var == pixels else n
            if isinstance(made, Declined):
                raise CodegenError(f"results of a window cannot be vectorised along pixels: {made}")
            return made

        return transpose_loads(rewrite(body, f), it(LANES), width)

    def scratch(self, body: Body) -> Body:
        """Allocate scratch memory for the copied planes."""
        for n, a in self.group.arrays.items():
            if a.role == "local" and n != self.core.array:
                body = (Alloc(n, a.dtype, self._scratch_elements(n), "scratch", body),)
        return body


def _fuse_pixel_loops(body: Body) -> tuple[Body, str]:
    """Fuse the loops over image rows and columns if all addresses allow it. Return the body and its innermost loop."""
    (outer,) = body
    assert isinstance(outer, For), "the tree has a loop over lines"
    (made,) = flatten_loops(body, Coord(outer.var))
    assert isinstance(made, For) and isinstance(made.body[0], For), "the tree has loops over pixels and lanes"
    inner = made.body[0]
    return (made,), made.var if inner.var == it(LANES) else inner.var


TURNED_WINDOW: Family[TurnedWindowKernel] = Family(
    names=bound_names,
    sizes=TurnedWindowKernel.counts,
    statements=lambda x: {s.name: x.lowering(s) for s in x.group.statements},
    opened=TurnedWindowKernel.opened,
    stores=(
        Rule("fill", "planes are copied to lanes", TurnedWindowKernel.fill, MarkName.FILL),
        Rule("tile", "the tile's loops become vectors in registers", TurnedWindowKernel.tile, MarkName.TILE),
        Rule("store", "results are copied from lanes", TurnedWindowKernel.store, MarkName.STORE),
        Rule("share", "the first plane of a task", TurnedWindowKernel.share, MarkName.SHARE),
    ),
    band=lambda *_: ranges(),
    around=(Rule("scratch", "the planes of a task around all tasks", TurnedWindowKernel.scratch),),
)
