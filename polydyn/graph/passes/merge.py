"""GEMM merging (BladeDISC 4.1, TSCompiler 4.2 horizontal groups): contractions that share their row operand become one.

``A*B, A*C, A*D`` with constant matrices is ``A*[B C D]``: A is read once and one kernel runs. What was computed apart
becomes views of the merged result; element-wise readers that differ only in constants along the merged axis (biases)
are merged in the same way, so that they stay epilogues.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from polydyn.graph.ir import Compute, Graph, Node, Tensor, dim_name, reduction_name
from polydyn.schedules.expr import Array, FromIndex, Load, Op, Value, children, indices, load, loads, walk
from polydyn.schedules.index import ZERO, Index


@dataclass(frozen=True)
class _Product:
    """A contraction with a constant matrix: ``row[.., r0] * matrix[r0, last]``."""

    node: Compute
    row: Value
    matrix: Array


def merge_contractions(graph: Graph) -> Graph:
    """Merges the contractions of a graph that share their row operand; the reasons go to ``notes``."""
    shared: dict[object, list[_Product]] = {}
    for n in graph.nodes:
        p = _product(graph, n)
        if p is not None:
            prefix = graph.tensors[n.output].shape[:-1]
            shared.setdefault((p.row, prefix, p.node.reduction), []).append(p)
    merger = _Merger(graph)
    for members in shared.values():
        if len(members) > 1:
            merger.merge(members)
    return merger.finish()


def _product(graph: Graph, n: Node) -> _Product | None:
    if not isinstance(n, Compute) or n.reduce != "sum" or len(n.reduction) != 1:
        return None
    rank = len(graph.tensors[n.output].shape)
    if not (isinstance(n.body, Op) and n.body.name == "mul" and rank):
        return None
    last, r = Index.of(dim_name(rank - 1)), Index.of(reduction_name(0))
    for row, col in (n.body.args, n.body.args[::-1]):
        if not isinstance(col, Load) or col.buffer not in graph.constants or len(col.index) != 2:
            continue
        if any(str(last) in i.symbols() for i in indices(row)) or not loads(row):
            continue
        if any(x.buffer in graph.constants for x in loads(row)):
            continue
        array = graph.constants[col.buffer]
        if col.index == (r, last):
            return _Product(n, row, array)
        if col.index == (last, r):
            return _Product(n, row, array.T)
    return None


class _Merger:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tensors = dict(graph.tensors)
        self.constants = dict(graph.constants)
        self.replaced: dict[str, tuple[Node, ...]] = {}
        self.consumers = graph.consumers()
        self.position = {n.output: i for i, n in enumerate(graph.nodes)}
        self.notes: list[str] = []

    def merge(self, members: list[_Product]) -> None:
        """One contraction for all members, one map for their isomorphic readers."""
        names = [m.node.output for m in members]
        widths = [m.matrix.shape[1] for m in members]
        matrix = self._constant(f"{names[0]}+matrix", np.concatenate([m.matrix for m in members], axis=1))
        whole = self._tensor(f"{names[0]}+merged", names[0], sum(widths))
        first = members[0].node
        rank = len(self.tensors[whole].shape)
        column = load(matrix, (Index.of(reduction_name(0)), Index.of(dim_name(rank - 1))), first.body.dtype)
        body = Op(first.body.dtype, "mul", (members[0].row, column))
        merged: list[Node] = [replace(first, output=whole, body=body)]
        readers = self._readers(names)
        if readers is not None:
            merged += self._merge_readers(readers, names, widths, whole)
        offset = 0
        for n, w in zip(names, widths, strict=True):
            self._put(n, merged, self._view(n, whole, offset))
            merged = []
            offset += w
        self.notes.append(f"{', '.join(names)}: merged into one contraction (they share their row operand)")

    def _readers(self, names: list[str]) -> list[Compute] | None:
        """The only reader of each member, when all are maps that differ in constants along the last axis only."""
        readers = []
        for n in names:
            found = self.consumers[n]
            if len(found) != 1 or not isinstance(found[0], Compute) or n in self.graph.outputs:
                return None
            readers.append(found[0])
        if any(self.position.get(t, -1) > self.position[names[0]] for t in readers[0].inputs if t != names[0]):
            return None  # the merged reader stands where the first member stood
        same = all(self._isomorphic(readers[0].body, r.body, names[0], n) for r, n in zip(readers, names, strict=True))
        whole = all(self._elementwise(r, n) for r, n in zip(readers, names, strict=True))
        return readers if same and whole and len({r.output for r in readers}) == len(readers) else None

    def _elementwise(self, r: Compute, n: str) -> bool:
        shape = self.graph.tensors[r.output].shape
        here = tuple(Index.of(dim_name(a)) for a in range(len(shape)))
        last = {str(here[-1])} if here else set()
        plain = [v.index for v in walk(r.body) if isinstance(v, FromIndex)]
        others = [x for x in loads(r.body) if x.buffer != n and not self._per_column(x, here[-1])]
        return (
            r.is_map
            and shape == self.graph.tensors[n].shape
            and all(x.index == here for x in loads(r.body) if x.buffer == n)
            and not any(last & i.symbols() for i in (*plain, *(i for x in others for i in x.index)))
        )

    def _per_column(self, x: Load, last: Index) -> bool:
        return x.buffer in self.graph.constants and x.index == (last,)

    def _isomorphic(self, a: Value, b: Value, own_a: str, own_b: str) -> bool:
        if isinstance(a, Load) and isinstance(b, Load):
            if a.buffer == own_a or b.buffer == own_b:
                return a.buffer == own_a and b.buffer == own_b
            last = Index.of(dim_name(len(self.graph.tensors[own_a].shape) - 1))
            free = self._per_column(a, last) and self._per_column(b, last)
            return a.index == b.index and a.dtype == b.dtype and (a.buffer == b.buffer or free)
        if isinstance(a, Op) and isinstance(b, Op):
            if (a.name, a.dtype, len(a.args)) != (b.name, b.dtype, len(b.args)):
                return False
            pairs = zip(children(a), children(b), strict=True)
            return all(self._isomorphic(x, y, own_a, own_b) for x, y in pairs)
        return a == b

    def _merge_readers(self, readers: list[Compute], names: list[str], widths: list[int], whole: str) -> list[Node]:
        last = Index.of(dim_name(len(self.tensors[whole].shape) - 1))
        output = self._tensor(f"{readers[0].output}+merged", readers[0].output, sum(widths))
        body = self._join([r.body for r in readers], names, whole, last)
        offset = 0
        for r, w in zip(readers, widths, strict=True):
            self._put(r.output, [], self._view(r.output, output, offset))
            offset += w
        return [replace(readers[0], output=output, body=body)]

    def _join(self, bodies: list[Value], names: list[str], whole: str, last: Index) -> Value:
        a = bodies[0]
        if isinstance(a, Load):
            if a.buffer == names[0]:
                return replace(a, buffer=whole)
            if not self._per_column(a, last):
                return a
            parts = [self.graph.constants[b.buffer] for b in bodies if isinstance(b, Load)]
            return replace(a, buffer=self._constant(f"{a.buffer}+{whole}", np.concatenate(parts)))
        if isinstance(a, Op):
            columns = zip(*(children(b) for b in bodies), strict=True)
            return replace(a, args=tuple(self._join(list(c), names, whole, last) for c in columns))
        return a

    def _view(self, name: str, whole: str, offset: int) -> Compute:
        rank = len(self.tensors[whole].shape)
        index = [Index.of(dim_name(a)) for a in range(rank)]
        index[-1] = index[-1] + offset
        return Compute(name, load(whole, tuple(index), self.tensors[whole].dtype))

    def _put(self, name: str, before: Iterable[Node], view: Node) -> None:
        self.replaced[name] = (*before, view)

    def _constant(self, name: str, array: Array) -> str:
        self.constants[name] = array
        self.tensors[name] = Tensor(name, str(array.dtype), tuple(map(Index.of, array.shape)))
        return name

    def _tensor(self, name: str, like: str, width: int) -> str:
        t = self.tensors[like]
        self.tensors[name] = Tensor(name, t.dtype, (*t.shape[:-1], ZERO + width))
        return name

    def finish(self) -> Graph:
        """The graph with members and readers replaced by views; constants that nothing reads are dropped."""
        nodes = tuple(x for n in self.graph.nodes for x in self.replaced.get(n.output, (n,)))
        used = {t for n in nodes for t in n.inputs} | set(self.graph.outputs)
        constants = {n: a for n, a in self.constants.items() if n in used}
        tensors = {n: t for n, t in self.tensors.items() if n in constants or n not in self.constants}
        notes = (*self.graph.notes, *self.notes)
        return replace(self.graph, nodes=nodes, tensors=tensors, constants=constants, notes=notes)
