"""Bind symbols to constants and simplify: decided guards, empty loops and loops of one iteration."""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Compare, For, If, Node, rewrite
from polydyn.schedules.index import IndexLike
from polydyn.schedules.ranges import Ranges, is_nonnegative


def fold(body: Body, ranges: Ranges | None = None) -> Body:
    """Remove decided guards, empty loops and loops of one iteration. ``ranges``: extents of iterators (>= 1)."""
    facts = dict(ranges or {})

    def f(n: Node) -> Node | Body:
        if isinstance(n, If):
            open_conditions = []
            for c in n.cond:
                d = _decide(c, facts)
                if d is False:
                    return n.orelse
                if d is None:
                    open_conditions.append(c)
            if not open_conditions:
                return n.then
            if not n.then and not n.orelse:
                return ()
            return If(tuple(open_conditions), n.then, n.orelse)
        if isinstance(n, For):
            trips = (n.hi - n.lo).constant
            if not n.body or (trips is not None and trips <= 0):
                return ()
            if trips == 1:
                return substitute(n.body, {n.var: n.lo})
        return n

    return rewrite(body, f)


def _decide(c: Compare, ranges: Ranges) -> bool | None:
    d = c.decided()
    if d is not None or not ranges:
        return d
    if c.relation == ">=" and is_nonnegative(c.left - c.right, ranges):
        return True
    if c.relation == ">=" and is_nonnegative(c.right - c.left - 1, ranges):
        return False
    return None


def bind(body: Body, env: Mapping[str, IndexLike]) -> Body:
    """Substitute symbols (mostly tile sizes) and fold."""
    return fold(substitute(body, env))
