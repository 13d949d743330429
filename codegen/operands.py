"""The two operands of an accumulated product: their order and their layout in memory."""

from __future__ import annotations

from dataclasses import replace

from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import PRODUCTS, Load, Op, Value, symbols_of
from polydyn.schedules.index import ONE
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tiling import Roles


def operands(acc: Statement, roles: Roles) -> tuple[Value, Value]:
    """Return (row operand, column operand) of the accumulated product. CodegenError: they are not separate."""
    v = acc.value
    if not (isinstance(v, Op) and v.name in PRODUCTS):
        raise CodegenError(f"{acc.name} does not accumulate a product")
    a, b = v.args
    if roles.col in symbols_of(a):
        a, b = b, a
    if roles.col in symbols_of(a) or roles.row in symbols_of(b):
        raise CodegenError(f"{acc.name}: the operands do not separate rows from columns")
    return a, b


def multiplied(acc: Statement, row: Value, col: Value) -> Value:
    """Return the accumulated value for other operands."""
    assert isinstance(acc.value, Op)
    return replace(acc.value, args=(row, col))


def dense(group: Group, x: Load, iterator: str) -> bool:
    """Whether the next iteration reads the next element."""
    stride, rest = group.arrays[x.buffer].address(x.index).split(iterator)
    return stride == ONE and iterator not in rest.symbols()
