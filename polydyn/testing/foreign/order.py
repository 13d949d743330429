"""Order, convexity and reachability of groups and waves, recomputed by networkx.

The inputs of a tensor are read from the loads of the groups' own bodies, anywhere in an expression. The bit sets of
``fusion/partition.py`` and the declared reads and writes of launches are not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import networkx as nx

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.place import PlacedGroup
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Load
from polydyn.schedules.index import Atom, Index
from polydyn.testing.foreign.expressions import ForeignError


def loads(x: Any) -> Iterator[str]:
    """Yield the tensors that an expression reads, as values and as subscripts."""
    if isinstance(x, Index):
        for factors in x.terms:
            for a in factors:
                yield from loads(a)
    elif isinstance(x, (tuple, list)):
        for y in x:
            yield from loads(y)
    elif dataclasses.is_dataclass(x):
        if isinstance(x, Load):
            yield x.buffer
        if isinstance(x, Atom) and x.kind == "fetch":
            yield x.name
        for f in dataclasses.fields(x):
            yield from loads(getattr(x, f.name))


def _wrong(message: str, tensor: str) -> ForeignError:
    return ForeignError(message, tensor=tensor, rule="the order is computed again (POLYDYN_VERIFY=2)")


# -- groups ------------------------------------------------------------------------------------------------------------


def check_groups(plan: FusionPlan) -> None:
    """Check the groups of a fusion plan; ForeignError names a tensor.

    - The groups, with concatenations as separate nodes, have no cycle: so none is between two nodes of another.
    - Every group follows all groups that it reads, through concatenations too.
    - A group stores in memory all tensors that other groups, concatenations and the caller read.
    - Everything that an output needs is computed by exactly one group.
    """
    home: dict[str, int] = {}
    for k, g in enumerate(plan.groups):
        for n in g.nodes:
            if home.setdefault(n.output, k) != k:
                raise _wrong("two groups compute it", n.output)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(plan.groups)))
    given = {*plan.graph.inputs, *plan.graph.constants}
    needed: dict[int, set[str]] = {k: set() for k in range(len(plan.groups))}
    whole = {w.target for w in plan.windows.values()}

    def reads(tensor: str, reader: Any) -> None:
        if tensor in whole:
            graph.add_edge(tensor, reader)
        elif tensor in home:
            if home[tensor] != reader:
                graph.add_edge(home[tensor], reader, tensor=tensor)
                needed[home[tensor]].add(tensor)
        elif tensor not in given:
            raise _wrong("it is read, and no group computes it", tensor)

    for t, w in plan.windows.items():
        reads(t, w.target)
    for k, g in enumerate(plan.groups):
        for n in g.nodes:
            for t in loads(n.body):
                reads(t, k)
    for t in plan.graph.outputs:
        reads(t, "caller")
    _check_quotient(plan, graph, needed)


def _check_quotient(plan: FusionPlan, graph: nx.DiGraph, needed: dict[int, set[str]]) -> None:
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [a for a, _ in nx.find_cycle(graph)]
        first = next(k for k in cycle if isinstance(k, int))
        raise _wrong(f"a cycle of groups {cycle}: one of them is not convex", plan.groups[first].nodes[0].output)
    for k, g in enumerate(plan.groups):
        late = [a for a in nx.ancestors(graph, k) if isinstance(a, int) and a >= k]
        if late:
            raise _wrong(f"its group {k} needs group {late[0]}, which comes later", g.nodes[0].output)
        missing = needed[k] - set(g.outputs)
        if missing:
            raise _wrong("another group reads it, and its group does not leave it in memory", min(missing))
    if "caller" in graph:
        lost = [k for k in range(len(plan.groups)) if k not in nx.ancestors(graph, "caller")]
        unread = [k for k in lost if not _is_asked(plan, k)]
        if unread:
            raise _wrong("nothing that the caller gets needs it", plan.groups[unread[0]].nodes[0].output)


def _is_asked(plan: FusionPlan, k: int) -> bool:
    """Return whether a group is kept for checks of indices alone."""
    return bool({b.tensor for b in plan.graph.bounds} & {n.output for n in plan.groups[k].nodes})


# -- waves -------------------------------------------------------------------------------------------------------------


def check_waves(plan: HostPlan, placed: Sequence[PlacedGroup]) -> None:
    """Check the order of launches on a CPU; ForeignError names a launch and a buffer.

    A launch is in a later wave than all launches that write its inputs, and no launch of a wave writes what another one
    of it touches, except parts of one buffer. ``placed``: the groups, whose statements define loads and stores.
    """
    touched = dict(map(touches, placed))
    wave_of = waves_of(plan)
    graph = nx.DiGraph()
    writers: dict[str, list[int]] = {}
    known = [(k, touched[x.label]) for k, x in enumerate(plan.launches) if x.label in touched]
    for k, (_, written) in known:
        for b in written:
            writers.setdefault(b, []).append(k)
    for k, (read, _) in known:
        for b in read:
            graph.add_edges_from((w, k, {"buffer": b}) for w in writers.get(b, ()) if w != k)
    for a, b, data in graph.edges(data=True):
        if wave_of[a] >= wave_of[b]:
            raise ForeignError(
                f"wave {wave_of[b]} reads what wave {wave_of[a]} writes", node=plan.launches[b].label,
                tensor=data["buffer"], rule="the order is computed again (POLYDYN_VERIFY=2)",
            )  # fmt: skip
    if not nx.is_directed_acyclic_graph(graph):
        raise ForeignError("launches need each other", rule="the order is computed again (POLYDYN_VERIFY=2)")


def touches(p: PlacedGroup) -> tuple[str, tuple[set[str], set[str]]]:
    """Return the label of a group's launch, and the buffers that its statements load and store."""
    buffers = p.lowered.buffers
    read = {buffers[t] for s in p.lowered.group.statements for t in loads(s.value) if t in buffers}
    read |= {buffers[t] for s in p.lowered.group.statements for t in loads(s.index) if t in buffers}
    written = {buffers[s.array] for s in p.lowered.group.statements if s.array in buffers}
    own = {buffers[s.array] for s in p.lowered.group.statements if s.array in buffers and s.reduce is not None}
    return f"{p.fused.kind} {p.fused.outputs[0]}", (read - own, written)


def waves_of(plan: HostPlan) -> list[int]:
    """Return the wave of every launch."""
    out: list[int] = []
    for wave, count in enumerate(plan.waves or [1] * len(plan.launches)):
        out += [wave] * count
    return out
