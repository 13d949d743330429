"""What kind of sum of products a node is, by its subscripts: matrix product, convolution, depthwise convolution."""

from __future__ import annotations

from polydyn.graph.ir import Compute
from polydyn.schedules.expr import Op, Value, indices, loads, symbols_of
from polydyn.schedules.index import Index

PRODUCTS = ("float32", "int32")
"""What sums of products are built for; others run as ordinary loop nests."""


def is_contraction(n: Compute) -> bool:
    """A sum of products of two loaded operands: matmul, convolution and their like."""
    if n.reduce != "sum" or not (isinstance(n.body, Op) and n.body.name == "mul") or n.body.dtype not in PRODUCTS:
        return False
    a, b = (frozenset(s for x in loads(v) for i in x.index for s in i.symbols()) for v in n.body.args)
    axes = {s for s in a | b if is_axis(s)}
    return bool(loads(n.body.args[0]) and loads(n.body.args[1])) and bool((a ^ b) & axes)


def is_windowed(n: Compute) -> bool:
    """Whether the product is a convolution of any kind but the plain 1x1, which is a matrix product.

    A subscript of one operand moves with an output axis that the other operand lacks, and with a reduction or by
    steps; or an axis is cut into groups, ``d // n``.
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
    """Whether both operands of a product move along an output axis along which the other one does not."""
    assert isinstance(n.body, Op)
    a, b = (axes_of(v) for v in n.body.args)
    return bool(a - b and b - a)


NARROW = (2, 4, 8)
"""Channels of a group that is a part of a vector of any processor's."""


def has_narrow_groups(n: Compute, axis: str) -> bool:
    """Whether an operand reads groups of few channels of an output axis, ``axis // m``."""
    return n.body.dtype == "float32" and any(group_size(i, axis) in NARROW for i in indices(n.body))


def group_size(i: Index, axis: str) -> int:
    """m where a subscript moves by m for every m steps of an axis, ``m * (axis // m)``; 0 where it does not."""
    for a in i.atoms():
        if not isinstance(a, str) and a.kind == "floordiv" and a.args[0] == Index.of(axis):
            m = a.args[1].constant or 0
            return m if i.terms.get((a,)) == m and axis not in i.split(axis)[0].symbols() else 0
    return 0


def axes_of(v: Value) -> frozenset[str]:
    """The output axes along which an operand moves step by step (cut into groups, ``d // n``, it does not)."""
    return frozenset(a for i in indices(v) for a in i.atoms() if isinstance(a, str) and is_axis(a))


def is_axis(symbol: str) -> bool:
    """Whether a symbol is the iterator of an output axis."""
    return symbol[:1] == "d" and symbol[1:].isdigit()


def is_reduction(symbol: str) -> bool:
    """Whether a symbol is the iterator of a reduction."""
    return symbol[:1] == "r" and symbol[1:].isdigit()
