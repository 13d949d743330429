"""Written addresses: no two elements of an output share a place in memory.

Proofs about elements are then proofs about memory: tasks that write different elements do not race.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ONE, ZERO, Index, polynomial_division
from polydyn.schedules.model import Array, Group
from polydyn.schedules.ranges import is_nonnegative

_SIZES = ((2, 3, 5, 7), (7, 5, 3, 2), (1, 2, 1, 3), (16, 16, 33, 17), (64, 1, 8, 32))
"""Sizes that unproven strides are tried with, in turn for the symbols in order of name."""


def check_addresses(group: Group, params: Mapping[str, Index], free: Collection[str] = ()) -> tuple[str, ...]:
    """Every output's addresses are injective. ``params``: what the group's parameters stand for in this place.

    ``free``: symbols for strides that the caller of the program chooses; that those keep elements apart is checked on
    every call, here only the dims with strides of our own are.

    Mixed radix: dims can be ordered so that every stride passes over the whole span of the dims before it. Returns the
    outputs for which that is not proven because it follows from sizes of other tensors (a part of a concatenation
    whose other parts have sizes that may be negative as far as the expression tells). LegalityError names the array,
    the dim and sizes for which two elements do share an address.
    """
    outputs = {n: _own(a, params, free) for n, a in group.arrays.items() if a.role == "output"}
    return tuple(n for n, a in outputs.items() if not _proven(a, params))


def _own(a: Array, params: Mapping[str, Index], free: Collection[str]) -> Array:
    """The array without the dims whose strides the caller chooses."""
    kept = [d for d, s in enumerate(a.strides) if s.subs(params).symbols().isdisjoint(free)]
    return replace(a, shape=tuple(a.shape[d] for d in kept), strides=tuple(a.strides[d] for d in kept))


def _proven(a: Array, params: Mapping[str, Index]) -> bool:
    left = {
        d: (e.subs(params), s.subs(params)) for d, (e, s) in enumerate(zip(a.shape, a.strides, strict=True)) if e != ONE
    }
    extents = {f"%{d}": e for d, (e, _) in left.items()}  # where anything is written at all they are >= 1
    span = ONE
    while left:
        fits = [d for d, (_, s) in left.items() if _passes(s, span, extents)]
        inner = [d for d in fits if all(_passes(left[o][1], left[d][1], extents) for o in fits)]
        if not inner:
            _refute(a, params)
            return False
        e, s = left.pop(inner[0])
        span = span + (e - 1) * s
    return True


def _passes(stride: Index, span: Index, extents: Mapping[str, Index]) -> bool:
    """``stride >= span``, where the span is >= 1."""
    if is_nonnegative(stride - span, extents):
        return True
    times, rest = polynomial_division(stride, span)
    return rest == ZERO and is_nonnegative(times - 1, extents)


def _refute(a: Array, params: Mapping[str, Index]) -> None:
    """LegalityError when the strides are wrong for one of a few sizes."""
    dims = [(e.subs(params), s.subs(params)) for e, s in zip(a.shape, a.strides, strict=True)]
    names = sorted(set().union(*(x.symbols() for pair in dims for x in pair)))
    for sizes in _SIZES:
        env = {n: sizes[k % len(sizes)] for k, n in enumerate(names)}
        concrete = sorted((s.evaluate(env), e.evaluate(env), d) for d, (e, s) in enumerate(dims) if not e.fetches())
        if any(e < 1 for _, e, _ in concrete):
            continue
        span = 1
        for s, e, d in concrete:
            if e > 1 and s < span:
                raise LegalityError(
                    f"elements of {a.name} share addresses: dim {d} of extent {e} has stride {s}, the dims inside it "
                    f"span {span}\n  for example {env}",
                    tensor=a.name,
                    dim=str(d),
                    rule="injective writes",
                )
            span += (e - 1) * s
