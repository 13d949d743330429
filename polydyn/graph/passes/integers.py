"""Integer sums for products of dequantized operands (docs/adr/0013-quantization.md).

``sum((a - za) * sa * ((w - zw) * sw))`` is ``sum((a - za) * (w - zw)) * (sa * sw)``: the integer sum is exact, and the
scales are hoisted, one factor for the tensor or for each output column. This requires that both scales are known at
compile time and that int32 sums cannot wrap, whatever the bytes hold. If ``zw`` is 0, the zero point of the activations
is hoisted too, as ``za * sum(w)``, one known integer per output column, and the stored bytes are multiplied directly.

8-bit floats have no zero points, and their sums are float32. Their scales are hoisted in the same way, even if the
model rounds dequantized values to 16 bits.
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

BYTE_DTYPES = ("int8", "uint8")


@dataclass(frozen=True)
class _Operand:
    """An operand of a product in its quantized form. ``padded``: the float padding through which it is read."""

    step: Step
    padded: Compute | None = None

    @property
    def value(self) -> Value:
        """The operand ``x - zero`` as int32; a small float as float32."""
        x = self.step.x
        return wide(x) if x.dtype in FLOAT8 else centred(x, self.step.zero)


def integer_products(graph: Graph) -> Graph:
    """Use integer sums for the products of dequantized activations with dequantized constants."""
    return _Products(graph, BYTE_DTYPES).run()


def float8_products(graph: Graph) -> Graph:
    """Use float32 sums of 8-bit operands for the products of dequantized 8-bit floats."""
    return _Products(graph, FLOAT8).run()


class _Products(Rewriting):
    """The rewriting. ``dtypes``: dtypes of the quantized operands."""

    def __init__(self, graph: Graph, dtypes: Collection[str]) -> None:
        super().__init__(_with_bytes(graph))
        self.whole, self.dtypes, self.makers = graph, dtypes, self.graph.producer()
        self.paddings: dict[str, str] = {}
        """Maps a padding in float32 to the same padding in bytes."""

    def run(self) -> Graph:
        """Return the rewritten graph, or the graph itself if there is no such product."""
        for n in self.graph.nodes:
            if not self._rewritten(n):
                self.nodes.append(n)
        return live(self.result()) if self.notes else self.whole

    def _rewritten(self, node: Node) -> bool:
        """Rewrite a product as a scaled sum over the quantized operands, if both are equal."""
        n = as_contraction(node)
        if n is None or n.body.dtype != "float32":
            return False
        assert isinstance(n.body, Op)
        operands = [x for x in (self._operand(n, v) for v in n.body.args) if x is not None]
        rows, weights = ([x for x in operands if self._is_constant(x) == c] for c in (False, True))
        if len(rows) != 1 or len(weights) != 1:
            return False
        factor = self._factor(rows[0].step, weights[0].step)
        if factor is None or not self._fits(n, rows[0].step, weights[0].step):
            return False
        row, column = self._in_bytes(rows[0]), weights[0]
        offset = self._offset(n, row.step, column.step)
        if offset is not None:
            row = replace(row, step=replace(row.step, zero=None))
        body = op("mul", *(row.value if x is rows[0] else x.value for x in operands))
        self._write(
            n, body, offset, load(self.constant(f"{n.output}@scale", factor), column.step.scale.index, "float32")
        )
        return True

    def _write(self, n: Compute, body: Value, offset: Load | None, factor: Load) -> None:
        """Write the sum, and the node as (sum - offset) * factor."""
        shape = self.tensors[n.output].shape
        total = self.fresh_name(f"{n.output}@sum")
        self.add(replace(n, output=total, body=body), shape)
        sums: Value = load(total, tuple(map(dim_name, range(len(shape)))), body.dtype)
        sums = sums if offset is None else op("sub", sums, offset)
        self.nodes.append(Compute(n.output, op("mul", cast(sums, "float32"), factor), origin=n.origin))
        what = "integers" if body.dtype == "int32" else "8-bit floats"
        self.notes.append(f"{n.output}: a product of {what}, scaled once (its operands are dequantized)")

    def _offset(self, n: Compute, rows: Step, weights: Step) -> Load | None:
        """Return the contribution of the rows' zero point to a sum, ``zero * sum(w)``, or None if it stays inside.

        It stays inside if the weights have a zero point, are not subscripted by plain iterators, or are a part of a
        constant (a slice, whose constant has more steps than the product).
        """
        zero = number(self.constants, rows.zero)
        column_sum = column_sums(n, weights.x, self.constants[weights.x.buffer])
        if not zero or column_sum is None or weights.zero is not None:
            return None
        sums, index = column_sum
        offsets = (sums.astype(np.int64) * int(zero)).astype(np.int32)
        return load(self.constant(f"{n.output}@zero", offsets), index, "int32")

    # -- operands ------------------------------------------------------------------------------------------------

    def _operand(self, n: Compute, v: Value) -> _Operand | None:
        """Match an operand that is dequantized, perhaps through views or with zeros around it. Returns None
        otherwise.
        """
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
        """Match a dequantization. Small floats may also be dequantized to 16 bits, which represent them exactly."""
        if self.dtypes is FLOAT8 and isinstance(maker, Compute) and maker.body.dtype in HALF:
            assert isinstance(maker.body, Op | Load)
            maker = replace(maker, body=maker.body.args[0]) if isinstance(maker.body, Op) else maker
        return dequantization(maker)

    def _inside(self, padded: Compute) -> Step | None:
        """Return the dequantization inside a padding with zeros."""
        padding = _padding(padded)
        assert padding is not None
        x = through_views(self.graph, self.makers, padding[1], padded)
        step = dequantization(self.makers.get(x.buffer))
        return step.at(x.index) if step else None

    def _in_bytes(self, x: _Operand) -> _Operand:
        """Return the operand with its padding in bytes, which is added if needed. Its fill is the zero point."""
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
        """Check whether the whole operand is constant."""
        s = x.step
        return all(p is None or p.buffer in self.constants for p in (s.x, s.scale, s.zero))

    # -- when both ways are the same -----------------------------------------------------------------------------

    def _factor(self, rows: Step, weights: Step) -> Array | None:
        """Return the product of the scales in the shape of the weights' scales, or None if it is not an ordinary
        number.

        The scale of the weights may differ by output column, but not along the sum.
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
        """Check that no sum of these integers leaves int32. float32 represents any sum of small floats."""
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
    """Sum an integer constant, read as ``x``, over the reduction of ``n``. Return int32 sums and the remaining axes.

    Returns None if the constant is not subscripted by plain iterators, or is read in part (a slice, whose constant has
    more steps than the product).
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
    """Quantize constants now: some exporters store float weights and quantize them in the model."""
    constants, nodes = dict(graph.constants), list[Node]()
    for n in graph.nodes:
        if quantization(n) and n.output not in graph.outputs and all(t in constants for t in n.inputs):
            constants[n.output] = evaluate_node(n, graph.tensors[n.output], {}, constants)
        else:
            nodes.append(n)
    return replace(graph, nodes=tuple(nodes), constants=constants)


def _padding(n: Compute) -> tuple[Value, Load] | None:
    """Match a node that is one load under a condition on subscripts, else 0. Return condition and load, or None."""
    inside, v = list[Value](), n.body
    while isinstance(v, Op) and v.name == "where" and not loads(v.args[0]) and v.args[2] == const(0, "float32"):
        inside.append(v.args[0])
        v = v.args[1]
    condition = all_of(inside)
    return None if condition is None or not n.is_map or not isinstance(v, Load) else (condition, v)
