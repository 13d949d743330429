"""Grouping: a pipeline over the nodes in topological order; each node joins a producer's group or starts its own.

Rules, in order (TSCompiler 4.2 backbone first; BladeDISC 4.2 stitch):
1. an element-wise node joins the contraction whose output it reads element by element (epilogue);
2. an element-wise node joins an element-wise or stitch group whose rows it shares;
3. a reduction over trailing axes joins the group that makes its rows (stitch);
4. otherwise it starts a group.
With ``promotion`` maps that only a product or a window reads join it first (prologue).
A join must not create a cycle between groups (convexity).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from polydyn.codegen.passes.vectorise import has_lanes
from polydyn.fusion.append import find_appends, free_strides, part_name
from polydyn.fusion.guards import needs_guard
from polydyn.fusion.inline import inline
from polydyn.fusion.layout import channels_last
from polydyn.fusion.plan import FusedGroup, FusionPlan, Prologue, Window
from polydyn.fusion.products import has_column, is_contraction, is_windowed
from polydyn.fusion.prologue import compose, is_guarded_view, is_shuffled, may_join, row_operand
from polydyn.graph.ir import Compute, Concat, Graph, Node, Tensor, dim_name, reduction_name
from polydyn.schedules.expr import Load, indices, load, loads
from polydyn.schedules.index import ONE, ZERO, Index


@dataclass
class _Open:
    """A group under construction."""

    kind: str
    nodes: list[Compute]
    prefix: int
    reasons: list[str]
    before: set[int] = field(default_factory=set)
    prologue: Prologue | None = None


class _Grouping:
    def __init__(self, graph: Graph, promotion: bool, private: Collection[str]) -> None:
        """``private``: tensors that one node reads, in one place, and that need not exist in memory."""
        self.graph, self.promotion, self.private = graph, promotion, private
        self.groups: list[_Open] = []
        self.home: dict[str, int] = {}

    # -- what a node may join ------------------------------------------------------------------------------------

    def add(self, n: Compute) -> None:
        """Places one node."""
        plain, reasons = n, [f"{n.output}: starts a KIND group"]
        n, maps = self._with_prologue(n) if self.promotion else (n, ())
        reasons += [f"{m.output}: joins the promotion of {n.output}'s operand (prologue)" for m in maps]
        prologue = Prologue(maps, plain) if maps else None
        producers = dict.fromkeys(self.home[t] for t in n.inputs if t in self.home)
        ranked = [] if maps else sorted(producers, key=lambda g: (self.groups[g].kind != "contract", -g))
        for g in ranked:
            prefix = self.groups[g].prefix
            why = self._joins(n, self.groups[g])
            if why and not self._cycle(n, g):
                self._join(n, g, why)
                return
            self.groups[g].prefix = prefix
        kind = "contract" if self._is_product(plain) and self._tileable(plain) else "nest"
        reasons[0] = reasons[0].replace("KIND", kind)
        self.groups.append(_Open(kind, [n], self._own_prefix(n), reasons, prologue=prologue))
        self._settle(n, len(self.groups) - 1)

    def _is_product(self, n: Compute) -> bool:
        """A contraction that can share a register tile: with promotion, no depthwise convolution.

        Such a window has no column of its own: vectors run along its last axis as in any nest.
        """
        return is_contraction(n) and not (self.promotion and is_windowed(n) and not has_column(n))

    def _with_prologue(self, n: Compute) -> tuple[Compute, tuple[Compute, ...]]:
        """The node with the maps that it alone reads put into its body, and those maps in order."""
        joined: tuple[Compute, ...] = ()
        if n.is_map:
            return n, joined
        product, plain = self._is_product(n) and self._tileable(n), n
        while True:
            for t in dict.fromkeys(x.buffer for x in loads(plain.body)):
                maps = self._chain(t)
                operand = row_operand(plain, t) if product else None
                padding = all(is_guarded_view(m) and not is_shuffled(m) for m in maps)
                fits = maps and (operand is not None if product else padding)
                if fits and (operand is None or may_join(self.graph, plain, operand, maps)):
                    self.groups[self.home[t]].nodes.clear()
                    plain, joined = compose(plain, maps), (*maps, *joined)
                    break
            else:
                return plain, joined

    def _chain(self, tensor: str) -> tuple[Compute, ...]:
        """The maps of the group that makes a tensor, when nothing but the tensor leaves it and one node reads that."""
        if tensor not in self.private or tensor not in self.home:
            return ()
        nodes = self.groups[self.home[tensor]].nodes
        read = {t for m in nodes for t in m.inputs}
        inner = all(m.output == tensor or (m.output in self.private and m.output in read) for m in nodes)
        ok = self.groups[self.home[tensor]].kind == "nest" and inner and all(m.is_map for m in nodes)
        return tuple(nodes) if ok and nodes and nodes[-1].output == tensor else ()

    def _joins(self, n: Compute, g: _Open) -> str | None:
        """The reason for joining, or None."""
        if is_contraction(n) or g.kind == "concat":
            return None
        if g.kind == "contract":
            same = n.is_map and self._shape(n) == self._shape(g.nodes[0]) and self._aligned(n, g, self._rank(n))
            same = same and self._tileable(n)
            return f"{n.output}: element-wise on the contraction's output (epilogue)" if same else None
        if n.is_map:
            return self._map_joins(n, g)
        p = self._rows(n, g)
        if p is None:
            return None
        pure = all(m.is_map for m in g.nodes) and g.prefix == self._rank(g.nodes[0])
        if p != g.prefix and not (pure and p < g.prefix and self._trailing(n, p)):
            return None
        g.prefix = p
        return f"{n.output}: reduces rows that the group makes (stitch)"

    def _tileable(self, n: Compute) -> bool:
        """Whether a register tile can compute the node: in vector lanes, which evaluate all branches.

        Halves count: a target without them refuses the model by name.
        """
        return has_lanes(n.body, ("float16", "bfloat16")) and not needs_guard(self.graph, n)

    def _map_joins(self, n: Compute, g: _Open) -> str | None:
        p = g.prefix
        shape = self._shape(n)
        if len(shape) < p or shape[:p] != self._shape(g.nodes[0])[:p] or not self._aligned(n, g, p):
            return None
        inner = tuple(e for e in shape[p:] if e != ONE)
        if inner and inner not in {self._inner(m, p) for m in g.nodes}:
            return None
        return f"{n.output}: element-wise on shared rows"

    def _inner(self, m: Compute, p: int) -> tuple[Index, ...]:
        return tuple(e for e in (*self._shape(m)[p:], *m.reduction) if e != ONE)

    def _rows(self, n: Compute, g: _Open) -> int | None:
        """How many leading axes a reduction keeps in place of all the group's tensors that it reads."""
        own = {m.output for m in g.nodes}
        counts = set()
        for x in loads(n.body):
            if x.buffer in own:
                k = 0
                while k < len(x.index) and k < self._rank(n) and self._identity(x, k):
                    k += 1
                counts.add(k)
        shape = self._shape(n)
        p = min([self._own_prefix(n), *counts]) if counts else 0
        if not p or any(e != ONE for e in shape[p:]) or shape[:p] != self._shape(g.nodes[0])[:p]:
            return None
        return p

    def _trailing(self, n: Compute, p: int) -> bool:
        """Whether every group tensor read is reduced over all its axes from ``p`` on, in order."""
        wanted = [reduction_name(j) for j in range(len(n.reduction))]
        return all(
            [str(i) for i in x.index[p:]] == wanted
            for x in loads(n.body)
            if x.buffer in self.home and self._identity(x, 0)
        )

    def _identity(self, x: Load, axis: int) -> bool:
        i = x.index[axis]
        return i == Index.of(dim_name(axis)) or (i == ZERO and self.graph.tensors[x.buffer].shape[axis] == ONE)

    def _aligned(self, n: Compute, g: _Open, p: int) -> bool:
        """Every read of the group's tensors is element by element; none is fetched from."""
        own = {m.output for m in g.nodes}
        fetched = {a.name for x in loads(n.body) for i in x.index for a in i.fetches()}
        return not fetched & own and all(
            all(self._identity(x, a) for a in range(len(x.index))) for x in loads(n.body) if x.buffer in own
        )

    def _own_prefix(self, n: Compute) -> int:
        shape = self._shape(n)
        while shape and shape[-1] == ONE:
            shape = shape[:-1]
        return len(shape)

    def _shape(self, n: Compute) -> tuple[Index, ...]:
        return self.graph.tensors[n.output].shape

    def _rank(self, n: Compute) -> int:
        return len(self._shape(n))

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _cycle(self, n: Compute, g: int) -> bool:
        others = {self.home[t] for t in n.inputs if t in self.home} - {g}
        return any(g in self.groups[h].before for h in others)

    def _join(self, n: Compute, g: int, why: str) -> None:
        self.groups[g].nodes.append(n)
        self.groups[g].reasons.append(why)
        self._settle(n, g)

    def _settle(self, n: Compute, g: int) -> None:
        new = {self.home[t] for t in n.inputs if t in self.home} - {g}
        new |= {b for h in new for b in self.groups[h].before}
        self.home[n.output] = g
        self.groups[g].before |= new
        for other in self.groups:
            if g in other.before:
                other.before |= new


