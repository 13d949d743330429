"""Checks of data-dependent subscripts: an index outside its axis is an error, and never wraps silently.

On a CPU, the index tensor of a gather is scanned before the first launch that reads it, in the caller's thread. This is
one pass over a few integers. If the tensor is a view of a whole buffer, that buffer is scanned. Otherwise (an index cut
out of a larger tensor) the integers are written to memory and scanned after all launches. On a device a separate launch
checks the integers (``index_checks.py``), through any view; only inputs in host memory are scanned by the host.
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
    """The result for a graph's index bounds: buffer checks, guards on sizes, notes on indices that are not checked.

    ``on_device``: the checks that a device makes.
    """

    checks: tuple[IndexCheck, ...]
    guards: tuple[Guard, ...]
    notes: tuple[str, ...]
    on_device: tuple[DeviceCheck, ...] = ()


def place_bounds(
    graph: Graph, buffers: Mapping[str, Buffer], launches: Iterable[Launch], writers: Mapping[str, int]
) -> Bounds:
    """Place every index bound of the graph.

    ``writers`` maps a buffer to the last launch that writes it (inputs have none). ShapeError: a constant index is
    outside its axis at every size.
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
            check = device.setdefault(bound.status, readers.on_device(bound))
            scanned = check.check if check.scanned else None
        else:
            scanned = readers.check(bound, name) if name in buffers else None
            if scanned is None or scanned.launch < 0:
                notes.append(f"{bound.node}: the indices {bound.tensor} are not checked to lie inside {bound.size}")
                guards += empty_guards(bound)
                continue
        if scanned is not None:
            checks.setdefault((scanned.buffer, bound.size, bound.offset, bound.part), scanned)
    ordered = sorted(checks.values(), key=lambda c: c.launch)
    on_device = sorted(device.values(), key=lambda c: c.launch)
    return Bounds(tuple(ordered), tuple(guards), tuple(dict.fromkeys(notes)), tuple(on_device))


class _Readers:
    """The launches that read each buffer. Launches that only check indices do not count."""

    def __init__(self, graph: Graph, launches: Iterable[Launch], writers: Mapping[str, int]) -> None:
        self.graph, self.writers = graph, writers
        launches = tuple(launches)
        self.end = len(launches)
        written: dict[int, list[str]] = {}
        for b, k in writers.items():
            written.setdefault(k, []).append(b)
        self.checking = {b.status for b in graph.bounds if b.status and written[writers[b.status]] == [b.status]}
        apart = {writers[s] for s in self.checking}
        self.readers: dict[str, list[int]] = {}
        for k, launch in enumerate(launches):
            for b in set(launch.buffers) if k not in apart else ():
                self.readers.setdefault(b, []).append(k)

    def check(self, bound: IndexBound, name: str) -> IndexCheck:
        """Return the check of a tensor's integers before the first launch that reads them; its launch is -1 if there
        is none."""
        first = min((k for k in self.readers.get(name, []) if k > self.writers.get(name, -1)), default=-1)
        message = f"{bound.node}: an index in '{name}' lies outside its axis of size {bound.size}"
        return IndexCheck(name, bound.size, bound.offset, first, message, bound.part)

    def at_end(self, bound: IndexBound) -> IndexCheck:
        """Return the check after all launches of integers that are written to memory. Other readers of the integers
        stay inside the axis anyway."""
        message = f"{bound.node}: an index in '{bound.tensor}' lies outside its axis of size {bound.size}"
        return IndexCheck(bound.kept, bound.size, ZERO, self.end, message)

    def on_device(self, bound: IndexBound) -> DeviceCheck:
        """Return the check by a launch on the device. A launch that also does other work is never skipped."""
        check, apart = self.check(bound, integers_of(self.graph, bound)), bound.status in self.checking
        scanned = apart and check.launch >= 0 and check.buffer in self.graph.inputs
        check = check if apart else replace(check, launch=-1)
        return DeviceCheck(check, bound.status, self.writers[bound.status], scanned)


def integers_of(graph: Graph, bound: IndexBound) -> str:
    """Return the name of a bound's integers for messages: its tensor, or the tensor that this is a full view of."""
    own = bound.formula is not None or bound.part[1] != 1
    return bound.tensor if own else followed(graph, bound.tensor, {})


def followed(graph: Graph, tensor: str, buffers: Mapping[str, object]) -> str:
    """Return the buffer that holds exactly the tensor's integers, or the last tensor on the way if there is none."""
    producers = graph.producer()
    while tensor not in buffers and tensor not in graph.constants:
        node = producers.get(tensor)
        base = _base(graph, node) if isinstance(node, Compute) else None
        if base is None:
            break
        tensor = base
    return tensor


def _base(graph: Graph, n: Compute) -> str | None:
    """Return the tensor that a view (or a cast between integers) shows completely: the element counts are equal and
    every iterator is used."""
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
    """Return guards on the axis for constant indices. ShapeError: the axis is too short at every size."""
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
    """Return a guard for unchecked indices: an empty axis allows no index, because no remainder exists."""
    if bound.formula is None or (bound.size.constant or 0) > 0:
        return []
    message = f"{bound.node}: the indices {bound.tensor} choose among the elements of an axis"
    return [Guard(minimum(product(bound.shape), ONE), "<=", bound.size, message)]


def without_duplicates(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """Return the guards in order, with equal conditions once (the first message is kept)."""
    seen: dict[tuple[Index, str, Index], Guard] = {}
    for g in guards:
        seen.setdefault((g.left, g.relation, g.right), g)
    return tuple(seen.values())
