"""The loop IR checker: invariants that hold after every pass."""

from __future__ import annotations

from collections.abc import Iterable

from polydyn.codegen.ir import (
    Alloc,
    Body,
    Call,
    Def,
    FlatLoad,
    For,
    Inst,
    Let,
    Mark,
    Node,
    Outline,
    Reg,
    Set,
    Store,
    bodies,
    lanes_of,
    mentions,
    node_buffers,
    node_indices,
    walk_value,
)  # fmt: skip
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import INTEGERS, Load


def verify_body(body: Body, symbols: Iterable[str], buffers: Iterable[str], *, lowered: bool = True) -> None:
    """Invariants: every symbol is bound where it is used and never bound twice; buffers are parameters or allocated;
    registers are defined once, before use, in an enclosing scope, and keep their number of lanes (a scalar integer is a
    symbol from there on); when ``lowered``, no instances, marks or logical loads are left.
    """
    _check(body, frozenset(symbols), dict[str, int](), frozenset(buffers), lowered)


def _check(body: Body, bound: frozenset[str], regs: dict[str, int], buffers: frozenset[str], lowered: bool) -> None:
    for n in body:
        symbols, fetched = mentions(n)
        if not symbols <= bound:
            where = next(i for i in node_indices(n) if not i.symbols() <= bound)
            raise CodegenError(f"unbound {sorted(symbols - bound)} in {where} of {type(n).__name__}")
        if not fetched <= buffers:
            raise CodegenError(f"fetch from unknown buffers {sorted(fetched - buffers)} in {type(n).__name__}")
        if isinstance(n, (Store, Def, Set)):
            _check_values(n, regs, buffers, lowered)
        if isinstance(n, Def) and n.value.dtype in INTEGERS and n.lanes == 1:
            bound = bound | {n.reg}
        if isinstance(n, Call) and (unknown := node_buffers(n) - buffers):
            raise CodegenError(f"{n.function} is called with unknown {sorted(unknown)}")
        if lowered and isinstance(n, (Inst, Mark)):
            raise CodegenError(f"{n.statement if isinstance(n, Inst) else n.name} was not consumed by any pass")
        inner, known = bound, buffers
        if isinstance(n, (For, Let)):
            if n.var in bound:
                raise CodegenError(f"{n.var} is bound twice")
            inner = bound | {n.var}
        if isinstance(n, Alloc):
            if n.buffer in buffers:
                raise CodegenError(f"buffer {n.buffer} is allocated twice")
            known = buffers | {n.buffer}
        for b in bodies(n):
            scope = dict[str, int]() if isinstance(n, Outline) else dict(regs)
            _check(b, inner, scope, known, lowered)


def _check_values(n: Node, regs: dict[str, int], buffers: frozenset[str], lowered: bool) -> None:
    assert isinstance(n, (Store, Def, Set))
    for v in walk_value(n.value):
        if isinstance(v, Reg) and regs.get(v.name) != v.lanes:
            raise CodegenError(f"register {v.name} is used with {v.lanes} lanes, defined with {regs.get(v.name)}")
        if isinstance(v, FlatLoad) and v.buffer not in buffers:
            raise CodegenError(f"load from unknown buffer {v.buffer}")
        if lowered and isinstance(v, Load):
            raise CodegenError(f"logical load of {v.buffer} was not lowered")
    if lanes_of(n.value) > n.lanes:
        raise CodegenError(f"{lanes_of(n.value)} lanes assigned to {n.lanes} in {type(n).__name__}")
    if isinstance(n, Store) and n.buffer not in buffers:
        raise CodegenError(f"store to unknown buffer {n.buffer}")
    if isinstance(n, Set) and regs.get(n.reg) != n.lanes:
        raise CodegenError(f"register {n.reg} is set with {n.lanes} lanes, defined with {regs.get(n.reg)}")
    if isinstance(n, Def):
        if n.reg in regs:
            raise CodegenError(f"register {n.reg} is defined twice")
        regs[n.reg] = n.lanes


