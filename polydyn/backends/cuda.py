"""CUDA devices as a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polydyn.backends.base import BF16, TF32X3, Kernels, Options, Target
from polydyn.errors import UnsupportedError
from polydyn.fusion.facts import facts_of
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import device_headers
from polydyn.gpu.targets import newest
from polydyn.graph.ir import Graph
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder, drop_replaced_versions
from polydyn.program.index_checks import with_index_checks
from polydyn.program.parallel_launches import join_waves
from polydyn.program.plan import HostPlan
from polydyn.search.outcomes import ChosenTiles
from polydyn.search.records import Records
from polydyn.search.strategies import strategy

STRICT = "stores"
"""The pass without which 16 bits are rounded after every node."""
LOOKS = "skipped when its integers lie in host memory, where the host looks"


class Cuda(Target):
    """Kernels in CUDA; every launch has several, and the host program takes one for each shape."""

    machine = "cuda"
    on_device = True
    unused = frozenset({"nibbles", "dequantize", "winograd", "rowsums", "offsets", "widen"})

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        if options.precision == BF16:
            raise UnsupportedError(f"precision {options.precision} on {name}", rule="a CPU", remedy="tf32, or a CPU")
        if options.winograd != Options.winograd:
            asked = f"winograd {options.winograd}"
            raise UnsupportedError(f"{asked} on {name}", rule="a CPU", remedy="leave it out: CUDA makes no tiles")
        self.arch = newest(name)

    def rewrite(self, graph: Graph) -> Graph:
        """As ``Target``. What looks for indices outside their axis is among the outputs too."""
        return with_index_checks(super().rewrite(graph))

    def builder(self, plan: FusionPlan, records: Records | None = None) -> CudaBuilder:
        """As ``Target``."""
        tuner = None
        if records is not None:
            tuner = ChosenTiles(records, strategy(self.options.strategy).name, self.name, self.options.tf32)
        tf32x3 = self.options.precision == TF32X3
        return CudaBuilder(plan, self.arch, self.options.tf32, tuner, STRICT in self.without, tf32x3)

    def place(self, builder: Builder, made: Callable[[Sequence[PlacedGroup]], None] = lambda _: None) -> Kernels:
        """As ``Target``; versions that no size needs are left out."""
        every = super().place(builder, made)
        facts = facts_of(every.plan.graph.guards)
        return replace(every, placed=[drop_replaced_versions(p, facts) for p in every.placed])

    @property
    def headers(self) -> Mapping[str, str]:
        """As ``Target``."""
        return dict(device_headers())

    def finish(self, plan: HostPlan) -> HostPlan:
        """The host plan with its launches in waves, and a reason for each that only looks for wrong indices."""
        plan = plan if "horizontal" in self.without else join_waves(plan)
        looking = {d.launch for d in plan.device_checks if d.scanned}
        launches = (replace(x, reasons=(*x.reasons, LOOKS)) if k in looking else x for k, x in enumerate(plan.launches))
        return replace(plan, launches=tuple(launches))
