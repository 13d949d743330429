"""CUDA kernels of windows whose outputs share inputs: depthwise convolutions and poolings, channels last.

A thread has a vector of adjacent channels and a few outputs of the outermost iterator along which the window moves:
image rows. The inputs of an image row are loaded once for all of them, into registers. Adjacent threads have adjacent
pixels of an image row, so the common inputs of their windows come from L1. Threads with different image rows would
share nothing, because a block seldom has several. So the outputs of a thread are on different image rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from polydyn.codegen import ir
from polydyn.codegen.cuda.emit import bound_names, emit
from polydyn.codegen.cuda.work import bounded_registers, points, vectors, window_work
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.indices import substitute
from polydyn.codegen.kernel import Block, Kernel, Work
from polydyn.codegen.lower import Lowering, flat
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.registers import unroll
from polydyn.codegen.passes.tiles import tasks
from polydyn.codegen.passes.widen import Multiples, widen
from polydyn.codegen.pipeline import Step
from polydyn.codegen.places import Coordinates, Places
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import FLOATS, ITEMSIZE, Const, FromIndex, Load, Op, Value, loads
from polydyn.schedules.group.footprint import together
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike
from polydyn.schedules.model import Group, Statement, stored
from polydyn.schedules.proof.obligations import vectors_inside
from polydyn.schedules.proof.proven import Obligation
from polydyn.schedules.tree.names import Coord, MarkName, b, extent, it
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.windows import LANES, OUTPUTS, window

THREADS, MOST_LANES = 256, 8
MOST_OUTPUTS, MOST_TAPS = 4, 64
"""Maximum outputs of a thread; maximum unrolled taps of all its outputs."""
MAX_DATA_REGISTERS = 72
"""Maximum registers of sums and loads in flight for which two blocks fit an SM without spills."""
V = Index.of


NO_WINDOW = Declined("it is not one reduction over a window of known size, and maps of its results")


@dataclass(frozen=True)
class Axes:
    """The axes of a window kernel.

    ``across``: the iterator of a thread's outputs, of which it has ``outputs``; ``taps``: the window's iterators, the
    last of which moves along ``across``.
    """

    across: str
    outputs: int
    taps: tuple[str, ...]


def window_axes(group: Group, band: tuple[str, ...]) -> Axes | Declined:
    """Match one reduction over a window of constant nonzero size, and maps of its result; return its axes.

    Declined unless outputs read common elements. ``band``: the shared iterators; vectors run along the last one.
    """
    cores = [s for s in group.statements if s.reduce]
    if len(cores) != 1 or len(band) < 2 or cores[0].reduce not in ("sum", "max", "min"):
        return NO_WINDOW
    (core,) = cores
    taps, extents = core.iterators[len(band) :], dict(core.iters)
    maps = all(s.iterators == band for s in group.statements if s is not core)
    if not taps or not maps or core.iterators[: len(band)] != band or not all(extents[x].constant for x in taps):
        return NO_WINDOW
    found: dict[Axes, Fraction] = {}
    for across in band[:-1]:
        for tap in taps:
            outputs = _outputs(extents[across].constant, int(extents[tap]))
            if outputs > 1 and (share := _share(group, core, across, tap, outputs)) < 1:
                found[Axes(across, outputs, (*(j for j in taps if j != tap), tap))] = share
    return min(found, key=lambda x: found[x]) if found else Declined("its outputs read no common elements")


def _outputs(most: int | None, taps: int) -> int:
    """Return the outputs of a thread: for a known number of rows, as many as leave few idle."""
    count = min(MOST_OUTPUTS, MOST_TAPS // taps)
    return count if not most or not count else -(-most // -(-most // count))


def _share(group: Group, core: Statement, across: str, tap: str, outputs: int) -> Fraction:
    """Return the ratio of the distinct elements that adjacent outputs read to the sum of each output's elements.

    It is 1 if they have none in common, or if more than one tensor moves along with them.
    """
    found = [group.arrays[x.buffer].address(x.index) for x in set(loads(core.value))]
    moving = [a for a in found if across in a.symbols()]
    step = together(moving[0].split(tap)[0], moving[0].split(across)[0]) if len(moving) == 1 else None
    if step is None:
        return Fraction(1)
    count = int(dict(core.iters)[tap])
    return Fraction(len({u + step * j for u in range(outputs) for j in range(count)}), outputs * count)


class CudaWindowKernel(Variant):
    """Builds the kernels of a window over ``axes``: the reduction of ``group`` has its iterators in their order.

    ``version``: the name of the kernels; ``threads``: threads of a block; ``sides``: the axes of a thread's tile.
    """

    version, threads = "window", THREADS
    sides: tuple[str, ...] = (LANES, OUTPUTS)

    def __init__(self, name: str, group: Group, prefix: tuple[str, ...], phases: Mapping[str, int], axes: Axes) -> None:
        self.name, self.group, self.prefix, self.phases = f"{name}_{self.version}", group, prefix, phases
        self.axes, self.extents = axes, dict(group.backbone.iters)
        outputs = [a for a in group.arrays.values() if a.role == "output"]
        self.lanes = min(MOST_LANES, 16 // max(ITEMSIZE[a.dtype] for a in outputs))
        self.alignments: list[Multiples] = []

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        x = self.axes
        return window(self.group, self.prefix, dict(self.phases), x.across, x.outputs, x.taps)

    @cached_property
    def places(self) -> Places:
        """The coordinates of instances."""
        return Places(self.schedule)

    def obligations(self) -> tuple[Obligation, ...]:
        """Loops inside the band may run as vectors."""
        return (vectors_inside(self.group, self.prefix, self.phases),)

    def versions(self) -> tuple[Kernel, ...]:
        """Build the kernel with indices of both widths; return nothing if results cannot be stored as vectors."""
        along = self.extents[self.prefix[-1]]
        if self.lanes == 1 or (along.constant or 0) % self.lanes:
            return ()
        self.alignments.clear()
        body, count = build(self.family, self)
        if not self.alignments:
            return ()
        multiples = dict.fromkeys((*(((along, self.lanes),) if along.constant is None else ()), *self.alignments[0]))
        tiles = {b(x): self.schedule.map.extents[x] for x in self.sides}
        limits = {x: self.extents[x] for x in self.prefix} | tiles | {"task": count + self.threads}
        blocks = self._blocks(body)
        work = self._work(body, bounded_registers(self.threads, blocks))
        kernel = Kernel(self.name, self.symbols, count.ceildiv(self.threads), version=self.version,
                        multiples=tuple(multiples), block=Block(self.threads, work=work))  # fmt: skip
        return emit(kernel, body, self.group.arrays, limits, blocks)

    @property
    def family(self) -> Family[Any]:
        """The tables of the kernel."""
        return WINDOW

    def sizes(self) -> dict[str, IndexLike]:
        """Return the numbers of tiles, and of lanes."""
        sizes: dict[str, IndexLike] = {extent(b(x)): self._tiles(x) for x in self.sides}
        return sizes | {extent(it(LANES)): self.lanes}

    def origins(self, body: ir.Body) -> ir.Body:
        """Bind the starts of a tile."""
        return substitute(body, {self.schedule.map.origins[x].symbol: self._first(x) for x in self.sides})

    def opened(self) -> tuple[str, ...]:
        """Return the names that statements introduce: the starts of tiles, and the cells of a tile."""
        return (*(str(self.schedule.map.origins[x].symbol) for x in self.sides), *self._arrays())

    def threads_step(self, count: Index) -> tuple[Step, ...]:
        """Return the step that makes each thread a task. Adjacent threads have adjacent vectors, pixels, tiles."""
        task = V("bid") * self.threads + V("tid")
        names = self._blocked()
        order = (*(names.get(x, it(x)) for x in self.prefix[:-1]), b(LANES))

        def threads(body: ir.Body) -> ir.Body:
            return bind(tasks(body, order=order), {"begin": task, "end": task + 1})

        return (
            Step("tasks", "a thread is a task", threads),
            Step("guard", "the last block has fewer tasks", lambda x: (ir.If((ir.Compare("<", task, count),), x),)),
        )

    def _tiles(self, axis: str) -> Index:
        """Return the number of tiles along an axis."""
        return self.extents[self.prefix[-1]] // self.lanes if axis == LANES else self.schedule.extents()[b(axis)]

    def _size(self, axis: str) -> int:
        """Return the elements of a tile along an axis."""
        return self.lanes if axis == LANES else self.axes.outputs

    def _first(self, axis: str) -> Index:
        """Return the start of a tile; a single tile has no loop."""
        return ZERO if self._tiles(axis) == ONE else V(b(axis)) * self._size(axis)

    def _blocked(self) -> dict[str, Coord]:
        """Return the loops over tiles of the band's iterators, except of the last one."""
        return {self.axes.across: b(OUTPUTS)}

    def _blocks(self, body: ir.Body) -> int:
        """Return the targeted blocks per multiprocessor, from the registers for sums and concurrent loads."""
        loaded = [ITEMSIZE[x.dtype] for x in vectors(body, "pd_ldg_wide")]
        return 2 if self.lanes * self.axes.outputs + sum(loaded) * self.lanes // 4 <= MAX_DATA_REGISTERS else 1

    def _work(self, body: ir.Body, registers: int) -> Work:
        return window_work(self.group, self._box(), body, self.threads, self.lanes, registers)

    def _box(self) -> dict[str, int]:
        """Return the outputs of a block: iterator of the band -> count."""
        x = self.axes
        others = tuple(y for y in self.prefix if y != x.across)
        return points(self.group.backbone, others, THREADS * self.lanes) | {x.across: x.outputs}

    def lowering(self, s: Statement) -> Lowering:
        """Return the lowering of a statement; results of the tile are cells of an array."""
        array = self.group.arrays[s.array]

        def f(a: Coordinates) -> ir.Body:
            env = self.places.env(s.name, a)
            value = flat(self.group, s.value, env, lambda x: self._local(x, a))
            if array.role == "local":
                return (ir.Store(s.array, self._cell(a), value, s.reduce),)
            return (ir.Store(s.array, array.address(tuple(i.subs(env) for i in s.index)), value, s.reduce),)

        return f

    def _local(self, x: Load, a: Coordinates) -> Value | None:
        local = self.group.arrays[x.buffer].role == "local"
        return ir.FlatLoad(x.dtype, x.buffer, self._cell(a)) if local else None

    def _cell(self, a: Coordinates) -> Index:
        """Return the offset of an output's result in the tile: a vector for each output."""
        return a[it(OUTPUTS)] * self.lanes + a[it(LANES)]

    def outputs(self, body: ir.Body) -> ir.Body:
        """Guard each output of a tile by its bounds check, because the last tile may be partial."""
        x, whole = self.axes, self.schedule.map.extents[OUTPUTS]
        first = self._first(OUTPUTS)

        def every(n: ir.Node) -> ir.Node:
            if not (isinstance(n, ir.For) and n.var == it(OUTPUTS)):
                return n
            exists = ir.Compare("<", first + n.var, whole)
            asked: ir.Body = n.body if whole % x.outputs == ZERO else (ir.If((exists,), n.body),)
            return replace(n, hi=V(x.outputs), body=asked)

        body = unroll(ir.rewrite(body, every), (it(OUTPUTS), it(x.taps[-1])))
        return asked_once(body, stored(self.group.arrays), first)

    def tile(self, body: ir.Body) -> ir.Body:
        """Turn the loop over lanes into vectors, with the cells of the tile around it."""
        (lanes,) = body
        assert isinstance(lanes, ir.For), "the tree has a loop over lanes"
        names = (*self.prefix, *map(b, self.sides), it(LANES))
        made = widen(lanes.body, it(LANES), self.lanes, stored(self.group.arrays), names)
        if made is None:
            return body
        self.alignments.append(made[1])
        out = made[0]
        for n, (dtype, count) in self._arrays().items():
            out = (ir.Alloc(n, dtype, V(self.lanes * count), "register", out),)
        return out

    def _arrays(self) -> dict[str, tuple[str, int]]:
        """Return the register arrays of a thread: name -> (dtype, vectors)."""
        return {n: (a.dtype, self.axes.outputs) for n, a in self.group.arrays.items() if a.role == "local"}


