"""Make a static export dynamic: chosen input axes become symbols, and the rest of the model follows or is rejected.

The graph is read twice. First, with the sizes of the file, every constant target of a Reshape is compared with the
shape that it reshapes. Sizes that both share at the front or at the end are dims of the input, whatever they are. Of
the sizes in between, the first one is inferred from the others. Then shapes are propagated with the symbols. If a
constant fixes a symbol, or ties it to another one, this is a contradiction. The error names the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from polydyn.errors import InputError, ShapeError
from polydyn.graph.importer import ImportedGraph, ModelInput
from polydyn.graph.operators.registry import OnnxNode
from polydyn.graph.typed import Typed
from polydyn.schedules.expr import Array
from polydyn.schedules.index import Index
from polydyn.schedules.names import internal_name
from polydyn.shapes.context import Assumed
from polydyn.shapes.sentences import sentence

Symbols: TypeAlias = "Mapping[str, Sequence[str | None]]"
"""Maps an input to a name for each of its axes; None for an axis that does not change."""


def with_symbols(graph: ImportedGraph, symbols: Symbols) -> ImportedGraph:
    """Name axes of a graph's inputs. Raises ShapeError for an unknown input or a wrong number of axes."""
    inputs = {x.name: x for x in graph.inputs}
    for name, axes in symbols.items():
        if name not in inputs:
            raise ShapeError(
                f"symbols names the input {name}, which the model does not have", tensor=name,
                remedy=f"its inputs are {', '.join(inputs)}",
            )  # fmt: skip
        dims = inputs[name].dims
        if dims is not None and len(dims) != len(axes):
            raise ShapeError(
                f"{len(axes)} symbols for the {len(dims)} axes of {name}", tensor=name,
                remedy="give one name for each axis, None for those that stay as they are",
            )  # fmt: skip
    return replace(graph, inputs=tuple(_named(x, symbols.get(x.name)) for x in graph.inputs))


def with_ranks(graph: ImportedGraph, symbols: Symbols) -> ImportedGraph:
    """Give inputs that declare no shape as many axes as they have symbols, all of unknown size.

    InputError: ``symbols`` is no mapping.
    """
    if not isinstance(symbols, Mapping):
        raise InputError(f"symbols is a {type(symbols).__name__}", rule="symbols", remedy='give {"x": ("B", "L")}')

    def ranked(x: ModelInput) -> ModelInput:
        return replace(x, dims=(None,) * len(symbols[x.name])) if x.dims is None and x.name in symbols else x

    return replace(graph, inputs=tuple(map(ranked, graph.inputs)))


def _named(x: ModelInput, axes: Sequence[str | None] | None) -> ModelInput:
    if axes is None:
        return x
    known = x.dims or (None,) * len(axes)
    return replace(x, dims=tuple(new or old for new, old in zip(axes, known, strict=True)))


# -- constant targets of Reshape --------------------------------------------------------------------------------------


def with_free_targets(static: Typed) -> ImportedGraph:
    """Return a propagated graph with the constant targets of its Reshapes computed from the shapes that they
    reshape.
    """
    nodes, constants = list[OnnxNode](), dict(static.graph.constants)
    for n in static.graph.nodes:
        target = constants.get(n.inputs[1]) if n.op == "Reshape" and len(n.inputs) > 1 else None
        if target is None:
            nodes.append(n)
            continue
        old, new = ([d.constant for d in static.tensor(x).shape] for x in (n.inputs[0], n.outputs[0]))
        if None in (*old, *new):
            nodes.append(n)
            continue
        before, inserted, constants = _target(n, target, [d or 0 for d in old], [d or 0 for d in new], constants)
        nodes += [*before, replace(n, inputs=(n.inputs[0], inserted))]
    return replace(static.graph, nodes=tuple(nodes), constants=constants)


