"""Replace band-matrix constants by comparisons of their subscripts.

A triangle of ones that a model stores and slices (``row >= column``) is a comparison of two integers. The comparison
reads no memory, and its consequences can be proven, such as which tiles of an attention it hides. An element may depend
only on ``column - row``, in two or three pieces.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from polydyn.graph.ir import Compute, Graph, Node
from polydyn.schedules.expr import Array, FromIndex, Load, Value, const, op, transform
from polydyn.schedules.index import Index

MIN_BAND_SIZE = 4
"""Minimum number of rows and of columns of a band matrix."""


def fold_band_constants(graph: Graph) -> Graph:
    """Replace loads from band matrices by comparisons in element-wise nodes."""
    bands: dict[str, _Band | None] = {}

    def value(v: Value) -> Value:
        array = graph.constants.get(v.buffer) if isinstance(v, Load) else None
        if array is None or not isinstance(v, Load):
            return v
        if v.buffer not in bands:
            bands[v.buffer] = _band(array)
        band = bands[v.buffer]
        if band is None or any(i.fetches() for i in v.index):
            return v
        row, column = v.index[-2:]
        return band.at(row, column, v.dtype)

    def node(n: Node) -> Node:
        return replace(n, body=transform(n.body, value)) if isinstance(n, Compute) and n.is_map else n

    return replace(graph, nodes=tuple(map(node, graph.nodes)))


class _Band:
    """A constant that is piecewise constant along its diagonals.

    Its element is ``values[k]`` for ``column - row <= ends[k]``. The last value applies after the last end.
    """

    def __init__(self, ends: tuple[int, ...], values: tuple[float | int | bool, ...]) -> None:
        self.ends, self.values = ends, values

    def at(self, row: Index, column: Index, dtype: str) -> Value:
        """Return the element at (row, column) as a comparison."""

        def upto(end: int) -> Value:
            return op("le", FromIndex("int64", column), FromIndex("int64", row + end))

        if dtype == "bool":
            inside = upto(self.ends[0])
            if len(self.ends) == 2:
                inside = op("and", op("not", inside), upto(self.ends[1]))
            return inside if bool(self.values[len(self.ends) - 1]) else op("not", inside)
        out: Value = const(self.values[-1], dtype)
        for end, x in zip(reversed(self.ends), reversed(self.values[:-1]), strict=True):
            out = op("where", upto(end), const(x, dtype), out)
        return out


def _band(a: Array) -> _Band | None:
    """Return the band that equals a constant bit for bit, or None if there is none."""
    if a.ndim < 2 or a.size != a.shape[-2] * a.shape[-1] or min(a.shape[-2:]) < MIN_BAND_SIZE:
        return None
    numbers = a.reshape(a.shape[-2:])
    bits = numbers.view(np.dtype(f"u{a.itemsize}")) if a.dtype != np.bool_ else numbers
    if not all((bits[k + 1, 1:] == bits[k, :-1]).all() for k in range(len(bits) - 1)):
        return None
    line = np.concatenate([bits[:0:-1, 0], bits[0]])
    changes = np.flatnonzero(line[1:] != line[:-1])
    if not 1 <= len(changes) <= 2:
        return None
    diagonals = np.concatenate([numbers[:0:-1, 0], numbers[0]])
    first = [0, *(int(c) + 1 for c in changes)]
    return _Band(tuple(int(c) - (len(bits) - 1) for c in changes), tuple(diagonals[k].item() for k in first))
