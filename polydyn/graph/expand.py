"""From ONNX nodes with known shapes to a Graph of primitives.

Tensors that hold shape arithmetic are never computed for their own sake: their elements are Dims. Only when a
primitive reads one as data, or it is an output of the model, a Compute over ``FromIndex`` is written for it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.graph.check import STUMBLES, unfit
from polydyn.graph.importer import ModelLike, load_model
from polydyn.graph.ir import Compute, Concat, Dim, Graph, Guard, IndexBound, Node, Tensor, dim_name, reduction_name
from polydyn.graph.operators import registry
from polydyn.graph.operators.registry import OnnxNode
from polydyn.graph.positions import Positions
from polydyn.graph.propagate import propagate
from polydyn.graph.typed import Typed
from polydyn.graph.verify import verify_graph
from polydyn.schedules.expr import (
    INTEGERS,
    Array,
    FromIndex,
    Load,
    Value,
    const,
    indices,
    load,
    map_index,
    op,
    transform,
)
from polydyn.schedules.index import ONE, Index, fetch, product
from polydyn.schedules.ranges import Ranges, upper_bound
from polydyn.shapes.sizes import Dims


def import_model(model: ModelLike, dims: Dims | None = None) -> Graph:
    """ONNX to a verified Graph of primitives with symbolic shapes.

    ``dims``: what is known of dynamic dims by name, (low, high) or ``Sizes``; checked on every call.
    Raises ModelError, UnsupportedError or ShapeError, each naming node and tensor.
    """
    graph = expand(propagate(load_model(model), dims))
    verify_graph(graph)
    return graph


def expand(typed: Typed) -> Graph:
    """Writes the primitives of all nodes and drops what nothing reads."""
    builder = _Builder(typed)
    for node in typed.nodes:
        builder.node(node)
    return builder.finish()


class _Builder:
    """The ExpandContext of all nodes in turn."""

    def __init__(self, typed: Typed) -> None:
        self.typed = typed
        self.facts = typed.facts
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {x.name: typed.tensor(x.name) for x in typed.graph.inputs}
        self.constants: dict[str, Array] = {}
        self.aliases: dict[str, str] = {}
        self.positions = Positions()
        self.current: OnnxNode | None = None
        self.count = 0
        self.bounds: list[IndexBound] = []

    # -- ExpandContext -------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> Tensor:
        """Type and canonical shape of any tensor."""
        if name in self.tensors and name not in self.typed.inferred:
            return self.tensors[name]
        return self.typed.tensor(name)

    def value(self, name: str) -> Array | None:
        """Shape arithmetic held by the tensor."""
        return self.typed.value(name) if name in self.typed.inferred else None

    def elements(self, name: str) -> Array | None:
        """Shape arithmetic held by the tensor, fractions too."""
        return self.typed.elements(name) if name in self.typed.inferred else None

    def constant(self, name: str) -> Array | None:
        """The array of a constant."""
        if name in self.typed.inferred:
            return self.typed.constant(name)
        return self.constants.get(name)

    def compute(
        self,
        shape: tuple[Dim, ...],
        body: Value,
        *,
        output: str | None = None,
        reduction: tuple[Dim, ...] = (),
        reduce: str | None = None,
    ) -> str:
        """Adds a Compute; its subscripts are simplified under all facts and the extents of its iterators."""
        name = output or self._fresh()
        shape = tuple(map(self.facts.canonical, shape))
        reduction = tuple(map(self.facts.canonical, reduction))
        ranges = {dim_name(i): e for i, e in enumerate(shape)}
        ranges |= {reduction_name(i): e for i, e in enumerate(reduction)}
        body, wraps = self._resolve(body)
        for position, n in wraps:
            self._inside(position, n, ranges)
        body = map_index(body, lambda i: self.facts.simplify(self.facts.canonical(i), ranges))
        node = Compute(name, body, reduction, reduce, self.current.name if self.current else "")
        for x in node.inputs:
            self._ensure(x)
        self.tensors[name] = Tensor(name, body.dtype, shape)
        self.nodes.append(node)
        self.positions.learn(node)
        return name

    def concat(self, parts: tuple[str, ...], axis: int, *, output: str | None = None) -> str:
        """Adds a Concat."""
        name = output or self._fresh()
        parts = tuple(self.aliases.get(p, p) for p in parts)
        for p in parts:
            self._ensure(p)
        shape = list(self.tensors[parts[0]].shape)
        shape[axis] = sum((self.tensors[p].shape[axis] for p in parts), Index.of(0))
        self.tensors[name] = Tensor(name, self.tensors[parts[0]].dtype, tuple(map(self.facts.canonical, shape)))
        node = Concat(name, parts, axis, self.current.name if self.current else "")
        self.nodes.append(node)
        self.positions.learn_concat(node, tuple(self.tensors[p].shape[axis] for p in parts))
        return name

    def alias(self, output: str, source: str) -> None:
        """The output is the source under another name."""
        self.aliases[output] = self.aliases.get(source, source)

    def bound(self, indices: str, size: Dim, component: int | None = None) -> None:
        """Known indices bound the axis now (a guard when it is symbolic); others are checked on every call."""
        place = f"{self.current.name} ({self.current.op})" if self.current else "a gather"
        value, known = self.value(indices), self.constant(indices)
        if component is not None:
            value = None if value is None else value[..., component]
            known = None if known is None else known[..., component]
        found = set(value.flat) if value is not None else set()
        if known is not None and known.size:
            found = {Index.of(int(known.min())), Index.of(int(known.max()))}
        for i in sorted(found, key=str):
            why = f"{place}: index {i} of {indices} lies in [-{size}, {size})"
            self.facts.at_most(i + 1, size, why)
            self.facts.at_most(-i, size, why)
        if value is None and known is None:
            self._bound_on_data(self.aliases.get(indices, indices), size, place, component)

    def _bound_on_data(self, indices: str, size: Dim, place: str, component: int | None) -> None:
        """A bound on what the primitive will fetch: the tensor, or the one that it is a shifted view of, whole."""
        shape = self.tensor(indices).shape
        at = [Index.of(dim_name(i)) for i in range(len(shape))]
        part = (0, 1)
        if component is not None:
            part = component, int(shape[-1].constant or 1)
            at[-1], shape = Index.of(component), (*shape[:-1], ONE)
        formula = self.positions.resolve(fetch(indices, at), self.aliases, [])
        fetched = formula.fetches()
        if not fetched:
            return  # sizes only: ``_inside`` makes a guard
        moving = {str(d) for d, e in zip(at, shape, strict=True) if e != 1}
        for a in fetched if len(fetched) == 1 else ():
            offset = formula - Index({(a,): 1})
            whole = product(shape) == product(self.tensor(a.name).shape)
            used = {s for x in a.args for s in x.symbols()}
            if whole and moving <= used and not offset.fetches() and not offset.symbols() & set(map(str, at)):
                self.bounds.append(IndexBound(a.name, size, place, offset))
                return
        self.bounds.append(IndexBound(indices, size, place, part=part, formula=formula, shape=shape))

    def position(self, indices: str, at: tuple[Index, ...], size: Dim, ranges: Ranges) -> Index | None:
        """A subscript that is a formula, inside its axis; None when it is data or may be negative."""
        name = self.aliases.get(indices, indices)
        self._ensure(name)
        found = self.positions.resolve(fetch(name, at), self.aliases, [])
        if (found.constant or 0) < 0:
            found = found + size
        if found.fetches() or not self.facts.nonnegative(found, ranges):
            return None
        self._inside(found, size, ranges)
        return found

    def new_constant(self, array: Array, hint: str) -> str:
        """Adds a constant."""
        name = self._fresh(hint)
        self._add_constant(name, array)
        return name

    # -- inside --------------------------------------------------------------------------------------------------

    def node(self, node: OnnxNode) -> None:
        """Expands one node, unless everything it computes is known shape arithmetic."""
        if all(self.typed.value(o) is not None for o in node.outputs if o):
            return
        self.current = node
        try:
            registry.OPERATORS[node.op].expand(node, self)
        except PolydynError as e:
            if e.node is not None:
                raise
            raise type(e)(str(e), node=f"{node.name} ({node.op})") from e
        except STUMBLES as e:
            raise unfit(node, e) from e
        for o in node.outputs:
            if o and o not in self.tensors and o not in self.aliases and self.typed.value(o) is None and self._read(o):
                raise UnsupportedError(f"{node.op} does not compute its output {o}", node=node.name, tensor=o)

    def _read(self, name: str) -> bool:
        return name in self.typed.graph.outputs or any(name in n.inputs for n in self.typed.nodes)

    def _fresh(self, hint: str = "") -> str:
        base = hint or (self.current.name if self.current else "t")
        while True:
            self.count += 1
            name = f"{base}.{self.count}"
            if name not in self.tensors and name not in self.typed.inferred:
                return name

    def _add_constant(self, name: str, array: Array) -> None:
        self.constants[name] = array
        self.positions.learn_constant(name, array)
        self.tensors[name] = Tensor(name, str(array.dtype), tuple(map(Index.of, array.shape)))

    def _resolve(self, body: Value) -> tuple[Value, list[tuple[Index, Index]]]:
        """Loads and fetches read what an alias stands for; fetched formulas of the position are written out."""

        def f(v: Value) -> Value:
            return Load(v.dtype, self.aliases.get(v.buffer, v.buffer), v.index) if isinstance(v, Load) else v

        body = transform(body, f)
        for t in sorted({self.aliases.get(a.name, a.name) for i in indices(body) for a in i.fetches()}):
            self._ensure(t)
        wraps: list[tuple[Index, Index]] = []
        return map_index(body, lambda i: self.positions.resolve(i, self.aliases, wraps)), wraps

    def _inside(self, x: Index, n: Index, ranges: Ranges) -> None:
        """Positions gathered from an axis must lie inside it: a bound on sizes, not on data."""
        last = upper_bound(x, ranges)
        if last is None or not self.facts.nonnegative(x, ranges):
            return
        place = f"{self.current.name} ({self.current.op})" if self.current else "a gather"
        room = (n - 1 - last).terms
        left, right = Index({m: -v for m, v in room.items() if v < 0}), Index({m: v for m, v in room.items() if v > 0})
        self.facts.at_most(left, right, f"{place}: positions 0 to {last} are read from an axis of {n}")

    def _ensure(self, name: str) -> None:
        """The tensor exists: a constant, or shape arithmetic written out as data."""
        if name in self.tensors:
            return
        known = self.constant(name)
        if known is not None and name in self.typed.graph.outputs:  # outputs are computed, constants are not
            self._copy(self.new_constant(known, name), name)
            return
        if known is not None:
            self._add_constant(name, known)
            return
        value = self.value(name)
        if value is None:
            raise PolydynError(f"{name} is read but no primitive computes it", tensor=name)
        t = self.typed.tensor(name)
        before, self.current = self.current, None
        self.compute(t.shape, spell(value, t.dtype), output=name)
        self.current = before

    def finish(self) -> Graph:
        """Outputs under their own names, then everything that is read, in order."""
        outputs = self.typed.graph.outputs
        for o in dict.fromkeys(outputs):
            self._output(o)
        needed, kept = set(outputs), []
        for n in reversed(self.nodes):
            if n.output in needed:
                kept.append(n)
                needed.update(n.inputs)
        inputs = tuple(x.name for x in self.typed.graph.inputs)
        nodes = tuple(reversed(kept))
        tensors = {t: self.tensors[t] for t in (*inputs, *self.tensors) if t in needed or t in inputs}
        return Graph(
            name=self.typed.graph.name, inputs=inputs, outputs=outputs,
            tensors={n: Tensor(n, t.dtype, tuple(map(self.facts.canonical, t.shape))) for n, t in tensors.items()},
            constants={n: a for n, a in self.constants.items() if n in needed}, nodes=nodes,
            sources=self.typed.sources,
            guards=tuple(Guard(g.left, g.relation, g.right, g.message) for g in self.facts.guards()),
            notes=tuple(dict.fromkeys(self.facts.notes)),
            bounds=tuple(map(self._canonical, self.bounds)),
        )  # fmt: skip

    def _canonical(self, b: IndexBound) -> IndexBound:
        of = self.facts.canonical
        formula = None if b.formula is None else of(b.formula)
        return replace(b, size=of(b.size), formula=formula, shape=tuple(map(of, b.shape)))

    def _output(self, name: str) -> None:
        """An output that is another name for a tensor is a copy of it."""
        self.current = None
        if name in {x.name for x in self.typed.graph.inputs}:
            raise UnsupportedError(
                f"output {name} is an input of the model", tensor=name, remedy="put an Identity node between them"
            )
        if name in self.aliases:
            self._copy(self.aliases.pop(name), name)
        else:
            self._ensure(name)

    def _copy(self, source: str, output: str) -> None:
        self._ensure(source)
        t = self.tensors[source]
        here = tuple(Index.of(dim_name(i)) for i in range(len(t.shape)))
        self.compute(t.shape, load(source, here, t.dtype), output=output)


def spell(value: Array, dtype: str) -> Value:
    """The body of a Compute that writes shape arithmetic: one Dim, a progression, or a choice by position."""
    if value.ndim == 0:
        return _scalar(value.item(), dtype)
    position: Index = Index.of(0)
    for axis, size in enumerate(value.shape):
        position = position * size + dim_name(axis)
    dims = list(value.flat)
    if len(dims) > FEW and dtype in INTEGERS:
        step = dims[1] - dims[0]
        if all(b - a == step for a, b in pairwise(dims)):
            return FromIndex(dtype, dims[0] + position * step)
    return _choice([_scalar(x, dtype) for x in dims] or [const(0, dtype)], 0, FromIndex("int64", position))


FEW = 8
"""So many elements are told apart one by one; more by halves, since expressions may not be nested a thousand deep."""


def _choice(flat: list[Value], first: int, position: Value) -> Value:
    """The element at a position, ``flat`` being those from ``first`` on."""
    if len(flat) > FEW and any(x != flat[0] for x in flat):
        half = len(flat) // 2
        low, high = _choice(flat[:half], first, position), _choice(flat[half:], first + half, position)
        return low if low == high else op("where", op("lt", position, const(first + half, "int64")), low, high)
    body = flat[-1]
    for i in range(len(flat) - 2, -1, -1):
        if flat[i] != body:
            body = op("where", op("eq", position, const(first + i, "int64")), flat[i], body)
    return body


def _scalar(x: Index, dtype: str) -> Value:
    c = x.constant
    if c is not None:
        return const(c, dtype)
    if dtype == "bool":
        return op("ne", FromIndex("int64", x), const(0, "int64"))
    return FromIndex(dtype, x)
