"""Models inside a node: the branches of an If and the bodies of a Loop or Scan, as separate models.

The tensors of the outer model that such a body reads become its inputs. Constants are copied into it. Shape arithmetic
comes in as the sizes in it (``size_input``). A size with a name outside has the same name inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from polydyn.graph.importer import ImportedGraph, ModelInput
from polydyn.graph.ir import Dim, size_input
from polydyn.graph.operators.registry import Inferred, OnnxNode
from polydyn.graph.typed import Typed
from polydyn.schedules.index import Index
from polydyn.shapes.sizes import Dims

Types = Sequence[tuple[str, Sequence[Dim | None]]]
"""Dtype and shape of each input of a body as known in the outer model. None is a size that differs from run to run."""
Propagate = Callable[[ImportedGraph, Dims, Mapping[str, Inferred]], Typed]


@dataclass(frozen=True)
class Inner:
    """A body with known shapes.

    ``formals``: its inputs that the node passes in. ``captured``: outer tensors that it reads, under their names.
    ``sizes``: the sizes that come in by name. ``results``: its outputs in order; some may be inputs.
    """

    typed: Typed
    formals: tuple[str, ...]
    captured: tuple[str, ...]
    sizes: tuple[str, ...]
    results: tuple[str, ...]
    is_refused: bool = False
    """Whether every call of the body fails. Then only the ranks of its results are right."""

    def dtype(self, position: int) -> str:
        """Return the dtype of a result."""
        return self.typed.tensor(self.results[position]).dtype

    def shape(self, position: int) -> tuple[Dim | None, ...]:
        """Return the shape of a result in sizes of the outer model; None for a size that these cannot express."""
        named = {str(d) for x in self.typed.graph.inputs for d in x.dims or () if isinstance(d, str)}
        shape = self.typed.tensor(self.results[position]).shape
        return tuple(d if d.symbols() <= named else None for d in shape)

    def keeps(self, result: int, formal: str) -> list[bool] | None:
        """Return for each axis whether a result has the size of an input, or None if rank or dtype differ."""
        a, b = self.typed.tensor(self.results[result]), self.typed.tensor(formal)
        if a.dtype != b.dtype or len(a.shape) != len(b.shape):
            return None
        return [p == q for p, q in zip(a.shape, b.shape, strict=True)]

    def always(self, result: int) -> bool:
        """Check whether a boolean result is constant true, or an input passed through."""
        name, producers = self.results[result], {o: n for n in self.typed.nodes for o in n.outputs}
        while name in producers and producers[name].op == "Identity":
            name = producers[name].inputs[0]
        known = self.typed.constant(name) if name not in self.formals else None
        return name in self.formals or (known is not None and bool(known.all()))


def free_names(graph: ImportedGraph) -> tuple[str, ...]:
    """Return the outer tensors that a body reads, in order."""
    inside = {i.name for i in graph.inputs} | graph.constants.keys() | {o for n in graph.nodes for o in n.outputs}
    read = [x for n in graph.nodes for x in (*n.inputs, *captured_by(n))]
    return tuple(dict.fromkeys(x for x in (*read, *graph.outputs) if x and x not in inside))


def captured_by(node: OnnxNode) -> tuple[str, ...]:
    """Return the tensors that the bodies of a node read in addition to its inputs."""
    bodies = [v for v in node.attributes.values() if isinstance(v, ImportedGraph)]
    return tuple(dict.fromkeys(x for b in bodies for x in free_names(b)))


def enter(body: ImportedGraph, types: Types, outside: Typed, propagate: Propagate) -> Inner:
    """Infer the shapes inside a body whose inputs have these types."""
    formals = tuple(
        ModelInput(i.name, dtype, tuple(map(_plain, shape)))
        for i, (dtype, shape) in zip(body.inputs, types, strict=True)
    )
    constants, values, captured = dict(body.constants), {}, []
    for x in free_names(body):
        t, value, known = outside.tensor(x), outside.value(x), outside.constant(x)
        if known is not None:
            constants[x] = known
        elif value is not None:
            values[x] = Inferred(t.dtype, t.shape, value)
        else:
            captured.append(ModelInput(x, t.dtype, tuple(map(_plain, t.shape))))
    used = {s for v in values.values() if v.value is not None for d in v.value.flat for s in d.symbols()}
    used |= {s for v in values.values() for d in v.shape for s in d.symbols()}
    sizes = tuple(sorted(used))
    inputs = (*formals, *captured, *(ModelInput(size_input(s), "uint8", (s,)) for s in sizes))
    given = {i.name for i in inputs}
    outputs = tuple(dict.fromkeys(o for o in body.outputs if o not in given))
    graph = replace(body, inputs=inputs, outputs=outputs, constants=constants)
    names = tuple(i.name for i in formals)
    dims = outside.facts.sizes_of({d for i in inputs for d in i.dims or () if isinstance(d, str)})
    return Inner(propagate(graph, dims, values), names, tuple(i.name for i in captured), sizes, body.outputs)


def _plain(d: Dim | None) -> int | str | None:
    """Return a size as an input of a model declares it, or None for an expression."""
    if d is None:
        return None
    d = Index.of(d)
    return d.constant if d.constant is not None else str(d) if d.is_symbol else None
