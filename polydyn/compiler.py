"""polydyn.compile: the whole way through the house, one named call for each stage."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from polydyn.build.features import architecture, machine_features
from polydyn.codegen.cuda_kernel import MULTIPROCESSORS, CudaKernel, TensorMapOf
from polydyn.codegen.cuda_kernel import WORKSPACE as CUDA_WORKSPACE
from polydyn.codegen.kernel import AVX2, AVX512, NEON, CpuTarget, Kernel, leaf_headers
from polydyn.errors import UnsupportedError
from polydyn.fusion.facts import facts_of
from polydyn.fusion.pipeline import check_names, fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.gpu.cache import content_key
from polydyn.gpu.compiler import device_headers
from polydyn.gpu.targets import BASE, CUDA_TARGETS, is_cuda, newest
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Graph
from polydyn.lowering.aliases import without_reshapes
from polydyn.lowering.cuda import CudaBuilder, CudaTuner, PlacedCuda, needed
from polydyn.lowering.kernels import KernelBuilder, PlacedKernel, Tuner, bind, flops
from polydyn.lowering.pack import pack
from polydyn.program.assemble import build_program
from polydyn.program.bounds import place_bounds, without_duplicates
from polydyn.program.evaluation import THREADS
from polydyn.program.offenders import find_offenders
from polydyn.program.plan import (
    WORKSPACE,
    Buffer,
    Choice,
    HostPlan,
    KernelSource,
    Launch,
    Variant,
    Version,
    size_bytes,
)
from polydyn.program.program import Program, check_threads
from polydyn.program.waves import join_waves
from polydyn.schedules.decision import map_indices
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.schedules.index import ZERO, Index, product
from polydyn.searches import ChosenByRecords, ChosenTiles
from polydyn.shapes.sizes import Dims, sizes_by_name
from polydyn.tuning.records import Records
from polydyn.tuning.strategy import strategy

NOT_ON_CUDA = ("layout", "widen", "prologue", "horizontal")
"""Passes for the CPU's kernels and host program only."""

Placed: TypeAlias = "PlacedKernel | PlacedCuda"


@dataclass(frozen=True)
class Options:
    """Choices that change what is compiled.

    ``without``: names of passes that are left out, of ``polydyn.fusion.pipeline.PASSES``: ``merge`` (GEMM merging),
    ``stitch``, ``attention``, ``horizontal`` ... Results are the same but for rounding; InputError when there is none
    of that name. ``strategy``: whose searches in the records choose tiles (``polydyn.tuning.strategy``). ``tf32``: on
    CUDA, products of float32 take tensor cores, which round their operands to 10 bits of mantissa; sums stay float32.
    """

    without: Collection[str] = frozenset()
    strategy: str = "polydyn"
    tf32: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "without", check_names(self.without))


def compile(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    threads: int | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
) -> Program:
    """Compiles an ONNX model once, for every shape.

    ``model``: path, bytes or ``onnx.ModelProto``. ``target``: ``cpu`` (this machine), ``cpu:avx512``, ``cpu:avx2``;
    ``cuda:sm_80`` (86, 89, 90a, 100), ``cuda`` (all of them), ``cuda:emulated`` (docs/adr/0011-cuda-runtime.md).
    ``dims``: what is known of dynamic dims by name, an inclusive range (low, high) or ``polydyn.Sizes`` with a multiple
    and likely sizes; ranges and multiples are checked on every call; no range means [0, inf).
    ``threads``: of every call, default all cores of this process. ``records``: a file of ``polydyn.tune``, only
    read; equal records give equal programs. What was tuned for several numbers of threads is chosen by that of a
    call; for a GPU the records of its architecture count. Raises PolydynError, see ``polydyn.errors``.
    """
    check_threads(threads)
    plan = plan_program(model, target=target, dims=dims, options=options, records=records)
    program = build_program(plan, target=target, threads=threads)
    del plan
    _return_memory()
    return program


