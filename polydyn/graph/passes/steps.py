"""Recognise quantization and dequantization by what nodes compute, not by their operators' names.

This module also has the pass ``requantize``: a tensor that is dequantized and quantized again with equal parameters
does not change. Exporters quantize around operators that only move elements, so a transposed tensor is dequantized,
moved and quantized again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from polydyn.graph.ir import Compute, Graph, Node, dim_name, iterators
from polydyn.graph.operators.common import wide
from polydyn.graph.operators.quantization import QUANTIZED_DTYPES, SCALE_DTYPES, dequantized, quantized
from polydyn.graph.rewriting import live
from polydyn.schedules.expr import Array, Load, Op, Value, load, loads, map_index, neutral
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.ranges import simplify


@dataclass(frozen=True)
class Step:
    """The loads of a step, over the iterators of its node: an element, its scale and its zero point (None if it is
    0).
    """

    x: Load
    scale: Load
    zero: Load | None

    def at(self, index: tuple[Index, ...]) -> Step:
        """Return the step that computes the element at ``index``."""
        env = {dim_name(a): i for a, i in enumerate(index)}

        def moved(x: Load) -> Load:
            return replace(x, index=tuple(i.subs(env) for i in x.index))

        return Step(moved(self.x), moved(self.scale), None if self.zero is None else moved(self.zero))


def dequantization(n: Node | None) -> Step | None:
    """Match a node that computes exactly ``(x - zero) * scale`` in float32."""
    step = _step(n, scale_last=True)
    if step is None or not isinstance(n, Compute):
        return None
    return step if n.body == dequantized(step.x, wide(step.scale), step.zero) else None


def quantization(n: Node | None) -> Step | None:
    """Match a node that computes exactly ``saturate(round(x / scale) + zero)`` of float32."""
    step = _step(n, scale_last=False)
    if step is None or not isinstance(n, Compute) or step.x.dtype != "float32" or n.body.dtype not in QUANTIZED_DTYPES:
        return None
    return step if n.body == quantized(step.x, wide(step.scale), step.zero, n.body.dtype) else None


def _step(n: Node | None, scale_last: bool) -> Step | None:
    """Return the candidate step of a node with two or three loads, or None. The caller compares the body."""
    read = loads(n.body) if isinstance(n, Compute) and n.is_map else ()
    if not 2 <= len(read) <= 3:
        return None
    x, *zero = read[:-1] if scale_last else (read[0], *read[2:])
    scale = read[-1] if scale_last else read[1]
    whole = scale.dtype in SCALE_DTYPES and (not zero or zero[0].dtype in (*QUANTIZED_DTYPES, "int32"))
    return Step(x, scale, zero[0] if zero else None) if whole else None


def through_views(graph: Graph, makers: Mapping[str, Node], v: Load, n: Compute) -> Load:
    """Follow views: return the load of the underlying tensor that a load of node ``n`` reads."""
    ranges = dict(iterators(graph, n))
    while isinstance(view := makers.get(v.buffer), Compute) and view.is_view:
        moved = map_index(view.at(v.index), lambda i: simplify(i, ranges))
        assert isinstance(moved, Load)
        v = moved
    return v


def number(constants: Mapping[str, Array], v: Load | None) -> np.float32 | int | None:
    """Return a parameter that is one known number for a whole tensor, or None. A missing zero point is 0."""
    if v is None:
        return 0
    known = constants.get(v.buffer)
    if known is None or known.size != 1 or any(i.symbols() or i.fetches() for i in v.index):
        return None
    one = known.reshape(-1)[0]
    return np.float32(one) if v.dtype in SCALE_DTYPES else int(one)


def is_ordinary(scale: Array | np.float32) -> bool:
    """Check that numbers are finite and not denormal, and that 32-bit integers times them are finite."""
    size = np.abs(np.asarray(scale, np.float64))
    f = np.finfo(np.float32)
    return bool((size >= f.tiny).all() and (size * 2.0**32 <= f.max).all())


# -- the pass ----------------------------------------------------------------------------------------------------------


def without_requantizing(graph: Graph) -> Graph:
    """Turn quantizing after dequantizing with the same scale and zero point into a view of the integers.

    ``(q - z) * s / s`` is at most two roundings from a whole number below 2^17, so that rounding restores it. A tensor
    that is dequantized repeatedly with the same numbers is dequantized once.
    """
    makers = graph.producer()
    nodes = tuple(_as_view(graph, makers, n) for n in graph.nodes)
    once = tuple(_once(replace(graph, nodes=nodes)))
    same = all(a is b for a, b in zip(once, graph.nodes, strict=True))
    return graph if same else live(replace(graph, nodes=once))


def _once(graph: Graph) -> Iterator[Node]:
    """Yield the nodes. A repeated dequantization becomes a view of the first one's result."""
    makers, first = graph.producer(), dict[Hashable, str]()
    for n in graph.nodes:
        step = dequantization(n)
        scale, zero = (number(graph.constants, x) for x in (step.scale, step.zero)) if step else (None, None)
        if step is None or scale is None or zero is None or not isinstance(n, Compute):
            yield n
            continue
        source = through_views(graph, makers, step.x, n)
        key = source.buffer, np.float32(scale).tobytes(), zero
        if key in first:
            yield replace(n, body=load(first[key], source.index, "float32"))
            continue
        shape = graph.tensors[source.buffer].shape
        places = zip(source.index, shape, strict=True)
        here = all(i == Index.of(dim_name(a)) or (i == ZERO and e == ONE) for a, (i, e) in enumerate(places))
        if here and shape == graph.tensors[n.output].shape:
            first[key] = n.output
        yield n


