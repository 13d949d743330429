"""Match attention over primitives and fuse it into one group: contraction, rows with a softmax, contraction.

Three consecutive groups become one if the second contraction is the only reader of the middle group (as its row
operand), and no other group reads the intermediate results (docs/adr/0009-fusion.md). Rows without a softmax, such as a
normalisation between two layers, stay separate. On the CPU a block of score rows stays in scratch, so no online softmax
is needed (docs/cpu.md 3).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.rows import node_rows
from polydyn.graph.ir import Compute, Graph, dim_name, reduction_name
from polydyn.graph.rewriting import compose, composed_size
from polydyn.schedules.expr import FLOATS, Const, Load, Op, Value, loads, walk
from polydyn.schedules.index import ONE, Index


def fuse_attention(plan: FusionPlan) -> FusionPlan:
    """Fuse every chain of a contraction, rows with a softmax and a contraction into one group of kind ``attention``.

    If two chains overlap, only the first one is fused: its values are the scores of the second.
    """
    by_output = {t: g for g in plan.groups for t in g.outputs}
    readers: dict[str, list[FusedGroup]] = {}
    for g in plan.groups:
        for t in {t for n in g.nodes for t in plan.inputs[n.output]}:
            readers.setdefault(t, []).append(g)
    taken: set[int] = set()
    joined: dict[int, FusedGroup] = {}
    refused = dict(plan.refused)
    for g in plan.groups:
        rows = _rows(plan, g, by_output)
        if rows is None:
            continue
        parts = _parts(plan, g, rows, by_output, readers)
        if parts is None or isinstance(parts, str):
            refused |= {(t, g.nodes[0].output): f"no attention: {parts}" for t in rows.outputs if parts}
            continue
        if {id(p) for p in parts} & taken:
            continue
        scores, rows, values = parts
        taken |= {id(p) for p in parts}
        joined[id(values)] = FusedGroup(
            "attention",
            (*scores.nodes, *rows.nodes, *values.nodes),
            values.outputs,
            {**scores.rows, **rows.rows, **values.rows},
            (*scores.reasons, *rows.reasons, *values.reasons, f"{values.outputs[0]}: scores stay in the kernel"),
            (scores, rows, values),
        )
    groups = tuple(joined.get(id(g), g) for g in plan.groups if id(g) in joined or id(g) not in taken)
    return replace(plan, groups=groups, refused=refused)


def _rows(plan: FusionPlan, values: FusedGroup, by_output: dict[str, FusedGroup]) -> FusedGroup | None:
    """Return the stitch group that computes the row operand of a contraction."""
    product = values.kind == "contract" and values.nodes[0].body.dtype in FLOATS
    weights = _row_operand(plan.graph, values.nodes[0]) if product else None
    rows = by_output.get(weights.buffer) if weights is not None else None
    return rows if rows is not None and rows.kind == "nest" and any(n.reduce for n in rows.nodes) else None


def _parts(
    plan: FusionPlan,
    values: FusedGroup,
    rows: FusedGroup,
    by_output: dict[str, FusedGroup],
    readers: dict[str, list[FusedGroup]],
) -> tuple[FusedGroup, FusedGroup, FusedGroup] | str | None:
    """Return the groups (scores, rows, values) if they form an attention, or a reason if they nearly do."""
    leading = _leading(plan, rows)
    read = [t for n in rows.nodes for t in plan.inputs[n.output]]
    producers = [by_output[t] for t in read if t in by_output and by_output[t] is not rows]
    reason = None
    for scores in producers:
        if scores.kind != "contract" or not leading or _shape(plan, scores) != _shape(plan, rows):
            continue
        if not has_softmax(scores, rows):  # separate products are faster
            continue
        if len(rows.outputs) != 1 or not _only(readers, rows.outputs, values) or _is_stored(plan, rows):
            return "others read what its rows give"
        if len(scores.outputs) != 1 or not _only(readers, scores.outputs, rows) or _is_stored(plan, scores):
            reason = "others read the scores"
        elif not _in_floats(plan, (scores.nodes[0].output, *scores.outputs, *rows.outputs)):
            reason = "it has products or rows of integers"
        elif not _row_by_row(plan, rows, scores.outputs[0]):
            reason = "its rows read scores of other rows"
        elif not _all_rows(plan, values.nodes[0], rows.outputs[0]):
            reason = "the values take part of the rows only"
        else:
            return scores, rows, values
    return reason


MAX_SCORE_VALUES = 4096
"""Maximum operations and loads of a softmax with the maps before it. Maps that read others twice double it."""


def has_softmax(scores: FusedGroup, rows: FusedGroup) -> bool:
    """Check whether the rows divide exponentials of the product's results by their sum."""
    product, *after = scores.nodes
    nodes = (*after, *rows.nodes)
    maps = [n for n in nodes if n.is_map]
    if any(composed_size(n, maps) > MAX_SCORE_VALUES for n in nodes):
        return False
    composed = {n.output: compose(n, maps).body for n in nodes}

    def is_weight(v: Value) -> bool:
        v = _bare(v)
        return isinstance(v, Op) and v.name == "exp" and any(x.buffer == product.output for x in loads(v))

    sums = {n.output for n in nodes if n.reduce == "sum" and is_weight(composed[n.output])}

    def is_quotient(v: Value) -> bool:
        if not isinstance(v, Op) or v.name not in ("div", "mul"):
            return False
        sides = (v.args, v.args[::-1]) if v.name == "mul" else (v.args,)
        return any(is_weight(a) and _divides(b, sums, v.name == "div") for a, b in sides)

    return any(is_quotient(v) for n in maps for v in walk(composed[n.output]))


