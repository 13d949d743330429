"""Sums that blocks leave in the workspace for the last of them, which adds them in the order of the blocks.

Blocks that share a task count themselves; the last one to come finds the sums of all. Which one that is says nothing
of the order in which they are added, so equal inputs give equal bits. Counters wrap around to 0.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.ir import Apply, Body, Compare, Def, Pointer
from polydyn.codegen.kernel import COUNTERS, MOST_COUNTERS, WORKSPACE, Kernel
from polydyn.schedules.expr import ITEMSIZE, const
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, row_major

V = Index.of
BEHIND = (WORKSPACE, COUNTERS)
"""The buffers that such kernels have too."""
COME = "come"
"""1 in the last block of those that share its task, behind ``count_block``; 0 in the others."""
LAST = Compare("==", V(COME), Index.of(1))
"""What holds in that one."""


def count_block(blocks: int) -> Body:
    """A block, of ``blocks`` that share a task and are neighbours in the grid, has left its sums."""
    counter = Pointer("uint32", COUNTERS, V("bid") // blocks)
    return (Def(COME, Apply("int32", "pd_last_block", (counter, const(blocks, "int32")))),)


def left_behind(kernel: Kernel, tasks: Index, sums: int, dtype: str) -> tuple[Kernel, dict[str, Array]]:
    """The kernel with a workspace of ``sums`` for each of its ``tasks``, and the arrays that it then has too."""
    size = tasks * sums
    arrays = {n: Array(n, d, (x,), "output", row_major((x,))) for n, d, x in
              ((WORKSPACE, dtype, size), (COUNTERS, "uint32", V(MOST_COUNTERS)))}  # fmt: skip
    few = Compare("<=", tasks, V(MOST_COUNTERS))
    kernel = replace(kernel, conditions=(*kernel.conditions, few), workspace=size * ITEMSIZE[dtype])
    return kernel, arrays
