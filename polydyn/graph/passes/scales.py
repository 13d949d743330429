"""Hoist numbers that scale an operand out of a product's sum.

``sum((x * c) * y)`` is ``sum(x * y) * c``. Exporters scale queries and keys by the root of a number each. The scaled
keys would then be a copy of the cache, written and read in every step of a decoder, once for each query that shares a
key. So the number is hoisted if the tensor that it scales is in memory anyway: an input or output of the model, or a
tensor with other readers. Sums that overflow before scaling are infinite. Both orders round once.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polydyn.graph.ir import Compute, Concat, Graph, Node, dim_name
from polydyn.graph.passes.join import as_contraction
from polydyn.graph.passes.steps import is_ordinary, number, through_views
from polydyn.graph.rewriting import Rewriting, live
from polydyn.schedules.expr import FLOATS, Const, Load, Op, Value, cast, const, load, op, transform


def products_without_scales(graph: Graph) -> Graph:
    """Multiply the stored operands of products and scale the results."""
    return _Scales(graph).run()


class _Scales(Rewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.makers, self.readers = graph.producer(), graph.consumers()
        self.factors: dict[str, Value] = {}
        """Maps products to the factor by which their readers, which are all maps, multiply them."""

    def run(self) -> Graph:
        """Return the rewritten graph, or the graph itself if there is no such product."""
        for n in self.graph.nodes:
            if not self._rewritten(n):
                self.nodes.append(self._counted(n))
        return live(self.result()) if self.notes else self.graph

    def _rewritten(self, node: Node) -> bool:
        """Rewrite a product as a scaled sum over its stored operands, if possible."""
        n = as_contraction(node)
        if n is None or n.body.dtype != "float32":
            return False
        assert isinstance(n.body, Op)
        operands = [self._operand(n, v) for v in n.body.args]
        factor = np.prod([np.float32(c) for _, c in operands], dtype=np.float32)
        if all(v is w for (v, _), w in zip(operands, n.body.args, strict=True)) or not is_ordinary(factor):
            return False
        n, shape = replace(n, body=op("mul", *(v for v, _ in operands))), self.tensors[n.output].shape
        by, readers = const(float(factor), "float32"), self.readers.get(n.output, [])
        if n.output not in self.graph.outputs and all(_computes(x) for x in readers):
            self.nodes.append(n)
            self.factors[n.output] = by
        else:
            total = self.add(replace(n, output=self.fresh_name(f"{n.output}@sum")), shape)
            sums = load(total, tuple(map(dim_name, range(len(shape)))), "float32")
            self.nodes.append(Compute(n.output, op("mul", sums, by), origin=n.origin))
        self.notes.append(f"{n.output}: the product is scaled, not its operand (which is in memory anyway)")
        return True

    def _counted(self, n: Node) -> Node:
        """Return a node that multiplies its reads of unscaled products by their factors."""
        if not isinstance(n, Compute) or self.factors.keys().isdisjoint(n.inputs):
            return n

        def scaled(v: Value) -> Value:
            by = self.factors.get(v.buffer) if isinstance(v, Load) else None
            return v if by is None else op("mul", v, by)

        return replace(n, body=transform(n.body, scaled))

    def _operand(self, n: Compute, v: Value) -> tuple[Value, float]:
        """Return the value that an operand scales, and the factor. Returns the operand and 1 if nothing is hoisted."""
        read = _uncast(v)
        if not isinstance(read, Load):
            return v, 1.0
        read = through_views(self.graph, self.makers, read, n)
        maker = self.makers.get(read.buffer)
        if not isinstance(maker, Compute) or not maker.is_map or read.buffer in self.graph.outputs:
            return v, 1.0
        scaling = _uncast(maker.at(read.index))
        if not isinstance(scaling, Op) or scaling.name != "mul":
            return v, 1.0
        for x, c in (scaling.args, scaling.args[::-1]):
            scaled, by = _uncast(x), self._number(_uncast(c))
            if by is not None and isinstance(scaled, Load) and scaled.dtype == read.dtype and self._kept(scaled, n):
                return cast(scaled, "float32"), by
        return v, 1.0

    def _number(self, v: Value) -> float | None:
        """Return the ordinary number that a value is, or None."""
        known = v.value if isinstance(v, Const) else number(self.constants, v) if isinstance(v, Load) else None
        if known is None or v.dtype not in FLOATS:
            return None
        return float(known) if is_ordinary(np.float32(known)) else None

    def _kept(self, v: Load, n: Compute) -> bool:
        """Check whether a tensor is in memory in any case, as the model defines it."""
        base = through_views(self.graph, self.makers, v, n).buffer
        maker = self.makers.get(base)
        if base in self.constants or base in self.factors:
            return False
        return maker is None or isinstance(maker, Concat) or base in self.graph.outputs or len(self.readers[base]) > 1


def _computes(n: Node) -> bool:
    """Check whether a node is a map other than a view, so that one more factor is free."""
    return isinstance(n, Compute) and n.is_map and not n.is_view


def _uncast(v: Value) -> Value:
    """Strip casts that only widen a value or round it to 16 bits."""
    while isinstance(v, Op) and v.name == "cast" and v.dtype in FLOATS and v.args[0].dtype in FLOATS:
        (v,) = v.args
    return v
