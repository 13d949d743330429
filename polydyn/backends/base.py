"""The interface between a compilation and its target. Only ``cpu.py`` and ``cuda.py`` depend on the kind of target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from polydyn.errors import InputError, planning
from polydyn.fusion.pipeline import check_names, fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.winograd import POINTS, SIDE
from polydyn.graph.ir import Graph
from polydyn.graph.regions import KIND as FALLBACK
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.program.plan import HostPlan
from polydyn.search.records import Records

BF16, TF32X3 = "bf16", "3xtf32"


@dataclass(frozen=True)
class Options:
    """Choices that change the compiled program.

    ``without``: names of passes to leave out, from ``polydyn.fusion.pipeline.PASSES``: ``merge`` (GEMM merging),
    ``stitch``, ``attention``, ``horizontal`` ... Results are equal up to rounding. An unknown name is an InputError.
    ``strategy``: the strategy whose searches in the records choose tiles (``polydyn.search.strategies``).

    ``tf32``: on CUDA, float32 products use tensor cores, which round their operands to 10 bits of mantissa; sums stay
    float32. ``precision``: "bf16" allows float32 products with constants to round both operands to bfloat16 on a CPU;
    sums stay float32, and notes report the precision of every product (docs/adr/0023-types.md). "3xtf32": on CUDA,
    float32 products use three tensor core products of operands split in two parts of 10 bits; the error is at most
    3/2^22 of each product's size (docs/adr/0015-cuda-products.md). None: full precision.

    ``winograd``: side in pixels of the Winograd tiles for 3x3 convolutions on a CPU. With 4 instead of 2 a pixel takes
    2.25 multiplications instead of 4. The errors are three to five times as large, up to twice those of a direct sum
    (docs/adr/0010-convolutions.md). ``fallback``: "onnxruntime" runs unsupported nodes in ONNX Runtime, each with a
    note and a warning; None rejects them by name.
    """

    without: Collection[str] = frozenset()
    strategy: str = "polydyn"
    tf32: bool = False
    fallback: str | None = None
    precision: str | None = None
    winograd: int = SIDE

    def __post_init__(self) -> None:
        if self.precision not in (None, BF16, TF32X3) or (self.tf32 and self.precision == TF32X3):
            remedy = f"None, {BF16!r} or {TF32X3!r}, this one without tf32"
            raise InputError(f"unknown precision {self.precision!r}", rule="Options(precision=...)", remedy=remedy)
        if self.winograd not in POINTS or (self.winograd != SIDE and self.precision == BF16):
            remedy = f"{' or '.join(map(str, POINTS))}; {SIDE} with precision {BF16}, which has no Winograd tiles"
            message = f"Winograd tiles of {self.winograd} pixels are not supported"
            raise InputError(message, rule="Options(winograd=...)", remedy=remedy)
        object.__setattr__(self, "without", check_names(self.without))
        if self.fallback not in (None, FALLBACK):
            raise InputError(
                f"unknown fallback {self.fallback!r}", rule="Options(fallback=...)", remedy=f"None or {FALLBACK!r}"
            )


@dataclass(frozen=True)
class Kernels:
    """The groups of a fusion plan with their kernels, in launch order; ``notes``: the decisions on the way."""

    plan: FusionPlan
    placed: Sequence[PlacedGroup]
    notes: tuple[str, ...] = ()


class Target(ABC):
    """A target of ``polydyn.compile``.

    ``name``: as the user writes it. ``machine``: where its programs run, ``cpu`` or ``cuda`` (``HostPlan.place``);
    ``on_device``: whether that is a device. ``unused``: passes of the fusion pipeline that are useless for it.
    """

    machine: str
    on_device = False
    unused: frozenset[str] = frozenset()

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.without = frozenset(options.without) | self.unused

    # -- stages, in order --------------------------------------------------------------------------------------------

    def rewrite(self, graph: Graph) -> Graph:
        """Return the graph of primitives that is fused."""
        return rewrite_graph(graph, self.without, cuda=self.on_device)

    def fuse(self, graph: Graph) -> FusionPlan:
        """Return the groups that become kernels, with reasons."""
        return fusion_plan(graph, self.without, cuda=self.on_device, side=self.options.winograd)

    @abstractmethod
    def builder(self, plan: FusionPlan, records: Records | None = None) -> Builder:
        """Return the builder that places the groups of a plan. ``records`` provide the tiles of products."""

    def place(self, builder: Builder, report: Callable[[Sequence[PlacedGroup]], None] = lambda _: None) -> Kernels:
        """Return the kernels of all groups: lowered, scheduled, proven, generated. After each group, ``report`` gets
        all kernels so far."""
        placed: list[PlacedGroup] = []
        for group in builder.plan.groups:
            with planning(f"the kernel of {group.nodes[-1].output}", (n.origin for n in group.nodes)):
                placed += builder.place(group)
            report(placed)
        unproven = (f"{x}: its addresses are right by construction, they are not proven" for x in builder.unproven)
        notes = (*builder.notes, *builder.roundings, *builder.untuned, *dict.fromkeys(unproven))
        return Kernels(builder.plan, placed, notes)

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """Maps file name -> text of the headers that kernels include."""

    def finish(self, plan: HostPlan) -> HostPlan:
        """Return the host plan after the changes of this target."""
        return plan