def _divides(v: Value, sums: Collection[str], divisor: bool) -> bool:
    """Check whether a value contains one of the sums. If the value is not a ``divisor``, it must contain its
    reciprocal.
    """
    inverse = (x for x in walk(v) if isinstance(x, Op) and x.name in ("reciprocal", "div"))
    parts = (v,) if divisor else (x.args[-1] for x in inverse)
    return any(x.buffer in sums for p in parts for x in loads(p))


def _bare(v: Value) -> Value:
    """Strip casts, and choices between the value and a constant (a mask)."""
    while isinstance(v, Op) and v.name in ("cast", "where", "select"):
        inside = [a for a in v.args[v.name != "cast" :] if not isinstance(a, Const)]
        if len(inside) != 1:
            break
        (v,) = inside
    return v


def _leading(plan: FusionPlan, rows: FusedGroup) -> bool:
    """Check whether the stitch runs over all axes except the last, including the one before the last."""
    output, last = rows.outputs[0], len(_shape(plan, rows)) - 1
    front = tuple(a for a in node_rows(plan.graph, output) if a < last)
    return rows.rows[output] == front and front[-1:] == (last - 1,)


def _in_floats(plan: FusionPlan, tensors: Iterable[str]) -> bool:
    """Check whether the tensors hold floats. Rows that stay inside a kernel must."""
    return all(plan.graph.tensors[t].dtype in FLOATS for t in tensors)


def _row_by_row(plan: FusionPlan, rows: FusedGroup, scores: str) -> bool:
    """Check whether the stitch reads only the scores of its own row."""
    shape = plan.graph.tensors[scores].shape
    for n in rows.nodes:
        for x in loads(n.body):
            if x.buffer == scores:
                front = zip(x.index[:-1], shape[:-1], strict=True)
                if not all(i == Index.of(dim_name(a)) or (i == 0 and e == 1) for a, (i, e) in enumerate(front)):
                    return False
    return True


def _all_rows(plan: FusionPlan, values: Compute, weights: str) -> bool:
    """Check whether the second product runs over all rows of the weights."""
    graph = plan.graph
    extents = {dim_name(a): e for a, e in enumerate(graph.tensors[values.output].shape)}
    read = next(x for x in loads(values.body) if x.buffer == weights)
    shape = graph.tensors[weights].shape
    return all(extents.get(str(i), ONE) == e for i, e in zip(read.index[:-1], shape[:-1], strict=True))


def _row_operand(graph: Graph, n: Compute) -> Load | None:
    """Return the operand that is read at (rows.., reduction): a plain load whose last subscript is the reduction.

    It may be widened to the dtype of the product.
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


def _is_stored(plan: FusionPlan, g: FusedGroup) -> bool:
    return any(t in plan.graph.outputs or t in plan.windows for t in g.outputs)


def _shape(plan: FusionPlan, g: FusedGroup) -> tuple[Index, ...]:
    return plan.graph.tensors[g.outputs[0]].shape
