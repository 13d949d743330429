"""Join several independent nodes of one form into one node over joined tensors, without moving an element.

There are two forms. ``Along(axis)``: outputs are concatenated along an axis, ``A*B, A*C -> A*[B C]``. ``Stacked()``:
outputs of equal shape are stacked along a new first axis, ``A*B, C*D -> [A, C]*[B, D]``. The operands must be

- the same element for all nodes (it does not run along the axis), or
- constants, which are joined now, or
- computed tensors that only these nodes read: their producers write directly into their part (``Concat``).

Element-wise readers of equal form are joined too, so that they stay epilogues. The original outputs become views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from polydyn.graph.ir import Compute, Concat, Dim, Graph, Node, Tensor, dim_name
from polydyn.graph.passes.order import Dependences, in_order
from polydyn.graph.rewriting import pruned
from polydyn.schedules.expr import (
    Array,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    children,
    load,
    loads,
    substitute,
    symbols_of,
)
from polydyn.schedules.index import ONE, ZERO, Index


class Different(Exception):
    """Raised if the nodes do not have one form, which is not worth a note."""


class Refusal(Exception):
    """Raised if nodes of one form must stay separate. The text is the reason."""


@dataclass(frozen=True)
class Along:
    """Outputs are concatenated along ``axis``."""

    axis: int


@dataclass(frozen=True)
class Stacked:
    """Outputs of equal shape are stacked along a new first axis."""


Form: TypeAlias = Along | Stacked


@dataclass(frozen=True)
class _Constants:
    """Arrays, each with its axes permuted, joined along ``axis`` (None: along a new first axis)."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    axis: int | None


def as_contraction(n: Node) -> Compute | None:
    """Match a sum of products of two loaded operands, each of which runs along an axis that the other lacks."""
    if not isinstance(n, Compute) or n.reduce != "sum" or not isinstance(n.body, Op) or n.body.name != "mul":
        return None
    a, b = ({s for s in symbols_of(v) if s[:1] == "d"} for v in n.body.args)
    return n if a - b and b - a and all(len(loads(v)) == 1 for v in n.body.args) else None


class GraphEditor:
    """The state of a graph while its nodes are joined."""

    def __init__(self, graph: Graph) -> None:
        self.notes: list[str] = []
        self.joined: set[str] = set()
        self._arrays: dict[_Constants, str] = {}
        self.take(graph)

    def take(self, graph: Graph) -> None:
        """Continue with another graph."""
        self.graph = graph
        self.consumers = graph.consumers()
        self.producers = graph.producer()
        self.dependences = Dependences(graph)

    def fresh_name(self, name: str) -> str:
        """Return a name based on this one that no tensor has."""
        taken, k = name, 0
        while taken in self.graph.tensors:
            k += 1
            taken = f"{name}_{k}"
        return taken

    def constant(self, parts: _Constants) -> str:
        """Return the joined constant. Equal constants are built once."""
        if parts not in self._arrays:
            arrays = [self.graph.constants[n].transpose(p) for n, p in parts.parts]
            array: Array = np.stack(arrays) if parts.axis is None else np.concatenate(arrays, axis=parts.axis)
            name = self._arrays[parts] = self.fresh_name(f"{parts.parts[0][0]}+{len(arrays) - 1}")
            tensor = Tensor(name, str(array.dtype), tuple(map(Index.of, array.shape)))
            self.graph = replace(
                self.graph, tensors={**self.graph.tensors, name: tensor},
                constants={**self.graph.constants, name: array},
            )  # fmt: skip
        return self._arrays[parts]

    def finish(self) -> Graph:
        """Return the graph without unused constants, with the notes."""
        return pruned(replace(self.graph, notes=(*self.graph.notes, *self.notes)))


