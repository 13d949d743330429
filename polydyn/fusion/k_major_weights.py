"""K-major constants of 8-bit integers or floats: the steps of a product are contiguous (docs/adr/0013-quantization.md).

Tensor cores take bytes along the reduction. TMA and wide copies require columns that begin at multiples of 16 bytes.
Models store weights as [K, N]. The weights are laid out again at compile time: first the axes that the product does not
sum, then its steps as one axis, padded with zeros. Zero points of constants are subtracted if the differences fit in a
byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polydyn.fusion.products import is_reduction
from polydyn.fusion.widen import OperandRewriting, over_constant, values_of
from polydyn.graph.ir import Graph
from polydyn.schedules.expr import FLOAT8, Array, Load, Op, Value, cast
from polydyn.schedules.index import ZERO, Index

SUFFIX = "@steps"
COPY_BYTES = 16
"""Bytes of the widest copy."""
BYTE_DTYPES = ("int8", "uint8")


@dataclass(frozen=True)
class _Layout:
    """The order of a constant's axes (``steps`` last, innermost last), and the subscripts of a load in this order."""

    front: tuple[int, ...]
    steps: tuple[int, ...]
    index: tuple[Index, ...]

    def arrange(self, a: Array) -> Array:
        """Return the elements in this order. The steps are one axis, padded to a multiple of 16 bytes."""
        front = [a.shape[x] for x in self.front]
        ordered = a.transpose(*self.front, *self.steps).reshape(*front, -1)
        more = -ordered.shape[-1] % COPY_BYTES
        return np.ascontiguousarray(np.pad(ordered, [(0, 0)] * len(front) + [(0, more)]))


def make_weights_k_major(graph: Graph) -> Graph:
    """Store the constant operands of 8-bit products in the order in which they are summed."""
    return _Rewriting(graph).run()


class _Rewriting(OperandRewriting):
    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.names: dict[tuple[Value, tuple[int, ...], tuple[int, ...]], str | None] = {}

    dtypes = ("int32", "float32")

    def operand(self, v: Value) -> Value:
        if v.dtype == "float32" and not _is_byte(v):
            return v
        operand = over_constant(self.graph, v)
        if operand is None:
            return v
        load, body = operand
        layout = _layout(load, self.graph)
        if layout is None or (_is_byte(v) and _is_laid_out(self.graph.constants[load.buffer], layout)):
            return v
        key = body, layout.front, layout.steps
        if key not in self.names:
            self.names[key] = self._constant(v, load, body, layout)
        name = self.names[key]
        return v if name is None else cast(Load(self.tensors[name].dtype, name, layout.index), v.dtype)

    def _constant(self, v: Value, load: Load, body: Value, layout: _Layout) -> str | None:
        """Return the name of the new constant if its values fit in a byte, else None."""
        array = self.graph.constants[load.buffer]
        values = array if _is_byte(v) else _as_bytes(values_of(self.graph, load, body))
        if values is None:
            return None
        return self.constant(f"{load.buffer}{SUFFIX}{len(self.names) or ''}", layout.arrange(values))


def _layout(x: Load, graph: Graph) -> _Layout | None:
    """Return the layout for a load at plain iterators, some of which are summed; None for other loads."""
    names = [str(i) if i.is_symbol else "" for i in x.index]
    plain = all(n or i.constant is not None for n, i in zip(names, x.index, strict=True))
    used = [n for n in names if n]
    steps = sorted((a for a, n in enumerate(names) if is_reduction(n)), key=lambda a: int(names[a][1:]))
    array = graph.constants[x.buffer]
    if not plain or len(set(used)) < len(used) or not array.size or all(array.shape[a] == 1 for a in steps):
        return None
    front = tuple(a for a in range(len(names)) if a not in steps)
    step = ZERO
    for a in steps:
        step = step * array.shape[a] + x.index[a]
    return _Layout(front, tuple(steps), (*(x.index[a] for a in front), step))


def _is_byte(v: Value) -> bool:
    """Check whether a value is a stored byte."""
    stored = v.args[0] if isinstance(v, Op) and v.name == "cast" else None
    return isinstance(stored, Load) and stored.dtype in (*BYTE_DTYPES, *FLOAT8)


def _is_laid_out(a: Array, layout: _Layout) -> bool:
    """Check whether a constant already has this order."""
    steps = int(np.prod([a.shape[x] for x in layout.steps]))
    return (*layout.front, *layout.steps) == tuple(range(a.ndim)) and steps % COPY_BYTES == 0


def _as_bytes(a: Array) -> Array | None:
    """Return the same numbers as bytes if they fit, else None."""
    for dtype in map(np.dtype, BYTE_DTYPES):
        if np.iinfo(dtype).min <= a.min() and a.max() <= np.iinfo(dtype).max:
            return a.astype(dtype)
    return None
