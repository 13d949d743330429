"""Products of dequantized operands as sums of products of integers (docs/adr/0013-quantization.md).

``sum((a - za) * sa * ((w - zw) * sw))`` is ``sum((a - za) * (w - zw)) * (sa * sw)``: the sum over bytes is exact, and
the scales come out of it, one factor for a tensor or for each output column. Only where both scales are known now and
where sums of int32 cannot wrap, whatever is in the bytes. Where ``zw`` is 0, the zero point of the activations comes
out of the sum too, as ``za * sum(w)``, one known integer for each output column: bytes are multiplied as they are.

Floats of 8 bits have no zero points, and their sums are float32: the scales come out in the same way, also where the
model rounds what it dequantizes to 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from polydyn.graph.ir import Compute, Graph, Node, dim_name, reduction_name
from polydyn.graph.operators.common import all_of, wide
from polydyn.graph.operators.quantization import HALF, centred
from polydyn.graph.passes.join import as_contraction
from polydyn.graph.passes.steps import Step, dequantization, is_ordinary, number, quantization, through_views
from polydyn.graph.reference import evaluate_node
from polydyn.graph.rewriting import Rewriting, live
from polydyn.schedules.expr import FLOAT8, Array, Load, Op, Value, cast, const, load, loads, op
from polydyn.schedules.index import product

BYTES = ("int8", "uint8")


@dataclass(frozen=True)
class _Operand:
    """An operand of a product as it was quantized. ``padded``: the float padding that it is read through."""

    step: Step
    padded: Compute | None = None

    @property
    def value(self) -> Value:
        """``x - zero`` as int32; a small float as float32."""
        x = self.step.x
        return wide(x) if x.dtype in FLOAT8 else centred(x, self.step.zero)


def integer_products(graph: Graph) -> Graph:
    """The graph with integer sums for the products of dequantized activations with dequantized constants."""
    return _Products(graph, BYTES).run()


def float8_products(graph: Graph) -> Graph:
    """The same with sums of float32 for operands of 8-bit floats."""
    return _Products(graph, FLOAT8).run()


class _Products(Rewriting):
    """``dtypes``: of the operands that are looked for."""

    def __init__(self, graph: Graph, dtypes: Collection[str]) -> None:
        super().__init__(_with_bytes(graph))
        self.whole, self.dtypes, self.makers = graph, dtypes, self.graph.producer()
        self.paddings: dict[str, str] = {}
        """A padding in float32 -> the same one in bytes."""

    def run(self) -> Graph:
        """The rewritten graph; itself where there is no such product."""
        for n in self.graph.nodes:
            if not self._rewritten(n):
                self.nodes.append(n)
        return live(self.result()) if self.notes else self.whole

    def _rewritten(self, node: Node) -> bool:
        """Writes a product as a sum over what was quantized and its scaling, where that is the same."""
        n = as_contraction(node)
        if n is None or n.body.dtype != "float32":
            return False
        assert isinstance(n.body, Op)
        found = [x for x in (self._operand(n, v) for v in n.body.args) if x is not None]
        rows, weights = ([x for x in found if self._is_constant(x) == c] for c in (False, True))
        if len(rows) != 1 or len(weights) != 1:
            return False
        factor = self._factor(rows[0].step, weights[0].step)
        if factor is None or not self._fits(n, rows[0].step, weights[0].step):
            return False
        row, column = self._in_bytes(rows[0]), weights[0]
        offset = self._offset(n, row.step, column.step)
        if offset is not None:
            row = replace(row, step=replace(row.step, zero=None))
        body = op("mul", *(row.value if x is rows[0] else x.value for x in found))
        self._write(
            n, body, offset, load(self.constant(f"{n.output}@scale", factor), column.step.scale.index, "float32")
        )
        return True

    def _write(self, n: Compute, body: Value, offset: Load | None, factor: Load) -> None:
        """The sum, and the node as this sum less the offset, times the factor."""
        shape = self.tensors[n.output].shape
        total = self.fresh_name(f"{n.output}@sum")
        self.add(replace(n, output=total, body=body), shape)
        sums: Value = load(total, tuple(map(dim_name, range(len(shape)))), body.dtype)
        sums = sums if offset is None else op("sub", sums, offset)
        self.nodes.append(Compute(n.output, op("mul", cast(sums, "float32"), factor), origin=n.origin))
        what = "integers" if body.dtype == "int32" else "8-bit floats"
        self.notes.append(f"{n.output}: a product of {what}, scaled once (its operands are dequantized)")

    def _offset(self, n: Compute, rows: Step, weights: Step) -> Load | None:
        """What the zero point of the rows adds to a sum: ``zero * sum(w)``; None where there is none to take out.

        It stays inside where the weights have a zero point, are not subscripted by plain iterators, or are a part of a
        constant (a slice of it, which has more steps than the product).
        """
        zero = number(self.constants, rows.zero)
        found = column_sums(n, weights.x, self.constants[weights.x.buffer])
        if not zero or found is None or weights.zero is not None:
            return None
        sums, index = found
        offsets = (sums.astype(np.int64) * int(zero)).astype(np.int32)
        return load(self.constant(f"{n.output}@zero", offsets), index, "int32")

    # -- operands ------------------------------------------------------------------------------------------------

    def _operand(self, n: Compute, v: Value) -> _Operand | None:
        """An operand that is dequantized, perhaps seen through views, perhaps with zeros around it; else None."""
        if self.dtypes is FLOAT8 and isinstance(v, Op) and v.name == "cast" and v.args[0].dtype in HALF:
            (v,) = v.args
        if not isinstance(v, Load):
            return None
        v = through_views(self.graph, self.makers, v, n)
        maker = self.makers.get(v.buffer)
        padded = maker if isinstance(maker, Compute) and _padding(maker) else None
        step = self._inside(padded) if padded else self._step(maker)
        if step is None or step.x.dtype not in self.dtypes:
            return None
        if padded is None:
            return _Operand(step.at(v.index))
        return _Operand(replace(step, x=replace(step.x, buffer=v.buffer, index=v.index)), padded)

    def _step(self, maker: Node | None) -> Step | None:
        """What dequantizes; of small floats also to 16 bits, which are more than they have."""
        if self.dtypes is FLOAT8 and isinstance(maker, Compute) and maker.body.dtype in HALF:
            assert isinstance(maker.body, Op | Load)
            maker = replace(maker, body=maker.body.args[0]) if isinstance(maker.body, Op) else maker
        return dequantization(maker)

    def _inside(self, padded: Compute) -> Step | None:
        """The step that makes what a padding surrounds with zeros."""
        found = _padding(padded)
        assert found is not None
        x = through_views(self.graph, self.makers, found[1], padded)
        step = dequantization(self.makers.get(x.buffer))
        return step.at(x.index) if step else None

    def _in_bytes(self, x: _Operand) -> _Operand:
        """The operand with its padding in bytes, written where it is not there yet: around it lies the zero point."""
        if x.padded is None:
            return x
        step, found = self._inside(x.padded), _padding(x.padded)
        assert step is not None and found is not None
        if x.padded.output not in self.paddings:
            fill = const(0, step.x.dtype) if step.zero is None else step.zero
            name = self.paddings[x.padded.output] = self.fresh_name(f"{x.padded.output}@bytes")
            body = op("where", found[0], step.x, fill)
            self.add(replace(x.padded, output=name, body=body), self.tensors[x.padded.output].shape)
        place = replace(x.step.x, buffer=self.paddings[x.padded.output])
        return replace(x, step=replace(x.step, x=place))

    def _is_constant(self, x: _Operand) -> bool:
        """Whether all of it is known now."""
        s = x.step
        return all(p is None or p.buffer in self.constants for p in (s.x, s.scale, s.zero))

    # -- when both ways are the same -----------------------------------------------------------------------------

    def _factor(self, rows: Step, weights: Step) -> Array | None:
        """The product of the scales, of the shape of the weights' scales; None where it is no ordinary number.

        The scale of the weights may differ by output column, not along the sum.
        """
        one, many = number(self.constants, rows.scale), self.constants[weights.scale.buffer].astype(np.float32)
        along = {s for i in weights.scale.index for s in i.symbols()}
        if one is None or number(self.constants, rows.zero) is None or any(s.startswith("r") for s in along):
            return None
        with np.errstate(all="ignore"):
            factor: Array = np.asarray(np.float32(one) * many, np.float32)
        ordinary = all(map(is_ordinary, (np.asarray(one, np.float32), many, factor)))
        return factor if ordinary else None

    def _fits(self, n: Compute, rows: Step, weights: Step) -> bool:
        """Whether no sum of these integers leaves int32; float32 holds any of small floats."""
        if rows.x.dtype in FLOAT8:
            return True
        steps, zero = product(n.reduction).constant, number(self.constants, rows.zero)
        array = self.constants[weights.x.buffer].astype(np.int64)
        if not steps or not array.size or zero is None:
            return False
        zeros: Array = np.zeros(1, np.int64)
        if weights.zero is not None:
            zeros = self.constants[weights.zero.buffer].astype(np.int64)
        ends = np.iinfo(rows.x.dtype)
        most = max(int(ends.max), -int(ends.min), int(ends.max) - int(zero), int(zero) - int(ends.min))
        widest = max(int(array.max()) - int(zeros.min()), int(zeros.max()) - int(array.min()))
        return bool(steps * most * widest < 2**31)


def column_sums(n: Compute, x: Load, array: Array) -> tuple[Array, tuple[str, ...]] | None:
    """What the product ``n`` sums of an integer constant that it reads as ``x``, in int32, and the axes that are left.

    None where the constant is not subscripted by plain iterators, or is read in part (a slice of it, which has more
    steps than the product).
    """
    if any(e.constant is None for e in n.reduction):
        return None
    extents = {reduction_name(j): int(e) for j, e in enumerate(n.reduction)}
    index = [str(i) for i in x.index if i.constant is None]
    plain = all(i.is_symbol or i.constant == 0 for i in x.index) and len(set(index)) == len(index)
    summed = (extents.get(str(i), None if i.is_symbol else 1) for i in x.index)
    part = any(steps not in (None, size) for steps, size in zip(summed, array.shape, strict=True))
    if not plain or part:
        return None
    axes = tuple(a for a, i in enumerate(x.index) if not i.is_symbol or str(i) in extents)
    again = math.prod(e for r, e in extents.items() if r not in index)
    sums: Array = (array.astype(np.int64).sum(axes) * again).astype(np.int32)
    return sums, tuple(i for i in index if i not in extents)


def _with_bytes(graph: Graph) -> Graph:
    """The graph with constants quantized now: some exporters keep weights as floats and quantize them in the model."""
    constants, nodes = dict(graph.constants), list[Node]()
    for n in graph.nodes:
        if quantization(n) and n.output not in graph.outputs and all(t in constants for t in n.inputs):
            constants[n.output] = evaluate_node(n, graph.tensors[n.output], {}, constants)
        else:
            nodes.append(n)
    return replace(graph, nodes=tuple(nodes), constants=constants)


def _padding(n: Compute) -> tuple[Value, Load] | None:
    """The condition on subscripts under which a node is one load, and that load; it is 0 elsewhere. None: it is not."""
    inside, v = list[Value](), n.body
    while isinstance(v, Op) and v.name == "where" and not loads(v.args[0]) and v.args[2] == const(0, "float32"):
        inside.append(v.args[0])
        v = v.args[1]
    condition = all_of(inside)
    return None if condition is None or not n.is_map or not isinstance(v, Load) else (condition, v)
