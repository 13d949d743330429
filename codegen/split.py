"""Split-K: a reduction in shares that run at the same time, as two groups (TSCompiler 5.2's tiles of the reduction).

The first group leaves the sums of each share in the workspace, an array (share, batch.., row, column) of them; the
second adds the shares of an element in their order and runs the epilogues. Nothing depends on which share is first, so
equal inputs give equal bits.
"""

from __future__ import annotations

from polydyn.codegen.kernel import WORKSPACE
from polydyn.schedules.expr import Load, loads
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, Group, Statement, row_major
from polydyn.schedules.tree.rewrites import SHARE, SHARES


def partial_group(group: Group) -> Group:
    """The group that leaves the sums of a share in the workspace."""
    init, acc, *_ = group.statements
    iters = init.iters
    shape = (Index.of(SHARES), *(e for _, e in iters))
    index = (Index.of(SHARE), *(Index.of(x) for x, _ in iters))
    dtype = acc.value.dtype
    workspace = Array(WORKSPACE, dtype, shape, "output", row_major(shape))
    store = Statement("DONE0", iters, WORKSPACE, index, Load(dtype, acc.array, init.index), None, "epilogue")
    names = {acc.array, *(x.buffer for x in loads(acc.value))}
    arrays = {n: a for n, a in group.arrays.items() if n in names}
    return Group(group.name, (*group.params, SHARES), {**arrays, WORKSPACE: workspace}, (init, acc, store))


def combining_group(group: Group) -> tuple[Group, tuple[str, ...], dict[str, int]]:
    """The group that adds the shares, its shared iterators and its phases."""
    init, acc, *epilogues = group.statements
    shape = (Index.of(SHARES), *(e for _, e in init.iters))
    index = (Index.of(SHARE), *(Index.of(x) for x, _ in init.iters))
    dtype = acc.value.dtype
    workspace = Array(WORKSPACE, dtype, shape, "input", row_major(shape))
    iters = (*init.iters, (SHARE, Index.of(SHARES)))
    add = Statement("SUM", iters, acc.array, init.index, Load(dtype, WORKSPACE, index), acc.reduce, "backbone")
    names = {acc.array, *(s.array for s in epilogues), *(x.buffer for s in epilogues for x in loads(s.value))}
    arrays = {n: a for n, a in group.arrays.items() if n in names}
    phases = {init.name: 0, add.name: 0, **{s.name: 1 for s in epilogues}}
    whole = Group(group.name, (*group.params, SHARES), {**arrays, WORKSPACE: workspace}, (init, add, *epilogues))
    return whole, init.iterators, phases
