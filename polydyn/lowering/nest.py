"""Lower element-wise and stitch groups."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.products import group_size
from polydyn.lowering.collapse import collapse_reduction, collapse_shared, in_order, split_divided
from polydyn.lowering.flatten import FlatNode, flatten, map_addresses
from polydyn.lowering.group import Canonical, LoweredGroup
from polydyn.lowering.output import output_array
from polydyn.schedules.expr import Load, Value, loads, neutral
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.model import Statement


def lower_nest(plan: FusionPlan, group: FusedGroup, names: Canonical | None = None) -> LoweredGroup:
    """Lower a nest group: an initialiser and an update for each reduction, one statement for each map.

    ``names``: the names of another form of the group, so that both forms share them.
    """
    nodes = tuple(flatten(plan, group, n) for n in group.nodes)
    if len(nodes) == 1 and nodes[0].reduce is None:
        nodes = (_reads_in_order(nodes[0]),)
    nodes = tuple(collapse_reduction(_reduced_in_order(n)) for n in collapse_shared(nodes))
    builder = NestBuilder(names or Canonical(plan.graph), group.outputs, nodes)
    for n in nodes:
        builder.add(n)
    return builder.names.group(builder.statements)


def _reads_in_order(n: FlatNode) -> FlatNode:
    """Let a copy that shuffles its last axis run over the parts of this axis, with the contiguous part innermost."""
    if n.inner or not n.shared:
        return n
    last = n.shared[-1][0]
    (split,) = split_divided((n,))
    if [x for x, _ in split.shared[-2:]] != [f"{last}g", last]:
        return n
    first = [x.index[0].split(f"{last}g")[0] for x in loads(split.body)]
    return replace(split, shared=(*split.shared[:-2], split.shared[-1], split.shared[-2])) if ONE in first else n


def _reduced_in_order(n: FlatNode) -> FlatNode:
    """Order a reduction by the memory of its operand, contiguous elements innermost.

    If channels form groups, contiguous axes go outside the taps along an image row. Those taps share loads that are
    spread over the group.
    """
    read = [x.index[0] for x in loads(n.body) if len(x.index) == 1]
    widest = max(read, key=lambda i: sum(x in i.symbols() for x, _ in n.reduction), default=ONE)
    order = in_order(n.reduction, widest)
    if any(group_size(i, x) for i in read for x, _ in n.shared):
        inside = tuple(a for a in order if widest.split(a[0])[0] == ONE)
        rest = tuple(a for a in order if a not in inside)
        order = (*rest[:-1], *inside, *rest[-1:])
    return replace(n, reduction=order)


class NestBuilder:
    """Collects the statements of a nest, node by node."""

    def __init__(
        self, names: Canonical, outputs: Collection[str], nodes: tuple[FlatNode, ...], label: str = "S"
    ) -> None:
        """``label``: prefix of statement names."""
        self.outputs, self.names, self.label = set(outputs), names, label
        self.statements: list[Statement] = []
        self.read_inside = {x.buffer for n in nodes for x in loads(n.body)} & {n.output for n in nodes}
        self.locals: dict[str, tuple[str, tuple[Index, ...]]] = {}
        self.extents: dict[str, Index] = {}

    def add(self, n: FlatNode) -> None:
        """Add the statements of one node."""
        n = self._one_extent_per_name(n)
        out = (*n.shared, *n.inner)
        iters = tuple((name, self.names.extent(e)) for name, e in (*out, *n.reduction))
        own = frozenset(name for name, _ in iters)
        value = self.names.value(n.body, own, self.locals)
        shared, inner = (tuple(Index.of(x) for x, _ in axes) for axes in (n.shared, n.inner))
        is_output = n.output in self.outputs
        if n.reduce is None and is_output and n.output not in self.read_inside:
            self.store(n, iters, value)
            return
        shape = tuple(self.names.extent(e) for _, e in out)
        local = self.names.local(n.dtype, shape)
        self.locals[n.output] = (local, shared)
        at = (*shared, *inner)
        if n.reduce is not None:
            start = neutral(n.reduce, n.dtype)
            self.append(iters[: len(out)], local, at, start, role="init")
        self.append(iters, local, at, value, n.reduce)
        if is_output:
            self.store(n, iters[: len(out)], Load(n.dtype, local, at))

    def _one_extent_per_name(self, n: FlatNode) -> FlatNode:
        """Rename the inner iterators of a node if an earlier node uses the same name for another extent."""
        names: dict[str, str] = {}
        for x, e in (*n.inner, *n.reduction):
            names[x], k = x, 0
            while self.extents.setdefault(names[x], e) != e:
                names[x], k = f"{x}_{k}", k + 1
        moved = map_addresses(n, {x: Index.of(y) for x, y in names.items() if x != y})
        return replace(
            moved,
            inner=tuple((names[x], e) for x, e in n.inner),
            reduction=tuple((names[x], e) for x, e in n.reduction),
        )

    def store(self, n: FlatNode, iters: tuple[tuple[str, Index], ...], value: Value) -> None:
        """Add the statement that writes a node's result to memory."""
        array, index = output_array(self.names, n, iters)
        self.append(iters, array, index, value)

    def append(
        self,
        iters: tuple[tuple[str, Index], ...],
        array: str,
        index: tuple[Index, ...],
        value: Value,
        reduce: str | None = None,
        role: str = "map",
    ) -> None:
        """Add a statement."""
        name = f"{self.label}{len(self.statements)}"
        self.statements.append(Statement(name, iters, array, index, value, reduce, role))
