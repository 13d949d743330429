"""Remove redundancy that exporters write: equal nodes, operations without effect, casts of casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from polydyn.graph.ir import Compute, Concat, Graph, Node, dim_name
from polydyn.graph.rewriting import live
from polydyn.schedules.expr import FLOATS, INTEGERS, Array, Const, Load, Op, Value, cast, load, map_index, transform
from polydyn.schedules.index import Atom, Index

MAX_COMPARED_ELEMENTS = 4096
"""Maximum number of elements of a constant that is compared. Larger ones (weights) count as different."""
_EXACT = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
"""Bits of the largest integers that a float type represents exactly."""


def tidy(graph: Graph) -> Graph:
    """Return the graph with equal nodes merged and operations without effect removed.

    ``x * 1``, ``x / 1``, ``x - 0`` and a sum with a neutral zero become ``x``. A cast of a lossless cast becomes one
    cast. A sum of floats with +0 stays, because it turns -0 into +0. The notes name every merged node.
    """
    work = _Tidy(graph)
    nodes = [m for n in graph.nodes if (m := work.node(n)) is not None]
    if all(a is b for a, b in zip(nodes, graph.nodes, strict=False)) and len(nodes) == len(graph.nodes):
        return graph
    bounds = tuple(replace(b, tensor=work.names.get(b.tensor, b.tensor)) for b in graph.bounds)
    return live(replace(graph, nodes=tuple(nodes), bounds=bounds, notes=(*graph.notes, *work.notes)))


class _Tidy:
    """State of the pass. ``names`` maps a removed tensor to its replacement. ``equal`` maps a constant to the first
    constant with equal elements, and a copy to its source. It is used only to compare nodes, so that the kernels of
    equal layers stay equal. ``made`` maps a computation to its output.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: dict[str, str] = {}
        self.equal: dict[str, str] = {}
        self.notes: list[str] = []
        self.made: dict[Any, str] = {}
        self.nodes: dict[str, Node] = {}
        self.kept = {*graph.outputs, *(b.kept for b in graph.bounds), *(b.status for b in graph.bounds)}
        self._equal_constants(graph.constants)

    def _equal_constants(self, constants: Mapping[str, Array]) -> None:
        first: dict[tuple[Any, ...], str] = {}
        for name, a in constants.items():
            if a.size <= MAX_COMPARED_ELEMENTS:
                same = first.setdefault((str(a.dtype), a.shape, np.ascontiguousarray(a).tobytes()), name)
                if same != name:
                    self.equal[name] = same

    def node(self, n: Node) -> Node | None:
        """Return the node as it stays in the graph, or None if another node computes the same value."""
        n = _renamed(n, self.names)
        if isinstance(n, Compute):
            body = transform(n.body, self._simpler)
            changed = body != n.body
            n = replace(n, body=body) if changed else n
            if (source := self._copied(n)) is not None:
                if changed and n.output not in self.kept:
                    self.names[n.output] = source
                    return None
                self.equal[n.output] = self.equal.get(source, source)
        t = self.graph.tensors[n.output]
        m = _renamed(n, self.equal)
        what = (m.body, m.reduction, m.reduce) if isinstance(m, Compute) else (m.parts, m.axis)
        first = self.made.setdefault((what, t.dtype, t.shape), n.output)
        if first != n.output:
            if n.output not in self.kept:
                self.names[n.output] = first
                self.notes.append(f"{n.output} is {first}, computed once")
                return None
            if isinstance(n, Compute) and n.reduce is not None:
                here = tuple(Index.of(dim_name(a)) for a in range(len(t.shape)))
                self.notes.append(f"{n.output} is a copy of {first}, computed once")
                n = Compute(n.output, load(first, here, n.body.dtype), origin=n.origin)
        self.nodes[n.output] = n
        return n

    def _copied(self, n: Compute) -> str | None:
        """Return the intermediate or input that the node copies without change of shape or order, or None."""
        v = n.body
        if n.reduce is not None or not isinstance(v, Load):
            return None
        source, t = self.graph.tensors[v.buffer], self.graph.tensors[n.output]
        here = tuple(Index.of(dim_name(a)) for a in range(len(t.shape)))
        same = (source.shape, source.dtype) == (t.shape, t.dtype) and v.index == here
        return v.buffer if same and v.buffer not in self.graph.constants else None

    def _simpler(self, v: Value) -> Value:
        if not isinstance(v, Op):
            return v
        if v.name == "cast":
            return self._cast(v)
        if v.name not in ("mul", "div", "add", "sub"):
            return v
        a, b = v.args
        for x, other, commutes in ((a, b, True), (b, a, v.name in ("mul", "add"))):
            if commutes and x.dtype == v.dtype and self._changes_nothing(v.name, other):
                return x
        return v

    def _changes_nothing(self, operation: str, v: Value) -> bool:
        """Return whether the operation with operand ``v`` returns its other operand unchanged, for all values."""
        number = self._number(v)
        if number is None or v.dtype not in (*FLOATS, *INTEGERS):
            return False
        if operation in ("mul", "div"):
            return bool(number == 1)
        if number != 0:
            return False
        return v.dtype in INTEGERS or bool(np.signbit(number)) == (operation == "add")

    def _number(self, v: Value) -> Any:
        """Return the number of a scalar constant operand, or None. Larger constants are never replaced."""
        if isinstance(v, Const):
            return v.value
        array = self.graph.constants.get(v.buffer) if isinstance(v, Load) else None
        return array.flat[0] if array is not None and array.size == 1 and array.dtype.kind in "fiu" else None

    def _cast(self, v: Op) -> Value:
        """Return one cast in place of two when the first one loses nothing."""
        (x,) = v.args
        producer = self.nodes.get(x.buffer) if isinstance(x, Load) else None
        if not isinstance(x, Load) or not isinstance(producer, Compute) or producer.reduce is not None:
            return v
        inner = producer.at(x.index)
        if not isinstance(inner, Op) or inner.name != "cast" or not isinstance(inner.args[0], Load):
            return v
        source = inner.args[0]
        return cast(source, v.dtype) if _keeps(source.dtype, inner.dtype) else v


def _renamed(n: Node, names: Mapping[str, str]) -> Node:
    """Return the node with its inputs renamed."""
    if names.keys().isdisjoint(n.inputs):
        return n
    if isinstance(n, Concat):
        return replace(n, parts=tuple(names.get(p, p) for p in n.parts))

    def atom(a: Atom) -> Index:
        return Index({(replace(a, name=names.get(a.name, a.name)) if a.kind == "fetch" else a,): 1})

    def f(v: Value) -> Value:
        return Load(v.dtype, names.get(v.buffer, v.buffer), v.index) if isinstance(v, Load) else v

    return replace(n, body=transform(map_index(n.body, lambda i: i.rebuild(atom)), f))


def _keeps(narrow: str, wide: str) -> bool:
    """Return whether ``wide`` represents every value of ``narrow`` exactly."""
    if narrow == wide or (narrow == "bool" and wide in (*INTEGERS, *FLOATS)):
        return True
    if narrow in _EXACT and wide in _EXACT:
        return _EXACT[wide] > _EXACT[narrow] and (narrow, wide) != ("bfloat16", "float16")
    if narrow not in INTEGERS or wide not in (*INTEGERS, *FLOATS):
        return False
    low, high = _ends(narrow)
    if wide in _EXACT:
        return bool(max(-low, high) <= 1 << _EXACT[wide])
    return _ends(wide)[0] <= low and high <= _ends(wide)[1]


def _ends(dtype: str) -> tuple[int, int]:
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)
