"""Floats of 16 bits are rounded where a kernel stores them, and stay float32 between its nodes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polydyn.schedules.expr import Load, Op, Value, cast, transform
from polydyn.schedules.model import Group, Statement

HALF, WIDE = ("float16", "bfloat16"), "float32"


def round_at_stores(group: Group, held: Collection[str] = ()) -> Group:
    """The group whose locals are float32 where they were 16 bits; what is widened again was never rounded.

    ``held``: arrays that no kernel stores, besides locals. An operand that is stored and widened stays as it is.
    """
    wide = {n for n, a in group.arrays.items() if a.role == "local" and a.dtype in HALF}
    arrays = {n: replace(a, dtype=WIDE) if n in wide else a for n, a in group.arrays.items()}
    own = wide | set(held)
    return replace(group, arrays=arrays, statements=tuple(_statement(s, own) for s in group.statements))


def _statement(s: Statement, own: Collection[str]) -> Statement:
    def value(v: Value) -> Value:
        if isinstance(v, Load) and v.buffer in own and v.dtype in HALF:
            return Op(v.dtype, "cast", (replace(v, dtype=WIDE),))
        return _unrounded(v)

    made = transform(s.value, value)
    if s.array in own and made.dtype in HALF:
        made = _unrounded(cast(made, WIDE))
    return replace(s, value=made)


def _unrounded(v: Value) -> Value:
    """A value without the rounding to 16 bits that a widening undoes."""
    if isinstance(v, Op) and v.name == "cast" and v.dtype == WIDE:
        (x,) = v.args
        if isinstance(x, Op) and x.name == "cast" and x.dtype in HALF and x.args[0].dtype == WIDE:
            return x.args[0]
    return v