def asked_once(body: ir.Body, buffers: Collection[str], first: Index) -> ir.Body:
    """Load each element once, under the bounds check of the first output that reads it.

    Before: straight-line statements, each guarded by ``first + u < n`` for its output u. Results of the tile lose the
    check: the loads have that of the first output that reads an element. If it does not exist, no later output does.
    The first output of a tile always exists. Stores to memory keep their check.
    """
    body = tuple(ir.with_bodies(n, tuple(asked_once(x, buffers, first) for x in ir.bodies(n))) for n in body)
    kept = [n for n in body if isinstance(n, ir.If) and not any(_is_stored(x, buffers) for x in n.then)]
    readers: dict[Value, ir.Compare] = {}
    for n in kept:
        for v in (v for x in n.then if isinstance(x, ir.Store) for v in read_of_memory(x.value, buffers)):
            before = readers.setdefault(v, n.cond[0])
            readers[v] = min(before, n.cond[0], key=lambda c: int(c.left - first))
    table = {v: guarded(v, c) for v, c in readers.items() if c.left != first}
    return tuple(x for n in body for x in (_with(n.then, table) if isinstance(n, ir.If) and n in kept else (n,)))


def _is_stored(n: ir.Node, buffers: Collection[str]) -> bool:
    return isinstance(n, ir.Store) and n.buffer in buffers


