"""Zero points of rows come out of integer products (docs/adr/0013-quantization.md).

``sum((a - za) * w) = sum(a * w) - za * sum(w)``: what is multiplied are bytes as they lie in memory, and the last sum
is one known integer for each column. Bytes with a sign are moved by 128, as instructions take the rows of a product
without one: ``sum((a - za) * w) = sum((a + 128) * w) - (za + 128) * sum(w)``.
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

BYTES = ("int8", "uint8")
SIGN = 128
"""What makes a byte with a sign one without."""
LEAST, MOST = -128, 127
"""What columns of bytes hold."""


def take_out_offsets(graph: Graph) -> Graph:
    """The graph in which products of bytes with constants of bytes have rows of uint8 without a zero point."""
    made = Rewriting(graph)
    for n in graph.nodes:
        found = _split(graph, n)
        if found is None or not isinstance(n, Compute):
            made.nodes.append(n)
            continue
        body, zero, (sums, index) = found
        if isinstance(zero, Const):
            sums = (sums.astype(np.int64) * int(zero.value)).astype(np.int32)
        rest: Value = load(made.constant(f"{n.output}@offsets", sums), index, "int32")
        rest = rest if isinstance(zero, Const) else op("mul", zero, rest)
        shape = graph.tensors[n.output].shape
        total = made.add(replace(n, output=made.fresh(f"{n.output}@total"), body=body), shape)
        here = load(total, tuple(map(dim_name, range(len(shape)))), "int32")
        made.nodes.append(Compute(n.output, op("sub", here, rest), origin=n.origin))
    return made.result()


def _split(graph: Graph, n: Node) -> tuple[Value, Value, tuple[Array, tuple[str, ...]]] | None:
    """The product without the zero point of its rows, this number, and the sums of the columns; None: nothing to do."""
    if not isinstance(n, Compute) or n.body.dtype != "int32" or not is_contraction(n) or not has_column(n):
        return None
    assert isinstance(n.body, Op)
    for row, column in (n.body.args, n.body.args[::-1]):
        found = over_constant(graph, column)
        parts = _row(row)
        if found is None or parts is None or over_constant(graph, row) is not None:
            continue
        x, zero = parts
        values = values_of(graph, *found)
        sums = column_sums(n, found[0], values)
        if sums is None or not values.size or values.min() < LEAST or values.max() > MOST:
            return None
        bytes_: Value = x
        if x.dtype == "int8":
            bytes_, sign = op("add", bitcast(x, "uint8"), const(SIGN, "uint8")), const(SIGN, "int32")
            zero = sign if zero is None else op("add", zero, sign)
        if zero is None:
            return None
        args = tuple(cast(bytes_, "int32") if v is row else v for v in n.body.args)
        return replace(n.body, args=args), zero, sums
    return None


def _row(v: Value) -> tuple[Load, Value | None] | None:
    """The byte that a row operand reads, and its zero point as one number of int32 (None: it is 0)."""
    zero: Value | None = None
    if isinstance(v, Op) and v.name == "sub":
        v, zero = v.args
        point = zero.args[0] if isinstance(zero, Op) and zero.name == "cast" else zero
        one = isinstance(point, Load) and not any(i.symbols() or i.fetches() for i in point.index)
        if not (isinstance(point, Const) or one):
            return None
    x = v.args[0] if isinstance(v, Op) and v.name == "cast" else None
    return (x, zero) if isinstance(x, Load) and x.dtype in BYTES else None