def _return_memory() -> None:
    """Gives the heap that compiling took back to the system; glibc would keep it, 80 MB after BERT-base."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def plan_program(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
) -> HostPlan:
    """Everything of ``compile`` that needs no C compiler: kernels as text, packed constants, the host plan."""
    graph = import_model(model, dims)
    if records is None:
        plan = plan_graph(graph, target=target, options=options)
    else:
        with Records.open(records, readonly=True) as opened:
            plan = plan_graph(graph, target=target, options=options, records=opened)
    return replace(plan, dims=sizes_by_name(dims))


def plan_graph(
    graph: Graph, *, target: str = "cpu", options: Options | None = None, records: Records | None = None
) -> HostPlan:
    """The host plan of a graph of primitives."""
    options = options or Options()
    name = strategy(options.strategy).name if records else ""
    if is_cuda(target):
        return cuda_plan(graph, options, target, ChosenTiles(records, name, target, options.tf32) if records else None)
    if options.tf32:
        raise UnsupportedError(f"tf32 on {target}", rule="tensor cores", remedy="a CUDA target, or no tf32")
    tuner = ChosenByRecords(records, name, cpu_target(target), target) if records else None
    graph, builder, placed = place_kernels(graph, target=target, options=options, tuner=tuner)
    placed, aliases = without_reshapes(builder.plan, placed)
    notes = (*graph.notes, *builder.notes, *aliases, *(tuner.notes if tuner else ()))
    host = host_plan(builder.plan, placed, builder.target, replace(graph, notes=notes))
    return host if "horizontal" in options.without else join_waves(host)


def place_kernels(
    graph: Graph, *, target: str = "cpu", options: Options | None = None, tuner: Tuner | None = None
) -> tuple[Graph, KernelBuilder, list[PlacedKernel]]:
    """The graph as it was fused, the builder with its fusion plan, and the kernels in launch order."""
    processor, options = cpu_target(target), options or Options()
    graph = rewrite_graph(graph, options.without)
    plan = fusion_plan(graph, options.without)
    builder = KernelBuilder(plan, processor, tuner)
    placed = [k for g in plan.groups for k in builder.place(g)]
    return replace(graph, notes=plan.graph.notes), builder, placed


def cpu_target(target: str) -> CpuTarget:
    """The code generator's view of a target name."""
    if target == "cpu":
        if architecture() in ("aarch64", "arm64"):
            return NEON
        features = machine_features()
        return AVX512 if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= features else AVX2
    known = {"cpu:avx512": AVX512, "cpu:avx2": AVX2}
    if target not in known:
        raise UnsupportedError(
            f"target {target} is not built",
            rule="known targets",
            remedy=f"use cpu, {', '.join((*known, *CUDA_TARGETS))}",
        )
    return known[target]


def host_plan(plan: FusionPlan, placed: list[PlacedKernel], target: CpuTarget, graph: Graph) -> HostPlan:
    """Buffers, packed constants, kernels and launches of a placed fusion plan of ``graph``."""
    constants = _constants(plan, placed)
    buffers = _buffers(plan, placed, constants, graph)
    kernels = {
        k.name: KernelSource(k.name, k.text, p.key, len(k.buffers), len(k.symbols), k.notes)
        for p in placed
        for k in (p.alternatives.kernels if p.alternatives else (p.kernel,))
    }
    launches = tuple(_launch(plan, p, buffers) for p in placed)
    return _host_plan(graph, placed, constants, buffers, kernels, launches, leaf_headers(target.width))


def cuda_builder(
    graph: Graph, options: Options | None = None, arch: str = BASE, tuner: CudaTuner | None = None
) -> tuple[Graph, CudaBuilder]:
    """The graph as it is fused, and the builder of its CUDA kernels with the fusion plan.

    Outputs of the graph are then those of ``find_offenders`` too. ``arch``: with ``sm_90a`` also the versions that only
    it can run.
    """
    options = options or Options()
    off = {*options.without, *NOT_ON_CUDA}
    graph = find_offenders(rewrite_graph(graph, off))
    return graph, CudaBuilder(fusion_plan(graph, off, cuda=True), arch, options.tf32, tuner)


def place_cuda_kernels(
    graph: Graph, options: Options | None = None, arch: str = BASE, tuner: CudaTuner | None = None
) -> tuple[Graph, CudaBuilder, list[PlacedCuda]]:
    """The graph as it was fused, the builder with its fusion plan, and all kernels in launch order."""
    graph, builder = cuda_builder(graph, options, arch, tuner)
    facts, plan = facts_of(graph.guards), builder.plan
    placed = [needed(k, facts) for g in plan.groups for k in builder.place(g)]
    return replace(graph, notes=(*plan.graph.notes, *builder.notes)), builder, placed


