"""polydyn.compile: the whole way through the house, one named call for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from polydyn.build.features import architecture, machine_features
from polydyn.codegen.kernel import AVX2, AVX512, NEON, CpuTarget
from polydyn.errors import UnsupportedError
from polydyn.fusion.attention import fuse_attention
from polydyn.fusion.grouping import fuse
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.importer import ModelLike
from polydyn.graph.passes.merge import merge_contractions
from polydyn.graph.verify import verify_graph
from polydyn.lowering.kernels import KernelBuilder, PlacedKernel, bind
from polydyn.lowering.pack import pack
from polydyn.program.assemble import build_program
from polydyn.program.plan import Buffer, HostPlan, KernelSource, Launch
from polydyn.program.program import Program
from polydyn.schedules.expr import Array
from polydyn.schedules.index import Index

LEAF = "pd_cpu.h"


@dataclass(frozen=True)
class Options:
    """Choices that change what is compiled.

    ``merge``: contractions that share an operand become one (GEMM merging). ``attention``: scores, softmax and values
    become one kernel.
    """

    merge: bool = True
    attention: bool = True


def compile(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Mapping[str, tuple[int, int | None]] | None = None,
    threads: int | None = None,
    options: Options | None = None,
) -> Program:
    """Compiles an ONNX model once, for every shape.

    ``model``: path, bytes or ``onnx.ModelProto``. ``target``: ``cpu`` (this machine), ``cpu:avx512``, ``cpu:avx2``.
    ``dims``: inclusive ranges of dynamic dims by name, checked on every call; no range means [0, inf).
    ``threads``: of every call, default all cores of this process. Raises PolydynError, see ``polydyn.errors``.
    """
    return build_program(plan_program(model, target=target, dims=dims, options=options), target=target, threads=threads)


def plan_program(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Mapping[str, tuple[int, int | None]] | None = None,
    options: Options | None = None,
) -> HostPlan:
    """Everything of ``compile`` that needs no C compiler: kernels as text, packed constants, the host plan."""
    processor, options = cpu_target(target), options or Options()
    graph = import_model(model, dims)
    graph = fold(graph)
    if options.merge:
        graph = merge_contractions(graph)
    verify_graph(graph)
    plan = fuse(graph)
    if options.attention:
        plan = fuse_attention(plan)
    builder = KernelBuilder(plan, processor)
    placed = [k for g in plan.groups for k in builder.place(g)]
    return host_plan(plan, placed, processor)


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
            f"target {target} is not built", rule="known targets", remedy=f"use cpu, {', '.join(known)}"
        )
    return known[target]


def host_plan(plan: FusionPlan, placed: list[PlacedKernel], target: CpuTarget) -> HostPlan:
    """Buffers, packed constants, kernels and launches of a placed fusion plan."""
    graph = plan.graph
    constants = _constants(plan, placed)
    header = files("polydyn.codegen") / "leaf" / LEAF
    kernels = {
        p.kernel.name: KernelSource(
            p.kernel.name, p.kernel.text, p.key, len(p.kernel.buffers), len(p.kernel.symbols)
        )
        for p in placed
    }
    return HostPlan(
        graph.name,
        graph.inputs,
        graph.outputs,
        _buffers(plan, placed, constants),
        constants,
        graph.sources,
        graph.guards,
        tuple(kernels.values()),
        tuple(map(_launch, placed)),
        tuple(r for p in placed for r in p.fused.reasons),
        {LEAF: f"#define PD_W {target.width}\n{header.read_text()}"},  # every unit includes it first
    )


def _constants(plan: FusionPlan, placed: list[PlacedKernel]) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for p in placed:
        for name in p.lowered.buffers.values():
            packing = p.lowered.packs.get(name)
            if packing is not None and name not in out:
                out[name] = pack(packing, plan.graph.constants[packing.source])
            elif packing is None and name in plan.graph.constants:
                out[name] = plan.graph.constants[name]
    return out


def _buffers(plan: FusionPlan, placed: list[PlacedKernel], constants: Mapping[str, Array]) -> dict[str, Buffer]:
    graph = plan.graph
    used = {n for p in placed for n in p.lowered.buffers.values()} | set(graph.inputs) | set(graph.outputs)
    out: dict[str, Buffer] = {}
    for name in sorted(used):
        if name in constants:
            a = constants[name]
            out[name] = Buffer(name, str(a.dtype), tuple(map(Index.of, a.shape)), "constant")
            continue
        t = graph.tensors[name]
        role = "input" if name in graph.inputs else "output" if name in graph.outputs else "intermediate"
        out[name] = Buffer(name, t.dtype, t.shape, role)
    return out


def _launch(p: PlacedKernel) -> Launch:
    k, params = p.kernel, p.lowered.params
    symbols = dict(params)
    for s in k.symbols[len(params) :]:
        symbols[s] = bind(params, k.launch[s])
    return Launch(
        k.name,
        tuple(p.lowered.buffers[a] for a in k.buffers),
        tuple(symbols[s] for s in k.symbols),
        bind(symbols, k.tasks),
        bind(symbols, k.scratch),
        p.flops,
        label=f"{p.fused.kind} {p.fused.outputs[0]}",
        flops=p.flops,
    )
