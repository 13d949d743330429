"""Constants of integer products that are no bytes with a sign are moved to be such (docs/adr/0013-quantization.md).

``sum(a * w) = sum(a * (w - m)) + m * sum(a)``: weights of uint8 less their zero point hold numbers from -255 to 255, of
which a tensor with one zero point has 256. Less m these are bytes, four of which are multiplied at once; what is left
is one sum for each row. Rows of windows are left as they are: their sums read them as often as there are taps.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.offsets import LEAST, MOST
from polydyn.fusion.products import axes_of, has_column, is_contraction, is_windowed
from polydyn.fusion.widen import over_constant, values_of
from polydyn.graph.ir import Compute, Graph, Node, dim_name
from polydyn.graph.rewriting import Rewriting
from polydyn.schedules.expr import Op, Value, const, load, op
from polydyn.schedules.index import ONE


def sum_rows(graph: Graph) -> Graph:
    """The graph in which products of integers with constants of a byte's range have constants of bytes with a sign."""
    made = Rewriting(graph)
    for n in graph.nodes:
        found = _operands(graph, n)
        made.nodes.append(n if found is None or not isinstance(n, Compute) else _moved(made, n, *found))
    return made.result()


def _moved(made: Rewriting, n: Compute, row: Value, column: Value, by: int) -> Compute:
    """What the product is made of, one of bytes and a sum for each row."""
    shape, moved = made.tensors[n.output].shape, const(by, "int32")
    axes = tuple(map(dim_name, range(len(shape))))
    alone = axes_of(column) - axes_of(row)
    body = op("mul", row, op("sub", column, moved))
    total = made.add(replace(n, output=made.fresh(f"{n.output}@bytes"), body=body), shape)
    summed = replace(n, output=made.fresh(f"{n.output}@rows"), body=row)
    rows = made.add(summed, tuple(ONE if x in alone else e for x, e in zip(axes, shape, strict=True)))
    at = load(rows, tuple(0 if x in alone else x for x in axes), "int32")
    return Compute(n.output, op("add", load(total, axes, "int32"), op("mul", moved, at)), origin=n.origin)


def _operands(graph: Graph, n: Node) -> tuple[Value, Value, int] | None:
    """The row operand, the column operand, and by how much this is moved; None: there is nothing to move."""
    if not isinstance(n, Compute) or n.body.dtype != "int32" or not is_contraction(n) or not has_column(n):
        return None
    assert isinstance(n.body, Op)
    for row, column in (n.body.args, n.body.args[::-1]):
        found = over_constant(graph, column)
        values = None if found is None or over_constant(graph, row) else values_of(graph, *found)
        if values is None or not values.size:
            continue
        low, high = int(values.min()), int(values.max())
        bytes_already, too_many = low >= LEAST and high <= MOST, high - low > MOST - LEAST
        return None if bytes_already or too_many or is_windowed(n) else (row, column, low - LEAST)
    return None
