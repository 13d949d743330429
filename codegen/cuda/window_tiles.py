"""CUDA kernels of large windows, channels last: a thread has a tile of pixels, of two adjacent channels.

Each image row is loaded and converted once for a tile, into registers, for all taps along it and for all rows of the
tile that read it. The loop runs over image rows. In each iteration, each row of the tile uses the row of taps that
applies to this image row. Rows of taps are loaded for each row of the tile. Constant weights are stored in float32
(``polydyn.lowering.weights``), so they need no conversion.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

from polydyn.codegen.cuda.windows import NO_WINDOW, WINDOW, Axes, CudaWindowKernel, guarded, read_of_memory
from polydyn.codegen.cuda.work import OF_A_LINE, OF_TAPS, tile_work
from polydyn.codegen.family import Family, Rule
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Compare, FlatLoad, For, If, Node, Store, map_value, rewrite, walk_value
from polydyn.codegen.ir import walk as walk_nodes
from polydyn.codegen.kernel import Work
from polydyn.codegen.passes.hoist import comparison, divide_before
from polydyn.codegen.passes.registers import unroll
from polydyn.codegen.places import Coordinates
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import ITEMSIZE, WIDENED, Const, Load, Op, Value, conjuncts, loads
from polydyn.schedules.expr import substitute as substitute_value
from polydyn.schedules.group.footprint import adds_nothing_outside, together
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import Array, Group, stored
from polydyn.schedules.ranges import Ranges, is_nonnegative
from polydyn.schedules.tree.names import Coord, b, it
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.windows import LANES, LINES, OUTPUTS, window_tile

MANY_TAPS = 20
"""Minimum taps of a window for this form: with fewer, the loads and conversions of an image row would serve too
little."""
CHANNELS, BLOCK, RESIDENT = 2, 32, 8
"""Adjacent channels of a thread; threads of a block, one warp, because tiles are large and threads share only L1;
targeted blocks per multiprocessor."""
MAX_DATA_REGISTERS = 168
"""Maximum 32-bit registers for sums, an image row and a row of taps, of 255; the others hold addresses."""
MOST_COLUMNS, MOST_LINES = 16, 8
VECTOR_LOAD_COST = 3
"""Cost of a vector load in instructions, its L1 bandwidth included, in the choice of sizes."""
ASSUMED_PIXELS = range(8, 65)
"""Assumed pixels along an axis of unknown extent."""
LINE, ROW = "line", "row"
"""The registers of an image row; the loop over image rows."""
V = Index.of


@dataclass(frozen=True)
class TileAxes:
    """The axes of a tile.

    ``lines``, ``columns``: the iterators of a tile's pixels (rows and columns); ``taps``: the window's iterators along
    them. ``pace``: rows of taps between successive rows of pixels; ``size``: rows and columns of a tile, which reads
    ``places`` elements of an image row.
    """

    lines: str
    columns: str
    taps: tuple[str, str]
    pace: int
    size: tuple[int, int]
    places: int


def tile_axes(group: Group, band: Sequence[str]) -> TileAxes | Declined:
    """Match one reduction over a large window along two axes, and maps of its result; return its axes.

    ``band``: the shared iterators, channels last. One tensor moves along with the pixels, and its rows that a tile
    reads are rows of taps apart. A number replaces taps outside of it.
    """
    cores = [s for s in group.statements if s.reduce]
    if len(cores) != 1 or len(band) < 3 or cores[0].reduce not in ("sum", "max", "min"):
        return NO_WINDOW
    (core,) = cores
    taps, extents = core.iterators[len(band) :], dict(core.iters)
    maps = all(s.iterators == tuple(band) for s in group.statements if s is not core)
    if len(taps) != 2 or not maps or core.iterators[: len(band)] != tuple(band) or not _is_plain(group):
        return NO_WINDOW
    if (product(extents[x] for x in taps).constant or 0) < MANY_TAPS:
        return Declined(f"its window has fewer than {MANY_TAPS} taps")
    for lines, columns in pairwise(band[:-1]):
        for order in (taps, taps[::-1]):
            steps = _step(group, lines, order[0]), _step(group, columns, order[1])
            if steps[0] and steps[1] and steps[0].numerator == 1 and steps[0].denominator <= int(extents[order[0]]):
                pixels = extents[lines].constant, extents[columns].constant
                size = _size(group, pixels, [int(extents[x]) for x in order], (steps[0], steps[1]))
                places = size and _places(size[1], int(extents[order[1]]), steps[1])
                if size and places:
                    return TileAxes(lines, columns, order, steps[0].denominator, size, places)
                return Declined("no tile of its pixels fits shared memory")
    return Declined("its taps do not move along two axes of pixels")


def _is_plain(group: Group) -> bool:
    """Whether all arrays are floats of at most 32 bits, and taps outside the image may be skipped."""
    return adds_nothing_outside(group.backbone) and all(
        WIDENED.get(a.dtype, a.dtype) == "float32" for a in group.arrays.values()
    )


def _places(columns: int, taps: int, step: Fraction) -> int:
    """Return the number of elements of an image row that ``columns`` pixels read."""
    return len({u + step * k for u in range(columns) for k in range(taps)})


def _step(group: Group, across: str, tap: str) -> Fraction | None:
    """Return the outputs that a tap moves along ``across``, in the only tensor that moves along it.

    Return None if there is no such tensor, or if outputs do not read each other's elements at shifted taps.
    """
    found = [(v, group.arrays[x.buffer].address(x.index)) for v in _reads(group.backbone.value) for x in set(loads(v))]
    moving = [(v, a) for v, a in found if across in a.symbols()]
    if len({a for _, a in moving}) != 1:
        return None
    step = together(moving[0][1].split(tap)[0], moving[0][1].split(across)[0])
    if step is None:
        return None
    other = {across: V(across) + step.numerator, tap: V(tap) - step.denominator}
    return step if all(substitute_value(v, other) == v for v, _ in moving) else None


def _reads(v: Value) -> Iterator[Value]:
    """Yield the loads of a value, each with the choice that contains it."""
    if isinstance(v, Load):
        yield v
    elif isinstance(v, Op):
        inside = [x for a in v.args for x in _reads(a)]
        yield from [v] if inside and v.name == "where" else inside


def _size(
    group: Group, pixels: tuple[int | None, int | None], taps: Sequence[int], steps: tuple[Fraction, Fraction]
) -> tuple[int, int] | None:
    """Return the rows and columns of a tile with the fewest instructions per output that fits the registers.

    ``pixels``: extents of both axes, if known.
    """
    converted = any(ITEMSIZE[x.dtype] < ITEMSIZE["float32"] for x in loads(group.backbone.value))
    pace, found = steps[0].denominator, dict[tuple[int, int], float]()
    for lines in range(2, min(MOST_LINES, pixels[0] or MOST_LINES) + 1):
        for columns in range(2, min(MOST_COLUMNS, pixels[1] or MOST_COLUMNS) + 1):
            places, rows = _places(columns, taps[1], steps[1]), pace * (lines - 1) + taps[0]
            if CHANNELS * (lines * columns + places + taps[1]) <= MAX_DATA_REGISTERS:
                once = rows * (places * (VECTOR_LOAD_COST + CHANNELS * converted) + OF_A_LINE)
                once += lines * taps[0] * (taps[1] * (VECTOR_LOAD_COST + CHANNELS * columns) + OF_TAPS)
                found[lines, columns] = once * _tiles(pixels[0], lines) * _tiles(pixels[1], columns)
    return min(found, key=lambda x: found[x], default=None)


def _tiles(pixels: int | None, size: int) -> float:
    """Return the average number of tiles per pixel along an axis."""
    return fmean(-(-n // size) / n for n in (ASSUMED_PIXELS if pixels is None else [max(1, pixels)]))


class CudaWindowTile(CudaWindowKernel):
    """Builds the kernels of a large window: the reduction of ``group`` has the taps of ``pixels`` in their order."""

    version, threads, sides = "tile", BLOCK, (LANES, LINES, OUTPUTS)

    def __init__(
        self, name: str, group: Group, prefix: tuple[str, ...], phases: Mapping[str, int], pixels: TileAxes
    ) -> None:
        super().__init__(name, group, prefix, phases, Axes(pixels.columns, pixels.size[1], pixels.taps))
        self.pixels, self.lanes = pixels, CHANNELS

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        x = self.pixels
        return window_tile(self.group, self.prefix, dict(self.phases), (x.lines, x.columns), x.size, x.taps)

    @property
    def rows(self) -> int:
        """The number of image rows that a tile reads."""
        x = self.pixels
        return x.pace * (x.size[0] - 1) + self._taps

    @property
    def _taps(self) -> int:
        """The number of rows of taps."""
        return int(self.extents[self.pixels.taps[0]])

    @property
    def family(self) -> Family[Any]:
        """The tables of a window; the address of an output is computed after its bounds checks."""
        return WINDOW_TILE

    def _size(self, axis: str) -> int:
        return {LANES: self.lanes, LINES: self.pixels.size[0], OUTPUTS: self.pixels.size[1]}[axis]

    def _blocked(self) -> dict[str, Coord]:
        return {self.pixels.lines: b(LINES), self.pixels.columns: b(OUTPUTS)}

    def _blocks(self, body: Body) -> int:
        return RESIDENT

    def _work(self, body: Body, registers: int) -> Work:
        x = self.pixels
        elements = BLOCK * self.lanes
        channels = min(elements, self.extents[self.prefix[-1]].constant or elements)
        box = dict.fromkeys(self.prefix, 1) | {self.prefix[-1]: channels, x.lines: x.size[0]}
        box[x.columns] = -(-x.size[1] * elements // channels)
        return tile_work(self.group, box, body, BLOCK, self.lanes, registers, x.size[0], self._shares(body))

    def _shares(self, body: Body) -> tuple[Fraction, Fraction]:
        """Return two fractions, as far as sizes are known.

        The first is the image rows inside the image among those that all tiles read. The second is the rows of pixels
        that have taps there, among the rows of pixels of all these.
        """
        (rows,) = (n for n in walk_nodes(body) if isinstance(n, For) and n.var == ROW)
        asked = [c for n in rows.body if isinstance(n, If) and len(rows.body) == 1 for c in n.cond]
        known = [c for c in asked if c.left.symbols() | c.right.symbols() <= {b(LINES), ROW}]
        tiles = [{b(LINES): v, ROW: n} for v in range(self._tiles(LINES).constant or 1) for n in range(self.rows)]
        inside = [at[ROW] for at in tiles if self._tiles(LINES).constant is None or all(c.holds(at) for c in known)]
        x = self.pixels
        met = sum(0 <= n - x.pace * v < self._taps for n in inside for v in range(x.size[0]))
        return Fraction(len(inside), len(tiles)), Fraction(met, len(tiles) * x.size[0])

    def _cell(self, a: Coordinates) -> Index:
        return (a[it(LINES)] * self.pixels.size[1] + a[it(OUTPUTS)]) * self.lanes + a[it(LANES)]

    def _arrays(self) -> dict[str, tuple[str, int]]:
        """Return the registers for sums and results of all pixels of a tile, and for an image row."""
        count = self.pixels.size[0] * self.pixels.size[1]
        held = {n: (a.dtype, count) for n, a in self.group.arrays.items() if a.role == "local"}
        return held | {LINE: ("float32", self.pixels.places)}

    def outputs(self, body: Body) -> Body:
        """Turn the loop over rows of taps into one over image rows, and unroll the outputs and taps of a row."""
        buffers = stored(self.group.arrays)

        def every(n: Node) -> Node:
            axis = next((x for x in self.sides[1:] if isinstance(n, For) and n.var == it(x)), None)
            if axis is None or not isinstance(n, For):
                return n
            whole, size = self.schedule.map.extents[axis], self._size(axis)
            exists = Compare("<", self._first(axis) + n.var, whole)
            plain = whole % size == ZERO or not any(_touches(x, buffers) for x in walk_nodes(n.body))
            inside: Body = n.body if plain else (If((exists,), n.body),)
            return replace(n, hi=V(size), body=inside)

        def rows(n: Node) -> Node:
            return self._rows(n) if isinstance(n, For) and n.var == it(self.pixels.taps[0]) else n

        return unroll(rewrite(rewrite(body, every), rows), (it(LINES), it(OUTPUTS)))

    def _rows(self, taps: For) -> For:
        """Turn the loop over rows of taps, of all rows of a tile, into a loop over image rows.

        Before: ``for j: for v: sum[v] += x[pace*v + j] * w[j]``. After: ``for row: line = x[row]; for v: if 0 <= row -
        pace*v < J: sum[v] += line * w[row - pace*v]``. Each sum has its terms in the same order as before; terms of
        rows outside the image are skipped.
        """
        (lines,) = taps.body
        assert isinstance(lines, For), "the tree has a loop over lines inside"
        x, number, inner = self.pixels, V(ROW), (it(self.pixels.taps[1]), it(OUTPUTS))
        at = [number - x.pace * v for v in range(x.size[0])]
        parts = [substitute(lines.body, {it(LINES): V(v), taps.var: n}) for v, n in enumerate(at)]
        written = [tuple(_guarded_stores(unroll(p, inner))) for p in parts]
        check_sums(written, self.group.arrays)
        readers = [self._readers(p) for p in written]
        shared = [r for r in readers[0] if ROW in _symbols(r) and all(r in other for other in readers)]
        if len(shared) != x.places:
            raise CodegenError(f"lines of a tile share {len(shared)} elements of a line of the image, not {x.places}")
        line: dict[Value, Value] = {
            r: FlatLoad(r.dtype, LINE, V(n * self.lanes) + it(LANES)) for n, r in enumerate(shared)
        }
        asked, body = self._loaded(shared, readers[0])
        for n, part, reads in zip(at, written, readers, strict=True):
            own = {r: guarded(r, c) for r, u in reads.items() for c in self._exists(OUTPUTS, V(u)) if r not in line}
            met = (Compare(">=", n, ZERO), Compare("<", n, V(self._taps)))
            made = tuple(_with(s, {**own, **line}) for s, _ in part)
            body += (If(self._varying_checks((*met, *self._exists(LINES, (number - n) // x.pace))), made),)
        return replace(taps, var=ROW, lo=ZERO, hi=V(self.rows), body=(If(asked, body),) if asked else body)

    def _readers(self, part: Sequence[tuple[Store, tuple[Compare, ...]]]) -> dict[Value, int]:
        """Return the reads of a tile's row -> the first of its pixels that has the read."""
        first, found = self._first(OUTPUTS), dict[Value, int]()
        for store, asked in part:
            u = next((int(c.left - first) for c in asked if (c.left - first).constant is not None), 0)
            for r in read_of_memory(store.value, stored(self.group.arrays)):
                found[r] = min(u, found.get(r, u))
        return found

    def _exists(self, axis: str, n: Index) -> tuple[Compare, ...]:
        """Return the bounds check of a tile's element ``n`` of an axis, if it needs one."""
        whole = self.schedule.map.extents[axis]
        if whole % self._size(axis) == ZERO or n == ZERO:
            return ()
        return (Compare("<", self._first(axis) + n, whole),)

    def _varying_checks(self, asked: Iterable[Compare]) -> tuple[Compare, ...]:
        """Return the checks that are not the same for all tiles and image rows, without duplicates."""
        ranges: Ranges = {b(LINES): self._tiles(LINES), b(OUTPUTS): self._tiles(OUTPUTS), ROW: V(self.rows)}
        return tuple(dict.fromkeys(_simple(c) for c in asked if not _holds(c, ranges)))

    def _loaded(self, reads: Sequence[Value], readers: Mapping[Value, int]) -> tuple[tuple[Compare, ...], Body]:
        """Load an image row into registers. Return the checks whether any of it exists, and its loads.

        The checks are those of the first row of pixels that reads it.
        """
        asked = [self._bounds_checks(r, readers[r]) for r in reads]
        common = tuple(c for c in asked[0] if all(c in other for other in asked))
        reader = (V(ROW) - self._taps + self.pixels.pace) // self.pixels.pace
        found: dict[tuple[Compare, ...], list[tuple[Store, Store]]] = {}
        for n, (r, of) in enumerate(zip(reads, asked, strict=True)):
            cell, own = V(n * self.lanes) + it(LANES), tuple(c for c in of if c not in common)
            value, other = (r.args[1], r.args[2]) if isinstance(r, Op) else (r, Const(r.dtype, 0.0))
            found.setdefault(own, []).append((Store(LINE, cell, value), Store(LINE, cell, other)))
        body: Body = ()
        for own, stores in found.items():
            then, orelse = (tuple(x) for x in zip(*stores, strict=True))
            body += (If(own, then, orelse),) if own else then
        return (*common, *self._exists(LINES, reader)), body

    def _bounds_checks(self, read: Value, reader: int) -> tuple[Compare, ...]:
        """Return the bounds checks of a read."""
        own: list[Compare] = []
        if isinstance(read, Op):
            for part in conjuncts(read.args[0]):
                c = comparison(part)
                if c is None:
                    raise CodegenError(f"a window has the condition {part}, which is not a comparison of coordinates")
                own.append(c)
        return (*self._varying_checks(own), *self._exists(OUTPUTS, V(reader)))


