"""Prove that a group's prologue may be computed inside its promotion statement."""

from __future__ import annotations

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import iterators
from polydyn.schedules.group.promotion import check_loads


def prove_prologue(plan: FusionPlan, group: FusedGroup) -> tuple[str, ...]:
    """Prove that the prologue computes every element that the reader uses, and that its own loads are in bounds.

    Returns the tensors whose sizes are not affine expressions. Raises LegalityError with an instance if the proof
    fails.
    """
    if group.prologue is None:
        return ()
    graph, reader, core = plan.graph, group.prologue.reader, group.nodes[0]
    computed = {m.output: graph.tensors[m.output].shape for m in group.prologue.maps}
    read = {t: graph.tensors[t].shape for t in core.inputs}
    facts = [(g.left, g.relation, g.right) for g in graph.facts]
    loops = tuple(iterators(graph, core))
    unproven = check_loads(reader.output, loops, reader.body, computed, facts)
    for m in group.prologue.maps:
        unproven += check_loads(m.output, tuple(iterators(graph, m)), m.body, computed, facts)
    return unproven + check_loads(core.output, loops, core.body, read, facts)
