"""Expand ONNX nodes with known shapes to a Graph of primitives.

Tensors that hold shape arithmetic are not computed for their own sake: their elements are Dims. A Compute over
``FromIndex`` is written only if a primitive reads one as data, or if it is an output of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polydyn.errors import ModelError, PolydynError, UnsupportedError, planning
from polydyn.graph.check import with_node
from polydyn.graph.dynamic import Symbols, prove_symbols, with_free_targets, with_ranks, with_symbols
from polydyn.graph.importer import ImportedGraph, ModelLike, load_model, with_inputs
from polydyn.graph.inner import Inner, captured_by
from polydyn.graph.intervals import Interval, of_array, stays_inside
from polydyn.graph.ir import (
    Compute,
    Concat,
    Dim,
    Graph,
    Guard,
    HostStep,
    IndexBound,
    Node,
    Tensor,
    dim_name,
    reduction_name,
)
from polydyn.graph.operators.registry import OnnxNode
from polydyn.graph.positions import Positions, at_the_end
from polydyn.graph.propagate import is_built, propagate, rules
from polydyn.graph.regions import FallbackNodes, RepropagationNeeded
from polydyn.graph.sequences import without_sequences
from polydyn.graph.spell import spell
from polydyn.graph.texts import without_texts
from polydyn.graph.typed import Key, Typed, step_key
from polydyn.graph.verify import free_symbols, verify_graph
from polydyn.schedules.expr import (
    Array,
    Load,
    Value,
    indices,
    load,
    map_index,
    transform,
)
from polydyn.schedules.index import ONE, ZERO, Index, fetch, minimum, product
from polydyn.schedules.ranges import Ranges, upper_bound
from polydyn.shapes.possible import check_possible
from polydyn.shapes.sizes import Dims


def import_model(model: ModelLike, dims: Dims | None = None, symbols: Symbols | None = None) -> Graph:
    """Import an ONNX model as a verified Graph of primitives with symbolic shapes, of one part.

    ``dims``: facts about dynamic dims by name, (low, high) or ``Sizes``; every call checks them. ``symbols``: names for
    axes of inputs to which the model gives a size (``polydyn/graph/dynamic.py``). Raises ModelError, UnsupportedError
    or ShapeError, each naming node and tensor.
    """
    graph = import_parts(model, dims, symbols)
    if graph.steps:
        step = graph.steps[0]
        raise UnsupportedError(
            f"{step.origin} needs a step of the host ({step.kind}) between two parts of the program", node=step.origin,
            rule="one part", remedy="polydyn.compile has programs of several parts",
        )  # fmt: skip
    return graph


def import_parts(
    model: ModelLike, dims: Dims | None = None, symbols: Symbols | None = None, general: bool = False,
    left: FallbackNodes | None = None, overridden: Collection[str] = (),
) -> Graph:  # fmt: skip
    """Import a model of any number of parts. A graph with steps is verified part by part (``graph/cut.py``).

    See ``import_model``. ``general``: sizes that may be equal or 1 are not assumed equal (``Graph.guessed``). ``left``:
    nodes that are not supported, or that it lists, become steps that run in another runtime (``graph/fallback.py``).
    ``overridden``: initializers of ``Graph.optional`` that become inputs.
    """
    read = without_texts(without_sequences(with_inputs(load_model(model), overridden)), is_built, left is not None)
    read = with_ranks(read, {} if symbols is None else symbols)
    while True:
        with planning("import"):
            try:
                graph = _imported(read, dims, symbols, general, left)
            except RepropagationNeeded:
                continue
            check_possible(graph.guards)
        if not graph.steps:
            verify_graph(graph)
        return graph


def _imported(
    read: ImportedGraph, dims: Dims | None, symbols: Symbols | None, general: bool, left: FallbackNodes | None
) -> Graph:
    """Import once. Raises RepropagationNeeded if more nodes go to the other runtime than before."""
    named = with_symbols(with_free_targets(propagate(read, left=left)), symbols) if symbols else read
    typed = propagate(named, dims, general=general, left=left)
    prove_symbols(typed, read, symbols or {})
    return expand(typed, left)


def expand(typed: Typed, left: FallbackNodes | None = None) -> Graph:
    """Write the primitives of all nodes and drop those that nothing reads. ``left``: see ``propagate``."""
    builder = _Builder(typed, left)
    for node in typed.nodes:
        builder.node(node)
    return builder.finish()


class _Builder:
    """The ExpandContext of all nodes, one after another."""

    def __init__(self, typed: Typed, left: FallbackNodes | None) -> None:
        self.typed, self.left = typed, left
        self.facts = typed.facts
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {x.name: typed.tensor(x.name) for x in typed.graph.inputs}
        self.constants: dict[str, Array] = {}
        self.aliases: dict[str, str] = {}
        self.positions = Positions()
        self.current: OnnxNode | None = None
        self.count = 0
        self.bounds: list[IndexBound] = []
        self.ranges: dict[str, Dim] = {}
        self.steps: dict[Key, HostStep] = dict(typed.asked.steps)

    # -- ExpandContext -------------------------------------------------------------------------------------------

    def tensor(self, name: str) -> Tensor:
        """Return type and canonical shape of any tensor."""
        if name in self.tensors and name not in self.typed.inferred:
            return self.tensors[name]
        return self.typed.tensor(name)

    def value(self, name: str) -> Array | None:
        """Return the shape arithmetic that the tensor holds."""
        return self.typed.value(name) if name in self.typed.inferred else None

    def elements(self, name: str) -> Array | None:
        """Return the shape arithmetic that the tensor holds, including fractions."""
        return self.typed.elements(name) if name in self.typed.inferred else None

    def known_elements(self, name: str) -> Array | None:
        """Return the shape arithmetic that the tensor holds in part."""
        return self.typed.known_elements(name) if name in self.typed.inferred else None

    def constant(self, name: str) -> Array | None:
        """Return the array of a constant."""
        if name in self.typed.inferred:
            return self.typed.constant(name)
        return self.constants.get(name)

    def compute(
        self, shape: tuple[Dim, ...], body: Value, *, output: str | None = None, reduction: tuple[Dim, ...] = (),
        reduce: str | None = None,
    ) -> str:  # fmt: skip
        """Add a Compute. Its subscripts are simplified with all facts and the extents of its iterators."""
        name = output or self._fresh()
        shape = tuple(map(self.facts.canonical, shape))
        reduction = tuple(map(self.facts.canonical, reduction))
        ranges = {dim_name(i): e for i, e in enumerate(shape)}
        ranges |= {reduction_name(i): e for i, e in enumerate(reduction)}
        body, wraps = self._resolve(self._repeated(body, ranges))
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
        """Add a Concat."""
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
        """Make the output another name of the source."""
        self.aliases[output] = self.aliases.get(source, source)

    def bound(self, indices: str, size: Dim, component: int | None = None, natural: bool = False) -> None:
        """Bound an axis that ``indices`` subscript: known indices now (a symbolic axis gets a guard), others in every
        call.
        """
        place = f"{self.current.name} ({self.current.op})" if self.current else "a gather"
        value, known = self.value(indices), self.constant(indices)
        if component is not None:
            value = None if value is None else value[..., component]
            known = None if known is None else known[..., component]
        indices_known = set(value.flat) if value is not None else set()
        if known is not None and known.size:
            indices_known = {Index.of(int(known.min())), Index.of(int(known.max()))}
        for i in sorted(indices_known, key=str):
            why = f"{place}: index {i} of {indices} lies in [{0 if natural else -size}, {size})"
            self.facts.at_most(i + 1, size, why)
            self.facts.at_most(-i, ZERO if natural else size, why)
        if value is None and known is None and not self._is_inside(indices, size, natural):
            for shift in (ZERO, -size) if natural else (ZERO,):  # x - size is in [-size, size): x is not negative
                self._bound_on_data(self.aliases.get(indices, indices), size, place, component, shift)

    def _interval(self, name: str) -> Interval | None:
        known = self.constant(name)
        return self.positions.intervals.of(self.aliases.get(name, name)) if known is None else of_array(known)

    def _is_inside(self, indices: str, size: Dim, natural: bool) -> bool:
        """Check whether the interval of computed indices proves the bound, whatever the data are."""
        found, least = self._interval(indices), ZERO if natural else -size
        return found is not None and all(self.facts.nonnegative(x) for x in (found[0] - least, size - 1 - found[1]))

    def never_negative(self, indices: str) -> bool:
        """Return whether constants decide that no element of ``indices`` is negative."""
        return (self._interval(indices) or (-1, -1))[0] >= 0

    def is_data(self, indices: str, at: tuple[Index, ...]) -> bool:
        """Return whether a subscript depends on data: it is no formula of sizes and positions."""
        return bool(self.positions.resolve(fetch(indices, at), self.aliases, []).fetches())

    def _bound_on_data(self, indices: str, size: Dim, place: str, component: int | None, shift: Index) -> None:
        """Add a bound on the data that the primitive will fetch: the whole tensor, or the tensor of which it is a
        shifted view.
        """
        shape = self.tensor(indices).shape
        at = [Index.of(dim_name(i)) for i in range(len(shape))]
        part = (0, 1)
        if component is not None:
            part = component, int(shape[-1].constant or 1)
            at[-1], shape = Index.of(component), (*shape[:-1], ONE)
        formula = self.positions.resolve(fetch(indices, at), self.aliases, []) + shift
        fetched = formula.fetches()
        if not fetched:
            return  # sizes only: ``_inside`` adds a guard
        if stays_inside(formula, size, self.ranges, self.facts):
            return
        moving = {str(d) for d, e in zip(at, shape, strict=True) if e != 1}
        for a in fetched if len(fetched) == 1 else ():
            offset = formula - Index({(a,): 1})
            whole = product(shape) == product(self.tensor(a.name).shape)
            used = {s for x in a.args for s in x.symbols()}
            if whole and moving <= used and not offset.fetches() and not offset.symbols() & set(map(str, at)):
                self.bounds.append(IndexBound(a.name, size, place, offset))
                return
        self.bounds.append(IndexBound(indices, size, place, part=part, formula=formula, shape=shape))

    def below(self, tensor: str, size: Dim) -> None:
        """Record that every element of a tensor made by the host is in [0, size)."""
        self.ranges[tensor] = size

    def position(self, indices: str, at: tuple[Index, ...], size: Dim, ranges: Ranges) -> Index | None:
        """Return a subscript that is a formula inside its axis, or None if it is data or may be negative."""
        name = self.aliases.get(indices, indices)
        self._ensure(name)
        subscript = self.positions.resolve(fetch(name, at), self.aliases, [])
        if (subscript.constant or 0) < 0:
            subscript = subscript + size
        if subscript.fetches() or not self.facts.nonnegative(subscript, ranges):
            return None
        self._inside(subscript, size, ranges)
        return subscript

    def ask(
        self, kind: str, inputs: Sequence[str], names: Sequence[str], dims: Sequence[Dim] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[Dim, ...]:  # fmt: skip
        """Return the sizes that the node's shape rule requested."""
        key = step_key(self._at(), kind, inputs, dims, settings)
        return tuple(map(self.facts.canonical, self.steps[key].symbols))

    def made(
        self, kind: str, inputs: Sequence[str], types: Sequence[tuple[str | None, str, tuple[Dim, ...]]],
        dims: Sequence[Dim] = (), settings: Mapping[str, Any] | None = None, more: Mapping[str, Any] | None = None,
        bodies: Sequence[str] = (),
    ) -> tuple[str, ...]:  # fmt: skip
        """Return tensors that a step computes."""
        node = self._at()
        key = step_key(node, kind, inputs, dims, settings)
        names = tuple(name or self._fresh() for name, _, _ in types)
        step_settings = tuple(sorted((settings or {}).items()))
        level = max(self.typed.asked.level(inputs), self.facts.level(*dims))
        new = HostStep(kind, tuple(inputs), tuple(dims), step_settings, level=level, origin=node.name)
        step = self.steps.get(key) or new
        if step.outputs:  # another node requested the same step
            for name, before in zip(names, step.outputs, strict=True):
                self.alias(name, before)
            return step.outputs
        inside = tuple((role, expand(self.inner(role).typed)) for role in bodies)
        step_settings = (*step.settings, *(more or {}).items())
        self.steps[key] = replace(step, outputs=names, dims=tuple(dims), settings=step_settings, bodies=inside)
        for name, (_, dtype, shape) in zip(names, types, strict=True):
            self.tensors[name] = Tensor(name, dtype, tuple(map(self.facts.canonical, shape)))
        return names

    def inner(self, role: str) -> Inner:
        """Return a body of the node."""
        body: Inner = self.typed.asked.inner[self._at().name, role]
        return body

    def new_constant(self, array: Array, hint: str) -> str:
        """Add a constant."""
        name = self._fresh(hint)
        self._add_constant(name, array)
        return name

    # -- inside --------------------------------------------------------------------------------------------------

    def node(self, node: OnnxNode) -> None:
        """Expand one node, unless all its results are known shape arithmetic."""
        if all(self.typed.value(o) is not None for o in node.outputs if o):
            return
        self.current = node
        try:
            rules(node).expand(node, self)
        except MemoryError:
            raise
        except Exception as e:
            why = with_node(e, node)
            if self.left is not None and not (node.fallback or isinstance(e, ModelError)):
                self.left.leave(why, node.name)
                raise RepropagationNeeded from e
            raise why from e
        for o in node.outputs:
            if o and o not in self.tensors and o not in self.aliases and self.typed.value(o) is None and self._read(o):
                raise UnsupportedError(f"{node.op} does not compute its output {o}", node=node.name, tensor=o)

    def _repeated(self, body: Value, ranges: Ranges) -> Value:
        """Repeat the only element of a shorter operand along an axis whose extent is a common size."""
        common = {self.facts.canonical(m) for m, _ in self.facts.common.values()}
        moving = {Index.of(v) for v, extent in ranges.items() if extent in common}
        if not moving:
            return body

        def again(i: Index, dim: Dim, extent: Dim) -> Index:
            return i if dim == extent or i not in moving else minimum(i, dim - 1)

        def f(v: Value) -> Value:
            if not isinstance(v, Load):
                return v
            shape = self.tensor(v.buffer).shape
            places = [again(i, d, ranges.get(str(i), d)) for i, d in zip(v.index, shape, strict=True)]
            return Load(v.dtype, v.buffer, tuple(places))

        return transform(body, f)

    def _common_steps(self) -> Iterator[HostStep]:
        """Yield steps for common sizes of two sizes. The host computes them before any kernel runs."""
        for (a, b), (m, why) in self.facts.common.items():
            pair = (self.facts.canonical(a), self.facts.canonical(b))
            yield HostStep("common", (), pair, (("why", why),), (), (str(m),), level=-1, origin=why.partition(" ")[0])

    def _at(self) -> OnnxNode:
        if self.current is None:
            raise PolydynError("a step of the host outside a node")
        return self.current

    def _read(self, name: str) -> bool:
        nodes = self.typed.nodes
        return name in self.typed.graph.outputs or any(name in (*n.inputs, *captured_by(n)) for n in nodes)

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
        """Replace aliases in loads and fetches by their source, and fetched formulas of the position by the formula."""

        def f(v: Value) -> Value:
            return Load(v.dtype, self.aliases.get(v.buffer, v.buffer), v.index) if isinstance(v, Load) else v

        body = transform(body, f)
        for t in sorted({self.aliases.get(a.name, a.name) for i in indices(body) for a in i.fetches()}):
            self._ensure(t)
        wraps: list[tuple[Index, Index]] = []
        return map_index(body, lambda i: self.positions.resolve(i, self.aliases, wraps)), wraps

    def _inside(self, x: Index, n: Index, ranges: Ranges) -> None:
        """Require that positions gathered from an axis are inside it: a bound on sizes, not on data."""
        last = upper_bound(at_the_end(x, ranges, self.facts.nonnegative), ranges)
        if last is None or not self.facts.nonnegative(x, ranges):
            return
        place = f"{self.current.name} ({self.current.op})" if self.current else "a gather"
        room = (n - 1 - last).terms
        left, right = Index({m: -v for m, v in room.items() if v < 0}), Index({m: v for m, v in room.items() if v > 0})
        self.facts.at_most(left, right, f"{place}: positions 0 to {last} are read from an axis of {n}")

    def _ensure(self, name: str) -> None:
        """Add the tensor if needed: a constant, or shape arithmetic written as data."""
        if name in self.tensors:
            return
        if (known := self.constant(name)) is not None:
            if name in self.typed.graph.outputs:  # outputs are computed, constants are not
                self._copy(self.new_constant(known, name), name)
            else:
                self._add_constant(name, known)
            return
        value = self.value(name)
        if value is None:
            raise PolydynError(f"{name} is read but no primitive computes it", tensor=name)
        before, self.current = self.current, None
        self.compute(self.typed.tensor(name).shape, spell(value, self.typed.tensor(name).dtype), output=name)
        self.current = before

    def finish(self) -> Graph:
        """Build the graph: outputs under their own names, then everything that is read, in order."""
        outputs = self.typed.graph.outputs
        for o in dict.fromkeys(outputs):
            self._output(o)
        steps = [self._finished(s) for s in (*self._common_steps(), *self.steps.values())]
        guards = tuple(Guard(g.left, g.relation, g.right, g.message, g.words) for g in self.facts.guards())
        needed, kept, steps = self._needed(outputs, guards, steps)
        inputs = tuple(x.name for x in self.typed.graph.inputs)
        tensors = {t: self.tensors[t] for t in (*inputs, *self.tensors) if t in needed or t in inputs}
        return Graph(
            name=self.typed.graph.name, inputs=inputs, outputs=outputs,
            tensors={n: Tensor(n, t.dtype, tuple(map(self.facts.canonical, t.shape))) for n, t in tensors.items()},
            constants={n: a for n, a in self.constants.items() if n in needed}, nodes=tuple(kept),
            sources=self.typed.sources, guards=guards,
            promises=tuple(Guard(g.left, g.relation, g.right, g.message) for g in self.facts.promises()),
            notes=tuple(dict.fromkeys((*self.facts.notes, *self.facts.pinned()))),
            bounds=tuple(map(self._canonical, self.bounds)),
            steps=tuple(steps),
            guessed=tuple(self.facts.guessed),
            metadata=self.typed.graph.metadata, copies=self.typed.graph.copies,
            host=self.typed.graph.host, optional=self.typed.graph.optional,
        )  # fmt: skip

    def _finished(self, step: HostStep) -> HostStep:
        """Return a step with existing inputs under their final names."""
        for x in filter(None, step.inputs):
            self._ensure(self.aliases.get(x, x))
        inputs = tuple(self.aliases.get(x, x) for x in step.inputs)
        return replace(step, inputs=inputs, dims=tuple(map(self.facts.canonical, step.dims)))

    def _needed(
        self, outputs: Sequence[str], guards: Sequence[Guard], steps: Sequence[HostStep]
    ) -> tuple[set[str], list[Node], list[HostStep]]:
        """Return all that the outputs and guards need: names of tensors and late sizes, nodes and steps in order."""
        needed = set(outputs) | {s for g in guards for s in g.left.symbols() | g.right.symbols()}
        needed_nodes: dict[int, Node] = {}
        needed_steps: list[HostStep] = []
        while True:
            for k in reversed(range(len(self.nodes))):
                n = self.nodes[k]
                if n.output in needed and k not in needed_nodes:
                    needed_nodes[k] = n
                    shape = self.tensors[n.output].shape
                    needed |= {*n.inputs, *free_symbols(n), *(s for d in shape for s in self._canonical_symbols(d))}
            more = [s for s in steps if s not in needed_steps and needed & {*s.outputs, *s.symbols}]
            if not more:
                return needed, [needed_nodes[k] for k in sorted(needed_nodes)], [s for s in steps if s in needed_steps]
            needed_steps += more
            needed |= {x for s in more for x in (*s.inputs, *s.outputs) if x}
            needed |= {x for s in more for d in s.dims for x in d.symbols()}
            needed |= {x for s in more for o in s.outputs if o for d in self.tensors[o].shape for x in d.symbols()}

    def _canonical_symbols(self, d: Dim) -> frozenset[str]:
        return self.facts.canonical(d).symbols()

    def _canonical(self, b: IndexBound) -> IndexBound:
        of = self.facts.canonical
        formula = None if b.formula is None else of(b.formula)
        return replace(b, size=of(b.size), formula=formula, shape=tuple(map(of, b.shape)))

    def _output(self, name: str) -> None:
        """Add an output. If it is another name for a tensor, copy the tensor."""
        self.current = None
        if name in self.aliases:
            self._copy(self.aliases.pop(name), name)
        else:
            self._ensure(name)

    def _copy(self, source: str, output: str) -> None:
        self._ensure(source)
        t = self.tensors[source]
        here = tuple(Index.of(dim_name(i)) for i in range(len(t.shape)))
        self.compute(t.shape, load(source, here, t.dtype), output=output)
