"""The CPU as a target: this machine's processor, or a named one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from polydyn.backends.base import Kernels, Target
from polydyn.backends.options import BF16, TF32X3, Options
from polydyn.build.compiler import find_compiler, required_features
from polydyn.build.features import architecture, machine_features
from polydyn.codegen.cpu.target import AVX2, AVX512, NEON, CpuTarget, leaf_headers
from polydyn.errors import BuildError, UnsupportedError
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.targets import CUDA_TARGETS
from polydyn.graph.ir import Graph
from polydyn.lowering.aliases import without_reshapes
from polydyn.lowering.handmade import Handmade
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.program.index_checks import with_kept_indices
from polydyn.program.parallel_launches import join_waves
from polydyn.program.plan import HostPlan
from polydyn.schedules.handmade.document import Written, library
from polydyn.search.hardware import Hardware, calibrated, with_system_cache
from polydyn.search.outcomes import ChosenByRecords, first_machine
from polydyn.search.records import Records
from polydyn.search.strategies import strategy

AMX = replace(AVX512, quads=True, amx=True)
NAMED_TARGETS = {"cpu:avx512": AVX512, "cpu:avx2": AVX2, "cpu:neon": NEON, "cpu:amx": AMX, "cpu:amx-emulated": AMX}
"""Targets other than this machine's processor. The last one emulates the matrix unit in C, for tests."""
UNIT = {"amx_tile", "amx_bf16", "amx_int8"}
"""The features of a matrix unit that kernels use."""


def _compiler_has_unit(name: str) -> bool:
    """Whether the C compiler knows the matrix unit. Without a compiler the processor decides: plans need none."""
    try:
        return set(required_features(find_compiler(), name)) >= UNIT
    except BuildError:
        return True


def cpu_target(name: str) -> CpuTarget:
    """Return the code generator's description of a CPU target. UnsupportedError: no target has this name."""
    if name == "cpu":
        if architecture() in ("aarch64", "arm64"):
            return replace(NEON, core=with_system_cache(NEON.core))
        features = machine_features()
        if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= features:
            unit = features >= UNIT and _compiler_has_unit(name)
            wide = AMX if unit else replace(AVX512, quads="avx512_vnni" in features)
            return replace(wide, core=with_system_cache(wide.core))
        return replace(AVX2, quads="avx_vnni" in features, core=with_system_cache(AVX2.core))
    if name not in NAMED_TARGETS:
        raise UnsupportedError(
            f"unknown target {name}",
            rule="known targets",
            remedy=f"use cpu, {', '.join((*NAMED_TARGETS, *CUDA_TARGETS))}",
        )
    return NAMED_TARGETS[name]


class Cpu(Target):
    """Kernels in C with SIMD. Independent launches run in parallel."""

    machine = "cpu"

    def __init__(self, name: str, options: Options, schedules: Sequence[Written] = ()) -> None:
        """``schedules``: written by the user. UnsupportedError: the target does not exist, or has no tensor cores."""
        super().__init__(name, options)
        if options.tf32 or options.precision == TF32X3:
            option = "tf32" if options.tf32 else TF32X3
            remedy = f"use a CUDA target, or no {option}"
            raise UnsupportedError(f"{option} on {name}", rule="tensor cores", remedy=remedy)
        if options.precision == BF16:
            self.without |= {"winograd"}  # the sums of tiles would amplify the rounding
        self.processor = cpu_target(name)
        off = name != "cpu" or "library" in self.without  # other targets than this machine have unknown processors
        shipped = () if off else [x for x in library() if machine_features().issuperset(x.features)]
        self.handmade = Handmade(schedules, shipped)
        if not self.processor.quads:
            self.without |= {"rowsums"}  # int16 pairs can hold the weights minus their zero points

    @property
    def unit(self) -> bool:
        """See ``Target``."""
        return self.processor.amx

    def rewrite(self, graph: Graph) -> Graph:
        """Implement ``Target.rewrite``, and write the integers of index checks to memory."""
        return with_kept_indices(super().rewrite(graph))

    def builder(self, plan: FusionPlan, records: Records | None = None) -> KernelBuilder:
        """Implement ``Target.builder``."""
        tuner = None
        if records is not None:
            self.calibrate(first_machine(records, self.processor.name))
            tuner = ChosenByRecords(records, strategy(self.options.strategy).name, self.processor, self.name)
        return KernelBuilder(plan, self.processor, tuner, self.rounded, self.handmade)

    def calibrate(self, machine: Hardware | None) -> None:
        """Derive the sizes that are not tuned from this machine's description, if there is one."""
        if machine is not None:
            self.processor = replace(self.processor, core=calibrated(self.processor.core, machine))

    def place(self, builder: Builder, report: Callable[[Sequence[PlacedGroup]], None] = lambda _: None) -> Kernels:
        """Implement ``Target.place``; outputs that are a reshape of another tensor are not copied."""
        every = super().place(builder, report)
        placed, aliases = without_reshapes(every.plan, every.placed)
        return Kernels(every.plan, placed, (*every.notes, *aliases))

    def finished(self) -> Mapping[str, Any]:
        """Implement ``Target.finished``: the schedules written by hand, each of which has a group."""
        used = self.handmade.used()
        return {"schedules": [x.to_json() for x in used]} if used else {}

    @property
    def headers(self) -> Mapping[str, str]:
        """Implement ``Target.headers``."""
        return leaf_headers(self.processor.width)

    def finish(self, plan: HostPlan) -> HostPlan:
        """Return the host plan with its launches grouped into waves."""
        return plan if "horizontal" in self.without else join_waves(plan)
