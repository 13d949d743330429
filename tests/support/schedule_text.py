"""Scheduled groups as text, for golden files."""

from __future__ import annotations

from polydyn.schedules.tree import show
from polydyn.schedules.tree.scheduled import Scheduled


def text(t: Scheduled) -> str:
    """Format the tree, loops with their digits, buffers, bounds, and the beginnings of axis parts."""
    lines = [show(t.tree)]
    for n, view in t.map.views.items():
        loops = [f"{x.coord}{f' {x.at}' if x.at else ''} {list(x.digits)}" for x in view.loops]
        hidden = f"; hides {list(view.hidden)}" * bool(view.hidden)
        guard = "".join(f"; {low} <= {k} < extent - {short}" for k, low, short in view.guard)
        lines.append(f"{n}: {', '.join(loops)}{hidden}{guard}")
    for x in t.buffers:
        met = ", ".join(f"{f.statement} {f.meets}" for f in t.flow if f.buffer == x.name)
        fixed = sorted(d.name for d in x.fixed)
        lines.append(f"buffer {x.name} of {x.array} along {x.axes}, fixed {fixed}, scope {list(x.scope)}: {met}")
    lines += [f"{x.statement} is cut along {x.axis}, whole {x.whole}" for x in t.clips]
    lines += [f"at once: {level} {list(loops)}" for level, loops in t.parallel]
    lines += [f"padded: {sorted(t.padded)}"] if t.padded else []
    lines += [
        f"axis {n}: the current {x.tile} begins at {x.symbol}{', even' * x.even}" for n, x in t.map.origins.items()
    ]
    lines += [
        f"axis {n}: {x.block} has tiles from {x.tiles}, elements from {x.elements}" for n, x in t.map.shares.items()
    ]
    lines += [f"axis {n} is {e}" for n, e in t.map.joined.items()]
    return "\n".join(lines)
