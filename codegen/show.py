"""Text of the loop IR for people: dumps and golden tests.

Every form has a separate text. It omits only dtypes that the buffer or register has already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polydyn.codegen import ir
from polydyn.schedules.expr import Op, Value
from polydyn.schedules.expr import show as show_plain
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.isl_util import at_least
from polydyn.schedules.show import COMBINED
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree import TileStatement
from polydyn.schedules.tree import show as show_tree


def show(body: ir.Body, indent: int = 0) -> str:
    """Return one node per line, with bodies indented."""
    return "".join(_node(n, indent) for n in body)


def show_tiled(tiled: TiledGroup) -> str:
    """Return a schedule tree, ranges of coordinates, instances of statements, and values of extents."""
    bounds: dict[str, dict[str, None]] = {}  # coordinate -> its upper bounds; there should be one
    lines = []
    for s in tiled.statements:
        upper, others = _domain(s)
        for c, high in upper.items():
            bounds.setdefault(c, {})[high] = None
        lines.append((s, upper, others))
    ranges = ", ".join(f"{c} < {' or '.join(highs)}" for c, highs in bounds.items())
    text = f"{show_tree(tiled.tree)}from 0 on: {ranges or 'nothing'}\n"
    for s, upper, others in lines:
        conditions = " and ".join((*(f"{c} < {high}" for c, high in upper.items() if len(bounds[c]) > 1), *others))
        text += f"{s.name}[{', '.join(s.coords)}]" + f" where {conditions}" * bool(conditions) + "\n"
    text += "".join(f"{n} = {e}\n" for n, e in tiled.extents.items())
    return text + f"parallel: {', '.join(tiled.coincident) or 'none'}\n"


def _domain(s: TileStatement) -> tuple[dict[str, str], list[str]]:
    """Return (coordinate -> the upper bound of its range from 0, all other conditions)."""
    left, ranges = list(s.conditions), {}
    for c in s.coords:
        low, high = at_least(c, 0), [k for k in left if not k.equality and k.expr.split(c)[0] == -1]
        if low in left and high:
            left = [k for k in left if k not in (low, high[0])]
            ranges[c] = str(high[0].expr + c + 1)
    return ranges, list(map(str, left))


def _node(n: ir.Node, depth: int) -> str:
    pad = "  " * depth
    if isinstance(n, (ir.Store, ir.Def, ir.Set)):
        return f"{pad}{_assignment(n)}\n"
    if isinstance(n, ir.Inst):
        return f"{pad}{n.statement}({', '.join(_coordinates(n))})\n"
    if isinstance(n, ir.If):
        cond = " and ".join(f"{c.left} {c.relation} {c.right}" for c in n.cond)
        orelse = f"{pad}else\n{show(n.orelse, depth + 1)}" if n.orelse else ""
        return f"{pad}if {cond}\n{show(n.then, depth + 1)}{orelse}"
    if isinstance(n, ir.Switch):
        cases = "".join(f"{pad}case {k}\n{show(b, depth + 1)}" for k, b in n.cases)
        return f"{pad}switch {n.on}\n{cases}"
    if isinstance(n, ir.Call):
        return f"{pad}{n.function}({', '.join(map(value, n.args))})\n"
    head = {
        ir.For: lambda x: f"{x.kind} {x.var} in [{x.lo}, {x.hi})",
        ir.Let: lambda x: f"let {x.var} = {x.value}",
        ir.Mark: lambda x: f"mark {x.name}",
        ir.Alloc: lambda x: f"alloc {x.scope} {x.dtype} {x.buffer}[{x.size}]",
        ir.Outline: lambda x: f"outline {x.name}",
    }[type(n)](n)
    return f"{pad}{head}\n{show(n.body, depth + 1)}"


def _coordinates(n: ir.Inst) -> list[str]:
    """Return ``name=value``, or only the value if it equals the name or has none."""
    names = n.coords or ("",) * len(n.args)
    return [str(i) if c in ("", str(i)) else f"{c}={i}" for c, i in zip(names, n.args, strict=True)]


def _assignment(n: ir.Store | ir.Def | ir.Set) -> str:
    if isinstance(n, ir.Def):
        return f"def {n.reg}{_lanes(n.lanes)} = {value(n.value)}"
    if isinstance(n, ir.Set):
        return f"{n.reg}{_lanes(n.lanes)} {COMBINED[n.reduce]} {value(n.value)}"
    streamed = "" if n.stream is None else f"  // around the caches if {n.stream} > 0"
    again = "  // replaces what its task wrote" if n.again else ""
    place = _place(n.address, n.lanes, n.stride, n.mask)
    return f"{n.buffer}{place} {COMBINED[n.reduce]} {value(n.value)}{streamed}{again}"


def _lanes(lanes: int) -> str:
    return f"<{lanes}>" if lanes > 1 else ""


def _place(address: Index, lanes: int, stride: Index, mask: Index | None) -> str:
    step = f" by {stride}" if lanes > 1 and stride != ONE else ""
    return f"[{address}{step}]{_lanes(lanes)}" + (f" if lane < {mask}" if mask is not None else "")


def value(v: Value) -> str:
    """Return the text of a scalar or vector expression, or of an argument of a call."""
    if isinstance(v, Op):
        return f"{v.dtype if v.name == 'cast' else v.name}({', '.join(map(value, v.args))})"
    form = _FORMS.get(type(v))
    return show_plain(v) if form is None else form(v)


def _load(v: ir.FlatLoad) -> str:
    guard = "" if v.guard is None else f" where {value(v.guard)}"
    return v.buffer + _place(v.address, v.lanes, v.stride, v.mask) + guard


_FORMS: dict[type[Value], Callable[[Any], str]] = {
    ir.FlatLoad: _load,
    ir.Undefined: lambda v: "undefined",
    ir.Reg: lambda v: v.name + _lanes(v.lanes),
    ir.Broadcast: lambda v: f"broadcast{_lanes(v.lanes)}({value(v.value)})",
    ir.Horizontal: lambda v: f"{v.reduction} of lanes({value(v.value)})",
    ir.Blend: lambda v: f"first {v.count} lanes({value(v.new)}, else {value(v.old)})",
    ir.Ramp: lambda v: f"ramp{_lanes(v.lanes)}({v.start}, {v.step})",
    ir.Between: lambda v: f"lanes{_lanes(v.lanes)} from {v.low} below {v.high}",
    ir.Apply: lambda v: f"{v.function}({', '.join(map(value, v.args))})",
    ir.Tile: lambda v: (
        f"{v.buffer}[tile {v.start}, row {v.row} by {v.pitch}, column {v.column} in chunks of {v.chunk}]"
    ),
    ir.Pointer: lambda v: f"&{v.buffer}[{v.address}] as {v.dtype}",
    ir.Parameter: lambda v: f"&{v.name}",
}
"""The text of the forms that exist only in codegen."""
