"""Keep weights of 4 and 8 bits packed in products (docs/adr/0013-quantization.md).

``sum(x * (q - z) * s)`` has 4-bit constants q, with a scale and a zero point per block of steps, as in MatMulNBits and
blocked DequantizeLinear. Folding would turn the weights into floats, eight times the model's bytes. Here the product
reads the integers, and its steps are counted as (block, eight, one of eight), so that scales are affine in the
iterators and eight steps are one 32-bit word.

Weights of 8 bits are two digits of 4 bits, ``16 h + l``, each with words of its own: all that reads words of 4 bits
then reads bytes too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polydyn.graph.ir import Compute, Graph, Node, reduction_name
from polydyn.graph.operators.quantization import dequantized
from polydyn.graph.passes.join import as_contraction
from polydyn.graph.passes.steps import Step, dequantization, through_views
from polydyn.graph.reference import evaluate_node
from polydyn.graph.rewriting import Rewriting, live, live_nodes
from polydyn.graph.verify import free_symbols
from polydyn.schedules.expr import NIBBLES, Array, Load, Op, Value, cast, const, load, map_index, op, substitute
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import simplify

NIBBLE_OFFSETS: Mapping[str, int] = {"int4": 0, "int8": 0, "uint4": 8, "uint8": 8}
"""Dtypes that store 4-bit weights, and the number to subtract to obtain integers from -8 to 7."""


BYTE_OFFSETS: Mapping[str, int] = {"int8": 0, "uint8": 128}
"""Dtypes that store 8-bit weights, and the number to subtract to obtain integers from -128 to 127."""
HIGH_DIGIT, MAX_BALANCED = 16, 119
"""Weight of the high digit, and the greatest integer that two digits from -8 to 7 can represent."""


@dataclass(frozen=True)
class _Weights:
    """Weights ``high * 16 + q`` [columns, steps]: digits in int8 from -8 to 7, s and z [columns, blocks].

    ``high`` is None for 4 bits, z if it is 0. ``offset``: a number to add to all weights. ``column``: the iterator of
    the columns.
    """

    q: Array
    high: Array | None
    s: Array
    z: Array | None
    offset: int
    column: Index


def products_of_nibbles(graph: Graph) -> Graph:
    """Let products with constants of 4 or 8 bits read these directly."""
    rewriting = _Nibbles(graph)
    rewriting.nodes += map(rewriting.node, graph.nodes)
    return live(rewriting.result()) if rewriting.notes else graph


class _Nibbles(Rewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.makers = graph.producer()

    def node(self, node: Node) -> Node:
        """Rewrite a product with weights of 4 or 8 bits over its integers. Other nodes do not change."""
        n = as_contraction(node)
        if n is None or n.body.dtype != "float32" or len(n.reduction) != 1 or n.reduction[0].constant is None:
            return node
        assert isinstance(n.body, Op)
        for row, column in (n.body.args, n.body.args[::-1]):
            step = self._step(n, column)
            weights = None if step is None else self._weights(step, int(n.reduction[0]))
            if weights is not None:
                return self._product(n, self._rows(n, row), weights)
        return node

    def _step(self, n: Compute, v: Value) -> Step | None:
        """Return the dequantization of an operand over the iterators of the product, or None."""
        if not isinstance(v, Load):
            return None
        v = through_views(self.graph, self.makers, v, n)
        step = dequantization(self.makers.get(v.buffer))
        return step.at(v.index) if step is not None and step.x.dtype in NIBBLE_OFFSETS else None

    def _weights(self, step: Step, count: int) -> _Weights | None:
        """Return the weights with columns first if they are constant and their blocks consist of whole words, else
        None.

        ``count``: steps of the product, which may be fewer than the constant has.
        """
        names = [x.buffer for x in (step.x, step.scale, step.zero) if x is not None]
        arrays = _computed_now(self.graph, names)
        steps = Index.of(reduction_name(0))
        plain = [i for i in step.x.index if i != steps]
        if arrays is None or len(step.x.index) != 2 or len(plain) != 1 or not plain[0].is_symbol:
            return None
        q = arrays[step.x.buffer].astype(np.int16)
        q = q if step.x.index[1] == steps else q.T
        middle = NIBBLE_OFFSETS[step.x.dtype]
        if not q.size or q.shape[1] != count:
            return None
        if q.min() - middle < -8 or q.max() - middle > 7:
            if step.x.dtype not in BYTE_OFFSETS:
                return None
            middle = BYTE_OFFSETS[step.x.dtype]
        q = q - middle
        of_block = [x for x in (step.scale, step.zero) if x is not None]
        block = _block(of_block, q.shape[1])
        if block % NIBBLES or block == NIBBLES:  # scales are one more word of a block, which must have several
            return None
        if (q.min() < -8 or q.max() > 7) and block == count:  # bytes with a scale per column are folded, as filters are
            return None
        s, *z = (_by_blocks(x, arrays[x.buffer], q.shape, block, str(plain[0])) for x in of_block)
        zero = z[0].astype(np.int16) - middle if z else np.full_like(s, -middle, np.int16)
        if zero.min() < -128 or zero.max() > 127:
            return None
        z8 = zero.astype(np.int8) if zero.any() else None
        if q.min() >= -8 and q.max() <= 7:
            return _Weights(q.astype(np.int8), None, s, z8, 0, plain[0])
        offset = 8 * int(q.max() > MAX_BALANCED)
        low = (q + 8 - offset) % HIGH_DIGIT - 8
        high = (q - offset - low) // HIGH_DIGIT
        return _Weights(low.astype(np.int8), high.astype(np.int8), s, z8, offset, plain[0])

    def _rows(self, n: Compute, v: Value) -> Value:
        """Return the row operand. If it is dequantized from bytes, return its bytes times scales."""
        step = self._step(n, v)
        if step is None or step.x.dtype != "int8" or step.zero is not None:
            return v
        return dequantized(through_views(self.graph, self.makers, step.x, n), step.scale, None)

    def _product(self, n: Compute, row: Value, w: _Weights) -> Compute:
        """Return the product over blocks, words of a block and steps of a word."""
        columns, steps = w.q.shape
        blocks = w.s.shape[1]
        sizes = (blocks, steps // blocks // NIBBLES, NIBBLES)
        block, word, step = (Index.of(reduction_name(k)) for k in range(3))

        def constant(suffix: str, array: Array) -> str:
            return self.constant(f"{n.output}@{suffix}", np.ascontiguousarray(array))

        place = w.column, block, word, step
        q: Value = load(constant("q", w.q.reshape(columns, *sizes)), place, "int8")
        if w.high is not None:
            high = load(constant("high", w.high.reshape(columns, *sizes)), place, "int8")
            q = op("add", op("mul", cast(high, "int32"), const(HIGH_DIGIT, "int32")), cast(q, "int32"))
            q = op("add", q, const(w.offset, "int32")) if w.offset else q
        s = load(constant("s", w.s), (w.column, block), "float32")
        z = None if w.z is None else load(constant("z", w.z), (w.column, block), "int8")
        here = substitute(row, {reduction_name(0): (block * sizes[1] + word) * NIBBLES + step})
        ranges = {reduction_name(k): Index.of(e) for k, e in enumerate(sizes)}
        here = map_index(here, lambda i: simplify(i, ranges))
        self.notes.append(f"{n.output}: its weights stay integers of {4 if w.high is None else 8} bits")
        return replace(n, body=op("mul", here, dequantized(q, s, z)), reduction=tuple(map(Index.of, sizes)))


def _computed_now(graph: Graph, names: Collection[str]) -> dict[str, Array] | None:
    """Evaluate tensors that nodes compute from constants alone. Returns None if other tensors are read."""
    nodes = live_nodes(graph.nodes, names)
    needed, computed = {*names, *(t for n in nodes for t in n.inputs)}, {n.output for n in nodes}
    if needed - computed - graph.constants.keys() or any(map(free_symbols, nodes)):
        return None
    values = {t: a for t, a in graph.constants.items() if t in needed}
    for n in nodes:
        values[n.output] = evaluate_node(n, graph.tensors[n.output], {}, values)
    return {t: values[t] for t in names}


def _block(read: list[Load], steps: int) -> int:
    """Return the largest divisor of the steps such that all steps of a block read the same elements."""
    block = steps
    for i in (i for x in read for i in x.index):
        places = _places(i, steps)
        block = math.gcd(block, *(int(k) + 1 for k in np.flatnonzero(np.diff(places))))
    return block


def _places(i: Index, steps: int) -> Array:
    """Return a subscript at each step, with its other iterators at 0."""
    env = dict.fromkeys(i.symbols(), 0)
    return np.array([i.evaluate({**env, reduction_name(0): k}) for k in range(steps)])


def _by_blocks(x: Load, array: Array, shape: tuple[int, ...], block: int, column: str) -> Array:
    """Return the elements that are read for each column and block."""
    columns, steps = shape
    index = []
    for i in x.index:
        at = np.array([[i.evaluate({column: c, reduction_name(0): 0})] for c in range(columns)])
        index.append(at + (_places(i, steps)[::block] - _places(i, 1)))
    return np.broadcast_to(array[tuple(index)], (columns, steps // block))
