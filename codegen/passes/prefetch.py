"""Prefetching: a tile's reduction asks for the memory of the next tile while it computes.

A register tile reads several short rows side by side. From beyond the second-level cache each of them is a stream of
its own that ends before a hardware prefetcher has learnt it. The rows of the next tile are known, so they are asked
for by line, spread over the loop. A prefetch reads nothing and may name any address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.codegen.ir import Body, Call, Def, FlatLoad, For, Node, Pointer, Set, rewrite, substitute, walk, walk_value
from polydyn.schedules.index import ONE, ZERO, Index

LEAF = "pd_prefetch_f32"
LINE = 16
"""float32 elements of a cache line."""
AHEAD = 4096
"""Elements of rows between what is used and what is prefetched: a memory's latency times its bandwidth, and more."""


def prefetch_next(body: Body, var: str, following: Mapping[str, Index]) -> Body:
    """Loops ``var`` prefetch their loads of float32 for the next tile, line by line.

    ``following``: what symbols stand for in the next tile; loads that depend on none of them are left alone, and so are
    those that are not dense along ``var``. A loop over vectors prefetches for every vector, one over elements in strips
    of a line.
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
        if not found:
            return n
        if n.kind == "vector":
            return replace(n, body=(*_calls(found, following), *n.body))
        return _strips(n, found, following)

    return rewrite(body, f)


def _dense(v: FlatLoad, var: str) -> bool:
    stride, rest = v.address.split(var)
    along = stride == ONE if v.lanes == 1 else v.stride == ONE and stride.constant is not None
    return along and var not in rest.symbols()


def _calls(loads: list[FlatLoad], env: Mapping[str, Index]) -> Body:
    return tuple(Call(LEAF, (Pointer(v.dtype, v.buffer, v.address.subs(env)),)) for v in loads)


def _strips(n: For, loads: list[FlatLoad], following: Mapping[str, Index]) -> Body:
    """The loop in strips of a line's elements and what is left over, each begun by the prefetches."""
    strip, whole = f"{n.var}_line", n.hi // LINE
    s = Index.of(strip)
    calls = _calls(loads, {**following, n.var: s * LINE})
    rest = () if n.hi % LINE == ZERO else substitute(calls, {strip: whole})
    inner = For(n.var, s * LINE, s * LINE + LINE, n.body, n.kind)
    return (For(strip, ZERO, whole, (*calls, inner)), *rest, For(n.var, whole * LINE, n.hi, n.body, n.kind))
