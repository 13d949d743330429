"""Split-K with an in-kernel fix-up: each block stores its partial sums in the workspace, and the last one adds them.

Blocks of a task increment an arrival counter, and the last block to arrive reads the sums of all. They are always added
in block order, whichever block is last, so equal inputs give equal bits. Counters wrap around to 0.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.ir import Apply, Body, Compare, Def, Pointer
from polydyn.codegen.kernel import COUNTERS, MOST_COUNTERS, WORKSPACE, Kernel, Work
from polydyn.schedules.expr import ITEMSIZE, const
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, row_major
from polydyn.schedules.tree.names import c

V = Index.of
FIXUP_LATENCIES = 4
"""Memory latencies at the end of a counted block: store the sums, count, load the sums, store the results."""
FIXUP_BUFFERS = (WORKSPACE, COUNTERS)
"""The additional buffers of such kernels."""
K_SLICE = c("k")
"""The loop over the blocks of a task."""
IS_LAST_BLOCK = "come"
"""Register set by ``increment_arrival_counter``: 1 in the last block of a split-K task, 0 in the others."""
IN_LAST_BLOCK = Compare("==", V(IS_LAST_BLOCK), Index.of(1))
"""The condition for the last block."""


def increment_arrival_counter(blocks: int) -> Body:
    """Count one arrival after a block has stored its partial sums. ``blocks`` consecutive blocks share a task."""
    counter = Pointer("uint32", COUNTERS, V("bid") // blocks)
    return (Def(IS_LAST_BLOCK, Apply("int32", "pd_last_block", (counter, const(blocks, "int32")))),)


def with_fixup_work(work: Work, parts: int, size: int) -> Work:
    """Add to ``work`` the stores of ``work.elements`` partial sums of ``size`` bytes, and the loads of all parts."""
    return replace(work, ends=FIXUP_LATENCIES, results=work.results + (1 + parts) * work.elements * size)


def with_fixup_buffers(kernel: Kernel, tasks: Index, sums: int, dtype: str) -> tuple[Kernel, dict[str, Array]]:
    """Return the kernel with a workspace of ``sums`` for each of its ``tasks``, and its additional arrays."""
    size = tasks * sums
    arrays = {n: Array(n, d, (x,), "output", row_major((x,))) for n, d, x in
              ((WORKSPACE, dtype, size), (COUNTERS, "uint32", V(MOST_COUNTERS)))}  # fmt: skip
    few = Compare("<=", tasks, V(MOST_COUNTERS))
    kernel = replace(kernel, conditions=(*kernel.conditions, few), workspace=size * ITEMSIZE[dtype])
    return kernel, arrays
