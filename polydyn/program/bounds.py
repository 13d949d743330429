"""Checks of data-dependent subscripts: an index outside its axis is refused by name, never wrapped in silence.

A gather's index tensor is scanned before the first launch that reads it, in the caller's thread: one pass over a few
integers. Views of it are followed to the buffer that is really read, as far as they show all of it; what cannot be
followed (an index cut out of a larger tensor) is written down for it and scanned behind all launches. On a device a
launch of its own looks (``index_checks.py``), through any view; only inputs in the host's memory are scanned there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from polydyn.errors import ShapeError
from polydyn.graph.ir import Compute, Graph, Guard, IndexBound, dim_name
from polydyn.program.plan import Buffer, DeviceCheck, IndexCheck, Launch
from polydyn.schedules.expr import Array, Load, Op
from polydyn.schedules.index import ONE, ZERO, Index, minimum, product


@dataclass(frozen=True)
class Bounds:
    """What becomes of a graph's index bounds: checks of buffers, guards on sizes, notes on what is not checked.

    ``on_device``: what a device checks.
    """

    checks: tuple[IndexCheck, ...]
    guards: tuple[Guard, ...]
    notes: tuple[str, ...]
    on_device: tuple[DeviceCheck, ...] = ()


def place_bounds(
    graph: Graph, buffers: Mapping[str, Buffer], launches: Iterable[Launch], writers: Mapping[str, int]
) -> Bounds:
    """Places every bound of the graph.

    ``writers``: buffer -> the last launch that writes it (inputs have none). ShapeError: a constant index can never
    lie inside its axis.
    """
    readers = _Readers(graph, launches, writers)
    checks: dict[tuple[str, Index, Index, tuple[int, int]], IndexCheck] = {}
    device: dict[str, DeviceCheck] = {}
    guards: list[Guard] = []
    notes: list[str] = []
    for bound in graph.bounds:
        name = followed(graph, bound.tensor, buffers) if bound.part[1] == 1 else bound.tensor
        if name in graph.constants:
            first, step = bound.part
            guards += constant_guards(bound, graph.constants[name].reshape(-1)[first::step])
            continue
        if bound.kept:
            checks.setdefault((bound.kept, bound.size, ZERO, (0, 1)), readers.at_end(bound))
            guards += empty_guards(bound)
            continue
        if bound.status:
            found = device.setdefault(bound.status, readers.on_device(bound))
            scanned = found.check if found.scanned else None
        else:
            scanned = readers.check(bound, name) if name in buffers else None
            if scanned is None or scanned.launch < 0:
                notes.append(f"{bound.node}: the indices {bound.tensor} are not checked to lie inside {bound.size}")
                guards += empty_guards(bound)
                continue
        if scanned is not None:
            checks.setdefault((scanned.buffer, bound.size, bound.offset, bound.part), scanned)
    ordered = sorted(checks.values(), key=lambda c: c.launch)
    there = sorted(device.values(), key=lambda c: c.launch)
    return Bounds(tuple(ordered), tuple(guards), tuple(dict.fromkeys(notes)), tuple(there))


class _Readers:
    """Which launches read a buffer; those that only look for offenders do not count."""

    def __init__(self, graph: Graph, launches: Iterable[Launch], writers: Mapping[str, int]) -> None:
        self.graph, self.writers = graph, writers
        launches = tuple(launches)
        self.end = len(launches)
        written: dict[int, list[str]] = {}
        for b, k in writers.items():
            written.setdefault(k, []).append(b)
        self.looking = {b.status for b in graph.bounds if b.status and written[writers[b.status]] == [b.status]}
        apart = {writers[s] for s in self.looking}
        self.touching: dict[str, list[int]] = {}
        for k, launch in enumerate(launches):
            for b in set(launch.buffers) if k not in apart else ():
                self.touching.setdefault(b, []).append(k)

    def check(self, bound: IndexBound, name: str) -> IndexCheck:
        """The bound on the integers of a tensor before the first launch that reads them; -1: there is none."""
        first = min((k for k in self.touching.get(name, []) if k > self.writers.get(name, -1)), default=-1)
        message = f"{bound.node}: an index in '{name}' lies outside its axis of size {bound.size}"
        return IndexCheck(name, bound.size, bound.offset, first, message, bound.part)

    def at_end(self, bound: IndexBound) -> IndexCheck:
        """The bound on integers that are written down: what reads them elsewhere stays inside its axis anyway."""
        message = f"{bound.node}: an index in '{bound.tensor}' lies outside its axis of size {bound.size}"
        return IndexCheck(bound.kept, bound.size, ZERO, self.end, message)

    def on_device(self, bound: IndexBound) -> DeviceCheck:
        """The bound as a launch of its own sees to it; a launch that has other work too is never skipped."""
        check, apart = self.check(bound, integers_of(self.graph, bound)), bound.status in self.looking
        scanned = apart and check.launch >= 0 and check.buffer in self.graph.inputs
        check = check if apart else replace(check, launch=-1)
        return DeviceCheck(check, bound.status, self.writers[bound.status], scanned)


def integers_of(graph: Graph, bound: IndexBound) -> str:
    """The tensor that a bound is about, for people too: its own, or the one that this is a whole view of."""
    own = bound.formula is not None or bound.part[1] != 1
    return bound.tensor if own else followed(graph, bound.tensor, {})


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


def empty_guards(bound: IndexBound) -> list[Guard]:
    """For indices that are not checked: an axis without elements has no remainder to read at, so there must be none."""
    if bound.formula is None or (bound.size.constant or 0) > 0:
        return []
    message = f"{bound.node}: the indices {bound.tensor} choose among the elements of an axis"
    return [Guard(minimum(product(bound.shape), ONE), "<=", bound.size, message)]


def without_duplicates(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Guards in order, equal conditions once (the first message counts)."""
    seen: dict[tuple[Index, str, Index], Guard] = {}
    for g in guards:
        seen.setdefault((g.left, g.relation, g.right), g)
    return tuple(seen.values())