def _guarded_stores(body: Body, asked: tuple[Compare, ...] = ()) -> Iterator[tuple[Store, tuple[Compare, ...]]]:
    """Yield stores with the checks that guard them."""
    for n in body:
        if isinstance(n, Store):
            yield n, asked
        elif isinstance(n, If) and not n.orelse and not any(c.decided() for c in n.cond):
            yield from _guarded_stores(n.then, (*asked, *n.cond))
        else:
            raise CodegenError(f"a tile of a window has {type(n).__name__} inside")


def check_sums(parts: Iterable[Sequence[tuple[Store, tuple[Compare, ...]]]], arrays: Mapping[str, Array]) -> None:
    """Raise CodegenError unless each row of a tile adds to sums of its own, because their order may change."""
    met: set[tuple[str, Index]] = set()
    for part in parts:
        cells = {(s.buffer, s.address) for s, _ in part}
        kept = all(arrays[s.buffer].role == "local" and s.reduce for s, _ in part)
        read = {x.buffer for s, _ in part for x in walk_value(s.value) if isinstance(x, FlatLoad)}
        if not kept or cells & met or read & {buffer for buffer, _ in cells}:
            raise CodegenError("lines of a tile do not add to sums of their own")
        met |= cells


def _symbols(read: Value) -> frozenset[str]:
    """Return the symbols in the addresses of a read."""
    return frozenset(x for v in walk_value(read) if isinstance(v, FlatLoad) for x in v.address.symbols())