def cuda_plan(graph: Graph, options: Options, target: str, tuner: ChosenTiles | None = None) -> HostPlan:
    """The host plan of a graph for a CUDA device: every launch with all its versions."""
    outputs = graph.outputs  # what checks of indices find is none of the model's
    graph, builder, placed = place_cuda_kernels(graph, options, newest(target), tuner)
    notes = (*graph.notes, *(tuner.notes if tuner else ()))
    graph, plan = replace(graph, outputs=outputs, notes=notes), builder.plan
    constants = _constants(plan, placed)
    buffers = _buffers(plan, placed, constants, graph)
    sources = {
        k.name: KernelSource(k.name, k.text, content_key(k.text), len(k.buffers), len(k.symbols), k.notes, k.arch)
        for p in placed
        for v in p.versions
        for k in (v, *v.after)
    }
    launches = tuple(_cuda_launch(plan, p, buffers) for p in placed)
    whole = _host_plan(graph, placed, constants, buffers, sources, launches, dict(device_headers()))
    looks = "skipped when its integers lie in host memory, where the host looks"
    why = {d.launch: looks for d in whole.device_checks if d.scanned}
    told = (replace(x, reasons=(*x.reasons, why[k])) if k in why else x for k, x in enumerate(launches))
    return replace(whole, place="cuda", launches=tuple(told))


def _host_plan(
    graph: Graph,
    placed: Sequence[Placed],
    constants: dict[str, Array],
    buffers: dict[str, Buffer],
    kernels: Mapping[str, KernelSource],
    launches: tuple[Launch, ...],
    headers: dict[str, str],
) -> HostPlan:
    writers = {b: k for k, p in enumerate(placed) for b in _written(p)}
    bounds = place_bounds(graph, buffers, launches, writers)
    return HostPlan(
        graph.name,
        graph.inputs,
        graph.outputs,
        buffers,
        constants,
        graph.sources,
        without_duplicates((*graph.guards, *bounds.guards)),
        tuple(kernels.values()),
        launches,
        (*graph.notes, *_copies(placed), *bounds.notes),
        headers,
        bounds.checks,
        device_checks=bounds.on_device,
    )


def _constants(plan: FusionPlan, placed: Sequence[Placed]) -> dict[str, Array]:
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
    plan: FusionPlan, placed: Sequence[Placed], constants: Mapping[str, Array], graph: Graph
) -> dict[str, Buffer]:
    """``graph``: has the shapes of inputs and outputs as the caller knows them; the plan may have split their axes."""
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


def _written(p: Placed) -> list[str]:
    """The buffers that a kernel writes."""
    arrays = p.lowered.group.arrays
    return [b for a, b in p.lowered.buffers.items() if arrays[a].role == "output"]


def _copies(placed: Sequence[Placed]) -> list[str]:
    """The kernels that only move elements."""
    nodes = [n for p in placed for n in p.fused.nodes if len(p.fused.nodes) == 1]
    return [f"{n.output} is a copy of {n.inputs[0]}" for n in nodes if n.is_view]


def _launch(plan: FusionPlan, p: PlacedKernel, buffers: Mapping[str, Buffer]) -> Launch:
    k, params, own = p.kernel, p.lowered.params, _variant(p, p.kernel)
    choice = None
    if p.alternatives is not None:
        decision = map_indices(p.alternatives.decision, lambda i: bind(params, i))
        choice = Choice(tuple(_variant(p, k) for k in p.alternatives.kernels), decision)
    return Launch(
        k.name,
        tuple(p.lowered.buffers[a] for a in k.buffers),
        own.symbols,
        own.tasks,
        own.scratch,
        p.flops,
        label=f"{p.fused.kind} {p.fused.outputs[0]}",
        flops=p.flops,
        skip_if_same=_shared(plan, p.fused),
        copied=_copied(plan, p.fused),
        bytes=sum((size_bytes(buffers[b]) for b in sorted(set(p.lowered.buffers.values()))), ZERO),
        names=k.symbols,
        choices=len(k.symbols) - len(params),
        reasons=(*p.fused.reasons, *plan.why_apart(p.fused), *(p.alternatives.reasons if p.alternatives else ())),
        choice=choice,
        kind=p.fused.kind,
        writes=tuple(_written(p)),
    )


