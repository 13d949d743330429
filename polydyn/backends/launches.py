"""From placed kernels to the host plan: buffers, packed constants, and a launch for every site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polydyn.backends.base import Kernels, Target
from polydyn.codegen.ir import Compare
from polydyn.codegen.kernel import COUNTERS as COUNTERS_ARRAY
from polydyn.codegen.kernel import WORKSPACE as WORKSPACE_ARRAY
from polydyn.codegen.kernel import Block, Kernel, TensorMapOf
from polydyn.errors import PolydynError
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Graph
from polydyn.lowering.pack import pack
from polydyn.lowering.place import PlacedGroup, flops
from polydyn.program.bounds import place_bounds, without_duplicates
from polydyn.program.plan import COUNTERS, WORKSPACE, Buffer, Candidate, HostPlan, Launch, size_bytes
from polydyn.runtime.symbols import Condition
from polydyn.schedules.decision import chooses, map_indices
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.schedules.index import ZERO, Index, minimum, product


def host_plan(graph: Graph, kernels: Kernels, target: Target) -> HostPlan:
    """Return the host plan of a model. ``graph``: the graph that was fused, with the model's outputs only, and with the
    shapes of inputs and outputs as the caller sees them.
    """
    plan, placed = kernels.plan, kernels.placed
    constants = _constants(plan, placed)
    buffers = _buffers(plan, placed, constants, graph)
    launches = tuple(x for p in placed for x in _launches(plan, p, buffers))
    writers = {b: k for k, x in enumerate(launches) for b in x.writes or ()}
    bounds = place_bounds(graph, buffers, launches, writers)
    host = HostPlan(
        graph.name,
        graph.inputs,
        graph.outputs,
        buffers,
        constants,
        graph.sources,
        without_duplicates((*graph.guards, *bounds.guards)),
        distinct_kernels(placed),
        launches,
        (*plan.graph.notes, *kernels.notes, *_copies(placed), *bounds.notes),
        dict(target.headers),
        bounds.checks,
        place=target.machine,
        device_checks=bounds.on_device,
    )
    return target.finish(host)


def distinct_kernels(placed: Sequence[PlacedGroup]) -> tuple[Kernel, ...]:
    """Return each kernel once, including those that are launched after another."""
    every = (k for p in placed for first in p.kernels for k in (first, *first.after))
    return tuple({k.name: k for k in every}.values())


def _constants(plan: FusionPlan, placed: Sequence[PlacedGroup]) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for p in placed:
        for name in p.lowered.buffers.values():
            packing = p.lowered.packs.get(name)
            if packing is not None and name not in out:
                out[name] = pack(packing, plan.graph.constants)
            elif packing is None and name in plan.graph.constants:
                out[name] = plan.graph.constants[name]
    return out


def _buffers(
    plan: FusionPlan, placed: Sequence[PlacedGroup], constants: Mapping[str, Array], graph: Graph
) -> dict[str, Buffer]:
    """``graph`` has the shapes of inputs and outputs as the caller sees them; the plan may have split their axes."""
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
    return out | {x.name: x for p in placed if (x := _workspace(p))}


def _copies(placed: Sequence[PlacedGroup]) -> list[str]:
    """Return notes on kernels that only move elements."""
    nodes = [n for p in placed for n in p.fused.nodes if len(p.fused.nodes) == 1]
    return [f"{n.output} is a copy of {n.inputs[0]}" for n in nodes if n.is_view]


def _workspace(p: PlacedGroup) -> Buffer | None:
    """Return the buffer of float32 sums that a launch on a CPU passes to the launch after it, or None. It is an
    ordinary intermediate, of no elements where the decision names another kernel. A device has separate memory for it.
    """
    position = next((n for n, k in enumerate(p.kernels) if k.after and k.block is None), None)
    if position is None:
        return None
    if any(k.conditions or k.multiples for k in p.kernels):
        raise PolydynError(
            f"{p.fused.outputs[0]}: a kernel beside a split reduction has conditions",
            rule="the decision alone says whether partial sums are added",
        )
    split, params = p.kernels[position], p.lowered.params
    size = split.workspace.subs({n: e.subs(params) for n, e in split.launch.items()} | params)
    sums = size // ITEMSIZE["float32"] * chooses(p.decision, position).subs(params)
    return Buffer(f"shares of {p.fused.outputs[0]}", "float32", (sums,), "intermediate")


def _launches(plan: FusionPlan, p: PlacedGroup, buffers: Mapping[str, Buffer]) -> tuple[Launch, ...]:
    """Return the launches of a site. On a CPU, the kernel after one of its candidates is a second launch. This launch
    has no work if another candidate is chosen.
    """
    first, space = _launch(plan, p, buffers), _workspace(p)
    if space is None:
        return (first,)
    (then,) = (x for c in first.candidates for x in c.after)
    (adds,) = space.shape
    last = Launch(
        (then,), first.elements * minimum(1, adds), adds, label=f"{space.name}, added", kind="shares", flops=adds,
        writes=p.written, reads=(*p.read, space.name),
    )  # fmt: skip
    first = replace(first, candidates=tuple(replace(c, after=()) for c in first.candidates))
    results = (n for n in p.written if n in first.buffers)  # a decision of a search may name the split kernel alone
    first = replace(first, writes=(*results, space.name))
    return tuple(replace(x, bytes=_bytes(x, buffers)) for x in (first, last))


def _launch(plan: FusionPlan, p: PlacedGroup, buffers: Mapping[str, Buffer]) -> Launch:
    params, operations = p.lowered.params, flops(plan, p.fused)
    launch = Launch(
        _candidates(p),
        sum((product(plan.graph.tensors[n].shape) for n in p.fused.outputs), ZERO),
        operations,
        map_indices(p.decision, lambda i: i.subs(params)),
        f"{p.fused.kind} {p.fused.outputs[0]}",
        p.fused.kind,
        flops=operations,
        copied=_copied(plan, p.fused),
        skip_if_same=_shared(plan, p.fused),
        writes=p.written,
        reads=p.read,
        reasons=(*p.fused.reasons, *plan.why_apart(p.fused), *p.reasons),
        declined=p.declined,
    )
    return replace(launch, bytes=_bytes(launch, buffers))


def _bytes(x: Launch, buffers: Mapping[str, Buffer]) -> Index:
    """Return the total size of the buffers that a launch names."""
    return sum((size_bytes(buffers[b]) for b in sorted(x.buffers)), ZERO)


def _shared(plan: FusionPlan, group: FusedGroup) -> tuple[str, str] | None:
    """Return the input and the output that have the same elements if this group is skipped."""
    pairs = {a.copy: (a.input, a.output) for a in plan.appends}
    return pairs.get(group.outputs[0]) if len(group.nodes) == 1 else None


def _copied(plan: FusionPlan, group: FusedGroup) -> Index:
    """Return the bytes that a group writes if it only moves elements, else 0."""
    tensors = [plan.graph.tensors[t] for t in group.outputs if all(n.is_view for n in group.nodes)]
    return sum((product(t.shape) * ITEMSIZE[t.dtype] for t in tensors), ZERO)


def _candidates(p: PlacedGroup) -> tuple[Candidate, ...]:
    """Return the kernels of a site as candidates of its launch. Those without a version name are numbered."""
    space = _workspace(p)
    names = {**p.lowered.buffers, WORKSPACE_ARRAY: space.name if space else WORKSPACE, COUNTERS_ARRAY: COUNTERS}
    candidates = [_candidate(k, p.lowered.params, names) for k in p.kernels]
    several = len(candidates) > 1
    return tuple(
        replace(c, name=f"kernel {n}") if several and not k.version else c
        for n, (k, c) in enumerate(zip(p.kernels, candidates, strict=True))
    )


def _candidate(k: Kernel, params: Mapping[str, Index], names: Mapping[str, str]) -> Candidate:
    """Return the candidate of a kernel at a site, with the kernels after it, which share its launch-time symbols.

    ``params``: the group's parameters over the model's symbols; ``names`` maps the kernel's buffers to the model's.
    """
    values = {**params, **{s: e.subs(params) for s, e in k.launch.items()}}
    multiples = [(i.subs(values), "%==", Index.of(n)) for i, n in k.multiples]
    return Candidate(
        k.name,
        tuple(names[a] for a in k.buffers),
        tuple(values[s] for s in k.symbols),
        k.tasks.subs(values),
        k.scratch.subs(values),
        k.version,
        k.symbols,
        sum(s in k.launch for s in k.symbols),
        (*multiples, *(_condition(c, values) for c in k.conditions)),
        tuple(_candidate(x, values, names) for x in k.after),
        k.workspace.subs(values),
        None if k.block is None else _block(k.block, values, names),
    )


def _block(b: Block, values: Mapping[str, Index], names: Mapping[str, str]) -> Block:
    maps = tuple(_tensor_map(m, values, names) for m in b.maps)
    work = None if b.work is None else b.work.subs(values)
    return replace(b, maps=maps, work=work)


def _tensor_map(m: TensorMapOf, values: Mapping[str, Index], names: Mapping[str, str]) -> TensorMapOf:
    def substituted(every: tuple[Index, ...]) -> tuple[Index, ...]:
        return tuple(i.subs(values) for i in every)

    pixels = m.pixels and replace(m.pixels, lower=substituted(m.pixels.lower), upper=substituted(m.pixels.upper))
    sizes = {"dims": substituted(m.dims), "strides": substituted(m.strides)}
    changes = {"offset": m.offset.subs(values), "pixels": pixels} | sizes
    return replace(m, buffer=names[m.buffer], **changes)  # type: ignore[arg-type]


def _condition(c: Compare, values: Mapping[str, Index]) -> Condition:
    """Return a comparison of integers as a guard's relation."""
    left, right = c.left.subs(values), c.right.subs(values)
    forms = {
        "==": (left, "==", right), "<=": (left, "<=", right), ">=": (right, "<=", left),
        "<": (left + 1, "<=", right), ">": (right + 1, "<=", left),
    }  # fmt: skip
    return forms[c.relation]
