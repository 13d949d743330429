"""The loop IR checker: invariants that hold after every pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polydyn.clock import timed
from polydyn.codegen import ir
from polydyn.codegen.indices import mentions, node_buffers, node_indices
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import INTEGERS, Load


@timed("checking the loop IR")
def verify_body(
    body: ir.Body, symbols: Iterable[str], buffers: Iterable[str], *, open_names: frozenset[str] | None = None
) -> None:
    """Check the invariants of a body; CodegenError otherwise.

    Every symbol is bound where it is used and never bound twice. Buffers are parameters or allocated. Registers are
    defined once, before use, in an enclosing scope, and keep their number of lanes (a scalar integer is a symbol from
    there on). No instances, marks or logical loads are left.

    ``open_names`` is given between two passes: later passes may bind these symbols and buffers, and nodes that are not
    lowered yet are allowed.
    """
    lowered = open_names is None
    _check(body, frozenset(symbols), dict[str, int](), frozenset(buffers), _Rules(lowered, open_names or frozenset()))


@dataclass(frozen=True)
class _Rules:
    """Rules of a check. ``lowered``: nothing may be left to lower. ``open``: names that need no binding."""

    lowered: bool
    open: frozenset[str]


def free_names(body: ir.Body) -> frozenset[str]:
    """Return the symbols and buffers that a body uses and does not bind itself."""
    used, bound = set[str](), set[str]()
    for n in ir.walk(body):
        symbols, fetched = mentions(n)
        used |= symbols | fetched | node_buffers(n)
        if isinstance(n, (ir.For, ir.Let)):
            bound.add(n.var)
        elif isinstance(n, ir.Alloc):
            bound.add(n.buffer)
        elif isinstance(n, ir.Def):
            bound.add(n.reg)
    return frozenset(used - bound)


def _check(body: ir.Body, bound: frozenset[str], regs: dict[str, int], buffers: frozenset[str], rules: _Rules) -> None:
    for n in body:
        symbols, fetched = mentions(n)
        if missing := symbols - bound - rules.open:
            where = next(i for i in node_indices(n) if i.symbols() & missing)
            raise CodegenError(f"unbound {sorted(missing)} in {where} of {type(n).__name__}")
        if missing := fetched - buffers - rules.open:
            raise CodegenError(f"fetch from unknown buffers {sorted(missing)} in {type(n).__name__}")
        if isinstance(n, (ir.Store, ir.Def, ir.Set)):
            _check_values(n, regs, buffers, rules)
        if isinstance(n, ir.Def) and n.value.dtype in INTEGERS and n.lanes == 1:
            bound = bound | {n.reg}
        if isinstance(n, ir.Call) and (unknown := node_buffers(n) - buffers - rules.open):
            raise CodegenError(f"{n.function} is called with unknown {sorted(unknown)}")
        if rules.lowered and isinstance(n, (ir.Inst, ir.Mark)):
            raise CodegenError(f"{n.statement if isinstance(n, ir.Inst) else n.name} was not consumed by any pass")
        inner, reachable = bound, buffers
        if isinstance(n, (ir.For, ir.Let)):
            if n.var in bound:
                raise CodegenError(f"{n.var} is bound twice")
            inner = bound | {n.var}
        if isinstance(n, ir.Alloc):
            if n.buffer in buffers:
                raise CodegenError(f"buffer {n.buffer} is allocated twice")
            reachable = buffers | {n.buffer}
        for b in ir.bodies(n):
            scope = dict[str, int]() if isinstance(n, ir.Outline) else dict(regs)
            _check(b, inner, scope, reachable, rules)


@dataclass(frozen=True)
class _Reads:
    """Reads of a node's value: registers with lanes, buffers, arrays of logical loads; and the value's lanes."""

    registers: frozenset[tuple[str, int]]
    buffers: frozenset[str]
    arrays: frozenset[str]
    lanes: int


def _reads(n: ir.Store | ir.Def | ir.Set) -> _Reads:
    """Return the reads. They are cached in the node, which never changes: passes leave most nodes unchanged."""
    cache: _Reads | None = n.__dict__.get("_reads")
    if cache is None:
        parts = list(ir.walk_value(n.value))
        cache = n.__dict__["_reads"] = _Reads(
            frozenset((v.name, v.lanes) for v in parts if isinstance(v, ir.Reg)),
            frozenset(v.buffer for v in parts if isinstance(v, ir.FlatLoad)),
            frozenset(v.buffer for v in parts if isinstance(v, Load)),
            ir.lanes_of(n.value),
        )
    return cache


def _check_values(n: ir.Store | ir.Def | ir.Set, regs: dict[str, int], buffers: frozenset[str], rules: _Rules) -> None:
    reads = _reads(n)
    for name, lanes in reads.registers:
        if regs.get(name) != lanes:
            raise CodegenError(f"register {name} is used with {lanes} lanes, defined with {regs.get(name)}")
    if missing := reads.buffers - buffers - rules.open:
        raise CodegenError(f"load from unknown buffer {min(missing)}")
    if rules.lowered and reads.arrays:
        raise CodegenError(f"logical load of {min(reads.arrays)} was not lowered")
    if reads.lanes > n.lanes:
        raise CodegenError(f"{reads.lanes} lanes assigned to {n.lanes} in {type(n).__name__}")
    if isinstance(n, ir.Store) and n.buffer not in buffers and n.buffer not in rules.open:
        raise CodegenError(f"store to unknown buffer {n.buffer}")
    if isinstance(n, ir.Set) and regs.get(n.reg) != n.lanes:
        raise CodegenError(f"register {n.reg} is set with {n.lanes} lanes, defined with {regs.get(n.reg)}")
    if isinstance(n, ir.Def):
        if n.reg in regs:
            raise CodegenError(f"register {n.reg} is defined twice")
        regs[n.reg] = n.lanes