def fuse(graph: Graph, promotion: bool = False) -> FusionPlan:
    """The fusion plan of a graph of primitives.

    ``promotion``: the target's contractions copy a row operand that is not plain to scratch. Then convolutions are
    computed channels last, and prologues join them.
    """
    source = graph = channels_last(inline(graph)) if promotion else inline(graph)
    tensors = dict(graph.tensors)
    windows: dict[str, Window] = {}
    nodes: list[Compute] = []
    reads = _read_counts(graph)
    made = {n.output for n in graph.nodes if isinstance(n, Compute)}
    for n in graph.nodes:
        if isinstance(n, Compute):
            nodes.append(n)
            continue
        offset = ZERO
        for k, part in enumerate(n.parts):
            name = part
            sole = reads[part] == 1 and part in made and part not in graph.outputs and part not in windows
            if not sole:
                name = part_name(n.output, k)
                tensors[name] = Tensor(name, tensors[part].dtype, tensors[part].shape)
                index = tuple(Index.of(dim_name(a)) for a in range(len(tensors[part].shape)))
                nodes.append(Compute(name, load(part, index, tensors[part].dtype), origin=n.origin))
            windows[name] = Window(n.output, n.axis, offset)
            offset = offset + tensors[part].shape[n.axis]
    graph = Graph(
        graph.name, graph.inputs, graph.outputs, tensors, graph.constants, tuple(nodes), graph.sources, graph.guards
    )
    appends = find_appends(source)
    groups = _groups(graph, windows, promotion)
    return FusionPlan(_as_grouped(graph, groups), groups, windows, appends, free_strides(appends))


