"""Check prologues inside promotion statements: the elements that a copy computes instead of loading exist.

A producer may be computed where its consumer's operand is copied under two conditions. Every element is written once
(true for a graph, whose computation is a function of its subscripts), and it has every element that the consumer reads.
Then the copy's instance replaces the producer's instance of that element (docs/polyhedral.md 2, TSCompiler 5.3). The
loads of the inlined computation must stay inside their tensors under the conditions that guard them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Load, Op, Value, at_least_zero, children, integer, symbols_of, walk
from polydyn.schedules.index import Atom, Index
from polydyn.schedules.isl_util import Condition, Frame, at_least, between, equals, frame, sample


def check_loads(
    subject: str,
    iterators: Sequence[tuple[str, Index]],
    value: Value,
    shapes: Mapping[str, tuple[Index, ...]],
    facts: Sequence[tuple[Index, str, Index]] = (),
) -> tuple[str, ...]:
    """Check that every load of the tensors in ``shapes`` stays inside its shape, for all sizes (0 included).

    ``iterators``: (name, extent); ``facts``: (left, ``==``, ``<=`` or ``%==``, right) over sizes. Return the tensors
    for which isl cannot express the check (products of sizes, subscripts from data, facts of another form).
    LegalityError names the load and an instance.
    """
    every = [_fact(*x) for x in facts]
    known = [c for c in every if _is_piecewise(c.expr)]
    exprs = [*(i for x in shapes.values() for i in x), *(e for _, e in iterators), *(c.expr for c in known)]
    names = tuple(n for n, _ in iterators)
    used = symbols_of(value).union(*(e.symbols() for e in exprs))
    params = tuple(sorted(used - set(names)))
    f = frame("instance", names, params)
    known += [c for n, e in iterators for c in (between(0, n, e) if _is_piecewise(e) else between(0, n, 0)[:1])]
    sizes = [at_least(p, 0) for p in params]
    inside = reduce(isl.Set.intersect, map(f.holds, known), f.where(sizes))
    unsaid = [c for c in every if not _is_piecewise(c.expr) and c.expr.symbols() & used]
    start = _Reached(inside, not unsaid and all(_is_piecewise(e) for _, e in iterators))
    unproven = []
    for x, reached in _reached(f, value, start):
        if x.buffer not in shapes:
            continue
        for axis, (i, e) in enumerate(zip(x.index, shapes[x.buffer], strict=True)):
            if not _is_piecewise(i) or not _is_piecewise(e):
                unproven.append(x.buffer)
                continue
            bad = reached.instances.intersect(f.holds(at_least(-1, i)).union(f.holds(at_least(i, e))))
            if not bad.is_empty() and reached.exact:
                raise LegalityError(
                    f"{subject} reads {x.buffer}[{', '.join(map(str, x.index))}] outside its shape along axis {axis}, "
                    f"which has {e} elements\n  for example {sample(bad)}",
                    node=subject, tensor=x.buffer, rule="reads of a promotion",
                )  # fmt: skip
            if not bad.is_empty():
                unproven.append(x.buffer)
    return tuple(dict.fromkeys(unproven))


def _fact(left: Index, relation: str, right: Index) -> Condition:
    """Return a guard as a condition."""
    if relation == "%==":
        return equals(left, left // right * right)
    return equals(left, right) if relation == "==" else at_least(right, left)


def _is_piecewise(e: Index) -> bool:
    """Whether isl can express it: affine with floor divisions by constants, minima and maxima."""
    return all(len(m) <= 1 and all(isinstance(a, str) or _is_piece(a) for a in m) for m in e.terms)


def _is_piece(a: Atom) -> bool:
    if a.kind == "floordiv":
        return (a.args[1].constant or 0) > 0 and _is_piecewise(a.args[0])
    return a.kind in ("min", "max") and all(map(_is_piecewise, a.args))


@dataclass(frozen=True)
class _Reached:
    """Instances that may execute an expression; ``exact`` if isl can express everything that decides it."""

    instances: isl.Set
    exact: bool


def _reached(f: Frame, v: Value, by: _Reached) -> Iterator[tuple[Load, _Reached]]:
    """Yield the loads, each with the instances that may execute it: both branches of a choice have its condition."""
    if isinstance(v, Load):
        yield v, by
    if not isinstance(v, Op) or v.name not in ("where", "select"):
        for c in children(v):
            yield from _reached(f, c, by)
        return
    condition, then, orelse = v.args
    may, must = _truth(f, condition)
    compared = filter(None, map(_comparison, walk(condition)))
    exact = by.exact and all(_is_piecewise(c.expr) for c in compared)
    yield from _reached(f, condition, by)
    yield from _reached(f, then, _Reached(by.instances.intersect(may), exact))
    yield from _reached(f, orelse, _Reached(by.instances.subtract(must), exact))


def _truth(f: Frame, v: Value) -> tuple[isl.Set, isl.Set]:
    """Return the sets in which a condition may hold and in which it certainly holds.

    They are equal if it compares only subscripts.
    """
    if isinstance(v, Op) and v.name == "not":
        may, must = _truth(f, v.args[0])
        return must.complement(), may.complement()
    if isinstance(v, Op) and v.name in ("and", "or"):
        (may, must), (other, sure) = (_truth(f, x) for x in v.args)
        both = v.name == "and"
        return (may.intersect(other), must.intersect(sure)) if both else (may.union(other), must.union(sure))
    holds = _comparison(v)
    if holds is None or not _is_piecewise(holds.expr):
        return f.universe(), f.universe().complement()
    exact = f.holds(holds)
    exact = exact.complement() if isinstance(v, Op) and v.name == "ne" else exact
    return exact, exact


def _comparison(v: Value) -> Condition | None:
    """Return the condition of a comparison of subscripts (for ``ne`` its opposite), or None for any other value."""
    if isinstance(v, Op) and v.name in ("eq", "ne"):
        a, b = map(integer, v.args)
        return None if a is None or b is None else equals(a, b)
    least = at_least_zero(v)
    return None if least is None else at_least(least, 0)
