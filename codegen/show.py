"""The loop IR as text for people: dumps, golden tests."""

from __future__ import annotations

from polydyn.codegen.ir import (
    Alloc,
    Blend,
    Body,
    Broadcast,
    Call,
    Def,
    FlatLoad,
    For,
    Horizontal,
    If,
    Inst,
    Let,
    Mark,
    Node,
    Outline,
    Ramp,
    Reg,
    Set,
    Store,
    Switch,
    Undefined,
)  # fmt: skip
from polydyn.schedules.expr import Op, Value
from polydyn.schedules.expr import show as show_plain
from polydyn.schedules.index import ONE, Index


def show(body: Body, indent: int = 0) -> str:
    """One node per line, bodies indented."""
    return "".join(_node(n, indent) for n in body)


def _node(n: Node, depth: int) -> str:
    pad = "  " * depth
    if isinstance(n, (Store, Def, Set)):
        return f"{pad}{_assignment(n)}\n"
    if isinstance(n, Inst):
        return f"{pad}{n.statement}({', '.join(map(str, n.args))})\n"
    if isinstance(n, If):
        cond = " and ".join(f"{c.left} {c.relation} {c.right}" for c in n.cond)
        orelse = f"{pad}else\n{show(n.orelse, depth + 1)}" if n.orelse else ""
        return f"{pad}if {cond}\n{show(n.then, depth + 1)}{orelse}"
    if isinstance(n, Switch):
        cases = "".join(f"{pad}case {k}\n{show(b, depth + 1)}" for k, b in n.cases)
        return f"{pad}switch {n.on}\n{cases}"
    if isinstance(n, Call):
        return f"{pad}{n}\n"
    head = {
        For: lambda x: f"{x.kind} {x.var} in [{x.lo}, {x.hi})",
        Let: lambda x: f"let {x.var} = {x.value}",
        Mark: lambda x: f"mark {x.name}",
        Alloc: lambda x: f"alloc {x.scope} {x.dtype} {x.buffer}[{x.size}]",
        Outline: lambda x: f"outline {x.name}",
    }[type(n)](n)
    return f"{pad}{head}\n{show(n.body, depth + 1)}"


def _assignment(n: Store | Def | Set) -> str:
    combine = {"sum": "+=", "prod": "*=", "max": "max=", "min": "min=", None: "="}
    if isinstance(n, Def):
        return f"def {n.reg}{_lanes(n.lanes)} = {value(n.value)}"
    if isinstance(n, Set):
        return f"{n.reg}{_lanes(n.lanes)} {combine[n.reduce]} {value(n.value)}"
    return f"{n.buffer}{_place(n.address, n.lanes, n.stride, n.mask)} {combine[n.reduce]} {value(n.value)}"


def _lanes(lanes: int) -> str:
    return f"<{lanes}>" if lanes > 1 else ""


def _place(address: Index, lanes: int, stride: Index, mask: Index | None) -> str:
    step = f" by {stride}" if lanes > 1 and stride != ONE else ""
    return f"[{address}{step}]{_lanes(lanes)}" + (f" if lane < {mask}" if mask is not None else "")


def value(v: Value) -> str:
    """A scalar or vector expression."""
    if isinstance(v, FlatLoad):
        return v.buffer + _place(v.address, v.lanes, v.stride, v.mask)
    if isinstance(v, Undefined):
        return "undefined"
    if isinstance(v, Reg):
        return v.name + _lanes(v.lanes)
    if isinstance(v, Broadcast):
        return f"broadcast{_lanes(v.lanes)}({value(v.value)})"
    if isinstance(v, Horizontal):
        return f"{v.reduction} of lanes({value(v.value)})"
    if isinstance(v, Blend):
        return f"first {v.count} lanes({value(v.new)}, else {value(v.old)})"
    if isinstance(v, Ramp):
        return f"ramp{_lanes(v.lanes)}({v.start}, {v.step})"
    if isinstance(v, Op):
        return f"{v.dtype if v.name == 'cast' else v.name}({', '.join(map(value, v.args))})"
    return show_plain(v)