def _as_grouped(graph: Graph, groups: tuple[FusedGroup, ...]) -> Graph:
    """The graph with prologues inside their readers."""
    gone = {m.output for g in groups if g.prologue for m in g.prologue.maps}
    new = {g.nodes[0].output: g.nodes[0] for g in groups if g.prologue}
    return replace(graph, nodes=tuple(new.get(n.output, n) for n in graph.nodes if n.output not in gone))


def _read_counts(graph: Graph) -> dict[str, int]:
    counts = dict.fromkeys(graph.tensors, 0)
    for n in graph.nodes:
        for t in n.parts if isinstance(n, Concat) else n.inputs:
            counts[t] += 1
    return counts


def _private(graph: Graph, windows: dict[str, Window]) -> set[str]:
    """Tensors that one node reads, in one place, and nobody outside sees."""
    count = dict.fromkeys(graph.tensors, 0)
    for n in graph.nodes:
        assert isinstance(n, Compute)
        fetched = [a.name for i in indices(n.body) for a in i.fetches()]
        for t in (*(x.buffer for x in loads(n.body)), *fetched, *fetched):
            count[t] += 1
    return {t for t, c in count.items() if c == 1 and t not in graph.outputs and t not in windows}


def _groups(graph: Graph, windows: dict[str, Window], promotion: bool) -> tuple[FusedGroup, ...]:
    """Groups nodes; a reader of a concatenation depends on the writers of all its parts."""
    parts: dict[str, list[str]] = {}
    for name, w in windows.items():
        parts.setdefault(w.target, []).append(name)
    grouping = _Grouping(graph, promotion, _private(graph, windows))
    for n in _in_order(graph.nodes, parts):
        grouping.add(n)
        for target, names in parts.items():
            if n.output in names and all(p in grouping.home for p in names):
                _link(grouping, target, names)
    consumers: dict[str, set[int]] = {}
    for g, o in enumerate(grouping.groups):
        for t in (t for m in o.nodes for t in m.inputs):
            consumers.setdefault(t, set()).add(g)
    out = []
    for g, o in enumerate(grouping.groups):
        outputs = tuple(
            n.output
            for n in o.nodes
            if n.output in graph.outputs or n.output in windows or consumers.get(n.output, set()) - {g}
        )
        out.append(FusedGroup(o.kind, tuple(o.nodes), outputs, o.prefix, tuple(o.reasons), prologue=o.prologue))
    order = sorted(range(len(out)), key=lambda g: (len(grouping.groups[g].before), g))
    return tuple(out[g] for g in order if out[g].outputs)


def _link(grouping: _Grouping, target: str, names: list[str]) -> None:
    """Makes a pseudo-group for a concatenation, so that its readers come after all parts."""
    before = {grouping.home[p] for p in names}
    before |= {b for h in before for b in grouping.groups[h].before}
    grouping.groups.append(_Open("concat", [], 0, [f"{target}: all parts are written"], before))
    grouping.home[target] = len(grouping.groups) - 1


def _in_order(nodes: tuple[Node, ...], parts: dict[str, list[str]]) -> list[Compute]:
    return [n for n in nodes if isinstance(n, Compute)]