def _variant(p: PlacedKernel, k: Kernel) -> Variant:
    """A kernel of a placed group with its launch over the model's symbols."""
    params = p.lowered.params
    symbols = dict(params)
    for s in k.symbols[len(params) :]:
        symbols[s] = bind(params, k.launch[s])
    return Variant(k.name, tuple(symbols[s] for s in k.symbols), bind(symbols, k.tasks), bind(symbols, k.scratch))


def _cuda_launch(plan: FusionPlan, p: PlacedCuda, buffers: Mapping[str, Buffer]) -> Launch:
    params, names = p.lowered.params, p.lowered.buffers
    kernels = [k for v in p.versions for k in (v, *v.after)]
    arrays = [a for k in kernels for a in (*k.buffers, *(m.buffer for m in k.maps))]
    used = [names[a] for a in arrays if a != CUDA_WORKSPACE]
    return Launch(
        p.versions[0].name,
        tuple(dict.fromkeys(used)),
        tuple(params.values()),
        sum((product(plan.graph.tensors[n].shape) for n in p.fused.outputs), ZERO),  # nothing to do without elements
        ZERO,
        ZERO,
        label=f"{p.fused.kind} {p.fused.outputs[0]}",
        flops=flops(plan, p.fused),
        skip_if_same=_shared(plan, p.fused),
        copied=_copied(plan, p.fused),
        bytes=sum((size_bytes(buffers[b]) for b in sorted(set(used))), ZERO),
        names=tuple(params),
        reasons=(*p.fused.reasons, *p.reasons),
        versions=tuple(_version(k, params, names) for k in p.versions),
    )


def _version(k: CudaKernel, params: Mapping[str, Index], names: Mapping[str, str]) -> Version:
    """A version and what comes after it, which shares its launch-time symbols."""
    device = {**params, MULTIPROCESSORS: Index.of(THREADS)}
    known = {**params, **{s: bind(device, e) for s, e in k.launch.items()}}
    multiples = [(bind(known, i), "%==", Index.of(n)) for i, n in k.multiples]
    conditions = [_condition(bind(known, c.left), c.relation, bind(known, c.right)) for c in k.conditions]
    return Version(
        k.name,
        k.version,
        tuple(WORKSPACE if a == CUDA_WORKSPACE else names[a] for a in k.buffers),
        tuple(known[s] for s in k.symbols),
        bind(known, k.grid),
        bind(known, k.smem),
        k.threads,
        (*multiples, *conditions),
        bind(known, k.workspace),
        tuple(_version(x, known, names) for x in k.after),
        tuple(_tensor_map(m, known, names) for m in k.maps),
        k.arch,
        None if k.work is None else replace(k.work, steps=bind(known, k.work.steps)),
        factor=k.factor,
    )


def _tensor_map(m: TensorMapOf, known: Mapping[str, Index], names: Mapping[str, str]) -> TensorMapOf:
    dims, strides = (tuple(bind(known, i) for i in x) for x in (m.dims, m.strides))
    return replace(m, buffer=names[m.buffer], offset=bind(known, m.offset), dims=dims, strides=strides)


def _condition(left: Index, relation: str, right: Index) -> tuple[Index, str, Index]:
    """A comparison of integers as a guard's relation."""
    forms = {
        "==": (left, "==", right), "<=": (left, "<=", right), ">=": (right, "<=", left),
        "<": (left + 1, "<=", right), ">": (right + 1, "<=", left),
    }  # fmt: skip
    return forms[relation]


def _shared(plan: FusionPlan, group: FusedGroup) -> tuple[str, str] | None:
    """The input and output that hold the same elements when this group has nothing to do."""
    pairs = {a.copy: (a.input, a.output) for a in plan.appends}
    return pairs.get(group.outputs[0]) if len(group.nodes) == 1 else None


def _copied(plan: FusionPlan, group: FusedGroup) -> Index:
    """Bytes that a group writes when all it does is moving elements."""
    tensors = [plan.graph.tensors[t] for t in group.outputs if all(n.is_view for n in group.nodes)]
    return sum((product(t.shape) * ITEMSIZE[t.dtype] for t in tensors), ZERO)
