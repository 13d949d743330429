"""Hoist row zero points out of integer products (docs/adr/0013-quantization.md).

``sum((a - za) * w) = sum(a * w) - za * sum(w)``: the product multiplies the stored bytes directly, and the last sum is
one known integer per column. Signed bytes are shifted by 128, because the instructions take unsigned rows:
``sum((a - za) * w) = sum((a + 128) * w) - (za + 128) * sum(w)``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polydyn.fusion.products import has_column, is_contraction
from polydyn.fusion.widen import over_constant, values_of
from polydyn.graph.ir import Compute, Graph, Node, dim_name
from polydyn.graph.passes.integers import column_sums
from polydyn.graph.rewriting import Rewriting
from polydyn.schedules.expr import Array, Const, Load, Op, Value, bitcast, cast, const, load, op

BYTE_DTYPES = ("int8", "uint8")
SIGN_OFFSET = 128
"""Offset from int8 to uint8."""
INT8_MIN, INT8_MAX = -128, 127
"""Range of the column values (int8)."""


def hoist_zero_points(graph: Graph) -> Graph:
    """Give products of 8-bit rows with constant 8-bit columns uint8 rows without a zero point."""
    rewriting = Rewriting(graph)
    for n in graph.nodes:
        parts = _split(graph, n)
        if parts is None or not isinstance(n, Compute):
            rewriting.nodes.append(n)
            continue
        body, zero, (sums, index) = parts
        if isinstance(zero, Const):
            sums = (sums.astype(np.int64) * int(zero.value)).astype(np.int32)
        rest: Value = load(rewriting.constant(f"{n.output}@offsets", sums), index, "int32")
        rest = rest if isinstance(zero, Const) else op("mul", zero, rest)
        shape = graph.tensors[n.output].shape
        total = rewriting.add(replace(n, output=rewriting.fresh_name(f"{n.output}@total"), body=body), shape)
        here = load(total, tuple(map(dim_name, range(len(shape)))), "int32")
        rewriting.nodes.append(Compute(n.output, op("sub", here, rest), origin=n.origin))
    return rewriting.result()


def _split(graph: Graph, n: Node) -> tuple[Value, Value, tuple[Array, tuple[str, ...]]] | None:
    """Return the product without the zero point of its rows, the zero point, and the column sums.

    Returns None if there is nothing to hoist.
    """
    if not isinstance(n, Compute) or n.body.dtype != "int32" or not is_contraction(n) or not has_column(n):
        return None
    assert isinstance(n.body, Op)
    for row, column in (n.body.args, n.body.args[::-1]):
        constant = over_constant(graph, column)
        parts = _row(row)
        if constant is None or parts is None or over_constant(graph, row) is not None:
            continue
        x, zero = parts
        values = values_of(graph, *constant)
        sums = column_sums(n, constant[0], values)
        if sums is None or not values.size or values.min() < INT8_MIN or values.max() > INT8_MAX:
            return None
        bytes_: Value = x
        if x.dtype == "int8":
            bytes_, sign = op("add", bitcast(x, "uint8"), const(SIGN_OFFSET, "uint8")), const(SIGN_OFFSET, "int32")
            zero = sign if zero is None else op("add", zero, sign)
        if zero is None:
            return None
        args = tuple(cast(bytes_, "int32") if v is row else v for v in n.body.args)
        return replace(n.body, args=args), zero, sums
    return None


def _row(v: Value) -> tuple[Load, Value | None] | None:
    """Return the load of the 8-bit row operand, and its zero point as one int32 value (None if it is 0)."""
    zero: Value | None = None
    if isinstance(v, Op) and v.name == "sub":
        v, zero = v.args
        point = zero.args[0] if isinstance(zero, Op) and zero.name == "cast" else zero
        one = isinstance(point, Load) and not any(i.symbols() or i.fetches() for i in point.index)
        if not (isinstance(point, Const) or one):
            return None
    x = v.args[0] if isinstance(v, Op) and v.name == "cast" else None
    return (x, zero) if isinstance(x, Load) and x.dtype in BYTE_DTYPES else None
