"""Check that no two elements of an output share an address.

Proofs about elements are then proofs about memory: tasks that write different elements do not race.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import lcm

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ONE, ZERO, Index, polynomial_division
from polydyn.schedules.model import Array, Group
from polydyn.schedules.ranges import Ranges, is_nonnegative

_SIZES = ((2, 3, 5, 7), (7, 5, 3, 2), (1, 2, 1, 3), (16, 16, 33, 17), (64, 1, 8, 32))
"""Sizes for testing unproven strides, assigned cyclically to the symbols in order of name."""


@dataclass(frozen=True)
class SizeFacts:
    """Facts of a program about its sizes.

    ``nonnegative`` proves an expression over the ranges of iterators. ``canonical`` writes equal sizes in the same way.
    ``conditions`` (left, a guard's relation, right) hold in every call.
    """

    nonnegative: Callable[[Index, Ranges], bool] = is_nonnegative
    canonical: Callable[[Index], Index] = Index.of
    conditions: tuple[tuple[Index, str, Index], ...] = ()

    def allow(self, env: Mapping[str, int]) -> bool:
        """Whether the conditions on the given sizes hold."""
        met = {"==": lambda a, b: a == b, "<=": lambda a, b: a <= b, "%==": lambda a, b: a % b == 0 if b else a == 0}
        return all(
            met[r](a.evaluate(env), b.evaluate(env))
            for a, r, b in self.conditions
            if a.symbols() | b.symbols() <= env.keys()
        )


NO_FACTS = SizeFacts()


def check_addresses(
    group: Group, params: Mapping[str, Index], free: Collection[str] = (), facts: SizeFacts = NO_FACTS
) -> tuple[str, ...]:
    """Check that every output's addresses are injective; return the outputs for which this is not proven.

    ``params`` gives the values of the group's parameters at this site. ``free`` has the symbols for strides that the
    caller of the program chooses. Every call checks that those keep elements apart, so only the other dims are checked
    here.

    Mixed radix: the dims can be ordered so that every stride passes over the whole span of the dims before it. An
    output is not proven if this follows from sizes of other tensors (a part of a concatenation, if the sizes of the
    other parts may be negative as far as the expressions tell). LegalityError names the array, the dim, and sizes,
    allowed by ``facts``, for which two elements do share an address.
    """
    outputs = {n: _own(a, params, free, facts) for n, a in group.arrays.items() if a.role == "output"}
    return tuple(n for n, a in outputs.items() if not _proven(a, facts))


def _own(a: Array, params: Mapping[str, Index], free: Collection[str], facts: SizeFacts) -> Array:
    """Return the array over the program's sizes, without the dims whose strides the caller chooses."""
    kept = [d for d, s in enumerate(a.strides) if s.subs(params).symbols().isdisjoint(free)]
    shape, strides = (tuple(facts.canonical(x[d].subs(params)) for d in kept) for x in (a.shape, a.strides))
    return replace(a, shape=shape, strides=strides)


def _proven(a: Array, facts: SizeFacts) -> bool:
    left = {d: (e, s) for d, (e, s) in enumerate(zip(a.shape, a.strides, strict=True)) if e != ONE}
    extents = {f"%{d}": e for d, (e, _) in left.items()}  # where anything is written at all they are >= 1
    span = ONE
    while left:
        fits = [d for d, (_, s) in left.items() if _passes(s, span, extents, facts)]
        inner = [d for d in fits if all(_passes(left[o][1], left[d][1], extents, facts) for o in fits)]
        if not inner:
            _refute(a, facts)
            return False
        e, s = left.pop(inner[0])
        span = span + (e - 1) * s
    return True


def _passes(stride: Index, span: Index, extents: Mapping[str, Index], facts: SizeFacts) -> bool:
    """Whether ``stride >= span`` is proven, for a span >= 1."""
    if is_nonnegative(stride - span, extents) or facts.nonnegative(stride - span, extents):
        return True
    times, rest = polynomial_division(stride, span)
    return rest == ZERO and is_nonnegative(times - 1, extents)


def _refute(a: Array, facts: SizeFacts) -> None:
    """Raise LegalityError if the strides are wrong for one of a few sizes."""
    dims = list(zip(a.shape, a.strides, strict=True))
    names = sorted(set().union(*(x.symbols() for pair in dims for x in pair)))
    scale = lcm(*(n for _, r, b in facts.conditions if r == "%==" and (n := b.constant)))
    for k, sizes in ((k, sizes) for k in sorted({1, scale}) for sizes in _SIZES):
        env = {n: k * sizes[i % len(sizes)] for i, n in enumerate(names)}
        concrete = sorted((s.evaluate(env), e.evaluate(env), d) for d, (e, s) in enumerate(dims) if not e.fetches())
        if not facts.allow(env) or any(e < 1 for _, e, _ in concrete):
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