def _as_view(graph: Graph, makers: Mapping[str, Node], n: Node) -> Node:
    again = quantization(n)
    if again is None or not isinstance(n, Compute):
        return n
    source = through_views(graph, makers, again.x, n)
    if (extreme := _as_extreme(graph, makers, n, again, source)) is not None:
        return extreme
    first = dequantization(makers.get(source.buffer))
    if first is None or first.x.dtype != n.body.dtype:
        return n
    step = first.at(source.index)
    if not _alike(graph, step, again):
        return n
    body: Value = load(step.x.buffer, step.x.index, step.x.dtype)
    ranges = dict(iterators(graph, n))
    return replace(n, body=map_index(body, lambda i: simplify(i, ranges)))


def _alike(graph: Graph, a: Step, b: Step) -> bool:
    """Check whether two steps have the same scale and zero point, known numbers with an ordinary scale."""
    scale, zero = number(graph.constants, a.scale), number(graph.constants, a.zero)
    same = (scale, zero) == (number(graph.constants, b.scale), number(graph.constants, b.zero))
    return scale is not None and zero is not None and same and is_ordinary(np.float32(scale))


def _as_extreme(
    graph: Graph, makers: Mapping[str, Node], n: Compute, requantized: Step, source: Load
) -> Compute | None:
    """Turn the quantized extreme of dequantized integers into the extreme of the integers. Returns None for other
    nodes.

    Quantizing preserves the order. The extreme of a window with nothing but padding, an infinity, saturates.
    """
    m, here = makers.get(source.buffer), tuple(Index.of(dim_name(a)) for a in range(len(graph.tensors[n.output].shape)))
    if not isinstance(m, Compute) or m.reduce not in ("max", "min") or source.index != here:
        return None
    inside, v = None, m.body
    if isinstance(v, Op) and v.name == "where" and v.args[2] == neutral(m.reduce, "float32"):
        inside, v, _ = v.args
    if not isinstance(v, Load) or (inside is not None and loads(inside)):
        return None
    x = through_views(graph, makers, v, m)
    first = dequantization(makers.get(x.buffer))
    if first is None or first.x.dtype != n.body.dtype or not _alike(graph, step := first.at(x.index), requantized):
        return None
    if (number(graph.constants, step.scale) or 0) <= 0:
        return None
    body: Value = step.x
    if inside is not None:
        body = Op(body.dtype, "where", (inside, body, neutral(m.reduce, body.dtype)))
    ranges = dict(iterators(graph, m))
    return replace(n, body=map_index(body, lambda i: simplify(i, ranges)), reduction=m.reduction, reduce=m.reduce)
