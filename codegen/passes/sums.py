"""Horizontal sums of many vectors at once: eight of them cost little more than two, with one result in each lane."""

from __future__ import annotations

from polydyn.codegen.ir import Alloc, Body, Call, FlatLoad, Horizontal, Node, Pointer, Set
from polydyn.schedules.expr import Value
from polydyn.schedules.index import ZERO, Index

LEAF, SUMS_PER_CALL, MIN_SUMS = "pd_sums_f32", 8, 4
"""The leaf, the number of sums it computes, the minimum number that pays."""


def sum_together(body: Body) -> Body:
    """Compute runs of ``reg += sum of the lanes of v`` in float32 by the leaf, eight at a time.

    Before: ``r0 += hsum(v0); r1 += hsum(v1) ...``; after: ``sums = pd_sums(v0, v1 ...); r0 += sums[0] ...``. The lanes
    of all vectors are added in the same order.
    """
    out: list[Node] = []
    run: list[Set] = []
    groups = 0

    def flush() -> None:
        nonlocal groups
        while len(run) >= MIN_SUMS:
            few = run[:SUMS_PER_CALL]
            del run[:SUMS_PER_CALL]
            name = f"sums{groups}"
            groups += 1
            vectors = [n.value.value for n in few if isinstance(n.value, Horizontal)]
            args: tuple[Value, ...] = (Pointer("float32", name, ZERO), *vectors)
            args += (vectors[-1],) * (SUMS_PER_CALL - len(few))
            sets = [Set(n.reg, FlatLoad("float32", name, Index.of(i)), 1, "sum") for i, n in enumerate(few)]
            out.append(Alloc(name, "float32", Index.of(SUMS_PER_CALL), "stack", (Call(LEAF, args), *sets)))
        out.extend(run)
        run.clear()

    for n in body:
        if isinstance(n, Set) and isinstance(n.value, Horizontal) and _is_sum(n, n.value):
            run.append(n)
        else:
            flush()
            out.append(n)
    flush()
    return tuple(out)


def _is_sum(n: Set, v: Horizontal) -> bool:
    return v.reduction == n.reduce == "sum" and v.dtype == "float32"
