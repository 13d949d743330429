"""What a compilation asks of its target. ``cpu.py`` and ``cuda.py`` answer; nothing else asks which one it is."""

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
    """Choices that change what is compiled.

    ``without``: names of passes that are left out, of ``polydyn.fusion.pipeline.PASSES``: ``merge`` (GEMM merging),
    ``stitch``, ``attention``, ``horizontal`` ... Results are the same but for rounding; InputError when there is none
    of that name. ``strategy``: whose searches in the records choose tiles (``polydyn.search.strategies``). ``tf32``: on
    CUDA, products of float32 take tensor cores, which round their operands to 10 bits of mantissa; sums stay float32.
    ``precision``: "bf16" lets products of float32 with constants round both operands to bfloat16 on a CPU; sums stay
    float32, and notes say of every product what it does (docs/adr/0023-types.md). "3xtf32": on CUDA, products of
    float32 take tensor cores three times, on operands in two parts of 10 bits: each is right to 3/2^22 of its size
    (docs/adr/0015-cuda-products.md). None: never.
    ``winograd``: pixels along a side of the tiles that convolutions of 3x3 taps become on a CPU. With 4 instead of 2
    they take 2.25 multiplications for a pixel instead of 4, and errors are three to five times as large, up to
    twice those of a direct sum (docs/adr/0010-convolutions.md).
    ``fallback``: "onnxruntime" leaves nodes that are not built to ONNX Runtime, each with a note and a warning; None
    refuses them by name.
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
            raise InputError(f"no precision {self.precision!r}", rule="Options(precision=...)", remedy=remedy)
        if self.winograd not in POINTS or (self.winograd != SIDE and self.precision == BF16):
            remedy = f"{' or '.join(map(str, POINTS))}; {SIDE} with precision {BF16}, which makes no tiles"
            raise InputError(f"no tiles of {self.winograd} pixels", rule="Options(winograd=...)", remedy=remedy)
        object.__setattr__(self, "without", check_names(self.without))
        if self.fallback not in (None, FALLBACK):
            raise InputError(
                f"no fallback called {self.fallback!r}", rule="Options(fallback=...)", remedy=f"None or {FALLBACK!r}"
            )


@dataclass(frozen=True)
class Kernels:
    """The groups of a fusion plan with their kernels, in launch order; ``notes``: what was decided on the way."""

    plan: FusionPlan
    placed: Sequence[PlacedGroup]
    notes: tuple[str, ...] = ()


class Target(ABC):
    """A target of ``polydyn.compile``.

    ``name``: as the user says it. ``machine``: where its programs run, ``cpu`` or ``cuda`` (``HostPlan.place``);
    ``on_device``: whether that is a device. ``unused``: passes of the fusion pipeline that it has no use for.
    """

    machine: str
    on_device = False
    unused: frozenset[str] = frozenset()

    def __init__(self, name: str, options: Options) -> None:
        self.name, self.options = name, options
        self.without = frozenset(options.without) | self.unused

    # -- stages, in order --------------------------------------------------------------------------------------------

    def rewrite(self, graph: Graph) -> Graph:
        """The graph of primitives as it is fused."""
        return rewrite_graph(graph, self.without, cuda=self.on_device)

    def fuse(self, graph: Graph) -> FusionPlan:
        """The groups that become kernels, and why."""
        return fusion_plan(graph, self.without, cuda=self.on_device, side=self.options.winograd)

    @abstractmethod
    def builder(self, plan: FusionPlan, records: Records | None = None) -> Builder:
        """What places the groups of a plan; ``records``: whose tiles products have."""

    def place(self, builder: Builder, made: Callable[[Sequence[PlacedGroup]], None] = lambda _: None) -> Kernels:
        """The kernels of all groups: lowered, scheduled, proven, generated. ``made`` gets those so far after each."""
        placed: list[PlacedGroup] = []
        for group in builder.plan.groups:
            with planning(f"the kernel of {group.nodes[-1].output}", (n.origin for n in group.nodes)):
                placed += builder.place(group)
            made(placed)
        unproven = (f"{x}: its addresses are right by construction, they are not proven" for x in builder.unproven)
        notes = (*builder.notes, *builder.roundings, *builder.untuned, *dict.fromkeys(unproven))
        return Kernels(builder.plan, placed, notes)

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """File name -> text of what kernels include."""

    def finish(self, plan: HostPlan) -> HostPlan:
        """The host plan with what only this target does to it."""
        return plan
