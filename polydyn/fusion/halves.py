"""Store tensors between kernels as bfloat16 where their readers round them anyway (docs/adr/0023-types.md).

With ``Options(precision="bf16")`` a product rounds the rows that it reads. If all readers of a tensor are such
products, storing it rounded changes no number and halves its bytes; the product reads it in place. Depthwise
convolutions take rounded tensors too: their input is rounded, their weights and sums are float32. So do readers whose
results are rounded later: pooling, sums behind a product (residuals), and means that only products read (squeeze and
excitation). Norms, softmax and other readers get float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polydyn.fusion.products import has_column, is_contraction
from polydyn.graph.ir import Compute, Graph, Node, dim_name
from polydyn.graph.rewriting import Rewriting
from polydyn.schedules.expr import Const, Load, Op, Value, indices, loads, transform
from polydyn.schedules.index import Index

HALF, WIDE = "bfloat16", "float32"
SUFFIX = "@bf16"
WINDOWS = ("max", "sum")
"""Reductions of windows that take rounded elements."""


def store_in_halves(graph: Graph) -> Graph:
    """Round the tensors between kernels that only such readers read."""
    return _Rounding(graph).run()


class _Rounding(Rewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.consumers = graph.consumers()
        self.order = {n.output: k for k, n in enumerate(graph.nodes)}
        self.stored: dict[str, str] = {}
        self.behind = self._behind_products()
        self.late = self._rounded_later()
        self.exact = self._needing_floats()

    def run(self) -> Graph:
        """Return the rewritten graph."""
        for n in self.graph.nodes:
            self.nodes.append(self._reading(n))
            if isinstance(n, Compute) and self._stays_between_kernels(n):
                shape = self.graph.tensors[n.output].shape
                here = tuple(Index.of(dim_name(a)) for a in range(len(shape)))
                name = self.fresh_name(n.output + SUFFIX)
                rounded = Op(HALF, "cast", (Load(WIDE, n.output, here),))
                self.stored[n.output] = self.add(Compute(name, rounded, origin=n.origin), shape)
        return self.result()

    def _reading(self, n: Node) -> Node:
        """Return a node that reads the rounded tensors."""

        if isinstance(n, Compute) and self._pads(n) and loads(n.body)[0].buffer in self.stored:
            return self._padding(n)

        def wide(v: Value) -> Value:
            if not isinstance(v, Load) or v.buffer not in self.stored:
                return v
            return Op(WIDE, "cast", (Load(HALF, self.stored[v.buffer], v.index),))

        return replace(n, body=transform(n.body, wide)) if isinstance(n, Compute) else n

    def _padding(self, n: Compute) -> Compute:
        """Return a padding of the rounded tensor, which is rounded too."""

        def half(v: Value) -> Value:
            if isinstance(v, Load) and v.buffer in self.stored:
                return Load(HALF, self.stored[v.buffer], v.index)
            return replace(v, dtype=HALF) if v.dtype == WIDE and isinstance(v, (Op, Const)) else v

        name = self.fresh_name(n.output + SUFFIX)
        self.tensors[name] = replace(self.graph.tensors[n.output], name=name, dtype=HALF)
        self.stored[n.output] = name
        return replace(n, output=name, body=transform(n.body, half))

    def _stays_between_kernels(self, n: Compute) -> bool:
        """Check whether a float32 tensor is read by products with constants, depthwise convolutions or maxima that are
        rounded later, and by nothing that needs it exact.
        """
        tensor = self.graph.tensors[n.output]
        if tensor.dtype != WIDE or not tensor.shape or self._pads(n):
            return False
        readers = list(self._readers(n.output))
        takes = n.output not in self.graph.outputs and all(self._takes(r, name) for r, name in readers)
        return takes and any(isinstance(r, Compute) and self._gains(r, read) for r, read in readers)

    def _gains(self, reader: Compute, name: str) -> bool:
        """Check for a reader for whose sake a tensor is rounded."""
        largest = reader.reduce == "max" and reader.output in self.late
        return self._rounds(reader) or largest or self._is_depthwise(reader, name) or self._adds_later(reader, name)

    def _readers(self, name: str) -> Iterator[tuple[Node, str]]:
        """Yield the readers of a tensor, and instead of a padding its readers. Each with the tensor that it reads."""
        for r in self.consumers[name]:
            if isinstance(r, Compute) and self._pads(r) and r.output not in self.graph.outputs:
                yield from self._readers(r.output)
            else:
                yield r, name

    @staticmethod
    def _pads(n: Compute) -> bool:
        """Check for a map that only moves elements of one tensor, or has zeros in their place."""
        chosen = n.body
        while isinstance(chosen, Op) and chosen.name == "where":
            chosen, *rest = (v for v in chosen.args[1:] if not isinstance(v, Const) or v.value)
            if rest:
                return False
        return n.is_map and isinstance(chosen, Load)

    def _takes(self, reader: Node, name: str) -> bool:
        """Check whether a node may read a rounded tensor."""
        if not isinstance(reader, Compute) or any(a.name == name for i in indices(reader.body) for a in i.fetches()):
            return False
        if self._rounds(reader):
            return True
        if reader.reduce is not None:
            window = reader.reduce in WINDOWS and self._is_window(reader, name)
            return window or self._is_late_sum(reader)
        residual = any(x in self.behind for x in reader.inputs if x != name)
        return residual and reader.output not in self.exact

    def _behind_products(self) -> set[str]:
        """Return the tensors that are a product's, or are computed from one element by element."""
        found = set[str]()
        for n in self.graph.nodes:
            if isinstance(n, Compute) and (self._rounds(n) or (n.is_map and not found.isdisjoint(n.inputs))):
                found.add(n.output)
        return found

    def _adds_later(self, reader: Compute, name: str) -> bool:
        """Check for a residual sum behind a product that is computed after a tensor, so that the tensor is stored."""
        own = self.order.get(name, len(self.order))
        later = (x for x in reader.inputs if self.order.get(x, 0) > own)
        return reader.is_map and not self.behind.isdisjoint(later)

    def _needing_floats(self) -> set[str]:
        """Return the tensors that a norm or another reduction reads, or reads after a computation element by element.
        """
        found = set[str]()
        for n in reversed(self.graph.nodes):
            for r in self.consumers[n.output]:
                if not isinstance(r, Compute):
                    takes = False
                elif r.is_map:
                    takes = r.output not in found
                else:
                    takes = self._rounds(r) or self._is_window(r, n.output) or self._is_late_sum(r)
                if not takes:
                    found.add(n.output)
        return found

    def _is_late_sum(self, n: Compute) -> bool:
        """Check for a sum of a tensor, such as a mean of an image, that is rounded later and meets the tensor only
        after that: a norm subtracts its mean before.
        """
        late = n.reduce == "sum" and isinstance(n.body, Load) and n.output in self.late
        return late and not self._meets(n.output, n.inputs[0])

    def _meets(self, name: str, other: str) -> bool:
        """Check whether a map reads another tensor together with a tensor or what is computed from it."""
        seen, left = {name}, [name]
        while left:
            for r in self.consumers[left.pop()]:
                if isinstance(r, Compute) and r.is_map and r.output not in seen:
                    if other in r.inputs:
                        return True
                    seen.add(r.output)
                    left.append(r.output)
        return False

    def _rounded_later(self) -> set[str]:
        """Return the tensors that only products read that round, at once or after computations element by element."""
        found = set[str]()
        for n in reversed(self.graph.nodes):
            readers = self.consumers[n.output]
            late = (isinstance(r, Compute) and (self._rounds(r) or (r.is_map and r.output in found)) for r in readers)
            if n.output not in self.graph.outputs and all(late):
                found.add(n.output)
        return found

    def _rounds(self, n: Compute) -> bool:
        """Check for a product that rounds its operands: one of them is a constant (``lowering/k_packing.py``)."""
        return is_contraction(n) and n.body.dtype == WIDE and has_column(n) and bool(self._constant_operands(n))

    def _constant_operands(self, n: Compute) -> list[Value]:
        """Return the operands of a product that read constants alone."""
        assert isinstance(n.body, Op)
        return [v for v in n.body.args if all(x.buffer in self.graph.constants for x in loads(v))]

    def _is_depthwise(self, n: Compute, name: str) -> bool:
        """Check for a sum over a window of a tensor, each element times a constant."""
        product = n.reduce == "sum" and isinstance(n.body, Op) and n.body.name == "mul"
        return product and self._is_window(n, name) and bool(self._constant_operands(n))

    @staticmethod
    def _is_window(n: Compute, name: str) -> bool:
        """Check whether a reduction reads a tensor at subscripts that move with an output axis and a reduction."""
        read = [x for x in loads(n.body) if x.buffer == name]
        return any(len({s[0] for s in i.symbols() if s[1:].isdigit()} & {"d", "r"}) == 2 for x in read for i in x.index)
