"""CUDA devices as a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polydyn.backends.base import Kernels, Options, Target
from polydyn.codegen.cuda.kernel import MULTIPROCESSORS, CudaKernel, TensorMapOf
from polydyn.codegen.cuda.kernel import WORKSPACE as WORKSPACE_ARRAY
from polydyn.codegen.ir import Compare
from polydyn.fusion.facts import facts_of
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.cache import content_key
from polydyn.gpu.compiler import device_headers
from polydyn.gpu.targets import newest
from polydyn.graph.ir import Graph
from polydyn.lowering.place import Builder, Placed
from polydyn.lowering.place_cuda import CudaBuilder, needed
from polydyn.program.index_checks import with_index_checks
from polydyn.program.plan import WORKSPACE, Block, Candidate, HostPlan, KernelSource
from polydyn.runtime.symbols import THREADS, Condition
from polydyn.schedules.index import Index
from polydyn.search.outcomes import ChosenTiles
from polydyn.search.records import Records
from polydyn.search.strategies import strategy

LOOKS = "skipped when its integers lie in host memory, where the host looks"


class Cuda(Target[CudaKernel]):
    """Kernels in CUDA; every launch has several, and the host program takes one for each shape."""

    machine = "cuda"
    on_device = True
    unused = frozenset({"dequantize", "layout", "offsets", "widen", "prologue", "horizontal"})

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        self.arch = newest(name)

    def rewrite(self, graph: Graph) -> Graph:
        """As ``Target``. What looks for indices outside their axis is among the outputs too."""
        return with_index_checks(super().rewrite(graph))

    def builder(self, plan: FusionPlan, records: Records | None = None) -> CudaBuilder:
        """As ``Target``."""
        tuner = None
        if records is not None:
            tuner = ChosenTiles(records, strategy(self.options.strategy).name, self.name, self.options.tf32)
        return CudaBuilder(plan, self.arch, self.options.tf32, tuner)

    def place(self, builder: Builder[CudaKernel]) -> Kernels[CudaKernel]:
        """As ``Target``; versions that no size needs are left out."""
        made = super().place(builder)
        facts = facts_of(made.plan.graph.guards)
        return replace(made, placed=[needed(p, facts) for p in made.placed])

    def candidates(self, placed: Placed[CudaKernel]) -> tuple[Candidate, ...]:
        """As ``Target``."""
        return tuple(_candidate(k, placed.lowered.params, placed.lowered.buffers) for k in placed.kernels)

    def source(self, kernel: CudaKernel, key: str) -> KernelSource:
        """As ``Target``."""
        k = kernel
        return KernelSource(k.name, k.text, content_key(k.text), len(k.buffers), len(k.symbols), k.notes, k.arch)

    @property
    def headers(self) -> Mapping[str, str]:
        """As ``Target``."""
        return dict(device_headers())

    def finish(self, plan: HostPlan) -> HostPlan:
        """The host plan with a reason for every launch that only looks for wrong indices."""
        looking = {d.launch for d in plan.device_checks if d.scanned}
        launches = (replace(x, reasons=(*x.reasons, LOOKS)) if k in looking else x for k, x in enumerate(plan.launches))
        return replace(plan, launches=tuple(launches))


def _candidate(k: CudaKernel, params: Mapping[str, Index], names: Mapping[str, str]) -> Candidate:
    """A version and what comes after it, which shares its launch-time symbols."""
    device = {**params, MULTIPROCESSORS: Index.of(THREADS)}
    values = {**params, **{s: e.subs(device) for s, e in k.launch.items()}}
    multiples = [(i.subs(values), "%==", Index.of(n)) for i, n in k.multiples]
    return Candidate(
        k.name,
        tuple(WORKSPACE if a == WORKSPACE_ARRAY else names[a] for a in k.buffers),
        tuple(values[s] for s in k.symbols),
        k.grid.subs(values),
        k.smem.subs(values),
        k.version,
        k.symbols,
        sum(s in k.launch for s in k.symbols),
        (*multiples, *(_condition(c, values) for c in k.conditions)),
        Block(
            k.threads,
            k.arch,
            tuple(_tensor_map(m, values, names) for m in k.maps),
            k.workspace.subs(values),
            tuple(_candidate(x, values, names) for x in k.after),
            None if k.work is None else replace(k.work, steps=k.work.steps.subs(values)),
            k.factor,
        ),
    )


def _tensor_map(m: TensorMapOf, values: Mapping[str, Index], names: Mapping[str, str]) -> TensorMapOf:
    dims, strides = (tuple(i.subs(values) for i in x) for x in (m.dims, m.strides))
    return replace(m, buffer=names[m.buffer], offset=m.offset.subs(values), dims=dims, strides=strides)


def _condition(c: Compare, values: Mapping[str, Index]) -> Condition:
    """A comparison of integers as a guard's relation."""
    left, right = c.left.subs(values), c.right.subs(values)
    forms = {
        "==": (left, "==", right), "<=": (left, "<=", right), ">=": (right, "<=", left),
        "<": (left + 1, "<=", right), ">": (right + 1, "<=", left),
    }  # fmt: skip
    return forms[c.relation]
