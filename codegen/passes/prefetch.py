"""Prefetching: a tile's reduction asks for the memory of the next tile while it computes.

A register tile reads several short rows side by side. From beyond the second-level cache each of them is a stream of
its own that ends before a hardware prefetcher has learnt it. The rows of the next tile are known, so they are asked
for by line, spread over the loop. A prefetch reads nothing and may name any address.
"""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen.ir import Body, Call, Def, FlatLoad, For, Node, Pointer, Set, rewrite, substitute, walk, walk_value
from polydyn.schedules.index import ONE, ZERO, Index

LEAF = "pd_prefetch_f32"
LINE = 16
"""float32 elements of a cache line."""


def prefetch_next(body: Body, var: str, following: Mapping[str, Index]) -> Body:
    """Loops ``var`` prefetch their loads of float32 of unit stride along ``var`` for the next tile, line by line.

    ``following``: what symbols stand for in the next tile; loads that depend on none of them are left alone.
    """

    def f(n: Node) -> Node | Body:
        if not (isinstance(n, For) and n.var == var and n.lo == ZERO):
            return n
        loads = [
            v
            for x in walk(n.body)
            if isinstance(x, (Def, Set))
            for v in walk_value(x.value)
            if isinstance(v, FlatLoad) and v.dtype == "float32" and following.keys() & v.address.symbols()
        ]
        found = [v for v in dict.fromkeys(loads) if _dense(v, var)]
        return _strips(n, found, following) if found else n

    return rewrite(body, f)


def _dense(v: FlatLoad, var: str) -> bool:
    stride, rest = v.address.split(var)
    return stride == ONE and var not in rest.symbols()


def _strips(n: For, loads: list[FlatLoad], following: Mapping[str, Index]) -> Body:
    """The loop in strips of a line's elements, each begun by the prefetches; what is left over has none of its own."""
    strip, s = f"{n.var}_line", Index.of(f"{n.var}_line")
    whole = n.hi // LINE
    env = {**following, n.var: s * LINE}
    calls = tuple(Call(LEAF, (Pointer(v.dtype, v.buffer, v.address.subs(env)),)) for v in loads)
    last = tuple(substitute(calls, {strip: whole})) if (n.hi % LINE) != ZERO else ()
    inner = For(n.var, s * LINE, s * LINE + LINE, n.body, n.kind)
    return (
        For(strip, ZERO, whole, (*calls, inner)),
        *last,
        For(n.var, whole * LINE, n.hi, n.body, n.kind),
    )
