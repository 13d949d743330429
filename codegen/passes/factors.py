"""Factors that a loop does not change come out of the sums that it makes: ``sum(x * (v * s)) = sum(x * v) * s``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polydyn.codegen.ir import Body, Def, FlatLoad, For, Node, Reg, Set, rewrite, walk, walk_value
from polydyn.schedules.expr import FromIndex, Op, Value, neutral
from polydyn.schedules.index import Index


def factors_out(body: Body) -> Body:
    """Outermost loops around nothing but sums of such products make sums of their own, which are scaled behind them.

    Before: ``for k: s += x[k] * (v[k] * f)``; after: ``p = 0; for k: p += x[k] * v[k]; s += p * f``. In floating point
    the sum is rounded otherwise, as by any other order of its terms.
    """
    out: list[Node] = []
    for n in body:
        made = _scaled(n) if isinstance(n, For) else None
        if made is not None:
            out += made
        else:
            out.append(replace(n, body=factors_out(n.body)) if isinstance(n, For) else n)
    return tuple(out)


def _scaled(loop: For) -> Body | None:
    inside = [x for x in walk((loop,)) if not isinstance(x, For)]
    loops = {x.var for x in walk((loop,)) if isinstance(x, For)}
    sums = {x.reg: found for x in inside if isinstance(x, Set) and (found := _factor(x, loops))}
    if len(sums) < len(inside):
        return None

    def f(n: Node) -> Node:
        return replace(n, reg=_part(n.reg), value=sums[n.reg][0]) if isinstance(n, Set) else n

    sets = {x.reg: x for x in inside if isinstance(x, Set)}
    first = tuple(Def(_part(r), neutral("sum", n.value.dtype), n.lanes) for r, n in sets.items())
    last = tuple(
        replace(n, value=Op(n.value.dtype, "mul", (Reg(n.value.dtype, _part(r), n.lanes), sums[r][1])))
        for r, n in sets.items()
    )
    return (*first, *rewrite((loop,), f), *last)


def _part(reg: str) -> str:
    return f"{reg}_part"


def _factor(n: Set, loops: Collection[str]) -> tuple[Value, Value] | None:
    """What is added without its factor, and the factor, a load that changes in none of the loops."""
    if n.reduce != "sum" or not (isinstance(n.value, Op) and n.value.name == "mul"):
        return None
    for k, v in enumerate(n.value.args):
        if isinstance(v, Op) and v.name == "mul" and isinstance(v.args[1], FlatLoad) and _fixed(v.args[1], loops):
            args = tuple(v.args[0] if i == k else x for i, x in enumerate(n.value.args))
            return replace(n.value, args=args), v.args[1]
    return None


def _fixed(v: Value, loops: Collection[str]) -> bool:
    indices: list[Index] = []
    for x in walk_value(v):
        indices += [x.address] if isinstance(x, FlatLoad) else [x.index] if isinstance(x, FromIndex) else []
    return not any(i.symbols() & set(loops) for i in indices)
