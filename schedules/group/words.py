"""Values that pack several steps of a product into a 32-bit word (``polydyn/lowering/k_packing.py`` chooses them)."""

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
    """Return the word (an int32 built by the operation ``make``) of the values of ``v`` at consecutive steps.

    ``x`` is the iterator of ``v`` that counts ``steps`` single steps, and afterwards words. ``ranges`` has extents of
    iterators for simplifying subscripts.
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
    """Return the load of the first element of a word if its elements are contiguous in memory, else None."""
    if not (isinstance(v, Op) and v.name in PARTS):
        return None
    parts = [x.args[0] if isinstance(x, Op) and x.name == "cast" else x for x in v.args]
    first = parts[0]
    if not isinstance(first, Load) or first.dtype != PARTS[v.name] or len(first.index) != 1:
        return None
    (at,) = first.index
    return first if parts == [replace(first, index=(at + k,)) for k in range(len(parts))] else None


def _in_a_step(part: Value, last: Value) -> Value:
    """Return an element of a word, or 0 past the last step.

    Columns are 0 past the last step. An integer may have any value there, even the one that a guard puts outside an
    image, so one condition serves for both.
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
    """Pack several steps into a word.

    A guard that is common to all guards the word, unless elements are stored one by one.
    """
    first = parts[0]
    if isinstance(first, Op) and first.name == "where" and make not in PARTS:
        zero, guards = const(0, first.dtype), [p for p in parts if isinstance(p, Op) and p.name == "where"]
        if len(guards) == len(parts) and all((g.args[0], g.args[2]) == (first.args[0], zero) for g in guards):
            inside = _joined(make, [g.args[1] for g in guards])
            return Op("int32", "where", (first.args[0], inside, const(0, "int32")))
    return Op("int32", make, tuple(parts))
