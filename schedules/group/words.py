"""Words of several steps of a product (``polydyn/lowering/words.py`` chooses them): their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.schedules.expr import (
    INTEGERS,
    OPS,
    PARTS,
    FromIndex,
    Load,
    Op,
    Value,
    cast,
    const,
    map_index,
    op,
    substitute,
)
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import simplify


def word(make: str, v: Value, x: str, steps: int, ranges: Mapping[str, Index] | None = None) -> Value:
    """The word (an int32 that the operation ``make`` makes) of the values of ``v`` at consecutive steps.

    ``x``: the iterator of ``v`` that counts ``steps`` single steps, afterwards words. ``ranges``: extents of iterators,
    by which subscripts become simpler.
    """
    count, parts = OPS[make].arity, []
    for k in range(count):
        step = Index.of(x) * count + k
        part = substitute(v, {x: step})
        if ranges:
            part = map_index(part, lambda i: simplify(i, ranges))
        if steps % count:
            part = _in_a_step(part, op("lt", FromIndex("int64", step), const(steps, "int64")))
        parts.append(part)
    return _joined(make, parts)


def stored_parts(v: Value) -> Load | None:
    """The load of the first part of a word whose parts lie side by side in memory; None: they do not."""
    if not (isinstance(v, Op) and v.name in PARTS):
        return None
    parts = [x.args[0] if isinstance(x, Op) and x.name == "cast" else x for x in v.args]
    first = parts[0]
    if not isinstance(first, Load) or first.dtype != PARTS[v.name] or len(first.index) != 1:
        return None
    (at,) = first.index
    return first if parts == [replace(first, index=(at + k,)) for k in range(len(parts))] else None


def _in_a_step(part: Value, last: Value) -> Value:
    """A part of a word, under the condition that it is a step at all.

    Columns are 0 beyond the last step. An integer may be anything there, also what a guard puts outside of an image:
    one condition then serves for both.
    """
    wide = isinstance(part, Op) and part.name == "cast" and part.dtype == "int32"
    v = part.args[0] if wide and isinstance(part, Op) else part
    if v.dtype in INTEGERS and isinstance(v, Op) and v.name == "where":
        guard, then, orelse = v.args
        if isinstance(guard, Op) and guard.name == "and":
            both = op("and", guard.args[0], op("and", guard.args[1], last))
            return cast(replace(v, args=(both, then, orelse)), part.dtype)
    return Op(part.dtype, "where", (last, part, const(0, part.dtype)))


def _joined(make: str, parts: list[Value]) -> Value:
    """The word of several steps; what guards all of them alike guards the word, unless its parts are stored apart."""
    first = parts[0]
    if isinstance(first, Op) and first.name == "where" and make not in PARTS:
        zero, guards = const(0, first.dtype), [p for p in parts if isinstance(p, Op) and p.name == "where"]
        if len(guards) == len(parts) and all((g.args[0], g.args[2]) == (first.args[0], zero) for g in guards):
            inside = _joined(make, [g.args[1] for g in guards])
            return Op("int32", "where", (first.args[0], inside, const(0, "int32")))
    return Op("int32", make, tuple(parts))
