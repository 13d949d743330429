"""The CUDA kernel of any schedule that assigns blocks and threads, without the passes of a kernel family.

Loops of tasks are blocks, loops of units threads. Data that only one thread accesses stays in its registers. Data that
copies of a whole block write is in shared memory; all threads copy it between two barriers. The rest follows the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.codegen.cpu.scheduled import only_tasks, trim_step
from polydyn.codegen.cuda.emit import bound_names, emit
from polydyn.codegen.cuda.sharing import blocks_step
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Alloc, Body, Call, Compare, For, If, Inst, Mark, Node, walk
from polydyn.codegen.kernel import Block, Kernel
from polydyn.codegen.passes.bind import bind
from polydyn.codegen.passes.threads import WARP
from polydyn.codegen.scheduled import Instances
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike
from polydyn.schedules.tree.names import Coord, extent
from polydyn.schedules.tree.scheduled import Buffer, Scheduled
from polydyn.schedules.tree.space import UNIT
from polydyn.schedules.tree.tilemap import Digit

V = Index.of
MOST_THREADS = 1024
"""Maximum threads of a block."""
PART_LOOP = "turn"
"""The loop of a thread over its part of a copy."""


class ScheduledCudaKernel(Instances, Variant):
    """Builds the kernel of a scheduled group for CUDA.

    ScheduleError: as for ``Instances``; no loops are units, or their number is not a multiple of 32 up to 1024; a
    statement of the group runs outside of them; a buffer in shared memory has no constant size.
    """

    units = True

    def __init__(self, name: str, schedule: Scheduled, sizes: Mapping[str, int] | None = None) -> None:
        super().__init__(schedule, sizes)
        self.name = name
        self.of_units = tuple(k for level, ks in schedule.parallel if level == UNIT for k in ks)
        self.extents = {k: e.subs(self.sizes) for k, e in schedule.extents().items()}
        self.threads = self._threads()
        statements = {s.name for s in self.group.statements}
        alone = [n for n, w in schedule.map.views.items() if not all(w.loop(k) for k in self.of_units)]
        self.copies = frozenset(alone) - statements
        if outside := sorted(set(alone) & statements):
            raise ScheduleError(
                f"{', '.join(outside)} run outside the units {[str(k) for k in self.of_units]}",
                rule="schedules without a kernel family", remedy="give them these loops; copies may be a whole block's",
            )  # fmt: skip

    def _threads(self) -> int:
        first = self.schedule.parallel[:1]
        if not self.of_units or not first or first[0][0] == UNIT:
            raise ScheduleError(
                "no loops of tasks and then of units are assigned", rule="blocks and threads",
                remedy="assign(assign(t, 'task', ...), 'unit', ...)",
            )  # fmt: skip
        number = ONE
        for k in self.of_units:
            number = number * self.extents[k]
        n = number.constant
        if n is None or n % WARP or not 0 < n <= MOST_THREADS:
            raise ScheduleError(
                f"{number} threads of a block", rule="blocks and threads",
                remedy=f"a multiple of {WARP} up to {MOST_THREADS}, as a number",
            )  # fmt: skip
        return n

    def _shared(self, buffer: Buffer) -> bool:
        """Whether copies of the whole block access the buffer."""
        return any(f.buffer == buffer.name and f.statement in self.copies for f in self.schedule.flow)

    def apart(self, buffer: Buffer) -> frozenset[Digit]:
        """Return the digits along which each thread has its own copy, if no copy of the block accesses the buffer."""
        if self._shared(buffer):
            return frozenset()
        views = self.schedule.map.views.values()
        return frozenset(d for w in views for x in w.loops if x.coord in self.of_units for d in x.digits)

    # -- passes ----------------------------------------------------------------------------------------------------

    def fence_copies(self, body: Body) -> Body:
        """Distribute copies of a whole block over its threads, between barriers."""
        out: Body = ()
        for n in body:
            met = {x.statement for x in walk((n,)) if isinstance(x, Inst)}
            if met and met <= self.copies:
                out += (Call("pd_syncthreads"), self._deal(n), Call("pd_syncthreads"))
            elif isinstance(n, (For, Mark)):
                out += (replace(n, body=self.fence_copies(n.body)),)
            elif isinstance(n, If):
                out += (replace(n, then=self.fence_copies(n.then), orelse=self.fence_copies(n.orelse)),)
            else:
                out += (n,)
        return out

    def _deal(self, n: Node) -> Node:
        """Distribute the outermost loop of a nest over the threads. One thread executes a node without a loop."""
        tid = V("tid")
        if not isinstance(n, For):
            return If((Compare("==", tid, ZERO),), (n,))
        at = n.lo + V(PART_LOOP) * self.threads + tid
        inside = If((Compare("<", at, n.hi),), substitute(n.body, {n.var: at}))
        return For(PART_LOOP, ZERO, (n.hi - n.lo).ceildiv(self.threads), (inside,))

    def allocate(self, body: Body) -> Body:
        """Allocate registers of a thread and shared memory of the block."""
        for x in self.storage():
            size, dtype = self.elements(x), self.group.arrays[x.array].dtype
            if size.constant is None:
                raise ScheduleError(
                    f"{x.name} has {size} elements", tensor=x.name, rule="schedules without a kernel family",
                    remedy="storage of a block or a thread is a number: tile what it holds",
                )  # fmt: skip
            body = (Alloc(x.name, dtype, size, "shared" if self._shared(x) else "register", body),)
        return body

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths; the last one serves every size. CodegenError: a bug."""
        body, count = build(SCHEDULED, self)
        limits: dict[str, IndexLike] = {k: e for k, e in self.extents.items() if e.constant is None}
        limits |= {"task": count, PART_LOOP: 1 << 20}
        kernel = Kernel(self.name, self.symbols, count, version="by hand", block=Block(self.threads))
        return emit(kernel, bind(body, {}), self.group.arrays, limits)

    def numbers(self, body: Body) -> Body:
        """Bind the steps of all loops. They are not folded: a copy of one step is distributed too."""
        counts = {extent(k): e for k, e in self.extents.items()}
        return substitute(body, counts | {n: e.subs(self.sizes) for n, e in self.schedule.parameters().items()})

    def units_of_threads(self) -> dict[str, Index]:
        """Return the value of each loop of units in a thread; the last one runs fastest."""
        out: dict[str, Index] = {}
        rest = V("tid")
        for k in reversed(self.of_units[1:]):
            out[k], rest = rest % self.extents[k], rest // self.extents[k]
        first: Coord = self.of_units[0]
        return out | {first: rest}


SCHEDULED: Family[ScheduledCudaKernel] = Family(
    names=bound_names,
    first=(
        Rule("bind", "sizes become numbers", ScheduledCudaKernel.numbers),
        Rule("marks", "only the task mark remains", lambda _, body: only_tasks(body)),
        Rule("copies", "copies of a block are distributed over its threads", ScheduledCudaKernel.fence_copies),
    ),
    units=ScheduledCudaKernel.units_of_threads,
    statements=ScheduledCudaKernel.lowerings,
    opened=lambda x: tuple(buffer.name for buffer in x.storage()),
    band=lambda x, _: (blocks_step(x.sharing), trim_step()),
    around=(Rule("storage", "buffers of threads and blocks", ScheduledCudaKernel.allocate),),
)
