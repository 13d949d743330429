"""Shift constants of integer products into the int8 range (docs/adr/0013-quantization.md).

``sum(a * w) = sum(a * (w - m)) + m * sum(a)``: uint8 weights minus their zero point range from -255 to 255, but with
one zero point they span only 256 values. After subtracting m they fit in int8, and an instruction multiplies four of
them at once. What remains is one sum per row. Window products do not change: their row sums would read each element
once per tap.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.products import axes_of, has_column, is_contraction, is_windowed
from polydyn.fusion.widen import over_constant, values_of
from polydyn.fusion.zero_points import INT8_MAX, INT8_MIN
from polydyn.graph.ir import Compute, Graph, Node, dim_name
from polydyn.graph.rewriting import Rewriting
from polydyn.schedules.expr import Op, Value, const, load, op
from polydyn.schedules.index import ONE


def sum_rows(graph: Graph) -> Graph:
    """Give integer products whose constants span at most 256 values int8 constants."""
    rewriting = Rewriting(graph)
    for n in graph.nodes:
        operands = _operands(graph, n)
        rewriting.nodes.append(n if operands is None or not isinstance(n, Compute) else _moved(rewriting, n, *operands))
    return rewriting.result()


def _moved(rewriting: Rewriting, n: Compute, row: Value, column: Value, by: int) -> Compute:
    """Build the node that replaces the product: an int8 product plus the shift times a sum per row."""
    shape, moved = rewriting.tensors[n.output].shape, const(by, "int32")
    axes = tuple(map(dim_name, range(len(shape))))
    alone = axes_of(column) - axes_of(row)
    body = op("mul", row, op("sub", column, moved))
    total = rewriting.add(replace(n, output=rewriting.fresh_name(f"{n.output}@bytes"), body=body), shape)
    summed = replace(n, output=rewriting.fresh_name(f"{n.output}@rows"), body=row)
    rows = rewriting.add(summed, tuple(ONE if x in alone else e for x, e in zip(axes, shape, strict=True)))
    at = load(rows, tuple(0 if x in alone else x for x in axes), "int32")
    return Compute(n.output, op("add", load(total, axes, "int32"), op("mul", moved, at)), origin=n.origin)


def _operands(graph: Graph, n: Node) -> tuple[Value, Value, int] | None:
    """Return the row operand, the column operand and the shift of the columns, or None if nothing is to be shifted."""
    if not isinstance(n, Compute) or n.body.dtype != "int32" or not is_contraction(n) or not has_column(n):
        return None
    assert isinstance(n.body, Op)
    for row, column in (n.body.args, n.body.args[::-1]):
        constant = over_constant(graph, column)
        values = None if constant is None or over_constant(graph, row) else values_of(graph, *constant)
        if values is None or not values.size:
            continue
        low, high = int(values.min()), int(values.max())
        bytes_already, too_many = low >= INT8_MIN and high <= INT8_MAX, high - low > INT8_MAX - INT8_MIN
        return None if bytes_already or too_many or is_windowed(n) else (row, column, low - INT8_MIN)
    return None
