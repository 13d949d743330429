"""Lower statement instances to stores, definitions and updates of registers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polydyn.codegen.ir import Alloc, Body, FlatLoad, Inst, rewrite, walk
from polydyn.schedules.expr import ITEMSIZE, Load, Value, substitute, transform
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.model import Group

Lowering = Callable[[Mapping[str, Index]], Body]
"""Maps a statement's coordinates to the nodes that execute it."""


def lower(body: Body, table: Mapping[str, Lowering]) -> Body:
    """Replace every instance by the lowering that ``table`` has for its statement."""
    return rewrite(body, lambda n: table[n.statement](n.at) if isinstance(n, Inst) else n)


def flat(group: Group, v: Value, env: Mapping[str, IndexLike], local: Callable[[Load], Value | None]) -> Value:
    """Return a statement's value with iterators substituted and flat loads; ``local`` gives values of locals."""

    def f(x: Value) -> Value:
        if not isinstance(x, Load):
            return x
        inner = local(x)
        return inner if inner is not None else FlatLoad(x.dtype, x.buffer, group.arrays[x.buffer].address(x.index))

    return transform(substitute(v, env), f)


def scratch_bytes(body: Body) -> Index:
    """Return an upper bound of a thread's scratch: all allocations with scope ``scratch``, each rounded to 64 bytes."""
    total = ZERO
    for n in walk(body):
        if isinstance(n, Alloc) and n.scope == "scratch":
            total = total + n.size * ITEMSIZE[n.dtype] + 64
    return total
