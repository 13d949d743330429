"""CUDA devices as a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polydyn.backends.base import Kernels, Target
from polydyn.backends.options import BF16, TF32X3, Options
from polydyn.errors import CodegenError, PolydynError, UnsupportedError
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

STORES_PASS = "stores"
"""The pass that must be left out to round 16-bit values after every node."""
SCALARS = "scalar operations of the device header"
"""The rule of an error about an operation that is not built for a dtype (``codegen.printers.cuda_values``)."""
HOST_CHECKS = "skipped when its integers are in host memory, where the host checks them"


class Cuda(Target):
    """Kernels in CUDA. Every launch has several, and the host program selects one for each shape."""

    machine = "cuda"
    on_device = True
    unused = frozenset({"nibbles", "dequantize", "winograd", "rowsums", "offsets", "widen"})

    def __init__(self, name: str, options: Options) -> None:
        super().__init__(name, options)
        if options.precision == BF16:
            remedy = "use tf32, or a CPU"
            raise UnsupportedError(f"precision {options.precision} on {name}", rule="a CPU", remedy=remedy)
        if options.winograd != Options.winograd:
            option = f"winograd {options.winograd}"
            remedy = "leave it out: CUDA has no Winograd tiles"
            raise UnsupportedError(f"{option} on {name}", rule="a CPU", remedy=remedy)
        self.arch = newest(name)

    def rewrite(self, graph: Graph) -> Graph:
        """Implement ``Target.rewrite``. The results of index checks are outputs of the graph too."""
        return with_index_checks(super().rewrite(graph))

    def builder(self, plan: FusionPlan, records: Records | None = None) -> CudaBuilder:
        """Implement ``Target.builder``."""
        tuner = None
        if records is not None:
            tuner = ChosenTiles(records, strategy(self.options.strategy).name, self.name, self.options.tf32)
        tf32x3 = self.options.precision == TF32X3
        return CudaBuilder(plan, self.arch, self.options.tf32, tuner, STORES_PASS in self.without, tf32x3)

    def place(self, builder: Builder, report: Callable[[Sequence[PlacedGroup]], None] = lambda _: None) -> Kernels:
        """Implement ``Target.place``; versions that no size needs are left out."""
        try:
            every = super().place(builder, report)
        except CodegenError as e:
            if e.rule != SCALARS:
                raise
            raise self._unsupported(e) from e
        facts = facts_of(every.plan.graph.facts)
        return replace(every, placed=[drop_replaced_versions(p, facts) for p in every.placed])

    def _unsupported(self, error: CodegenError) -> PolydynError:
        """Return the error that names the target and the remedies of an operation that kernels do not have."""
        cast = "cast its inputs to float32, " if "float64" in error.message else ""
        unsupported = UnsupportedError(
            f"{error.message.removesuffix(' for CUDA')} for {self.name}", node=error.node, rule=SCALARS,
            remedy=f"{cast}compile for a CPU, or let ONNX Runtime run the node: Options(fallback='onnxruntime')",
        )  # fmt: skip
        unsupported.origins = error.origins
        return unsupported

    @property
    def headers(self) -> Mapping[str, str]:
        """Implement ``Target.headers``."""
        return dict(device_headers())

    def finish(self, plan: HostPlan) -> HostPlan:
        """Return the host plan with its launches in waves. Launches that only check indices get a reason."""
        plan = plan if "horizontal" in self.without else join_waves(plan)
        checking = {d.launch for d in plan.device_checks if d.scanned}
        launches = (
            replace(x, reasons=(*x.reasons, HOST_CHECKS)) if k in checking else x for k, x in enumerate(plan.launches)
        )
        return replace(plan, launches=tuple(launches))
