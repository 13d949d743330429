"""Splitting merged axes: a tensor that its element-wise readers see as (B, L, N) is computed as (B, L, N).

Exporters flatten rows before a matrix product, (B, L, K) to (B*L, K), and unflatten after it. Once views are gone, the
product runs over ``B*L`` rows while what follows runs over (B, L), and neither can be an epilogue of the other. Reading
``c[L*d0 + d1, d2]`` with ``0 <= d1 < L`` is reading a tensor of shape (B, L, N), and a dense one has the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.graph.ir import Compute, Concat, Graph, Node, Tensor, dim_name, iterators
from polydyn.schedules.expr import Load, Value, loads, map_index, substitute, transform
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import row_major
from polydyn.schedules.ranges import divide, simplify


def split_merged_axes(graph: Graph) -> Graph:
    """The graph with merged axes split where that makes an element-wise reader read element by element."""
    nodes: dict[str, Node] = {n.output: n for n in graph.nodes}
    tensors = dict(graph.tensors)
    readers = graph.consumers()
    for name in reversed([n.output for n in graph.nodes]):
        n = nodes[name]
        if not isinstance(n, Compute) or name in graph.outputs:
            continue
        users = [nodes[u.output] for u in readers[name]]
        if any(isinstance(u, Concat) or _fetched(u, name) for u in users):
            continue
        found = _split(tensors, name, [u for u in users if isinstance(u, Compute)])
        if found is None:
            continue
        axis, factors = found
        view = replace(graph, tensors=tensors)
        for u in users:
            assert isinstance(u, Compute)
            nodes[u.output] = _reread(view, u, name, axis, factors)
        shape = tensors[name].shape
        tensors[name] = Tensor(name, tensors[name].dtype, (*shape[:axis], *factors, *shape[axis + 1 :]))
        nodes[name] = _recompute(replace(graph, tensors=tensors), n, axis, factors, len(shape))
    return replace(graph, nodes=tuple(nodes[n.output] for n in graph.nodes), tensors=tensors)


def _fetched(u: Node, name: str) -> bool:
    return isinstance(u, Compute) and any(
        a.name == name for x in loads(u.body) for i in x.index for a in i.fetches()
    )


def _split(
    tensors: Mapping[str, Tensor], name: str, users: list[Compute]
) -> tuple[int, tuple[Index, ...]] | None:
    """(axis, factors) of a merged axis that an element-wise reader runs over in parts."""
    shape = tensors[name].shape
    for u in users:
        own = tensors[u.output].shape
        for x in loads(u.body):
            if x.buffer != name or not u.is_map or len(own) <= len(shape):
                continue
            for axis, i in enumerate(x.index):
                parts = len(own) - len(shape) + 1
                factors = own[axis : axis + parts]
                merged = [Index.of(dim_name(a)) for a in range(axis, axis + parts)]
                linear = sum((m * s for m, s in zip(merged, row_major(factors), strict=True)), ZERO)
                rest = [Index.of(dim_name(a)) for a in range(len(own)) if not axis <= a < axis + parts]
                others = [e for a, e in enumerate(x.index) if a != axis]
                if parts > 1 and i == linear and others == rest and product(factors) == shape[axis]:
                    return axis, factors
    return None


def _reread(graph: Graph, u: Compute, name: str, axis: int, factors: tuple[Index, ...]) -> Compute:
    """The reader with its reads of the split tensor at the parts of the merged subscript."""
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

    return replace(u, body=transform(u.body, f))


def _recompute(graph: Graph, n: Compute, axis: int, factors: tuple[Index, ...], rank: int) -> Compute:
    """The tensor computed over the split axes."""
    more = len(factors) - 1
    parts = [Index.of(dim_name(axis + k)) for k in range(len(factors))]
    env = {dim_name(axis): sum((p * s for p, s in zip(parts, row_major(factors), strict=True)), ZERO)}
    env |= {dim_name(a): Index.of(dim_name(a + more)) for a in range(axis + 1, rank)}
    ranges = dict(iterators(graph, n))
    return replace(n, body=map_index(substitute(n.body, env), lambda i: simplify(i, ranges)))
