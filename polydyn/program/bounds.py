"""Checks of data-dependent subscripts: an index outside its axis is refused by name, never wrapped in silence.

A gather's index tensor is scanned before the first launch that reads it, in the caller's thread: one pass over a few
integers. Views of it are followed to the buffer that is really read, as far as they show all of it; what cannot be
followed (an index cut out of a larger tensor) is not checked and said in the program's notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polydyn.errors import ShapeError
from polydyn.graph.ir import Compute, Graph, Guard, IndexBound, dim_name
from polydyn.program.plan import Buffer, IndexCheck, Launch
from polydyn.schedules.expr import Array, Load, Op
from polydyn.schedules.index import ONE, Index, product


@dataclass(frozen=True)
class Bounds:
    """What becomes of a graph's index bounds: checks of buffers, guards on sizes, notes on what is not checked."""

    checks: tuple[IndexCheck, ...]
    guards: tuple[Guard, ...]
    notes: tuple[str, ...]


def place_bounds(
    graph: Graph, buffers: Mapping[str, Buffer], launches: Iterable[Launch], writers: Mapping[str, int]
) -> Bounds:
    """Places every bound of the graph.

    ``writers``: buffer -> the last launch that writes it (inputs have none). ShapeError: a constant index can never
    lie inside its axis.
    """
    touching: dict[str, list[int]] = {}
    for k, launch in enumerate(launches):
        for b in set(launch.buffers):
            touching.setdefault(b, []).append(k)
    checks: dict[tuple[str, Index, Index, tuple[int, int]], IndexCheck] = {}
    guards: list[Guard] = []
    notes: list[str] = []
    for bound in graph.bounds:
        name = followed(graph, bound.tensor, touching) if bound.part[1] == 1 else bound.tensor
        if name in graph.constants:
            first, step = bound.part
            guards += constant_guards(bound, graph.constants[name].reshape(-1)[first::step])
            continue
        readers = [k for k in touching.get(name, []) if k > writers.get(name, -1)]
        if name not in buffers or not readers:
            notes.append(f"{bound.node}: the indices {bound.tensor} are not checked to lie inside {bound.size}")
            continue
        message = f"{bound.node}: an index in '{name}' lies outside its axis of size {bound.size}"
        key = (name, bound.size, bound.offset, bound.part)
        checks.setdefault(key, IndexCheck(name, bound.size, bound.offset, min(readers), message, bound.part))
    ordered = sorted(checks.values(), key=lambda c: c.launch)
    return Bounds(tuple(ordered), tuple(guards), tuple(dict.fromkeys(notes)))


def followed(graph: Graph, tensor: str, buffers: Mapping[str, object]) -> str:
    """The buffer that holds exactly the tensor's integers; the last name that was reached when there is none."""
    producers = graph.producer()
    while tensor not in buffers and tensor not in graph.constants:
        node = producers.get(tensor)
        base = _base(graph, node) if isinstance(node, Compute) else None
        if base is None:
            break
        tensor = base
    return tensor


def _base(graph: Graph, n: Compute) -> str | None:
    """What a view (or a cast between integers) shows all of: as many elements, every iterator used."""
    body = n.body
    if isinstance(body, Op) and body.name == "cast" and "int" in body.dtype and "int" in body.args[0].dtype:
        body = body.args[0]
    if not isinstance(body, Load) or n.reduce is not None or any(i.fetches() for i in body.index):
        return None
    shape = graph.tensors[n.output].shape
    used = {s for i in body.index for s in i.symbols()}
    moving = {dim_name(a) for a, e in enumerate(shape) if e != ONE}
    whole = product(shape) == product(graph.tensors[body.buffer].shape)
    return body.buffer if whole and moving <= used else None


def constant_guards(bound: IndexBound, indices: Array) -> list[Guard]:
    """Conditions on the axis for constant indices. ShapeError: it is too short for every call."""
    if not indices.size:
        return []
    low, high = int(indices.min()), int(indices.max())
    size, offset = bound.size.constant, bound.offset.constant
    message = f"{bound.node}: the constant indices {bound.tensor} reach from {low} to {high}"
    if size is None or offset is None:
        last, first = Index.of(high) + bound.offset, Index.of(low) + bound.offset
        return [Guard(last + 1, "<=", bound.size, message), Guard(-first, "<=", bound.size, message)]
    if not -size <= low + offset <= high + offset < size:
        raise ShapeError(
            f"{message}, the axis has {size} elements", node=bound.node, tensor=bound.tensor,
            rule="an index lies in [-n, n)", remedy="the model is wrong: correct its indices",
        )  # fmt: skip
    return []


def without_duplicates(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Guards in order, equal conditions once (the first message counts)."""
    seen: dict[tuple[Index, str, Index], Guard] = {}
    for g in guards:
        seen.setdefault((g.left, g.relation, g.right), g)
    return tuple(seen.values())
