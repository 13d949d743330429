"""The loop IR checker: invariants that hold after every pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polydyn.codegen.indices import mentions, node_buffers, node_indices
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
    walk,
    walk_value,
)
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import INTEGERS, Load


def verify_body(
    body: Body, symbols: Iterable[str], buffers: Iterable[str], *, open_names: frozenset[str] | None = None
) -> None:
    """Invariants: every symbol is bound where it is used and never bound twice; buffers are parameters or allocated;
    registers are defined once, before use, in an enclosing scope, and keep their number of lanes (a scalar integer is a
    symbol from there on); no instances, marks or logical loads are left.

    ``open_names``: between two passes; these symbols and buffers may be bound by a later one, and what is not lowered
    yet may be there.
    """
    lowered = open_names is None
    _check(body, frozenset(symbols), dict[str, int](), frozenset(buffers), _Rules(lowered, open_names or frozenset()))


@dataclass(frozen=True)
class _Rules:
    """``lowered``: nothing may be left to lower. ``open``: names that need no binding."""

    lowered: bool
    open: frozenset[str]


def free_names(body: Body) -> frozenset[str]:
    """The symbols and buffers that a body uses and does not bind itself."""
    used, bound = set[str](), set[str]()
    for n in walk(body):
        symbols, fetched = mentions(n)
        used |= symbols | fetched | node_buffers(n)
        if isinstance(n, (For, Let)):
            bound.add(n.var)
        elif isinstance(n, Alloc):
            bound.add(n.buffer)
        elif isinstance(n, Def):
            bound.add(n.reg)
    return frozenset(used - bound)


def _check(body: Body, bound: frozenset[str], regs: dict[str, int], buffers: frozenset[str], rules: _Rules) -> None:
    for n in body:
        symbols, fetched = mentions(n)
        if missing := symbols - bound - rules.open:
            where = next(i for i in node_indices(n) if i.symbols() & missing)
            raise CodegenError(f"unbound {sorted(missing)} in {where} of {type(n).__name__}")
        if missing := fetched - buffers - rules.open:
            raise CodegenError(f"fetch from unknown buffers {sorted(missing)} in {type(n).__name__}")
        if isinstance(n, (Store, Def, Set)):
            _check_values(n, regs, buffers, rules)
        if isinstance(n, Def) and n.value.dtype in INTEGERS and n.lanes == 1:
            bound = bound | {n.reg}
        if isinstance(n, Call) and (unknown := node_buffers(n) - buffers - rules.open):
            raise CodegenError(f"{n.function} is called with unknown {sorted(unknown)}")
        if rules.lowered and isinstance(n, (Inst, Mark)):
            raise CodegenError(f"{n.statement if isinstance(n, Inst) else n.name} was not consumed by any pass")
        inner, reachable = bound, buffers
        if isinstance(n, (For, Let)):
            if n.var in bound:
                raise CodegenError(f"{n.var} is bound twice")
            inner = bound | {n.var}
        if isinstance(n, Alloc):
            if n.buffer in buffers:
                raise CodegenError(f"buffer {n.buffer} is allocated twice")
            reachable = buffers | {n.buffer}
        for b in bodies(n):
            scope = dict[str, int]() if isinstance(n, Outline) else dict(regs)
            _check(b, inner, scope, reachable, rules)


def _check_values(n: Node, regs: dict[str, int], buffers: frozenset[str], rules: _Rules) -> None:
    assert isinstance(n, (Store, Def, Set))
    for v in walk_value(n.value):
        if isinstance(v, Reg) and regs.get(v.name) != v.lanes:
            raise CodegenError(f"register {v.name} is used with {v.lanes} lanes, defined with {regs.get(v.name)}")
        if isinstance(v, FlatLoad) and v.buffer not in buffers | rules.open:
            raise CodegenError(f"load from unknown buffer {v.buffer}")
        if rules.lowered and isinstance(v, Load):
            raise CodegenError(f"logical load of {v.buffer} was not lowered")
    if lanes_of(n.value) > n.lanes:
        raise CodegenError(f"{lanes_of(n.value)} lanes assigned to {n.lanes} in {type(n).__name__}")
    if isinstance(n, Store) and n.buffer not in buffers | rules.open:
        raise CodegenError(f"store to unknown buffer {n.buffer}")
    if isinstance(n, Set) and regs.get(n.reg) != n.lanes:
        raise CodegenError(f"register {n.reg} is set with {n.lanes} lanes, defined with {regs.get(n.reg)}")
    if isinstance(n, Def):
        if n.reg in regs:
            raise CodegenError(f"register {n.reg} is defined twice")
        regs[n.reg] = n.lanes
