"""Small graphs, written by hand, compiled and compared with the reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polydyn.graph.ir import Compute, Concat, Graph, Node, SymbolSource, Tensor
from polydyn.graph.reference import evaluate
from polydyn.graph.verify import verify_graph
from polydyn.schedules.expr import Array, Value, load, op
from polydyn.schedules.index import Index, IndexLike
from polydyn.testing.fuzz import compile_graph, difference

Shapes = Mapping[str, Sequence[IndexLike]]


class Sheet:
    """Collects a graph: ``sheet["x"]`` reads, ``sheet.let`` computes."""

    def __init__(self, dtype: str = "float32", **inputs: Sequence[IndexLike]) -> None:
        self.tensors = {n: Tensor(n, dtype, tuple(map(Index.of, s))) for n, s in inputs.items()}
        self.inputs = list(inputs)
        self.constants: dict[str, Array] = {}
        self.nodes: list[Node] = []

    def constant(self, name: str, array: Array) -> None:
        self.tensors[name] = Tensor(name, str(array.dtype), tuple(map(Index.of, array.shape)))
        self.constants[name] = array

    def at(self, name: str, *index: IndexLike) -> Value:
        return load(name, index, self.tensors[name].dtype)

    def let(
        self,
        name: str,
        shape: Sequence[IndexLike],
        body: Value,
        reduction: Sequence[IndexLike] = (),
        reduce: str | None = None,
    ) -> None:
        self.tensors[name] = Tensor(name, body.dtype, tuple(map(Index.of, shape)))
        self.nodes.append(Compute(name, body, tuple(map(Index.of, reduction)), reduce, origin=name))

    def concat(self, name: str, parts: Sequence[str], axis: int) -> None:
        shape = list(self.tensors[parts[0]].shape)
        shape[axis] = sum((self.tensors[p].shape[axis] for p in parts[1:]), shape[axis])
        self.tensors[name] = Tensor(name, self.tensors[parts[0]].dtype, tuple(shape))
        self.nodes.append(Concat(name, tuple(parts), axis, origin=name))

    def graph(self, *outputs: str) -> Graph:
        sources: dict[str, SymbolSource] = {}
        for x in self.inputs:
            for a, d in enumerate(self.tensors[x].shape):
                if d.is_symbol:
                    sources.setdefault(str(d), SymbolSource(str(d), x, a))
        graph = Graph(
            "sheet", tuple(self.inputs), outputs, self.tensors, self.constants, tuple(self.nodes),
            tuple(sources.values()),
        )  # fmt: skip
        verify_graph(graph)
        return graph


def matmul(sheet: Sheet, name: str, a: str, b: str) -> None:
    """Add ``name[m, n] = sum over k of a[m, k] * b[k, n]``."""
    (m, k), (_, n) = sheet.tensors[a].shape, sheet.tensors[b].shape
    sheet.let(name, (m, n), op("mul", sheet.at(a, "d0", "r0"), sheet.at(b, "r0", "d1")), (k,), "sum")


def random_inputs(graph: Graph, seed: int = 0, **sizes: int) -> dict[str, Array]:
    r = np.random.default_rng(seed)
    out: dict[str, Array] = {}
    for x in graph.inputs:
        t = graph.tensors[x]
        shape = [d.evaluate(sizes) for d in t.shape]
        floats = t.dtype.startswith("float")
        out[x] = (r.standard_normal(shape) if floats else r.integers(0, 11, shape)).astype(t.dtype)
    return out


def wrong(graph: Graph, *sizes: Mapping[str, int], target: str = "cpu") -> dict[str, str]:
    """Return the errors of the compiled graph by sizes, with one thread and two; empty if it is right."""
    one, two = compile_graph(graph, target)
    out: dict[str, str] = {}
    for s in sizes:
        feeds = random_inputs(graph, **s)
        got, again = one.run(feeds), two.run(feeds)
        message = difference(graph, feeds, got, evaluate(graph, feeds))
        for o in graph.outputs:
            if not message and got[o].tobytes() != again[o].tobytes():
                message = f"{o} has other bits with two threads"
        if message:
            out[str(dict(s))] = message
    return out
