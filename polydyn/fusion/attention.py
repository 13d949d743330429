"""Attention as one group, found by pattern over primitives: contraction, row softmax (or any stitch), contraction.

Three neighbouring groups become one when the middle one's only reader is the row operand of the second contraction, and
nothing else reads what lies between (ARCHITECTURE, ``attention``). On the CPU a block of rows of the scores stays in
scratch, so no online softmax is needed (CPU.md 3).
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Compute, Graph, dim_name, reduction_name
from polydyn.schedules.expr import Load, Op, loads
from polydyn.schedules.index import Index


def fuse_attention(plan: FusionPlan) -> FusionPlan:
    """The plan with every {contraction, stitch, contraction} chain as one group of kind ``attention``."""
    by_output = {t: g for g in plan.groups for t in g.outputs}
    readers: dict[str, list[FusedGroup]] = {}
    for g in plan.groups:
        for t in {t for n in g.nodes for t in n.inputs}:
            readers.setdefault(t, []).append(g)
    swallowed: set[int] = set()
    joined: dict[int, FusedGroup] = {}
    for g in plan.groups:
        parts = _parts(plan, g, by_output, readers)
        if parts is None or {id(p) for p in parts} & swallowed:
            continue
        scores, rows, values = parts
        swallowed |= {id(scores), id(rows)}
        joined[id(values)] = FusedGroup(
            "attention",
            (*scores.nodes, *rows.nodes, *values.nodes),
            values.outputs,
            values.prefix,
            (*scores.reasons, *rows.reasons, *values.reasons, f"{values.outputs[0]}: scores stay in the kernel"),
            (scores, rows, values),
        )
    groups = tuple(joined.get(id(g), g) for g in plan.groups if id(g) not in swallowed)
    return replace(plan, groups=groups)


def _parts(
    plan: FusionPlan,
    values: FusedGroup,
    by_output: dict[str, FusedGroup],
    readers: dict[str, list[FusedGroup]],
) -> tuple[FusedGroup, FusedGroup, FusedGroup] | None:
    """The three groups that end in ``values``, when they form an attention."""
    if values.kind != "contract":
        return None
    weights = _row_operand(plan.graph, values.nodes[0])
    rows = by_output.get(weights.buffer) if weights is not None else None
    if rows is None or rows.kind != "nest" or rows.outputs != (weights.buffer if weights else "",):
        return None
    if not any(n.reduce for n in rows.nodes) or not _only(readers, rows.outputs, values) or _kept(plan, rows):
        return None
    rank = len(plan.graph.tensors[rows.outputs[0]].shape)
    made = [by_output[t] for n in rows.nodes for t in n.inputs if t in by_output and by_output[t] is not rows]
    for scores in made:
        same = scores.kind == "contract" and len(scores.outputs) == 1 and rows.prefix == rank - 1
        if same and _shape(plan, scores) == _shape(plan, rows) and _only(readers, scores.outputs, rows):
            if _kept(plan, scores) or not _row_by_row(plan, rows, scores.outputs[0]):
                return None
            return scores, rows, values
    return None


def _row_by_row(plan: FusionPlan, rows: FusedGroup, scores: str) -> bool:
    """Whether the stitch reads the scores of its own row only."""
    shape = plan.graph.tensors[scores].shape
    for n in rows.nodes:
        for x in loads(n.body):
            if x.buffer == scores:
                front = zip(x.index[:-1], shape[:-1], strict=True)
                if not all(i == Index.of(dim_name(a)) or (i == 0 and e == 1) for a, (i, e) in enumerate(front)):
                    return False
    return True


def _row_operand(graph: Graph, n: Compute) -> Load | None:
    """The operand that is read at (rows.., reduction): a plain load whose last subscript is the reduction.

    It may be widened to the type of the product.
    """
    assert isinstance(n.body, Op)
    if len(n.reduction) != 1:
        return None
    for v in n.body.args:
        if isinstance(v, Op) and v.name == "cast":
            v = v.args[0]
        if isinstance(v, Load) and v.buffer not in graph.constants and v.index:
            *front, last = v.index
            names = [str(i) for i in front if i.constant != 0]
            plain = all(i.is_symbol or i.constant == 0 for i in front) and len(set(names)) == len(names)
            if plain and last == Index.of(reduction_name(0)) and graph.tensors[v.buffer].shape[-1] == n.reduction[0]:
                return v
    return None


def _only(readers: dict[str, list[FusedGroup]], outputs: tuple[str, ...], reader: FusedGroup) -> bool:
    return all([id(r) for r in readers.get(t, [])] == [id(reader)] for t in outputs)


def _kept(plan: FusionPlan, g: FusedGroup) -> bool:
    return any(t in plan.graph.outputs or t in plan.windows for t in g.outputs)


def _shape(plan: FusionPlan, g: FusedGroup) -> tuple[Index, ...]:
    return plan.graph.tensors[g.outputs[0]].shape