class Join:
    """One attempt to join nodes with their readers. Raises Different or Refusal if they stay separate."""

    def __init__(self, editor: GraphEditor, members: Sequence[Compute], form: Form) -> None:
        self.editor, self.graph, self.form = editor, editor.graph, form
        self.tensors: dict[str, Tensor] = {}
        self.made: list[Node] = []
        self.gone: list[str] = []
        self._windows: dict[tuple[tuple[str, ...], int], str] = {}
        self._parts: set[str] = set()
        self._pending: dict[_Constants, str] = {}
        self.members = list(members)
        self._join(members, {})
        self._dims([(*m.reduction, *self._fixed(m.output)) for m in members])
        while readers := self._readers():
            self._join(readers, {m.output: k for k, m in enumerate(self.members)})
            self.members = readers
        self._check_remaining()

    def commit(self) -> None:
        """Replace the members by the joined nodes."""
        views: dict[str, Node] = {m.output: self._view(k) for k, m in enumerate(self.members)}
        anchor, nodes = self.gone[0], list[Node]()
        for n in self.graph.nodes:
            if n.output == anchor:
                nodes += [*self._materialised(), *views.values()]
            if n.output not in self.gone:
                nodes.append(n)
        tensors = {**self.editor.graph.tensors, **self.tensors}  # constants were added in between
        self.editor.joined |= set(self.gone)
        self.editor.take(replace(self.editor.graph, nodes=in_order(nodes), tensors=tensors))

    # -- one level -----------------------------------------------------------------------------------------------

    def _join(self, nodes: Sequence[Compute], previous: dict[str, int]) -> None:
        """Join these nodes, which read the members of the previous level (``previous``)."""
        if not self.editor.dependences.independent([n.output for n in nodes]):
            raise Refusal("one depends on another")
        self.own, self.nodes = previous, nodes
        body = self._values([n.body for n in nodes])
        whole = self._tensor(nodes[0].output, "merged", self._joined_shape(nodes))
        self.made.append(replace(nodes[0], output=whole, body=body))
        self.whole = whole
        self.gone += [n.output for n in nodes]

    def _joined_shape(self, nodes: Sequence[Compute]) -> tuple[Dim, ...]:
        shapes = [self._shape(n.output) for n in nodes]
        if isinstance(self.form, Stacked):
            return (Index.of(len(nodes)), *shapes[0])
        a = self.form.axis
        return (*shapes[0][:a], sum((s[a] for s in shapes), ZERO), *shapes[0][a + 1 :])

    def _readers(self) -> list[Compute]:
        """Return the only readers of the members if they are element-wise and of one form, else an empty list."""
        consumers = [self.editor.consumers[m.output] for m in self.members]
        readers = [c[0] for c in consumers if len(c) == 1 and isinstance(c[0], Compute)]
        outputs = any(m.output in self.graph.outputs for m in self.members)
        if outputs or len({r.output for r in readers}) < len(self.members):
            return []
        if not all(self._epilogue(r, m.output) for r, m in zip(readers, self.members, strict=True)):
            return []
        own = {m.output: k for k, m in enumerate(self.members)}
        before = (dict(self.tensors), list(self.made), dict(self._windows), set(self._parts))
        try:  # a trial: if it fails, nothing has changed
            self.own, self.nodes = own, readers
            self._values([r.body for r in readers])
        except (Different, Refusal):
            return []
        finally:
            self.tensors, self.made, self._windows, self._parts = before
        return readers if self.editor.dependences.independent([r.output for r in readers]) else []

    def _epilogue(self, r: Node, t: str) -> bool:
        """Check whether the reader reads ``t`` element by element."""
        if not isinstance(r, Compute) or not r.is_map or self._shape(r.output) != self._shape(t):
            return False
        shape, reads = self._shape(t), [x for x in loads(r.body) if x.buffer == t]
        return bool(reads) and all(
            i == Index.of(dim_name(a)) or (i == ZERO and e == ONE)
            for x in reads
            for a, (i, e) in enumerate(zip(x.index, shape, strict=True))
        )

    def _check_remaining(self) -> None:
        """Check that remaining readers of the parts can read views without a cost."""
        for m in self.members:
            readers = self.editor.consumers[m.output]
            if m.output in self.graph.outputs:
                raise Refusal("an output of the model would have to be copied")
            if any(isinstance(r, Concat) for r in readers):
                raise Refusal("a part of a concatenation would have to be copied")
            if any(self._is_lost(r, m.output) for r in readers):
                raise Refusal("what follows differs, an epilogue would become a kernel of its own")

            if self._feeds_rows(m.output):
                raise Refusal("rows made of it feed a product, all three may be one attention kernel")

    def _feeds_rows(self, t: str) -> bool:
        """Check whether row reductions of ``t`` compute a same-shape operand that only one product reads
        (attention).
        """
        stack, seen = [(t, False)], set[tuple[str, bool]]()
        while stack:
            x, reduced = state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            for r in self.editor.consumers[x]:
                if not isinstance(r, Compute):
                    continue
                if as_contraction(r) is None:
                    stack.append((r.output, reduced or not r.is_map))
                elif reduced and self._shape(x) == self._shape(t) and len(self.editor.consumers[x]) == 1:
                    return True
        return False

    def _is_lost(self, r: Node, t: str) -> bool:
        """Check whether the reader could be an epilogue: element-wise, with all its other operands computed before
        ``t``.
        """
        if not self._epilogue(r, t) or (isinstance(r, Compute) and r.is_view):
            return False
        return not any(self.editor.dependences.depends(u, t) for u in r.inputs if u != t)

    # -- values --------------------------------------------------------------------------------------------------

    def _values(self, vs: Sequence[Value]) -> Value:
        first = vs[0]
        if isinstance(first, Load):
            return self._loads([v for v in vs if isinstance(v, Load) and v.dtype == first.dtype], len(vs))
        if isinstance(first, Op):
            same = {(v.name, v.dtype, len(v.args)) for v in vs if isinstance(v, Op)}
            if len(same) > 1 or not all(isinstance(v, Op) for v in vs):
                raise Different
            return replace(first, args=tuple(map(self._values, zip(*map(children, vs), strict=True))))
        if any(v != first for v in vs) or (isinstance(first, FromIndex) and self._runs((first.index,))):
            raise Different
        return first if isinstance(first, Const) else self._shifted(first)

    def _loads(self, xs: list[Load], count: int) -> Value:
        first = xs[0]
        if len(xs) != count or any(len(x.index) != len(first.index) for x in xs):
            raise Different
        if any(x.buffer in self.own for x in xs):
            if any(self.own.get(x.buffer) != k for k, x in enumerate(xs)):
                raise Different  # all are read element by element, see _epilogue
            rank = len(self.tensors[self.whole].shape)
            return load(self.whole, tuple(Index.of(dim_name(a)) for a in range(rank)), first.dtype)
        if all(x == first for x in xs) and not self._runs(first.index):
            return self._shifted(first)
        constant = [x.buffer in self.graph.constants for x in xs]
        if all(constant):
            return self._constants(xs)
        if any(constant):
            raise Refusal("an operand is a constant in one and computed in another")
        return self._windowed(xs)

    def _runs(self, index: Sequence[Index]) -> bool:
        """Check whether subscripts run along the joined axis."""
        name = dim_name(self.form.axis) if isinstance(self.form, Along) else None
        return any(name in i.symbols() for i in index)

    def _shifted(self, v: Value) -> Value:
        if isinstance(self.form, Along):
            return v
        rank = len(self._shape(self.nodes[0].output))
        return substitute(v, {dim_name(a): dim_name(a + 1) for a in range(rank)})

    def _axis_of(self, index: Sequence[Index]) -> int:
        """Return the position of the subscript that is the iterator of the joined axis. No other subscript may use
        it.
        """
        assert isinstance(self.form, Along)
        name = dim_name(self.form.axis)
        places = [k for k, i in enumerate(index) if name in i.symbols()]
        if len(places) != 1 or index[places[0]] != Index.of(name):
            raise Different
        return places[0]

    def _extents(self) -> list[Dim]:
        assert isinstance(self.form, Along)
        return [self._shape(n.output)[self.form.axis] for n in self.nodes]

    def _constants(self, xs: list[Load]) -> Value:
        """Join constants. Each may have its axes in another order."""
        arrays: list[tuple[int, ...]] = []
        parts = []
        for x in xs:
            names = list(map(str, x.index))
            axis_names = list(map(str, xs[0].index))
            if names != axis_names and (sorted(names) != sorted(axis_names) or len(set(names)) < len(names)):
                raise Different
            order = tuple(range(len(names))) if names == axis_names else tuple(names.index(w) for w in axis_names)
            shape = self.graph.constants[x.buffer].shape
            arrays.append(tuple(shape[p] for p in order))
            parts.append((x.buffer, order))
        if isinstance(self.form, Stacked):
            if len(set(arrays)) > 1:
                raise Different
            name = self._constant(_Constants(tuple(parts), None))
            return load(name, (Index.of(dim_name(0)), *self._shifted_index(xs[0])), xs[0].dtype)
        p = self._axis_of(xs[0].index)
        whole = all(s[p] == e for s, e in zip(arrays, self._extents(), strict=True))
        if not whole or len({s[:p] + s[p + 1 :] for s in arrays}) > 1:
            raise Different
        return replace(xs[0], buffer=self._constant(_Constants(tuple(parts), p)))

    def _shifted_index(self, x: Load) -> tuple[Index, ...]:
        shifted = self._shifted(x)
        assert isinstance(shifted, Load)
        return shifted.index

    def _windowed(self, xs: list[Load]) -> Value:
        """Let the producers of tensors write into parts of one tensor."""
        first = xs[0]
        if any(x.index != first.index for x in xs) or not first.index:
            raise Different
        shapes = [self._shape(x.buffer) for x in xs]
        for x, n in zip(xs, self.nodes, strict=True):
            self._check_in_place(x.buffer, n)
        if isinstance(self.form, Stacked):
            self._dims(shapes)
            at = Index.of(dim_name(0)) * shapes[0][0]
            index = self._shifted_index(first)
            return Load(first.dtype, self._window([x.buffer for x in xs], 0), (index[0] + at, *index[1:]))
        p = self._axis_of(first.index)
        self._dims([s[:p] + s[p + 1 :] for s in shapes])
        if any(s[p] != e for s, e in zip(shapes, self._extents(), strict=True)):
            raise Different
        return replace(first, buffer=self._window([x.buffer for x in xs], p))

    def _check_in_place(self, t: str, reader: Compute) -> None:
        maker = self.editor.producers.get(t)
        if maker is None:
            raise Refusal("an operand is an input of the model, it would have to be copied")
        if not isinstance(maker, Compute) or maker.is_view or t in self.graph.outputs:
            raise Refusal("an operand is a view, a concatenation or an output, it would have to be copied")
        if [n.output for n in self.editor.consumers[t]] != [reader.output]:
            raise Refusal("an operand is read by others too, it would have to be copied")

    # -- names ---------------------------------------------------------------------------------------------------

    def _window(self, parts: list[str], axis: int) -> str:
        key = (tuple(parts), axis)
        if key not in self._windows:
            if self._parts & set(parts) or len(set(parts)) < len(parts):
                raise Refusal("an operand is read in two ways, it would have to be copied")
            shape = list(self._shape(parts[0]))
            shape[axis] = sum((self._shape(t)[axis] for t in parts), ZERO)
            self._windows[key] = self._tensor(parts[0], "joined", tuple(shape))
            self._parts |= set(parts)
            self.made.append(Concat(self._windows[key], tuple(parts), axis))
        return self._windows[key]

    def _constant(self, parts: _Constants) -> str:
        """Return a placeholder name for a constant until it is built."""
        return self._pending.setdefault(parts, f"%{len(self._pending)}")

    def _materialised(self) -> list[Node]:
        """Return the joined nodes with their constants built."""
        names = {mark: self.editor.constant(parts) for parts, mark in self._pending.items() if self._marked(mark)}
        return [replace(n, body=_renamed(n.body, names)) if isinstance(n, Compute) else n for n in self.made]

    def _marked(self, mark: str) -> bool:
        return any(mark in n.inputs for n in self.made)

    def _tensor(self, like: str, suffix: str, shape: tuple[Dim, ...]) -> str:
        name = self.editor.fresh_name(f"{like}+{suffix}")
        self.tensors[name] = Tensor(name, self.graph.tensors[like].dtype, shape)
        return name

    def _view(self, k: int) -> Compute:
        """Return member ``k`` of the last level as a view of the joined tensor."""
        n = self.members[k]
        index = [Index.of(dim_name(a)) for a in range(len(self._shape(n.output)))]
        if isinstance(self.form, Stacked):
            index.insert(0, Index.of(k))
        else:
            a = self.form.axis
            index[a] = index[a] + sum((self._shape(m.output)[a] for m in self.members[:k]), ZERO)
        return Compute(n.output, load(self.whole, tuple(index), self.graph.tensors[n.output].dtype), origin=n.origin)

    def _shape(self, t: str) -> tuple[Dim, ...]:
        return self.graph.tensors[t].shape

    def _fixed(self, t: str) -> tuple[Dim, ...]:
        """Return the dims that must agree."""
        shape = self._shape(t)
        return shape if isinstance(self.form, Stacked) else (*shape[: self.form.axis], *shape[self.form.axis + 1 :])

    def _dims(self, rows: Sequence[tuple[Dim, ...]]) -> None:
        """Raise Different if dims differ, or Refusal if this is undecided."""
        for row in rows[1:]:
            if len(row) != len(rows[0]):
                raise Different
            for a, b in zip(rows[0], row, strict=True):
                if (a - b).constant not in (0, None):
                    raise Different
        for row in rows[1:]:
            for a, b in zip(rows[0], row, strict=True):
                if a != b:
                    raise Refusal(f"whether {a} equals {b} is not decided")


def _renamed(v: Value, names: dict[str, str]) -> Value:
    if isinstance(v, Load):
        return replace(v, buffer=names.get(v.buffer, v.buffer))
    return replace(v, args=tuple(_renamed(a, names) for a in v.args)) if isinstance(v, Op) else v
