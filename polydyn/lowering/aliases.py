"""Alias outputs that reshape an intermediate: the producer writes the output directly, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.expr import Load
from polydyn.schedules.index import product


def without_reshapes(plan: FusionPlan, placed: Sequence[PlacedGroup]) -> tuple[list[PlacedGroup], tuple[str, ...]]:
    """Remove kernels that copy an intermediate to an output in memory order. Return the other kernels and the notes.

    All uses of the intermediate become uses of the output. Before: ``t = f(x); y = reshape(t)``; after: ``y = f(x)``,
    and ``t`` is the same memory. A copy stays if its source is an input, an output or a constant, if either tensor is
    part of another tensor, or if the caller chooses the strides.
    """
    notes: list[str] = []
    names: dict[str, str] = {}
    remaining: list[PlacedGroup] = []
    for p in placed:
        pair = _same_memory(plan, p)
        if pair is None or pair[0] in names:
            remaining.append(p)
            continue
        source, output = pair
        names[source] = output
        notes.append(f"{output} is {source} in another shape: one memory")

    def renamed(p: PlacedGroup) -> PlacedGroup:
        if names.keys().isdisjoint(p.lowered.buffers.values()):
            return p
        buffers = {a: names.get(b, b) for a, b in p.lowered.buffers.items()}
        return replace(p, lowered=replace(p.lowered, buffers=buffers))

    return [renamed(p) for p in remaining], tuple(notes)


def _same_memory(plan: FusionPlan, p: PlacedGroup) -> tuple[str, str] | None:
    """Return (intermediate, output) if the kernel only copies the whole intermediate to the whole output at equal
    addresses, else None.
    """
    group, buffers, graph = p.lowered.group, p.lowered.buffers, plan.graph
    if len(group.statements) != 1:
        return None
    (s,) = group.statements
    if s.reduce is not None or not isinstance(s.value, Load) or s.value.buffer == s.array:
        return None
    to, source = group.arrays[s.array], group.arrays[s.value.buffer]
    output, tensor = buffers[s.array], buffers[s.value.buffer]
    shared = {*plan.windows, *(w.target for w in plan.windows.values()), *plan.strides}  # written by other kernels
    if output not in graph.outputs or output in shared or output in graph.inputs:
        return None
    if tensor in {*shared, *graph.inputs, *graph.outputs, *graph.constants}:
        return None
    if any(a.copy == output for a in plan.appends) or to.dtype != source.dtype:
        return None
    copied = product(e.subs(p.lowered.params) for _, e in s.iters)
    whole = copied == product(graph.tensors[tensor].shape) == product(graph.tensors[output].shape)
    return (tensor, output) if whole and to.address(s.index) == source.address(s.value.index) else None
