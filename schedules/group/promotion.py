"""Prologues inside promotion statements: what a copy computes instead of loading is there and in bounds.

A producer may be computed where its consumer's operand is copied when every element is written once (a graph's
computation is a function of its subscripts, so it is) and when it has every element that the consumer reads: then the
copy's instance takes the producer's instance of that element (docs/polyhedral.md 2, TSCompiler 5.3). The loads of what
is computed instead must stay inside their tensors under the conditions that guard them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Const, FromIndex, Load, Op, Value, children
from polydyn.schedules.group.polyhedra import is_exact
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import Condition, at_least, below, between, equals, frame, param_set, sample
from polydyn.schedules.model import Access


def check_loads(
    what: str,
    iterators: Sequence[tuple[str, Index]],
    value: Value,
    shapes: Mapping[str, tuple[Index, ...]],
    facts: Sequence[tuple[Index, str, Index]] = (),
) -> tuple[str, ...]:
    """Every load of the tensors in ``shapes`` stays inside its shape, for all sizes (0 included).

    ``iterators``: (name, extent); ``facts``: (left, ``==`` or ``<=``, right) over sizes. Returns the tensors for which
    isl cannot express it (products of sizes, subscripts from data). LegalityError names the load and an instance.
    """
    unproven = []
    names = tuple(n for n, _ in iterators)
    box = [c for n, e in iterators for c in between(0, n, e)]
    for x, guards in _guarded(value, ()):
        shape = shapes.get(x.buffer)
        if shape is None:
            continue
        known = [equals(a, b) if r == "==" else at_least(b, a) for a, r, b in facts if r != "%==" and _affine(a - b)]
        exprs = [*x.index, *shape, *(e for _, e in iterators), *(c.expr for c in guards)]
        if not all(map(_affine, exprs)):
            unproven.append(x.buffer)
            continue
        used = {s for e in (*exprs, *(c.expr for c in known)) for s in e.symbols()}
        params = tuple(sorted(used - set(names)))
        f = frame("instance", names, params)
        sizes = param_set(params, [*known, *(at_least(p, 0) for p in params)], positive=False)
        inside = f.where([*box, *guards]).intersect_params(sizes)
        for axis, (i, e) in enumerate(zip(x.index, shape, strict=True)):
            bad = inside.intersect(f.where([at_least(-1, i)]).union(f.where([at_least(i, e)])))
            if not bad.is_empty():
                raise LegalityError(
                    f"{what} reads {x.buffer}[{', '.join(map(str, x.index))}] outside its shape along axis {axis}, "
                    f"which has {e} elements\n  for example {sample(bad)}",
                    node=what, tensor=x.buffer, rule="reads of a promotion",
                )  # fmt: skip
    return tuple(dict.fromkeys(unproven))


def _affine(e: Index) -> bool:
    return is_exact(Access("", (e,)))


def _guarded(v: Value, guards: tuple[Condition, ...]) -> Iterator[tuple[Load, tuple[Condition, ...]]]:
    """The loads with the conditions on subscripts under which they happen."""
    if isinstance(v, Load):
        yield v, guards
    for k, c in enumerate(children(v)):
        chosen = isinstance(v, Op) and v.name in ("where", "select") and k == 1
        yield from _guarded(c, (*guards, *_conditions(v.args[0])) if chosen and isinstance(v, Op) else guards)


def _conditions(v: Value) -> Iterator[Condition]:
    """What a conjunction of comparisons of subscripts says; other conditions say nothing."""
    if not isinstance(v, Op):
        return
    if v.name == "and":
        for arg in v.args:
            yield from _conditions(arg)
    sides = [i for a in v.args for i in _integer(a)]
    if len(sides) != 2:
        return
    a, b = sides
    if v.name in ("ge", "lt"):
        yield at_least(a, b) if v.name == "ge" else below(a, b)
    if v.name in ("le", "gt"):
        yield at_least(b, a) if v.name == "le" else below(b, a)


def _integer(v: Value) -> tuple[Index, ...]:
    """The integer that a value is, if it is one of subscripts."""
    if isinstance(v, FromIndex):
        return (v.index,)
    return (Index.of(v.value),) if isinstance(v, Const) and isinstance(v.value, int) else ()
