"""Split merged axes, so that neighbouring nodes run over the same dims (BladeDISC 3: dim collapse equality).

Exporters flatten rows before a matrix product, (B, L, K) to (B*L, K), and unflatten after it; a group norm reads the
statistics of ``channel // size``. After views are removed, one side runs over ``B*L`` rows and the other over (B, L),
so neither can join the other. Splitting the merged axis helps in both cases: a dense tensor over (B, L, N) has the same
memory as one over (B*L, N). Model outputs are split too: the fusion plan has their memory, the program their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from polydyn.fusion.facts import same_size
from polydyn.fusion.inline import as_index
from polydyn.fusion.products import is_contraction
from polydyn.graph.ir import Compute, Concat, Graph, Node, dim_name, iterators, reduction_name
from polydyn.schedules.expr import Load, Op, Value, loads, map_index, substitute, transform
from polydyn.schedules.index import ONE, ZERO, Atom, Index, product
from polydyn.schedules.model import row_major
from polydyn.schedules.ranges import divide, simplify

Factors = tuple[Index, ...]


def split_merged_axes(graph: Graph) -> Graph:
    """Split merged axes if this makes a reader read element by element."""
    s = _Splitter(graph)
    names = [n.output for n in graph.nodes]
    changed = True
    while changed:  # terminates: each split makes an extent a proper divisor of the old one
        changed = False
        for t in names:
            changed |= s.as_read(t)
        for t in reversed(names):
            changed |= s.as_used(t)
    return s.graph()


class _Splitter:
    """The current nodes and tensors of the graph."""

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.nodes: dict[str, Node] = {n.output: n for n in graph.nodes}
        self.tensors = dict(graph.tensors)
        self.readers = {t: [n.output for n in users] for t, users in graph.consumers().items()}

    def graph(self) -> Graph:
        """Return the current graph."""
        return replace(self.source, nodes=tuple(self.nodes.values()), tensors=self.tensors)

    def as_used(self, name: str) -> bool:
        """Split an axis of a tensor that an element-wise reader runs over in parts."""
        n, users = self._free(name)
        parts = _parts_used(self.view(), name, users) if n else None
        if n is None or parts is None:
            return False
        self._split_axis(n, *parts)
        return True

    def as_read(self, name: str) -> bool:
        """Split an axis of a node (or a reduction) that reads a computed tensor along parts of it."""
        n = self.nodes[name]
        if not isinstance(n, Compute) or is_contraction(n):
            return False
        for x in loads(n.body):
            if not isinstance(self.nodes.get(x.buffer), Compute):
                continue
            for iterator, factors in _parts_read(self.view(), n, x):
                if iterator.startswith("r"):
                    self._split_reduction(n, int(iterator[1:]), factors)
                    return True
                if self._free(name)[0]:
                    self._split_axis(n, int(iterator[1:]), factors)
                    return True
        return False

    def view(self) -> Graph:
        """Return the original nodes with the current shapes, for queries about one node."""
        return replace(self.source, tensors=self.tensors)

    def _free(self, name: str) -> tuple[Compute | None, list[Compute]]:
        """Return the node and its readers if all of them can be rewritten, else (None, [])."""
        n = self.nodes[name]
        users = [self.nodes[u] for u in self.readers[name]]
        if not isinstance(n, Compute) or any(isinstance(u, Concat) or _fetched(u, name) for u in users):
            return None, []
        return n, [u for u in users if isinstance(u, Compute)]

    def _split_axis(self, n: Compute, axis: int, factors: Factors) -> None:
        for u in self._free(n.output)[1]:
            self.nodes[u.output] = _reread(self.view(), u, n.output, axis, factors)
        shape = self.tensors[n.output].shape
        more = len(factors) - 1
        env = {dim_name(axis): _linear(axis, factors, dim_name)}
        env |= {dim_name(a): Index.of(dim_name(a + more)) for a in range(axis + 1, len(shape))}
        split = (*shape[:axis], *factors, *shape[axis + 1 :])
        self.tensors[n.output] = replace(self.tensors[n.output], shape=split)
        self._rewrite(n, env)

    def _split_reduction(self, n: Compute, j: int, factors: Factors) -> None:
        more = len(factors) - 1
        env = {reduction_name(j): _linear(j, factors, reduction_name)}
        env |= {reduction_name(k): Index.of(reduction_name(k + more)) for k in range(j + 1, len(n.reduction))}
        self._rewrite(replace(n, reduction=(*n.reduction[:j], *factors, *n.reduction[j + 1 :])), env)

    def _rewrite(self, n: Compute, env: Mapping[str, Index]) -> None:
        """Replace the node; ``env`` maps the iterators of its body to expressions over the new ones."""
        ranges = dict(iterators(self.view(), n))
        body = map_index(substitute(n.body, env), lambda i: simplify(i, ranges))
        self.nodes[n.output] = replace(n, body=body)


def _linear(first: int, factors: Factors, name: Callable[[int], str]) -> Index:
    """Return the merged subscript over the iterators from ``first`` on."""
    parts = [Index.of(name(first + k)) for k in range(len(factors))]
    return sum((p * s for p, s in zip(parts, row_major(factors), strict=True)), ZERO)


def _fetched(u: Node, name: str) -> bool:
    return isinstance(u, Compute) and any(a.name == name for x in loads(u.body) for i in x.index for a in i.fetches())


def _parts_used(graph: Graph, name: str, users: list[Compute]) -> tuple[int, Factors] | None:
    """Return (axis, factors) of a merged axis that an element-wise reader runs over in parts, or None."""
    shape = graph.tensors[name].shape
    for u in users:
        sizes = graph.tensors[u.output].shape
        for x in loads(u.body):
            if x.buffer != name or not u.is_map or len(sizes) <= len(shape):
                continue
            for axis, i in enumerate(x.index):
                parts = len(sizes) - len(shape) + 1
                factors = sizes[axis : axis + parts]
                rest = [Index.of(dim_name(a)) for a in range(len(sizes)) if not axis <= a < axis + parts]
                others = [(e, shape[a]) for a, e in enumerate(x.index) if a != axis]
                aligned = all(e == d or (e == ZERO and size == ONE) for (e, size), d in zip(others, rest, strict=True))
                merged = parts > 1 and i == _linear(axis, factors, dim_name)
                if merged and aligned and same_size(graph.facts, product(factors), shape[axis]):
                    return axis, factors
    return None


def _parts_read(graph: Graph, n: Compute, x: Load) -> list[tuple[str, Factors]]:
    """Return (iterator, factors) for each merged iterator ``d`` that reads a tensor at ``d // s``.

    Either the other subscripts use ``d % s``, or the tensor holds one number for each ``d // s`` and the node runs over
    more axes after ``d`` (a group's statistics; not an image that grows by ``s``).
    """
    shape = graph.tensors[x.buffer].shape
    extents = dict(iterators(graph, n))
    out: list[tuple[str, Factors]] = []
    for k, i in enumerate(x.index):
        atom = next(iter(i.atoms()), None) if len(i.terms) == 1 else None
        if not isinstance(atom, Atom) or atom.kind != "floordiv" or i != Index({(atom,): 1}):
            continue
        d, s = str(atom.args[0]), atom.args[1]
        if d not in extents or not same_size(graph.facts, shape[k] * s, extents[d]):
            continue
        rest = any(d in j.symbols() for m, j in enumerate(x.index) if m != k)
        last = d == dim_name(len(graph.tensors[n.output].shape) - 1)
        statistic = d.startswith("d") and not last and all(e == ONE for e in shape[k + 1 :])
        if rest or statistic:
            out.append((d, (shape[k], s)))
    return out


def _reread(graph: Graph, u: Compute, name: str, axis: int, factors: Factors) -> Compute:
    """Return the reader with its reads of the split tensor at the parts of the merged subscript."""
    ranges = dict(iterators(graph, u))
    steps = row_major(factors)

    def f(v: Value) -> Value:
        if not (isinstance(v, Load) and v.buffer == name):
            return v
        parts, rest = [], v.index[axis]
        for k, s in enumerate(steps):
            q = divide(rest, s, ranges) if k + 1 < len(steps) else rest
            parts.append(simplify(q, ranges))
            rest = simplify(rest - q * s, ranges)
        return replace(v, index=(*v.index[:axis], *parts, *v.index[axis + 1 :]))

    return replace(u, body=transform(transform(u.body, f), partial(within_guard, ranges=ranges)))


# -- guards ----------------------------------------------------------------------------------------------------------


GUARDED_INDEX = "%inside"
"""Symbol for an index that a guard keeps in range."""


def within_guard(v: Value, ranges: Mapping[str, Index]) -> Value:
    """Simplify the subscripts of a guarded value with ``0 <= x + c < n`` from its guard, which holds where it is
    evaluated.
    """
    if not isinstance(v, Op) or v.name != "where":
        return v
    guard, then, orelse = v.args
    for e, n in _spans(guard):
        names = [x for x in e.symbols() if x in ranges]
        shift = e - names[0] if len(names) == 1 else e
        if shift.constant is None:
            continue
        inner_ranges = {**{k: r for k, r in ranges.items() if k not in names}, GUARDED_INDEX: n}
        env, back = {names[0]: Index.of(GUARDED_INDEX) - shift}, {GUARDED_INDEX: e}
        then = map_index(then, partial(_moved, env=env, ranges=inner_ranges, back=back))
    return replace(v, args=(guard, then, orelse))


def _moved(i: Index, env: Mapping[str, Index], ranges: Mapping[str, Index], back: Mapping[str, Index]) -> Index:
    return simplify(i.subs(env), ranges).subs(back)


def _spans(guard: Value) -> list[tuple[Index, Index]]:
    """Return (e, n) for each pair ``e >= 0`` and ``e < n`` in a conjunction."""
    parts = [guard]
    while any(isinstance(p, Op) and p.name == "and" for p in parts):
        parts = [a for p in parts for a in (p.args if isinstance(p, Op) and p.name == "and" else (p,))]
    compared = [
        (p.name, as_index(p.args[0]), as_index(p.args[1])) for p in parts if isinstance(p, Op) and len(p.args) == 2
    ]
    above = {e for name, e, low in compared if name == "ge" and e is not None and low == ZERO}
    return [(e, n) for name, e, n in compared if name == "lt" and n is not None and e is not None and e in above]
