"""Split-K: a reduction in slices that run in parallel, as two groups (TSCompiler 5.2's tiles of the reduction).

The first group stores the sums of each slice in the workspace, an array (slice, batch.., row, column) of them. The
second adds the slices of an element in order and runs the epilogues. Nothing depends on which slice finishes first, so
equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.kernel import WORKSPACE
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import Const, Load, const, op
from polydyn.schedules.index import Index
from polydyn.schedules.model import SHARE, SHARES, Array, Group, Statement, row_major, touched
from polydyn.schedules.tiling import AttentionParts, Roles


def partial_group(group: Group) -> Group:
    """Return the group that stores the sums of a slice in the workspace."""
    init, acc, *_ = group.statements
    iters = init.iters
    shape = (Index.of(SHARES), *(e for _, e in iters))
    index = (Index.of(SHARE), *(Index.of(x) for x, _ in iters))
    dtype = acc.value.dtype
    workspace = Array(WORKSPACE, dtype, shape, "output", row_major(shape))
    store = Statement("DONE0", iters, WORKSPACE, index, Load(dtype, acc.array, init.index), None, "epilogue")
    arrays = touched(group.arrays, (init, acc)) | {WORKSPACE: workspace}
    return Group(group.name, (*group.params, SHARES), arrays, (init, acc, store))


def combining_group(group: Group) -> tuple[Group, tuple[str, ...], dict[str, int]]:
    """Return the group that adds the slices, its shared iterators and its phases."""
    init, acc, *epilogues = group.statements
    shape = (Index.of(SHARES), *(e for _, e in init.iters))
    index = (Index.of(SHARE), *(Index.of(x) for x, _ in init.iters))
    dtype = acc.value.dtype
    workspace = Array(WORKSPACE, dtype, shape, "input", row_major(shape))
    iters = (*init.iters, (SHARE, Index.of(SHARES)))
    add = Statement("SUM", iters, acc.array, init.index, Load(dtype, WORKSPACE, index), acc.reduce, "backbone")
    arrays = touched(group.arrays, (init, *epilogues)) | {WORKSPACE: workspace}
    phases = {init.name: 0, add.name: 0, **{s.name: 1 for s in epilogues}}
    whole = Group(group.name, (*group.params, SHARES), arrays, (init, add, *epilogues))
    return whole, init.iterators, phases


STATISTICS = 4
"""Floats after the values of a row in the workspace: its maximum, the sum of its weights, and two unused ones, so
that rows begin at multiples of 16 bytes."""
PEAK, WEIGHT, TOTAL = "peak", "weight", "total"
"""Arrays for a row of an attention over all slices of its keys: the maximum, the weight of a slice, the sum of
weights."""


def partial_attention(values: Group, roles: Roles) -> Group:
    """Return the values of a split-KV attention: the sums of a slice, stored in the workspace.

    A row's values are followed by its maximum and the sum of its weights (``laws.online_softmax.online``).
    """
    group = partial_group(values)
    left = group.arrays[WORKSPACE]
    shape = (*left.shape[:-1], left.shape[-1] + STATISTICS)
    if group.epilogues[0].index[-1] != Index.of(roles.col):
        raise ScheduleError(f"{roles.col} is not the last side of the values", rule="rows of values are vectors")
    return replace(group, arrays={**group.arrays, WORKSPACE: replace(left, shape=shape, strides=row_major(shape))})


def attention_part(whole: Group, parts: AttentionParts) -> Group:
    """Return the group of an attention with ``partial_attention``: its inputs, and the workspace it writes."""
    made = (*parts.scores.statements, *parts.rows.statements, *parts.values.statements)
    arrays = touched(whole.arrays, made) | {WORKSPACE: parts.values.arrays[WORKSPACE]}
    return replace(whole, params=(*whole.params, SHARES), arrays=arrays)


def combining_attention(values: Group, roles: Roles, no_nan: bool) -> tuple[Group, tuple[str, ...], dict[str, int]]:
    """Return the group that combines a row's slices into its result, its shared iterators and its phases.

    A slice is weighted by ``exp(its maximum - the largest)``, both its values and its sum; the result is their quotient
    (Dao et al., "Flash-Decoding for long-context inference", 2023). A row that is masked everywhere is NaN, with
    ``no_nan`` 0.
    """
    init, acc, *epilogues = values.statements
    workspace = partial_attention(values, roles).arrays[WORKSPACE]
    iters, index, kind, width = init.iters, init.index, acc.value.dtype, dict(init.iters)[roles.col]
    each, shape = (*iters, (SHARE, Index.of(SHARES))), tuple(e for _, e in iters)
    place = (Index.of(SHARE), *(Index.of(x) for x, _ in iters))
    top, sums, value = (Load(kind, WORKSPACE, tuple(i.subs({roles.col: c}) for i in place))
                        for c in (width, width + 1, Index.of(roles.col)))  # fmt: skip
    arrays = touched(values.arrays, (init, *epilogues)) | {WORKSPACE: replace(workspace, role="input")}
    arrays |= {n: replace(values.arrays[acc.array], name=n, shape=shape, strides=row_major(shape))
               for n in (PEAK, TOTAL, WEIGHT)}  # fmt: skip
    peak, total, weighed = (Load(kind, n, index) for n in (PEAK, TOTAL, WEIGHT))
    counts = op("exp", op("sub", top, peak))
    zero, lowest = const(0, kind), Const(kind, float("-inf"))
    divided = op("div", weighed, total)
    divided = op("where", op("gt", total, zero), divided, zero) if no_nan else divided
    statements = (
        Statement("PEAK0", iters, PEAK, index, lowest), Statement("PEAK", each, PEAK, index, top, "max"),
        Statement("TOTAL0", iters, TOTAL, index, zero),
        Statement("TOTAL", each, TOTAL, index, op("mul", counts, sums), "sum"),
        Statement("VALUE0", iters, WEIGHT, index, zero),
        Statement("VALUE", each, WEIGHT, index, op("mul", counts, value), "sum"),
        Statement("FINISH", iters, acc.array, index, divided), *epilogues,
    )  # fmt: skip
    phases = {"PEAK0": 0, "PEAK": 0, "TOTAL0": 1, "TOTAL": 1, "VALUE0": 1, "VALUE": 1, "FINISH": 2}
    group = Group(values.name, (*values.params, SHARES), arrays, statements)
    return group, init.iterators, phases | {s.name: 2 for s in epilogues}
