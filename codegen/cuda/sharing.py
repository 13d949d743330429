"""Split-K inside one kernel: the blocks of a task add their sums through a workspace, or as a cluster.

``Counted``: each block stores its sums in the workspace and increments an arrival counter. The last block to arrive
reads the sums of all. Counters wrap around to 0. ``Cluster``: blocks read each other's shared memory (sm_90a).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from polydyn.codegen.ir import Apply, Body, Compare, Def, If, Let, Pointer
from polydyn.codegen.kernel import COUNTERS, MOST_COUNTERS, WORKSPACE, Kernel, Work
from polydyn.codegen.passes.threads import one_each
from polydyn.codegen.passes.warpgroups import CLUSTER_BARRIER
from polydyn.codegen.pipeline import Step
from polydyn.codegen.sharing import Sharing
from polydyn.schedules.expr import ITEMSIZE, const
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, row_major
from polydyn.schedules.tree.names import c

V = Index.of
FIXUP_LATENCIES = 4
"""Memory latencies at the end of a counted block: store the sums, count, load the sums, store the results."""
K_SLICE = c("k")
"""The loop over the blocks of a task."""
RANK = "rank"
"""The number of a block in its task."""
IS_LAST_BLOCK = "come"
"""Register set by ``Counted.meet``: 1 in the last block of a split-K task, 0 in the others."""


@dataclass(frozen=True)
class Counted(Sharing):
    """``parts`` consecutive blocks share a task. Each stores ``elements`` sums of ``dtype`` in the workspace."""

    elements: int = field(kw_only=True)
    dtype: str = field(kw_only=True)
    word: ClassVar[str] = "counted"
    buffers: ClassVar[tuple[str, ...]] = (WORKSPACE, COUNTERS)

    def meet(self) -> Body:
        """Count one arrival."""
        counter = Pointer("uint32", COUNTERS, V("bid") // self.parts)
        return (Def(IS_LAST_BLOCK, Apply("int32", "pd_last_block", (counter, const(self.parts, "int32")))),)

    def finish(self, body: Body) -> Body:
        """Run the epilogues in the last block of a task."""
        return (If((Compare("==", V(IS_LAST_BLOCK), V(1)),), body),)

    def arrays(self, tasks: Index) -> dict[str, Array]:
        """Return the workspace and the counters."""
        sizes = ((WORKSPACE, self.dtype, self._sums(tasks)), (COUNTERS, "uint32", V(MOST_COUNTERS)))
        return {n: Array(n, dtype, (x,), "output", row_major((x,))) for n, dtype, x in sizes}

    def launched(self, kernel: Kernel) -> Kernel:
        """Return the kernel with its workspace, for launches with a counter for each task."""
        few = Compare("<=", kernel.tasks, V(MOST_COUNTERS))
        size = self._sums(kernel.tasks) * ITEMSIZE[self.dtype]
        return super().launched(replace(kernel, conditions=(*kernel.conditions, few), workspace=size))

    def work(self, work: Work) -> Work:
        """Add the stores of ``work.elements`` sums, and the loads of the sums of all blocks."""
        moved = (1 + self.parts) * work.elements * ITEMSIZE[self.dtype]
        return replace(work, ends=FIXUP_LATENCIES, results=work.results + moved)

    def _sums(self, tasks: Index) -> Index:
        return tasks * (self.parts * self.elements)


@dataclass(frozen=True)
class Cluster(Sharing):
    """The blocks of a cluster share a task. Each finishes a part of its results."""

    word: ClassVar[str] = "cluster"
    cluster: ClassVar[bool] = True

    def meet(self) -> Body:
        """Wait for the blocks of the cluster."""
        return CLUSTER_BARRIER


def blocks_step(sharing: Sharing) -> Step:
    """Return the step that maps each task to a block, or to the blocks that share it.

    The blocks of a cluster wait for each other before they exit, because they read each other's shared memory.
    """
    if sharing.parts == 1:
        return Step("blocks", "a block is a task", one_each)

    def several(body: Body) -> Body:
        barrier = CLUSTER_BARRIER if sharing.cluster else ()
        return (Let(RANK, V("bid") % sharing.parts, (*one_each(body, V("bid") // sharing.parts), *barrier)),)

    return Step("blocks", "blocks that share a task", several)
