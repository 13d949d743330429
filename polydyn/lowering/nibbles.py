"""Weights of 4 and 8 bits in panels of 32-bit words, decoded where they are used (docs/adr/0013-quantization.md).

The column operand of a product, ``(q - z) * s``, becomes ``(nibble(word, step) - z) * s``: eight steps of a column form
one 32-bit word, and scales and zero points have separate panels. For tiles and proofs it is a product whose column
operand is computed. Kernels for few rows decode in registers; for many rows, PACK decodes panels of floats. Weights of
8 bits, ``16 h + q``, have panels of words for both digits.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.flatten import FlatNode
from polydyn.schedules.expr import (
    NIBBLE,
    NIBBLES,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    cast,
    const,
    indices,
    op,
    symbols_of,
)
from polydyn.schedules.index import Index
from polydyn.schedules.tiling import Roles

NIBBLE_MIN, NIBBLE_MAX = -8, 7


def over_nibbles(plan: FusionPlan, n: FlatNode) -> FlatNode | None:
    """Return the product ``n`` with a column that is decoded from words, or None if it has no such column."""
    if not (isinstance(n.body, Op) and n.body.name == "mul" and n.dtype == "float32" and n.reduction):
        return None
    for k, column in enumerate(n.body.args):
        decoded = _decoded(plan, column, n.reduction[-1])
        if decoded is not None:
            args = tuple(decoded if k == i else v for i, v in enumerate(n.body.args))
            return replace(n, body=replace(n.body, args=args))
    return None


def _decoded(plan: FusionPlan, v: Value, last: tuple[str, Index]) -> Value | None:
    """Return ``float(int(q) - int(z)) * s`` over words of the constant q, whose innermost eight steps are ``last``, or
    None.
    """
    if not (isinstance(v, Op) and v.name == "mul" and isinstance(v.args[1], Load) and last[1] == NIBBLES):
        return None
    integer, zero = _difference(v.args[0])
    decoded = None if integer is None else _digits(plan, integer, last[0])
    if decoded is None:
        return None
    decoded = decoded if zero is None else op("sub", decoded, cast(zero, "float32"))
    return replace(v, args=(decoded, v.args[1]))


def _digits(plan: FusionPlan, v: Value, step: str) -> Value | None:
    """Return ``int(q)``, or ``int(h) * 16 + int(q)`` plus a number, as a float over words of the constants; None if it
    is another value.
    """
    if isinstance(v, Op) and v.name in ("add", "mul"):
        parts = [const(x.value, "float32") if isinstance(x, Const) else _digits(plan, x, step) for x in v.args]
        return None if any(x is None for x in parts) else op(v.name, *filter(None, parts))
    q = _uncast(v, "int32")
    known = plan.graph.constants.get(q.buffer) if isinstance(q, Load) else None
    if not isinstance(q, Load) or known is None or known.dtype != "int8" or q.index[0].split(step)[0] != 1:
        return None
    if known.min() < NIBBLE_MIN or known.max() > NIBBLE_MAX:
        return None
    return Op("float32", NIBBLE, (q, FromIndex("int32", Index.of(step))))


def _difference(v: Value) -> tuple[Value | None, Load | None]:
    """Return (v, z) of ``float(v - int(z))``, or (v, None) of ``float(v)``."""
    inner = _uncast(v, "float32")
    if isinstance(inner, Op) and inner.name == "sub":
        zero = _uncast(inner.args[1], "int32")
        return (inner.args[0], zero) if isinstance(zero, Load) else (None, None)
    return inner, None


def _parts(v: Value) -> tuple[Load | None, Load | None]:
    """Return the loads (q, z) of ``float(int(q) - int(z))``, or (q, None) of ``float(int(q))``."""
    inner = _uncast(v, "float32")
    zero = None
    if isinstance(inner, Op) and inner.name == "sub":
        inner, point = inner.args
        zero = _uncast(point, "int32")
    q = _uncast(inner, "int32")
    return q if isinstance(q, Load) else None, zero if isinstance(zero, Load) else None


def _uncast(v: Value | None, dtype: str) -> Value | None:
    return v.args[0] if isinstance(v, Op) and v.name == "cast" and v.dtype == dtype else None


def in_bytes(n: FlatNode, roles: Roles) -> bool:
    """Check whether rows are bytes times scales, at addresses affine in the row and the steps, and so can be read in
    place.
    """
    assert isinstance(n.body, Op)
    (row,) = (v for v in n.body.args if roles.col not in symbols_of(v))
    names = (roles.row, roles.block, *roles.inner)
    affine = not any(
        i.symbols() & set(names) and any(x in i.split(x)[1].symbols() for x in names) for i in indices(row)
    )
    q, zero = _parts(row.args[0]) if isinstance(row, Op) and row.name == "mul" else (None, None)
    return affine and q is not None and q.dtype == "int8" and zero is None
