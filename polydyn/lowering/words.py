"""Integer products two steps at a time: pairs of 16 bits in words of 32 (docs/adr/0013-quantization.md).

Processors multiply two pairs of 16-bit integers and add both products in one instruction. Bytes fit, also less their
zero points, and so does the sum of two products. Panels of constants hold words then (``Pack.pairs``), and FILL makes
words of the rows; to tiles and proofs it is a product of half as many steps.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.flatten import FlatNode
from polydyn.schedules.expr import Array, Const, Load, Op, Value, const, map_index, substitute
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import simplify

BYTES = ("int8", "uint8")
LARGEST = 2**15


def in_pairs(plan: FusionPlan, n: FlatNode, column: Load) -> FlatNode:
    """The product over words, of half as many steps of its last reduction; as it was where something does not fit.

    ``column``: the operand that is a constant; packing makes words of it, here it keeps the address of single steps.
    """
    assert isinstance(n.body, Op)
    x, steps = n.reduction[-1][0], n.reduction[-1][1].constant
    (row,) = (v for v in n.body.args if v is not column)
    if n.dtype != "int32" or steps is None or steps < 4 or steps % 2:
        return n
    if not fits(row) or not _small(plan.graph.constants[column.buffer]):
        return n
    reduction = (*n.reduction[:-1], (x, Index.of(steps // 2)))
    ranges = dict((*n.shared, *reduction))
    low, high = (map_index(substitute(row, {x: Index.of(x) * 2 + k}), lambda i: simplify(i, ranges)) for k in (0, 1))
    word = paired(low, high)
    args = tuple(v if v is column else word for v in n.body.args)
    return replace(n, reduction=reduction, body=Op("int32", "dot2", args))


def fits(v: Value) -> bool:
    """Whether a value of int32 has 16 bits whatever is loaded: a byte, a difference of bytes, a choice of such."""
    if isinstance(v, Op) and v.name == "sub":
        return all(map(_is_byte, v.args))
    if isinstance(v, Op) and v.name in ("where", "select"):
        return all(map(fits, v.args[1:]))
    return _is_byte(v)


def paired(low: Value, high: Value) -> Value:
    """The word of two steps; what guards both of them guards the word."""
    if isinstance(low, Op) and isinstance(high, Op) and low.name == high.name == "where":
        zero = const(0, "int32")
        if low.args[0] == high.args[0] and low.args[2] == high.args[2] == zero:
            return Op("int32", "where", (low.args[0], paired(low.args[1], high.args[1]), zero))
    return Op("int32", "pair", (low, high))


def _is_byte(v: Value) -> bool:
    if isinstance(v, Const):
        return 0 <= abs(v.value) < 256
    return isinstance(v, Op) and v.name == "cast" and v.args[0].dtype in BYTES


def _small(a: Array) -> bool:
    return a.size == 0 or (int(a.min()) > -LARGEST and int(a.max()) < LARGEST)
