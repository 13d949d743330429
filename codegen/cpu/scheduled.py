"""The C kernel of any schedule: the result of a composition of transformations, without the passes of a kernel family.

Loops come from the tree, subscripts, extents and storage from the tile map. The code knows no purpose of a schedule.
Buffers are in scratch or on the stack, innermost loops become vectors if possible, and the rest follows the tree.
Schedules from notebooks run this way; compiled models use the kernels of families.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen import ir
from polydyn.codegen.cpu.emit import bound_names, emit
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.family import FOLD, Family, Rule, Variant, build
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import scratch_bytes
from polydyn.codegen.passes.tiles import TASK, tasks
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.codegen.pipeline import Step
from polydyn.codegen.scheduled import Instances
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import ONE, ZERO, Index, minimum
from polydyn.schedules.tree.names import MarkName, extent
from polydyn.schedules.tree.scheduled import Scheduled

STACK_ELEMENTS = 1024
"""Maximum elements of a buffer of constant size on the stack."""


class ScheduledKernel(Instances, Variant):
    """Builds the kernel of a scheduled group on a CPU. ScheduleError: as for ``Instances``."""

    def __init__(self, name: str, schedule: Scheduled, target: CpuTarget, sizes: Mapping[str, int] | None = None):
        super().__init__(schedule, sizes)
        self.name, self.target, self.notes = name, target, list[str]()

    def build(self) -> Kernel:
        """Build the kernel. CodegenError: a bug."""
        body, count = build(SCHEDULED, self)
        notes = tuple(dict.fromkeys(self.notes))
        return emit(
            Kernel(self.name, self.symbols, count, scratch_bytes(body), notes=notes), body, self.group.arrays, True
        )

    def counts(self) -> dict[str, Index]:
        """Return the numbers of steps of all loops."""
        return {extent(k): e.subs(self.sizes) for k, e in self.schedule.extents().items()}

    def vectorise(self, body: ir.Body) -> ir.Body:
        """Vectorise innermost loops of stores; the others stay scalar, with a note."""

        def f(n: ir.Node) -> ir.Node | ir.Body:
            if not isinstance(n, ir.For) or n.var == TASK or not all(isinstance(x, ir.Store) for x in n.body):
                return n
            vectors = vectorise_loop(n, self.target.width)
            if isinstance(vectors, Declined):
                self.notes.append(f"loop {n.var} is scalar: {vectors}")
                return n
            return vectors

        return ir.rewrite(body, f)

    def allocate(self, body: ir.Body) -> ir.Body:
        """Allocate all buffers, one after the other, for each thread."""
        for x in self.storage():
            size, dtype = self.elements(x), self.group.arrays[x.array].dtype
            small = size.constant is not None and size.constant <= STACK_ELEMENTS
            body = (ir.Alloc(x.name, dtype, size, "stack" if small else "scratch", body),)
        return body


def only_tasks(body: ir.Body) -> ir.Body:
    """Put the parallel loops under the task mark, and remove all other marks."""
    return (ir.Mark(MarkName.TASK, ir.rewrite(body, lambda n: n.body if isinstance(n, ir.Mark) else n)),)


def trim(body: ir.Body) -> ir.Body:
    """Move guards of a loop's whole body outside, or into the loop's end if they bound its variable."""

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
                hi = minimum(hi, -right)
            else:
                inside.append(c)
        loop = ir.For(n.var, n.lo, hi, (ir.If(tuple(inside), guard.then),) if inside else guard.then, n.kind)
        return ir.If(tuple(outside), (loop,)) if outside else loop

    return ir.rewrite(body, f)


TRIM = Step("trim", "guards become bounds of loops", trim)
SCHEDULED: Family[ScheduledKernel] = Family(
    names=bound_names,
    sizes=ScheduledKernel.counts,
    marks=(Rule("marks", "only the task mark remains", lambda _, body: only_tasks(body)),),
    statements=ScheduledKernel.lowerings,
    opened=lambda x: tuple(buffer.name for buffer in x.storage()),
    band=lambda *_: (Step("tasks", "the coincident band becomes a range of tasks", tasks), TRIM, FOLD),
    around=(
        Rule("vectorise", "innermost loops become vectors", ScheduledKernel.vectorise),
        Rule("storage", "buffers around all tasks", ScheduledKernel.allocate),
    ),
)
