"""Widen constant operands of integer products once, at compile time (docs/adr/0013-quantization.md).

A quantized product reads its weights as ``int32(w) - zero_w``. On the CPU this is computed at compile time, so that the
column operand is again a constant. Lowering packs it into panels like any other constant.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.fusion.products import has_column, is_contraction
from polydyn.graph.ir import Compute, Graph, Node, Tensor, dim_name
from polydyn.graph.reference import evaluate_node
from polydyn.graph.rewriting import Rewriting
from polydyn.schedules.expr import Array, Load, Op, Value, loads, substitute, transform
from polydyn.schedules.index import Index

SUFFIX = "@wide"


def widen_constants(graph: Graph) -> Graph:
    """Replace operands that integer products compute from constants by int32 constants."""
    return _Widening(graph).run()


class OperandRewriting(Rewriting):
    """A rewriting of the operands of products that are summed in ``dtypes``. A replacement may add constants."""

    dtypes: tuple[str, ...] = ("int32",)

    def operand(self, v: Value) -> Value:
        """Return the replacement of an operand."""
        raise NotImplementedError

    def run(self) -> Graph:
        """Return the rewritten graph."""
        self.nodes += map(self._node, self.graph.nodes)
        return self.result()

    def _node(self, n: Node) -> Node:
        if not isinstance(n, Compute) or n.body.dtype not in self.dtypes or not is_contraction(n) or not has_column(n):
            return n
        assert isinstance(n.body, Op)
        return replace(n, body=replace(n.body, args=tuple(map(self.operand, n.body.args))))


class _Widening(OperandRewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.names: dict[Value, str] = {}

    def operand(self, v: Value) -> Value:
        operand = over_constant(self.graph, v)
        if operand is None:
            return v
        load, body = operand
        if body not in self.names:
            name = f"{load.buffer}{SUFFIX}{len(self.names) or ''}"
            self.names[body] = self.constant(name, values_of(self.graph, load, body))
        return Load("int32", self.names[body], load.index)


def over_constant(graph: Graph, v: Value) -> tuple[Load, Value] | None:
    """Match a value that is computed from constants only: the load of the largest one, and the value over its axes.

    Returns None if it is itself a load, if it reads other tensors, or if it reads a constant at other subscripts than
    that load's iterators.
    """
    read = loads(v)
    if isinstance(v, Load) or not read or any(x.buffer not in graph.constants for x in read):
        return None
    load = max(read, key=lambda x: graph.constants[x.buffer].size)
    env = {str(i): dim_name(a) for a, i in enumerate(load.index) if i.is_symbol}
    plain = len(env) == len(load.index)
    for x in read:
        used = {s for i in x.index for s in i.symbols()}
        if x != load and (used - env.keys() or (used and not plain)):
            return None
    here = tuple(Index.of(dim_name(a)) for a in range(len(load.index)))

    def moved(x: Value) -> Value:
        if not isinstance(x, Load):
            return x
        return replace(x, index=here) if x == load else substitute(x, env)

    return load, transform(v, moved)


def values_of(graph: Graph, load: Load, body: Value) -> Array:
    """Evaluate the value of ``over_constant``: an array of the shape of the constant that ``load`` reads."""
    out = Tensor(load.buffer, body.dtype, graph.tensors[load.buffer].shape)
    return evaluate_node(Compute(out.name, body), out, {}, graph.constants)