def _target(
    n: OnnxNode, target: Array, old: list[int], new: list[int], constants: dict[str, Array]
) -> tuple[list[OnnxNode], str, dict[str, Array]]:
    """Return nodes that compute the target from the operand's shape, the target's name, and all constants."""
    front = next((k for k, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    most = min(len(old), len(new)) - front
    back = next((k for k in range(most) if old[-1 - k] != new[-1 - k]), most)
    axes: list[int | None] = [None] * len(new)  # the axis that an entry copies
    axes[:front] = range(front)
    for k in range(back):
        axes[-1 - k] = len(old) - 1 - k
    middle = list(range(front, len(new) - back))
    free = next((k for k in middle if target[k] == -1), middle[0] if middle else None)
    if all(a is None for a in axes) and free is None:
        return [], n.inputs[1], constants
    name, parts = f"{n.outputs[0]}.target", list[str]()
    constants = dict(constants)
    before = [_node(n, "Shape", (n.inputs[0],), f"{name}.shape")]
    for k, axis in enumerate(axes):
        part = f"{name}.{k}"
        if axis is None:
            constants[part] = np.array([-1 if k == free else new[k]], np.int64)
        else:
            constants[f"{part}.axis"] = np.array([axis], np.int64)
            before.append(_node(n, "Gather", (f"{name}.shape", f"{part}.axis"), part))
        parts.append(part)
    if not parts:
        return [], n.inputs[1], constants
    before.append(replace(_node(n, "Concat", tuple(parts), name), attributes={"axis": 0}))
    return before, name, constants


def _node(n: OnnxNode, op: str, inputs: tuple[str, ...], output: str) -> OnnxNode:
    return OnnxNode(f"{output}/{op}", op, inputs, (output,), {}, n.opset)


# -- what contradicts -------------------------------------------------------------------------------------------------


def prove_symbols(typed: Typed, file: ImportedGraph, symbols: Symbols) -> None:
    """Raise ShapeError if the model fixes a symbol or ties it to another one. The error names the constant that does
    so.

    ``file``: the model without symbols. An axis without a size in the file may have guards under any name.
    """
    sizes = {x.name: x.dims or () for x in file.inputs}
    named = [(a, d) for x, axes in symbols.items() for a, d in zip(axes, sizes[x], strict=False) if a]
    names = list(dict.fromkeys(internal_name(a) for a, d in named if isinstance(d, int)))
    own = {s.symbol for s in typed.sources}
    for guard in typed.facts.guards():
        tied = [s for s in names if s in guard.left.symbols() | guard.right.symbols()]
        others = (guard.left.symbols() | guard.right.symbols()) - set(names)
        if tied and guard.relation != "<=" and not (others & own) and not guard.message.startswith("dim "):
            raise _contradiction(typed, tied[0], guard)
    for name in names:
        value = typed.facts.canonical(Index.of(name))
        if value.constant is not None and not any(g.message.startswith(f"dim {name} ") for g in typed.facts.guards()):
            raise _contradiction(typed, name, Assumed(Index.of(name), "==", value, "the shapes of the model"))


def _contradiction(typed: Typed, name: str, guard: Assumed) -> ShapeError:
    fixed, remedy = next(_fixed(typed, guard), None), f"leave {name} out of symbols"
    what = ""
    if guard.relation == "%==" and guard.left.symbols() == {name}:
        raise _multiple(typed, name, guard)
    if fixed:
        kind = "constant" if fixed in typed.constants else "input"
        what = f"; the {kind} {fixed} {list(typed.tensor(fixed).shape)} fixes it"
        remedy += ", or name the axis of the input too" if kind == "input" else ""
    needs = sentence(guard.left, guard.relation, guard.right, guard.words)
    return ShapeError(
        f"{name} cannot be a symbol: the model needs {needs}{what}",
        tensor=fixed, dim=name, rule=guard.message, remedy=f"{remedy}, or export the model with this dim dynamic",
    )  # fmt: skip


def _multiple(typed: Typed, name: str, guard: Assumed) -> ShapeError:
    """Return the error for sizes that must be multiples: the user has to declare them, and every call checks them."""
    n = typed.facts.multiple_of(name)
    needs = sentence(guard.left, guard.relation, guard.right, guard.words)
    remedy = f'give dims={{"{name}": Sizes(multiple={n})}}' if n else f"leave {name} out of symbols"
    return ShapeError(
        f"{name} cannot be any size: {needs}", dim=name, rule=guard.message,
        remedy=f"{remedy}, or export the model with this dim dynamic",
    )  # fmt: skip


def _fixed(typed: Typed, guard: Assumed) -> Iterator[str]:
    """Yield the inputs and constants on which the node in a guard's message depends.

    Those with a size that the guard mentions come first, and among these the inputs, because a name for their axis may
    be all that is missing.
    """
    makers = {o: n for n in typed.nodes for o in n.outputs if o}
    inputs = {x.name: set(x.dims or ()) for x in typed.graph.inputs}
    start = [n for n in typed.nodes if n.name and n.name in guard.message]
    sizes = {guard.left.constant, guard.right.constant} - {None}

    def rank(x: str) -> tuple[bool, bool]:
        own = inputs[x] if x in inputs else {d.constant for d in typed.tensor(x).shape}
        return not sizes & own, x not in inputs

    found, queue = list[str](), [x for n in start for x in n.inputs if x]
    seen = set(queue)
    while queue:
        x = queue.pop(0)
        if x in typed.constants or (x in inputs and not rank(x)[0]):
            found.append(x)
        elif x in makers and not any(d.symbols() for d in typed.tensor(x).shape):
            more = [y for y in makers[x].inputs if y and y not in seen]
            seen |= set(more)
            queue += more
    yield from sorted(found, key=rank)
