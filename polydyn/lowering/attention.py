"""Lower attention groups: two contractions and a stitch over shared rows.

All three share the row iterators (``i0, i1, ...``; the last one is the row of the block). Scores have the column ``j``;
values have the column ``d`` and the reduction ``l``. The arrays ``scores`` and ``weights`` hold only the current rows:
their addresses count from the first row of the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering.collapse import collapse_reduction
from polydyn.lowering.contract import epilogue_values
from polydyn.lowering.flatten import FlatNode, flatten, map_addresses
from polydyn.lowering.group import Canonical, LoweredGroup
from polydyn.lowering.nest import NestBuilder
from polydyn.lowering.output import output_array
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import WIDENED, Const, Load, Op, Value, cast, loads, symbols_of, transform
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.model import Array, Group, Statement
from polydyn.schedules.tiling import AttentionParts, Roles
from polydyn.schedules.tree.attention import ROW_STRIDE, SCORES, VALUES
from polydyn.schedules.tree.strategies import ACC, DONE, FIRST_ROW, INIT

ROW_ARRAYS = ("scores", "weights")
"""Arrays that hold only the current rows."""


@dataclass(frozen=True)
class AttentionGroup:
    """A lowered attention: the whole group, and its three parts over the same arrays and parameters."""

    lowered: LoweredGroup
    parts: AttentionParts


def lower_attention(plan: FusionPlan, group: FusedGroup, wide: bool = False) -> AttentionGroup | Declined:
    """Lower an attention group; declined if its parts do not line up (they then become separate kernels).

    ``wide``: the rows of a block are float32 whatever the tensors are, as the CPU computes them.
    """
    scores, rows, values = group.parts
    score_nodes = tuple(_renamed(flatten(plan, scores, n), {f"i{_rank(plan, scores) - 1}": "j"}) for n in scores.nodes)
    axes = [x for x, _ in score_nodes[0].shared if x != "j"]
    row_tensors = frozenset(scores.outputs)
    row_nodes = tuple(flatten(plan, rows, n, row_tensors) for n in rows.nodes)
    value_nodes = _value_nodes(plan, values, rows.outputs[0])
    if isinstance(value_nodes, Declined):
        return value_nodes
    if not axes or [x for x, _ in row_nodes[0].shared] != axes:
        return Declined("the rows of its softmax are not the rows of its scores")
    first, last = collapse_reduction(score_nodes[0]), value_nodes[0]
    if not _separable(first, axes[-1], "j") or not _separable(last, axes[-1], "d") or not first.reduction:
        return Declined("the axes of its products are not rows, columns and one reduction")
    builder = _Builder(plan, group, axes)
    return builder.build((first, *score_nodes[1:]), row_nodes, value_nodes, wide)


def _rank(plan: FusionPlan, g: FusedGroup) -> int:
    return len(plan.graph.tensors[g.outputs[0]].shape)


def _renamed(n: FlatNode, names: dict[str, str]) -> FlatNode:
    """Rename the iterators of a node."""

    def axes(pairs: tuple[tuple[str, Index], ...]) -> tuple[tuple[str, Index], ...]:
        return tuple((names.get(x, x), e) for x, e in pairs)

    moved = map_addresses(n, {a: Index.of(b) for a, b in names.items()})
    return replace(moved, shared=axes(n.shared), inner=axes(n.inner), reduction=axes(n.reduction))


def _value_nodes(plan: FusionPlan, values: FusedGroup, weights: str) -> tuple[FlatNode, ...] | Declined:
    """Flatten the second contraction and give its row iterators the names that the scores use.

    Declined if it has no single column and reduction.
    """
    graph = plan.graph
    body = values.nodes[0].body
    read = next(v for v in loads(body) if v.buffer == weights)
    names: dict[str, str] = {}
    for a, i in enumerate(read.index[:-1]):
        if i.is_symbol and graph.tensors[weights].shape[a] != ONE:
            names[f"i{str(i)[1:]}"] = f"i{a}"
    flat = [flatten(plan, values, n, frozenset((weights,))) for n in values.nodes]
    rest = [x for x, _ in flat[0].shared if x not in names]
    if len(rest) != 1 or len(flat[0].reduction) != 1 or any(n.inner for n in flat):
        return Declined("its second product has not one column and one reduction")
    names |= {rest[0]: "d", flat[0].reduction[0][0]: "l"}
    return tuple(_renamed(n, names) for n in flat)


def _separable(n: FlatNode, row: str, col: str) -> bool:
    assert isinstance(n.body, Op)
    a, b = map(symbols_of, n.body.args)
    if col in a:
        a, b = b, a
    return col in b and col not in a and row not in b


class _Builder:
    def __init__(self, plan: FusionPlan, group: FusedGroup, axes: list[str]) -> None:
        self.plan, self.group, self.axes = plan, group, axes
        self.names = Canonical(plan.graph)
        self.row = Index.of(axes[-1])

    def build(
        self,
        scores: tuple[FlatNode, ...],
        rows: tuple[FlatNode, ...],
        values: tuple[FlatNode, ...],
        wide: bool,
    ) -> AttentionGroup:
        """Build all statements over one set of arrays and parameters."""
        s, r, v = self.group.parts
        length = self.names.extent(dict(scores[0].shared)["j"])
        extent = self.names.extent(dict(scores[0].shared)[self.axes[-1]])
        dtype = "float64" if scores[0].dtype == "float64" else "float32"
        for name in ROW_ARRAYS:
            stride = Index.of(ROW_STRIDE)
            self.names.arrays[name] = Array(
                name, dtype, (extent, length), "rows", (stride, ONE), -(Index.of(FIRST_ROW) * stride)
            )
        row_tensors: dict[str, tuple[str, tuple[Index, ...]]] = {}
        first = self._contraction(SCORES, scores, row_tensors, s.outputs, "scores")
        row_tensors = {s.outputs[0]: ("scores", (self.row,))}
        middle = self._stitch(rows, row_tensors, r.outputs)
        row_tensors = {r.outputs[0]: ("weights", (self.row,))}
        last = self._contraction(VALUES, values, row_tensors, v.outputs, None)
        if wide:
            first, middle, last = (tuple(map(_wide_rows, x)) for x in (first, middle, last))
        parts = [Group(n, tuple(self.names.params), dict(self.names.arrays), x) for n, x in
                 (("scores", first), ("rows", middle), ("values", last))]  # fmt: skip
        lowered = self.names.group((*first, *middle, *last))
        batch = tuple(self.axes[:-1])
        block, *inner = (x for x, _ in scores[0].reduction)
        return AttentionGroup(
            lowered,
            AttentionParts(
                parts[0],
                Roles(batch, self.axes[-1], "j", block, tuple(inner)),
                parts[1],
                tuple(self.axes),
                {},
                parts[2],
                Roles(batch, self.axes[-1], "d", "l", ()),
            ),
        )

    def _contraction(
        self,
        label: str,
        nodes: tuple[FlatNode, ...],
        row_tensors: dict[str, tuple[str, tuple[Index, ...]]],
        outputs: tuple[str, ...],
        into: str | None,
    ) -> tuple[Statement, ...]:
        core, names = nodes[0], self.names
        iters = tuple((x, names.extent(e)) for x, e in core.shared)
        red = tuple((x, names.extent(e)) for x, e in core.reduction)
        iterators = frozenset(x for x, _ in (*iters, *red))
        at = tuple(Index.of(x) for x, _ in iters)
        acc = names.local(core.dtype, tuple(e for _, e in iters))
        product = names.value(core.body, iterators, row_tensors)
        out = [
            Statement(label + INIT, iters, acc, at, Const(core.dtype, 0.0), None, "init"),
            Statement(label + ACC, (*iters, *red), acc, at, product, core.reduce, "backbone"),
        ]
        values = epilogue_values(names, nodes, iterators, Load(core.dtype, acc, at))
        for k, t in enumerate(outputs):
            if into is None:
                array, index = output_array(names, next(n for n in nodes if n.output == t), iters)
            else:
                array, index = into, (self.row, Index.of("j"))
            out.append(Statement(f"{label}{DONE}{k}", iters, array, index, values[t], None, "epilogue"))
        return tuple(out)

    def _stitch(
        self,
        nodes: tuple[FlatNode, ...],
        row_tensors: dict[str, tuple[str, tuple[Index, ...]]],
        outputs: tuple[str, ...],
    ) -> tuple[Statement, ...]:
        builder = _RowBuilder(self.names, outputs, nodes, "R")
        builder.locals = dict(row_tensors)
        builder.row = self.row
        for n in nodes:
            builder.add(n)
        return tuple(builder.statements)


class _RowBuilder(NestBuilder):
    """A nest builder whose result stays in the rows of the block."""

    row: Index = ZERO

    def store(self, n: FlatNode, iters: tuple[tuple[str, Index], ...], value: Value) -> None:
        """Write a result to the weights of the current row."""
        self.append(iters, "weights", (self.row, Index.of(iters[-1][0])), value)


def _wide_rows(s: Statement) -> Statement:
    """Make the current rows float32, whatever the tensors are. Values are rounded to the tensors' dtypes."""

    def f(v: Value) -> Value:
        if isinstance(v, Load) and v.buffer in ROW_ARRAYS and v.dtype in WIDENED:
            return Op(v.dtype, "cast", (replace(v, dtype=WIDENED[v.dtype]),))
        if isinstance(v, Op) and v.name == "cast" and isinstance(v.args[0], Op) and v.args[0].name == "cast":
            (x,) = v.args[0].args
            return x if isinstance(x, Load) and x.buffer in ROW_ARRAYS and x.dtype == v.dtype else v
        return v

    value = transform(s.value, f)
    return replace(s, value=cast(value, WIDENED.get(value.dtype, value.dtype)) if s.array in ROW_ARRAYS else value)
