"""Rounding of 16-bit floats: on CUDA where a kernel stores them; on a CPU redundant roundings are removed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import Const, Load, Op, Value, cast, transform
from polydyn.schedules.model import Group, Statement

HALF, WIDE = ("float16", "bfloat16"), "float32"
MONOTONE_OPS = ("max", "min", "neg", "abs")
"""Operations that commute with rounding: they select an operand by an order that rounding preserves, or change a
sign.
"""


def round_at_stores(group: Group, unstored: Collection[str] = (), product: bool = False) -> Group:
    """Make the 16-bit locals of a group float32. A value that is widened again is never rounded.

    ``unstored``: arrays other than locals that no kernel stores. An operand that is stored and widened does not change.
    Neither does an operand of a ``product`` that its copies compute: shared memory holds it, for 16-bit
    instructions.
    """
    wide = {n for n, a in group.arrays.items() if a.role == "local" and a.dtype in HALF}
    arrays = {n: replace(a, dtype=WIDE) if n in wide else a for n, a in group.arrays.items()}
    widened = wide | set(unstored)
    statements = (_statement(s, widened, product and s.reduce is not None) for s in group.statements)
    return replace(group, arrays=arrays, statements=tuple(statements))


def _statement(s: Statement, widened: Collection[str], product: bool) -> Statement:
    def value(v: Value) -> Value:
        if isinstance(v, Load) and v.buffer in widened and v.dtype in HALF:
            return Op(v.dtype, "cast", (replace(v, dtype=WIDE),))
        return _unrounded(v)

    def operand(v: Value) -> Value:
        copied = isinstance(v, Op) and v.name == "cast" and v.dtype == WIDE and v.args[0].dtype in HALF
        return replace(v, args=(transform(v.args[0], value),)) if copied and isinstance(v, Op) else transform(v, value)

    value_of_statement: Value
    if product and isinstance(s.value, Op) and s.value.name == "mul":
        value_of_statement = replace(s.value, args=tuple(map(operand, s.value.args)))
    else:
        value_of_statement = transform(s.value, value)
    if s.array in widened and value_of_statement.dtype in HALF:
        value_of_statement = _unrounded(cast(value_of_statement, WIDE))
    return replace(s, value=value_of_statement)


def _unrounded(v: Value) -> Value:
    """Remove a rounding to 16 bits that a widening undoes."""
    if isinstance(v, Op) and v.name == "cast" and v.dtype == WIDE:
        (x,) = v.args
        if isinstance(x, Op) and x.name == "cast" and x.dtype in HALF and x.args[0].dtype == WIDE:
            return x.args[0]
    return v


def round_once(group: Group) -> Group:
    """Remove roundings whose result is rounded again after clipping or a change of sign.

    ``round(max(round(x), 0))`` is ``round(max(x, 0))``, except for the sign of a zero that x rounds to.
    """
    statements = (replace(s, value=transform(s.value, _settled)) for s in group.statements)
    return replace(group, statements=tuple(statements))


def _settled(v: Value) -> Value:
    if not (isinstance(v, Op) and v.name == "cast" and v.dtype in HALF):
        return v
    (x,) = v.args
    if not (isinstance(x, Op) and x.name in MONOTONE_OPS and x.dtype == WIDE):
        return v
    if not all(_holds(v.dtype, a) for a in x.args):
        return v
    return replace(v, args=(replace(x, args=tuple(map(_unrounded, x.args))),))


def _holds(dtype: str, v: Value) -> bool:
    """Check whether a 16-bit dtype represents a float32 value exactly, whatever is loaded."""
    if isinstance(v, Const):
        number = np.asarray(v.value, np.float32)
        return bool(number.astype(numpy_dtype(dtype)).astype(np.float32) == number)
    return isinstance(v, Op) and v.name == "cast" and v.args[0].dtype == dtype
