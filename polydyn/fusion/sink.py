"""Move epilogues that only add traffic to their reader's kernel.

The epilogue pass absorbs every element-wise reader it can, so ``x = a @ b`` with ``x * x`` for a norm writes both. If
the operands stay in memory anyway and one group reads the result, that group computes it from them: one tensor fewer is
written and read. "Not all memory-intensive fusions are better to be fused with a producer compute-intensive op"
(BladeDISC 4.1). This pass decides by counting bytes.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.partition import Join
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.rows import node_rows
from polydyn.fusion.rules import elementwise, stitch
from polydyn.fusion.traffic import may_rise
from polydyn.graph.ir import Compute

SINK_REASON = "off-chip traffic would rise: the contraction would write both"


def sink_epilogues(plan: FusionPlan) -> FusionPlan:
    """Move each epilogue to the only group that reads it if this moves fewer bytes."""
    groups = {n.output: g for g in plan.groups for n in g.nodes}
    refused = dict(plan.refused)
    order = [g.nodes[0].output for g in plan.groups]
    for n in reversed(plan.graph.nodes):
        a = groups.get(n.output)
        readers = {id(groups[r]): groups[r] for r in plan.readers.get(n.output, ()) if r in groups}
        if a is None or a.kind != "contract" or n.output in (a.nodes[0].output, *plan.stored) or len(readers) != 1:
            continue
        assert isinstance(n, Compute), "concatenations are in no group"
        (b,) = readers.values()
        change = _moved(plan, a, b, n) if b is not a else None
        for g in change or ():
            groups |= {m.output: g for m in g.nodes}
        if change:
            refused |= {(t, n.output): SINK_REASON for t in plan.inputs[n.output]}
            order = [change[1].nodes[0].output if t == b.nodes[0].output else t for t in order]
    return replace(plan, groups=tuple(groups[t] for t in order), refused=refused)


def _moved(plan: FusionPlan, a: FusedGroup, b: FusedGroup, n: Compute) -> tuple[FusedGroup, FusedGroup] | None:
    """Return both groups after ``n`` has moved from contraction ``a`` to its reader ``b``, or None without a gain."""
    rows = {n.output: node_rows(plan.graph, n.output)}
    alone = FusedGroup("nest", (n,), (n.output,), rows, (f"{n.output}: starts a nest group",))
    join = elementwise(plan, alone, b) or stitch(plan, alone, b)
    if not isinstance(join, Join):
        return None
    remaining = tuple(m for m in a.nodes if m is not n)
    place = list(plan.inputs)
    nodes = tuple(sorted((n, *b.nodes), key=lambda m: place.index(m.output)))
    reasons = tuple(r for r in a.reasons if not r.startswith(f"{n.output}: "))
    reason = f"{n.output}: {join.reason}, no epilogue of {a.nodes[0].output}"
    rows = {t: axes for t, axes in a.rows.items() if t != n.output}
    rest = replace(a, nodes=remaining, outputs=plan.outputs_of(remaining), rows=rows, reasons=reasons)
    grown = FusedGroup("nest", nodes, plan.outputs_of(nodes), join.rows, (reason, *b.reasons))
    gains = len(rest.outputs) < len(a.outputs) and may_rise(plan, (a, b), (rest, grown)) is None
    return (rest, grown) if gains else None
