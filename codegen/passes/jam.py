"""Unroll and jam: run several iterations of a coincident loop at the same time, loop by loop.

The chain of operations at the end of one row of a softmax or norm (combining lanes, a division, starting the next pass)
then overlaps with those of other rows. This is legal if the loop carries no dependence and every copy has its own
registers and row buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polydyn.codegen import ir
from polydyn.codegen.indices import substitute
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import Value
from polydyn.schedules.index import Index


class _ApartError(Exception):
    """Iterations cannot run together. Never leaves this file: ``jam`` returns ``Declined``."""


def jam(loop: ir.For, copies: int, private: Collection[str], alone: ir.For | None = None) -> ir.Body | Declined:
    """Run ``loop`` as ``copies`` equal ranges of iterations in parallel, then the rest one by one.

    The copies are far apart, so that each accesses memory in order: adjacent rows would share pages, in which the
    hardware prefetches only one stream. ``private``: buffers that every iteration has for itself. Copy ``c`` >= 1 uses
    ``<name>_c<c>`` for them, and for registers. ``alone``: another form of the loop, for the rest. Declined: an
    inner loop or a choice depends on the iteration.
    """
    run = f"{loop.var}_run"
    registers = {n.reg for n in ir.walk(loop.body) if isinstance(n, ir.Def)}
    plain, x, distance = _without_lets(loop.body), Index.of(loop.var), Index.of(run)
    rows = [_renamed(substitute(plain, {loop.var: x + distance * c}), c, registers, private) for c in range(copies)]
    try:
        together = ir.For(loop.var, loop.lo, loop.lo + distance, _merged(rows), loop.kind)
    except _ApartError as e:
        return Declined(str(e))
    both = (together, replace(alone or loop, lo=loop.lo + distance * copies))
    return (ir.Let(run, (loop.hi - loop.lo) // copies, both),)


def copy_of(name: str, copy: int) -> str:
    """Return the name of a register or buffer in one of the copies."""
    return f"{name}_c{copy}" if copy else name


def _without_lets(body: ir.Body) -> ir.Body:
    """Substitute names, which may have another value in every copy."""
    return ir.rewrite(body, lambda n: substitute(n.body, {n.var: n.value}) if isinstance(n, ir.Let) else n)


def _renamed(body: ir.Body, copy: int, registers: Collection[str], private: Collection[str]) -> ir.Body:
    def value(v: Value) -> Value:
        if isinstance(v, ir.Reg) and v.name in registers:
            return replace(v, name=copy_of(v.name, copy))
        if isinstance(v, (ir.FlatLoad, ir.Pointer)) and v.buffer in private:
            return replace(v, buffer=copy_of(v.buffer, copy))
        return v

    def node(n: ir.Node) -> ir.Node:
        if isinstance(n, (ir.Def, ir.Set)) and n.reg in registers:
            return replace(n, reg=copy_of(n.reg, copy))
        if isinstance(n, ir.Store) and n.buffer in private:
            return replace(n, buffer=copy_of(n.buffer, copy))
        return n

    return ir.rewrite(ir.map_values(body, value), node) if copy else body


_WHAT = {ir.For: "the length of an inner loop", ir.If: "a choice", ir.Mark: "a mark"}


def _merged(rows: list[ir.Body]) -> ir.Body:
    """Merge the copies: statements one after another, loops and choices once with the bodies of all copies."""
    out: list[ir.Node] = []
    for nodes in zip(*rows, strict=True):
        first = nodes[0]
        if isinstance(first, (ir.Def, ir.Set, ir.Store, ir.Call)):
            out += nodes
            continue
        if not isinstance(first, (ir.For, ir.If, ir.Mark)):
            raise CodegenError(f"{type(first).__name__} inside a loop whose iterations run together")
        if any(_empty(n) != _empty(first) for n in nodes):
            raise _ApartError(f"{_WHAT[type(first)]} depends on the iteration of the loop around it")
        out.append(ir.with_bodies(first, tuple(_merged(list(b)) for b in zip(*map(ir.bodies, nodes), strict=True))))
    return tuple(out)


def _empty(n: ir.Node) -> ir.Node:
    """Return the node without its child bodies."""
    return ir.with_bodies(n, tuple(() for _ in ir.bodies(n)))
