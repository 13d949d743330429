"""Classify a sum of products by its subscripts: matrix product, convolution or depthwise convolution."""

from __future__ import annotations

from polydyn.graph.ir import Compute
from polydyn.schedules.expr import Op, Value, indices, loads, symbols_of
from polydyn.schedules.index import Index

PRODUCT_DTYPES = ("float32", "int32", "float64")
"""Dtypes of sums that contraction kernels support. Other sums run as ordinary loop nests."""


def is_contraction(n: Compute) -> bool:
    """Check for a sum of products of two loaded operands: matmul, convolution and similar nodes."""
    if n.reduce != "sum" or not (isinstance(n.body, Op) and n.body.name == "mul") or n.body.dtype not in PRODUCT_DTYPES:
        return False
    a, b = (frozenset(s for x in loads(v) for i in x.index for s in i.symbols()) for v in n.body.args)
    axes = {s for s in a | b if is_axis(s)}
    return bool(loads(n.body.args[0]) and loads(n.body.args[1])) and bool((a ^ b) & axes)


def is_windowed(n: Compute) -> bool:
    """Check whether the product is a convolution other than a plain 1x1, which is a matrix product.

    A subscript of one operand moves with an output axis that the other operand lacks, and with a reduction or by steps;
    or an axis is cut into groups, ``d // n``.
    """
    assert isinstance(n.body, Op)
    for operand, other in (n.body.args, n.body.args[::-1]):
        elsewhere = symbols_of(other)
        for i in indices(operand):
            if any(not isinstance(a, str) and a.kind == "floordiv" and is_axis(str(a.args[0])) for a in i.atoms()):
                return True
            axes = {s for s in i.symbols() - elsewhere if is_axis(s)}
            steps = any(s in i.atoms() and i.split(s)[0] != 1 for s in axes)
            if axes and (steps or any(map(is_reduction, i.symbols()))):
                return True
    return False


def has_column(n: Compute) -> bool:
    """Check whether each operand of a product moves along an output axis that the other operand lacks."""
    assert isinstance(n.body, Op)
    a, b = (axes_of(v) for v in n.body.args)
    return bool(a - b and b - a)


NARROW_GROUP_SIZES = (2, 4, 8)
"""Channels per group that are fewer than the lanes of a vector on any processor."""


def has_narrow_groups(n: Compute, axis: str) -> bool:
    """Check whether an operand reads narrow groups of an output axis, ``axis // m``."""
    return n.body.dtype == "float32" and any(group_size(i, axis) in NARROW_GROUP_SIZES for i in indices(n.body))


def group_size(i: Index, axis: str) -> int:
    """Return m if a subscript moves by m for every m steps of an axis, ``m * (axis // m)``, else 0."""
    for a in i.atoms():
        if not isinstance(a, str) and a.kind == "floordiv" and a.args[0] == Index.of(axis):
            m = a.args[1].constant or 0
            return m if i.terms.get((a,)) == m and axis not in i.split(axis)[0].symbols() else 0
    return 0


def axes_of(v: Value) -> frozenset[str]:
    """Return the output axes along which an operand moves step by step (not axes cut into groups, ``d // n``)."""
    return frozenset(a for i in indices(v) for a in i.atoms() if isinstance(a, str) and is_axis(a))


def is_axis(symbol: str) -> bool:
    """Check whether a symbol is the iterator of an output axis."""
    return symbol[:1] == "d" and symbol[1:].isdigit()


def is_reduction(symbol: str) -> bool:
    """Check whether a symbol is the iterator of a reduction."""
    return symbol[:1] == "r" and symbol[1:].isdigit()