def _slack(c: Compare) -> Index | None:
    """Return an Index that is >= 0 exactly if a comparison holds, or None for an equality."""
    slack = {">=": c.left - c.right, ">": c.left - c.right - 1, "<=": c.right - c.left, "<": c.right - c.left - 1}
    return slack.get(c.relation)


def _holds(c: Compare, ranges: Ranges) -> bool:
    slack = _slack(c)
    return slack is not None and is_nonnegative(slack, ranges)


def _simple(c: Compare) -> Compare:
    """Rewrite a check of a multiple of one symbol plus a number as one of the symbol."""
    slack = _slack(c)
    if slack is None or len(slack.symbols()) != 1:
        return c
    (name,) = slack.symbols()
    step, rest = slack.split(name)
    a, k = step.constant, rest.constant
    if not a or k is None:
        return c
    return Compare(">=", V(name), V(-(k // a))) if a > 0 else Compare("<", V(name), V(k // -a + 1))


def _touches(n: Node, buffers: Collection[str]) -> bool:
    """Whether a node reads or writes memory."""
    return isinstance(n, Store) and (n.buffer in buffers or any(True for _ in read_of_memory(n.value, buffers)))


def _with(s: Store, table: Mapping[Value, Value]) -> Store:
    return replace(s, value=map_value(s.value, lambda v: table.get(v, v)))


def _quotients(x: CudaWindowKernel, body: Body) -> Body:
    return divide_before(body, "q_", x.symbols)


WINDOW_TILE = replace(WINDOW, around=(Rule("sizes", "quotients of sizes once", _quotients),))