def read_of_memory(v: Value, buffers: Collection[str]) -> Iterator[Value]:
    """Yield the loads of a value from memory, each with the choice that contains it."""
    if isinstance(v, ir.FlatLoad) and v.buffer in buffers:
        yield v
    elif isinstance(v, Op):
        inside = [x for a in v.args for x in read_of_memory(a, buffers)]
        yield from [v] if inside and v.name == "where" else inside


def guarded(v: Value, exists: ir.Compare) -> Value:
    """Guard a read by the existence of an output that reads it."""
    asked = Op("bool", "lt", (FromIndex("int64", exists.left), FromIndex("int64", exists.right)))
    if isinstance(v, Op):
        choice, *values = v.args
        return replace(v, args=(Op("bool", "and", (asked, choice)), *values))
    return Op(v.dtype, "where", (asked, v, Const(v.dtype, 0.0 if v.dtype in FLOATS else 0)))


def _with(body: ir.Body, table: Mapping[Value, Value]) -> ir.Body:
    return tuple(
        replace(n, value=ir.map_value(n.value, lambda v: table.get(v, v))) if isinstance(n, ir.Store) else n
        for n in body
    )


WINDOW: Family[CudaWindowKernel] = Family(
    names=bound_names,
    sizes=CudaWindowKernel.sizes,
    statements=lambda x: {s.name: x.lowering(s) for s in x.group.statements},
    opened=CudaWindowKernel.opened,
    stores=(
        Rule("origin", "the start of a tile", CudaWindowKernel.origins),
        Rule("outputs", "all outputs of a tile and their taps are unrolled", lambda x, body: x.outputs(body)),
        Rule("widen", "adjacent elements become a vector", lambda x, body: x.tile(body), MarkName.TILE),
    ),
    band=lambda x, count: x.threads_step(count),
)
