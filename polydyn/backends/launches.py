"""From placed kernels to the host plan: buffers, packed constants, and a launch for every place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polydyn.backends.base import Kernels, Target
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Graph
from polydyn.lowering.pack import pack
from polydyn.lowering.place import K, Placed, flops
from polydyn.program.bounds import place_bounds, without_duplicates
from polydyn.program.plan import Buffer, HostPlan, KernelSource, Launch, size_bytes
from polydyn.schedules.decision import map_indices
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.schedules.index import ZERO, Index, product


def host_plan(graph: Graph, kernels: Kernels[K], target: Target[K]) -> HostPlan:
    """The host plan of a model. ``graph``: as it was fused, with the model's outputs only; has the shapes of inputs and
    outputs as the caller sees them.
    """
    plan, placed = kernels.plan, kernels.placed
    constants = _constants(plan, placed)
    buffers = _buffers(plan, placed, constants, graph)
    launches = tuple(_launch(plan, p, buffers, target) for p in placed)
    writers = {b: k for k, p in enumerate(placed) for b in p.written}
    bounds = place_bounds(graph, buffers, launches, writers)
    made = HostPlan(
        graph.name,
        graph.inputs,
        graph.outputs,
        buffers,
        constants,
        graph.sources,
        without_duplicates((*graph.guards, *bounds.guards)),
        tuple(_sources(placed, target).values()),
        launches,
        (*plan.graph.notes, *kernels.notes, *_copies(placed), *bounds.notes),
        dict(target.headers),
        bounds.checks,
        place=target.machine,
        device_checks=bounds.on_device,
    )
    return target.finish(made)


def _sources(placed: Sequence[Placed[K]], target: Target[K]) -> dict[str, KernelSource]:
    """Each kernel once, by name; also those that are launched after another."""
    every = [(k, p.key) for p in placed for first in p.kernels for k in (first, *getattr(first, "after", ()))]
    made = (target.source(k, key) for k, key in every)
    return {s.name: s for s in made}


def _constants(plan: FusionPlan, placed: Sequence[Placed[Any]]) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for p in placed:
        for name in p.lowered.buffers.values():
            packing = p.lowered.packs.get(name)
            if packing is not None and name not in out:
                out[name] = pack(packing, plan.graph.constants[packing.source])
            elif packing is None and name in plan.graph.constants:
                out[name] = plan.graph.constants[name]
    return out


def _buffers(
    plan: FusionPlan, placed: Sequence[Placed[Any]], constants: Mapping[str, Array], graph: Graph
) -> dict[str, Buffer]:
    """``graph``: has the shapes of inputs and outputs as the caller sees them; the plan may have split their axes."""
    used = {n for p in placed for n in p.lowered.buffers.values()} | set(graph.inputs) | set(graph.outputs)
    out: dict[str, Buffer] = {}
    for name in sorted(used):
        if name in constants:
            a = constants[name]
            out[name] = Buffer(name, str(a.dtype), tuple(map(Index.of, a.shape)), "constant")
            continue
        t = (plan.graph if name not in graph.outputs else graph).tensors[name]
        role = "input" if name in graph.inputs else "output" if name in graph.outputs else "intermediate"
        out[name] = Buffer(name, t.dtype, t.shape, role, plan.strides.get(name, ()))
    return out


def _copies(placed: Sequence[Placed[Any]]) -> list[str]:
    """The kernels that only move elements."""
    nodes = [n for p in placed for n in p.fused.nodes if len(p.fused.nodes) == 1]
    return [f"{n.output} is a copy of {n.inputs[0]}" for n in nodes if n.is_view]


def _launch(plan: FusionPlan, p: Placed[K], buffers: Mapping[str, Buffer], target: Target[K]) -> Launch:
    params, operations = p.lowered.params, flops(plan, p.fused)
    made = Launch(
        target.candidates(p),
        sum((product(plan.graph.tensors[n].shape) for n in p.fused.outputs), ZERO),
        operations,
        map_indices(p.decision, lambda i: i.subs(params)),
        f"{p.fused.kind} {p.fused.outputs[0]}",
        p.fused.kind,
        flops=operations,
        copied=_copied(plan, p.fused),
        skip_if_same=_shared(plan, p.fused),
        writes=p.written,
        reasons=(*p.fused.reasons, *plan.why_apart(p.fused), *p.reasons),
    )
    return replace(made, bytes=sum((size_bytes(buffers[b]) for b in sorted(made.buffers)), ZERO))


def _shared(plan: FusionPlan, group: FusedGroup) -> tuple[str, str] | None:
    """The input and output that hold the same elements when this group has nothing to do."""
    pairs = {a.copy: (a.input, a.output) for a in plan.appends}
    return pairs.get(group.outputs[0]) if len(group.nodes) == 1 else None


def _copied(plan: FusionPlan, group: FusedGroup) -> Index:
    """Bytes that a group writes when all it does is moving elements."""
    tensors = [plan.graph.tensors[t] for t in group.outputs if all(n.is_view for n in group.nodes)]
    return sum((product(t.shape) * ITEMSIZE[t.dtype] for t in tensors), ZERO)
