"""The C kernel of any schedule: the result of a composition of transformations, without the passes of a kernel family.

Loops come from the tree, subscripts, extents and storage from the tile map. The code knows no purpose of a schedule.
Buffers are in scratch or on the stack, innermost loops become vectors if possible, and the rest follows the tree.
Schedules from notebooks run this way; compiled models use the kernels of families.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from polydyn.codegen import ir
from polydyn.codegen.cpu.emit import bound_names, emit
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.family import FOLD, Family, Rule, Variant, build
from polydyn.codegen.indices import node_buffers
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import scratch_bytes
from polydyn.codegen.passes.register_tiles import tile_in_registers
from polydyn.codegen.passes.registers import partial_unroll
from polydyn.codegen.passes.segments import vectorise
from polydyn.codegen.passes.tiles import TASK, tasks
from polydyn.codegen.pipeline import Step
from polydyn.codegen.scheduled import Instances
from polydyn.schedules.errors import Declined, ScheduleError
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum
from polydyn.schedules.tree.names import Coord, MarkName, extent
from polydyn.schedules.tree.scheduled import Buffer, Scheduled
from polydyn.schedules.tree.tilemap import Loop

STACK_ELEMENTS = 1024
"""Maximum elements of a buffer of constant size on the stack."""


class ScheduledKernel(Instances, Variant):
    """Builds the kernel of a scheduled group on a CPU. ScheduleError: as for ``Instances``."""

    evens = True

    def __init__(
        self, name: str, schedule: Scheduled, target: CpuTarget, sizes: Mapping[str, int] | None = None,
        unrolled: Mapping[Coord, int] | None = None, vectors: Sequence[Coord] = (),
    ) -> None:  # fmt: skip
        """``unrolled``: loop -> number of steps to unroll, 0 for all. ``vectors``: loops that must become vectors."""
        super().__init__(schedule, sizes)
        self.name, self.target, self.notes = name, target, list[str]()
        self.unrolled, self.vectors = dict(unrolled or {}), tuple(vectors)

    def build(self) -> Kernel:
        """Build the kernel. ScheduleError: a loop does not become vectors. CodegenError: a bug."""
        body, count = build(SCHEDULED, self)
        notes = tuple(dict.fromkeys(self.notes))
        return emit(
            Kernel(self.name, self.symbols, count, scratch_bytes(body), notes=notes), body, self.group.arrays, True
        )

    @property
    def deep(self) -> frozenset[Coord]:
        """The loops inside tiles of tiles."""
        t = self.schedule
        every = [x for w in t.map.views.values() for x in w.loops if x.digits]
        return frozenset(x.coord for x in every if t.map.axes[x.digits[0].axis].index(x.digits[0]) > 1)

    def counts(self) -> dict[str, Index]:
        """Return the numbers of steps of all loops."""
        return {extent(k): e.subs(self.sizes) for k, e in self.schedule.extents().items()}

    def tiles(self, body: ir.Body) -> ir.Body:
        """Unroll loops, and keep the buffers of unrolled tiles in registers. A note says why one stays in memory."""
        for loop, factor in self.unrolled.items():
            body = partial_unroll(body, loop, factor) if factor else body
        whole = {x for x, factor in self.unrolled.items() if not factor}
        loops = {x.coord: x for w in self.schedule.map.views.values() for x in w.loops}
        for buffer in self.storage():
            using = [x.statement for x in self.schedule.flow if x.buffer == buffer.name]
            cells = {
                x.coord for n in using for x in self.schedule.view(n).loops
                if not x.at and not set(x.digits) <= buffer.fixed and x.digits[0].axis in buffer.axes
            }  # fmt: skip
            if not cells & whole:
                continue
            made = self._in_registers(body, buffer, cells, whole, loops)
            if isinstance(made, Declined):
                self.notes.append(f"{buffer.name} is in memory: {made}")
            else:
                body = made
        return body

    def _in_registers(
        self, body: ir.Body, buffer: Buffer, cells: set[Coord], whole: set[Coord], loops: Mapping[Coord, Loop]
    ) -> ir.Body | Declined:
        """Keep a buffer in registers. ``cells``: the loops over its cells; ``whole``: those that are unrolled."""
        if rest := sorted(cells - whole):
            return Declined(f"loop {rest[0]} is not unrolled")
        sizes = {n: loops[n].extent.subs(self.sizes).constant for n in whole if n in loops}
        steps = {str(n): size for n, size in sizes.items() if size is not None}
        carried = {x.loop for x in self.schedule.carried if x.register == buffer.name}
        outer = [n for n, x in loops.items() if set(x.digits) <= buffer.fixed or n in carried] + [TASK]
        vector = next((x for x in self.vectors if x in steps), "")
        dtype = self.group.arrays[buffer.array].dtype
        return tile_in_registers(
            body, buffer.name, dtype, outer, steps, vector, self.target.width, f"{self.name}_{buffer.name}"
        )  # fmt: skip

    def vectorise(self, body: ir.Body) -> ir.Body:
        """Vectorise innermost loops of stores; the others stay scalar, with a note."""

        def f(n: ir.Node) -> ir.Node | ir.Body:
            if not isinstance(n, ir.For) or n.var == TASK or not all(isinstance(x, ir.Store) for x in n.body):
                return n
            before, loop, after = _sums_in_registers(n)
            vectors = vectorise(loop, self.target.width)
            if isinstance(vectors, Declined) and n.var in self.vectors:
                remedy = "constants may lie in panels of other widths (pack), or their loops in another order (reorder)"
                reason = f"loop {n.var} does not become vectors: {vectors.reason}"
                raise ScheduleError(reason, dim=n.var, rule="vectorize", remedy=remedy)
            if isinstance(vectors, Declined):
                self.notes.append(f"loop {n.var} is scalar: {vectors}")
                return n
            return (*before, *vectors, *after)

        return ir.rewrite(body, f)

    def allocate(self, body: ir.Body) -> ir.Body:
        """Allocate all buffers, one after the other, for each thread."""
        for x in self.storage():
            size, dtype = self.elements(x), self.group.arrays[x.array].dtype
            small = size.constant is not None and size.constant <= STACK_ELEMENTS
            body = (ir.Alloc(x.name, dtype, size, "stack" if small else "scratch", body),)
        return body


def _sums_in_registers(loop: ir.For) -> tuple[ir.Body, ir.For, ir.Body]:
    """Return a loop of stores that sums in registers what it summed in memory, with the nodes before and after it."""
    used = Counter(x for n in loop.body for x in node_buffers(n))
    used.update(x.buffer for n in loop.body if isinstance(n, ir.Store) for x in ir.walk_value(n.value)
                if isinstance(x, ir.FlatLoad))  # fmt: skip
    before, body, after = list[ir.Node](), list[ir.Node](), list[ir.Node]()
    for n in loop.body:
        alone = isinstance(n, ir.Store) and n.reduce and used[n.buffer] == 1 and loop.var not in n.address.symbols()
        if not alone or not isinstance(n, ir.Store):
            body.append(n)
            continue
        name, dtype = f"{n.buffer}_{loop.var}", n.value.dtype
        before.append(ir.Def(name, ir.FlatLoad(dtype, n.buffer, n.address)))
        body.append(ir.Set(name, n.value, 1, n.reduce))
        after.append(ir.Store(n.buffer, n.address, ir.Reg(dtype, name)))
    return tuple(before), replace(loop, body=tuple(body)), tuple(after)


def only_tasks(body: ir.Body) -> ir.Body:
    """Put the parallel loops under the task mark, and remove all other marks."""
    return (ir.Mark(MarkName.TASK, ir.rewrite(body, lambda n: n.body if isinstance(n, ir.Mark) else n)),)


def trim(body: ir.Body, deep: Collection[str] = ()) -> ir.Body:
    """Move guards of a loop's whole body outside, or into the loop's end if they bound its variable.

    ``deep``: loops inside tiles of tiles. A tile beyond the last element has a negative number of steps of theirs.
    """

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if not (isinstance(n, ir.For) and len(n.body) == 1 and isinstance(n.body[0], ir.If) and not n.body[0].orelse):
            return n
        guard, hi = n.body[0], n.hi
        outside: list[ir.Compare] = []
        inside: list[ir.Compare] = []
        for c in guard.cond:
            left, right = (c.left - c.right).split(n.var)
            if c.relation != "<" or n.var in left.symbols() or n.var in right.symbols():
                inside.append(c)
            elif left == ZERO:
                outside.append(c)
            elif left == ONE:
                hi = minimum(hi, maximum(ZERO, -right) if n.var in deep else -right)
            else:
                inside.append(c)
        loop = ir.For(n.var, n.lo, hi, (ir.If(tuple(inside), guard.then),) if inside else guard.then, n.kind)
        return ir.If(tuple(outside), (loop,)) if outside else loop

    return ir.rewrite(body, f)


def trim_step(deep: Collection[str] = ()) -> Step:
    """Return the step of ``trim``."""
    return Step("trim", "guards become bounds of loops", lambda body: trim(body, deep))


def _band(kernel: ScheduledKernel, _: Index) -> tuple[Step, ...]:
    """Return the steps that make tasks and exact loops."""
    return Step("tasks", "the coincident band becomes a range of tasks", tasks), trim_step(kernel.deep), FOLD


SCHEDULED: Family[ScheduledKernel] = Family(
    names=bound_names,
    sizes=ScheduledKernel.counts,
    marks=(Rule("marks", "only the task mark remains", lambda _, body: only_tasks(body)),),
    statements=ScheduledKernel.lowerings,
    opened=lambda x: tuple(buffer.name for buffer in x.storage()),
    band=_band,
    around=(
        Rule("tiles", "sums of unrolled tiles are in registers", ScheduledKernel.tiles),
        Rule("vectorise", "innermost loops become vectors", ScheduledKernel.vectorise),
        Rule("storage", "buffers around all tasks", ScheduledKernel.allocate),
    ),
)
