"""Print a fusion plan for people: dumps, golden tests."""

from __future__ import annotations

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.show import show_node


def show_plan(plan: FusionPlan) -> str:
    """Print the groups in launch order: nodes, shared rows, why they are together, why other groups are separate."""
    groups = (f"group {n}: {show_group(plan, g)}" for n, g in enumerate(plan.groups))
    windows = (f"{t} is a part of {w.target}, along axis {w.axis} from {w.offset}\n" for t, w in plan.windows.items())
    appends = (f"{a.output} may share the memory of {a.input}\n" for a in plan.appends)
    strides = (f"{t} has strides {', '.join(s)} of the caller's\n" for t, s in plan.strides.items())
    return "".join((*groups, *windows, *appends, *strides))


def show_group(plan: FusionPlan, group: FusedGroup) -> str:
    """Print one group of a plan."""
    lines = [f"{group.kind} -> {', '.join(group.outputs)}"]
    lines += [f"  {show_node(plan.graph, n)}" for n in group.nodes]
    lines += [f"  rows of {t}: axes {', '.join(map(str, axes))}" for t, axes in group.rows.items() if axes]
    lines += [f"  part {p.kind}: {', '.join(n.output for n in p.nodes)}" for p in group.parts]
    if group.prologue is not None:
        lines += [f"  reads through {show_node(plan.graph, n)}" for n in group.prologue.maps]
    lines += [f"  because {r}" for r in group.reasons]
    lines += [f"  {r}" for r in plan.why_apart(group)]
    return "\n".join(lines) + "\n"
