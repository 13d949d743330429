"""CPU kernels of windows: depthwise convolutions and poolings, with the maps of their results.

Vectors run along the iterator along which most accesses have unit stride, never along the window. A register tile has
several outputs of the iterator with the windowed operand's next smallest stride, so that a loaded vector serves all
windows that contain it. Strides determine the axes: channels and pixel columns for channels-last images, columns and
image rows for planes. ``fits`` matches groups of this form; all others are nests (``rows.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from polydyn.codegen.cpu.choices import Choices, with_default
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.rows import NEST, NestForm, NestKernel, live_part
from polydyn.codegen.cpu.streaming import SAMPLE
from polydyn.codegen.cpu.target import INDEPENDENT_FMAS, CpuTarget
from polydyn.codegen.family import Family
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, FlatLoad, For, If, Let, Node, Store
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import Lowering, flat
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.hoist import hoist_choice
from polydyn.codegen.passes.taps import Window, specialise_guards
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.codegen.places import Coordinates
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import FromIndex, Load, Value, loads, walk
from polydyn.schedules.group.footprint import adds_nothing_outside, together
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.lanes import FLOAT_LANES
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tree.names import extent, it
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.windows import LANES, OUTPUTS, PLANES, window

MOST_TAPS = 256
"""Maximum unrolled taps of all outputs of a tile."""
MOST_WEIGHTS = 16
"""Maximum taps that are all unrolled: their weights stay in registers. With more taps, those along the lane are a
loop."""
TILE = 1024
"""Elements of a task along the lane."""
OUTPUTS_OF_TILES = (1, 2, 3, 4, 6, 8, 12, 16)
TILES = (256, 512, 1024, 2048, 4096)
PLANE_SIZES = (1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16)
"""Search choices instead of INDEPENDENT_FMAS outputs, TILE and the elements of the planes of a task."""
LEAST_SHARES = 16
"""Minimum number of parts of all planes, so that all threads have some."""
GAIN = 9, 8
"""Minimum ratio of a product's operations to a window's, for long rows, that justifies a second kernel and a second
copy of the weights."""
V = Index.of


@dataclass(frozen=True)
class Axes:
    """The axes of a window kernel.

    ``band``: the solved band with the lane last; ``across``: the iterator of a tile's outputs, ``outputs`` of them.
    ``alike``: these outputs read the same elements, each with weights of its own.

    ``taps``: the window's iterators; the last of them, ``unrolled``, are unrolled too. ``planes``: the iterator around
    planes of pixels, unless guards depend on it.
    """

    band: tuple[str, ...]
    across: str
    outputs: int
    taps: tuple[str, ...]
    unrolled: tuple[str, ...]
    planes: str | None
    alike: bool = False


NO_WINDOW = Declined("it is not one reduction over a window, and maps of its results")


def window_axes(
    group: Group, band: tuple[str, ...], width: int, sums: int = INDEPENDENT_FMAS
) -> Axes | Declined:  # fmt: skip
    """Match a group that is one reduction over a window of constant size and maps of its result; return its axes.

    ``sums``: maximum outputs of a tile that all read the same elements, like the channels of a convolution. A guard
    must be one conjunction of comparisons around a load, and taps outside must add nothing: then they can be skipped.
    """
    backbones = [s for s in group.statements if s.reduce]
    if len(backbones) != 1 or len(band) < 2:
        return NO_WINDOW
    (core,) = backbones
    taps = core.iterators[len(band) :]
    maps = all(s.iterators == band for s in group.statements if s is not core)
    if not taps or not maps or core.iterators[: len(band)] != band:
        return NO_WINDOW
    if not adds_nothing_outside(core):
        return Declined("taps outside of the image are not skipped: they add something, or their guard is another")
    dtypes = {a.dtype for a in group.arrays.values()}
    floats = dtypes <= {*FLOAT_LANES} and core.value.dtype == "float32"
    if not floats and dtypes not in ({"uint8"}, {"int8"}, {"float64"}):
        return Declined(f"its types are {', '.join(sorted(dtypes))}")
    extents = dict(core.iters)
    if any(extents[x].constant is None for x in taps):
        return Declined("the size of its window is not known")
    address = _image(group, core, band)
    if address is None:
        return NO_WINDOW
    lane = min(reversed(band), key=lambda x: _cost(group, x, extents[x], width))
    across = min((x for x in reversed(band) if x != lane), key=lambda x: _size(address.split(x)[0]))
    alike = [x for x in band if x != lane and x not in address.symbols() and extents[x].constant]
    across = alike[-1] if alike else across
    steps = [address.split(x)[0] for x in (lane, across)]
    along, over = (tuple(j for j in taps if together(address.split(j)[0], s)) for s in steps)
    unrolled = tuple(j for j in taps if j in (*along, *over))
    if over and (product(extents[j] for j in unrolled).constant or 1) > MOST_WEIGHTS:
        unrolled = over
    count = product(extents[j] for j in unrolled).constant or 1
    outputs = min(INDEPENDENT_FMAS, MOST_TAPS // count, extents[across].constant or INDEPENDENT_FMAS)
    if alike:  # tiles have only outputs that exist, because there are no weights for others
        outputs = max(
            (n for n in range(1, min(sums, MOST_TAPS // count) + 1) if int(extents[across]) % n == 0), default=0
        )
    if outputs < 1 or not unrolled:
        return Declined("its taps do not move along its outputs, or are too many for a tile")
    around = [x for x in band if x not in (lane, across)]
    asked = {x for v in walk(core.value) if isinstance(v, FromIndex) for x in v.index.symbols()}
    planes = around[-1] if around and around[-1] not in asked else None
    inside = tuple(sorted(taps, key=lambda j: j in unrolled))
    return Axes((*(x for x in band if x != lane), lane), across, outputs, inside, unrolled, planes, bool(alike))


def _image(group: Group, core: Statement, band: tuple[str, ...]) -> Index | None:
    """Return the address that the window moves over: that of the load that depends on most iterators of the band."""
    read = (group.arrays[r.buffer].address(r.index) for r in loads(core.value))
    moving = [x for x in read if not x.symbols().isdisjoint(core.iterators[len(band) :])]
    return max(moving, key=lambda x: len(x.symbols() & set(band)), default=None)


def _cost(group: Group, x: str, e: Index, width: int) -> tuple[int, int]:
    """Count the accesses that vectors along an iterator cannot make at once, and those with strides of a few elements.
    """
    far = near = 0
    short = e.constant is not None and e.constant * 2 <= width
    for s in group.statements:
        for name, index in ((s.array, s.index), *((r.buffer, r.index) for r in loads(s.value))):
            a = group.arrays[name]
            if a.role == "local":
                continue
            stride = a.address(index).split(x)[0]
            few = (stride.constant or 0) in range(2, 5)
            weight = 8 if s.reduce else 1
            far += weight * (short or not (stride in (ZERO, ONE) or few))
            near += weight * few
    return far, near


def _size(stride: Index) -> int:
    """Return a stride at a sample of the sizes. A stride of 0 counts as the largest."""
    return stride.subs(dict.fromkeys(stride.symbols(), SAMPLE)).constant or 1 << 62


def window_extra_cost(product: ContractKernel, group: Group, axes: Axes) -> Index | Declined:
    """Return the operations of the window form minus those of the product form, partial last vectors included.

    Declined if the window form never wins, has strides above 2, or the layout of the results differs. As a product,
    each row of column vectors is summed, then stored, transposed and moved once more. As a window, an image row takes
    the time of one more vector, for its ends, and a few dependent sums.
    """
    x, plan, w = product.product, product.plan, product.target.width
    lane, extents, arrays = axes.band[-1], dict(group.backbone.iters), group.arrays
    written = [arrays[s.array].address(s.index) for s in group.statements if arrays[s.array].role == "output"]
    image = _image(group, group.backbone, axes.band)
    near = image is not None and image.split(lane)[0] in (ONE, V(2)) and all(i.split(lane)[0] == ONE for i in written)
    steps, columns = x.steps * x.inner_steps, x.columns
    if not (axes.alike and near) or columns != extents[axes.across]:
        return Declined("its results are not stored in planes, or a stride is above 2")
    vectors = -(-int(columns) // w)
    moved = vectors * (round(int(steps) / x.target.share(plan.rows, plan.vectors)) + w.bit_length() + 1)
    summed = int(columns) // axes.outputs * max(axes.outputs, INDEPENDENT_FMAS) * int(steps)
    if summed * GAIN[0] >= moved * w * GAIN[1]:
        return Declined("it has too many channels")
    return (extents[lane].ceildiv(w) + 1) * summed - extents[lane] * moved


class _NoVectorsError(Exception):
    """The kernel cannot be vectorised. Never leaves this file."""


def in_vectors(
    body: Body, first: str, lanes: int | None, width: int, registers: Callable[[Body, bool], Body]
) -> Body | Declined:
    """Turn the loop over lanes from element ``first`` on into a loop over vectors and a masked tail.

    ``lanes``: lanes of all tiles, if that is a number. ``registers``: lowers a tile; its second argument is True if not
    all lanes exist. Declined: the loop cannot be vectorised.
    """
    vectors = f"{first}_v"  # the lane of a group of channels: every tile begins with a vector
    if any(n % width for n in (TILE, *TILES)):
        raise CodegenError(f"tiles of {TILE} elements do not begin with vectors of {width}")
    (loop,) = substitute(body, {first: V(vectors) * width})
    assert isinstance(loop, For), "the tree has a loop over lanes"
    lowered = vectorise_loop(loop, width, 1)
    if isinstance(lowered, Declined):
        return lowered
    if lanes is not None:  # only whole vectors, or none
        lowered = tuple(n for n in lowered if (lanes >= width if isinstance(n, For) else lanes % width))

    def tile(n: Node) -> Node:
        assert isinstance(n, (For, If)), "full vectors and a tail"
        if isinstance(n, For):
            return replace(n, body=registers(n.body, False))
        return replace(n, then=registers(n.then, True))

    return (Let(vectors, V(first) // width, tuple(map(tile, lowered))),)


class WindowKernel(NestKernel):
    """Builds the kernel of a window over ``axes``."""

    def __init__(self, name: str, group: Group, axes: Axes, phases: dict[str, int], target: CpuTarget) -> None:
        self.axes = axes
        super().__init__(name, group, axes.band, phases, target, tiled=True)
        self.across = None

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        x = self.axes
        return window(self.group, self.prefix, self.phases, x.across, x.outputs, x.taps, x.planes)

    def build_vectors(self) -> Kernel | Declined:
        """Build the kernel; declined if its statements cannot be vectorised."""
        try:
            return self.build()
        except _NoVectorsError as e:
            return Declined(str(e))

    def _place(self, array: str) -> str:
        return "tile"

    def _cell(self, at: Mapping[str, Index]) -> Index:
        """Return the offset of an output's results in a buffer of the tile: a vector for each output."""
        origin = {x: self.schedule.map.origins[x].symbol for x in (LANES, OUTPUTS)}
        lane = (at[self.prefix[-1]] - origin[LANES]) % self.target.width
        return (at[self.axes.across] - origin[OUTPUTS]) * self.target.width + lane

    def lowering(self, s: Statement, again: bool = False) -> Lowering:
        """Return the lowering of a statement.

        Results of the tile are cells of a buffer until its loops are unrolled.
        """
        array = self.group.arrays[s.array]

        def f(a: Coordinates) -> Body:
            env = self.places.env(s.name, a)
            value = flat(self.group, s.value, env, lambda x: self._read_local(x, env))
            if array.role == "local":
                return (Store(s.array, self._cell(env), value, s.reduce),)
            address = array.address(tuple(i.subs(env) for i in s.index))
            return (Store(s.array, address, value, s.reduce, stream=V("stream") if self.streams else None),)

        return f

    def _read_local(self, x: Load, env: Mapping[str, Index]) -> Value | None:
        local = self.group.arrays[x.buffer].role == "local"
        return FlatLoad(x.dtype, x.buffer, self._cell(env)) if local else None

    @property
    def family(self) -> Family[NestForm]:
        """The tables of a window. No row is stored, so none is recomputed."""
        return WINDOW

    def opened(self) -> tuple[str, ...]:
        """Return the names that statements introduce: the starts of tiles, and the cells of the tile."""
        cells = (n for n, a in self.group.arrays.items() if a.role == "local")
        return ("stream", *(f"o_{x}" for x in self.schedule.map.origins), *cells)

    def vector_tile(self, body: Body) -> Body:
        """Vectorise the tile's loops, in registers."""
        first, lanes = self.schedule.map.origins[LANES].symbol, self.extents[self.prefix[-1]].constant
        vectors = in_vectors(body, first, lanes, self.target.width, self._registers)
        if isinstance(vectors, Declined):
            raise _NoVectorsError(str(vectors))
        body = vectors
        for x in self.schedule.map.origins:
            body = live_part(self.schedule, x, body)
        return body

    def _registers(self, body: Body, partial: bool) -> Body:
        whole = self.schedule.map.extents[OUTPUTS] % self.axes.outputs == ZERO
        locals_ = {n: a.dtype for n, a in self.group.arrays.items() if a.role == "local"}
        arrays, across = self.group.arrays, self.axes.across
        read = loads(self.group.backbone.value)
        apart = self.prefix[-1] if self.axes.alike else across
        moving = frozenset(r.buffer for r in read if apart in arrays[r.buffer].address(r.index).symbols())
        live = None if whole else V(extent(it(OUTPUTS)))
        unrolled = tuple(map(it, self.axes.unrolled))
        origin = self.schedule.map.origins[OUTPUTS].symbol
        tile = Window(it(OUTPUTS), self.axes.outputs, live, unrolled, locals_, moving, partial, origin)
        if self.axes.planes is None:
            return fold(specialise_guards(fold(body), tile))
        (loop,) = body
        assert isinstance(loop, For), "the tree has a loop over planes"
        return fold(hoist_choice(replace(loop, body=specialise_guards(fold(loop.body), tile))))

    def choices(self) -> Choices:
        """Return the sizes that a search may choose: outputs of a tile, elements of a task and of its planes."""
        x, extents = self.axes, dict(self.group.backbone.iters)
        most = MOST_TAPS // (product(extents[j] for j in x.unrolled).constant or 1)
        most = min(most, self.extents[x.across].constant or most)
        planes = {} if x.planes is None else {"planes": with_default(self._planes, PLANE_SIZES)}
        outputs = with_default(x.outputs, (n for n in OUTPUTS_OF_TILES if n <= most))
        return Choices({"outputs": outputs}, {"along": with_default(TILE, TILES)} | planes)

    def resized(self, name: str, built: Mapping[str, int]) -> WindowKernel:
        """Return the kernel under another name, with other build-time sizes."""
        axes = replace(self.axes, outputs=built.get("outputs", self.axes.outputs))
        return WindowKernel(name, self.group, axes, self.phases, self.target)

    def launched(self, sizes: Mapping[str, int]) -> dict[str, Index]:
        """Return ``launch`` with other sizes of a task."""
        launch = {**super().launch, f"P_{LANES}": V(sizes.get("along", TILE))}
        if self.axes.planes is None:
            return launch
        e = self.extents
        plane, count = e[self.axes.across] * e[self.prefix[-1]], e[self.axes.planes]
        several = minimum(sizes.get("planes", self._planes) // maximum(plane, 1), count // LEAST_SHARES)
        return launch | {f"P_{PLANES}": maximum(several, 1)}

    @property
    def launch(self) -> dict[str, Index]:
        """The values of the launch-time symbols, over the group's parameters."""
        return self.launched({})

    @property
    def _planes(self) -> int:
        """Elements of all planes of a task."""
        return self.target.core.floats // 16


def _opened(x: NestForm) -> tuple[str, ...]:
    assert isinstance(x.of, WindowKernel)
    return x.of.opened()


WINDOW = replace(NEST, marks=(), opened=_opened, stores=tuple(x for x in NEST.stores if x.name == "tile"))
