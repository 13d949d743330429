"""Share strided loads: vectors of every other element, extracted from pairs of whole vectors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from polydyn.codegen.ir import Apply, Between, FlatLoad
from polydyn.schedules.expr import Value, op
from polydyn.schedules.index import ONE, ZERO, Index, minimum
from polydyn.schedules.lanes import FLOAT_LANES

V = Index.of


def share_strided_loads(loads: Iterable[FlatLoad]) -> dict[FlatLoad, Value]:
    """Return the vectors of every other element -> the same elements extracted from two whole vectors.

    Two vectors that begin one element apart are the even and the odd elements of the same whole vectors. These are
    loaded from the first to the last element that one of the two reads. All elements in between belong to the buffer,
    so the loads stay inside it. All loads must occur at the same point of the program.
    """
    apart = {v.address: v for v in loads if v.lanes > 1 and v.stride == 2 and v.dtype in FLOAT_LANES}
    left = {(v.buffer, i): v for i, v in sorted(apart.items(), key=lambda x: x[0].terms.get((), 0))}
    out: dict[FlatLoad, Value] = {}
    while left:
        first = left.pop(next(iter(left)))
        second = left.pop((first.buffer, first.address + 1), None)
        whole = tuple(_whole(first, second, behind) for behind in (ZERO, V(first.lanes)))
        out[first] = Apply(first.dtype, "vevens_f32", whole)
        if second:
            out[second] = Apply(second.dtype, "vodds_f32", whole)
    return out


def _whole(first: FlatLoad, second: FlatLoad | None, behind: Index) -> FlatLoad:
    """Return the whole vector from ``behind`` elements after the first one on, as far as one of the two reads it."""
    width, both = V(first.lanes), [(v, d) for d, v in enumerate((first, second)) if v]
    whole = replace(first, address=first.address + behind, stride=ONE, mask=None, guard=None)

    def end(v: FlatLoad, d: int, lanes: Index) -> Index:
        return 2 * (lanes if v.mask is None else minimum(lanes, v.mask)) - 1 + d - behind

    if not any(v.guard for v, _ in both):
        count = end(*both[-1], width)
        return whole if count.constant is not None and count.constant >= first.lanes else replace(whole, mask=count)
    ranges: list[Value] = []
    for v, d in both:
        lanes = v.guard if isinstance(v.guard, Between) else Between("bool", ZERO, width, first.lanes)
        ranges.append(replace(lanes, low=2 * lanes.low + d - behind, high=end(v, d, lanes.high)))
    return replace(whole, guard=reduce(lambda a, b: op("or", a, b), ranges))
