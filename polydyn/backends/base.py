"""The interface between a compilation and its target. Only ``cpu.py`` and ``cuda.py`` depend on the kind of target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydyn.backends.options import BF16, Options
from polydyn.clock import section
from polydyn.errors import planning
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.ir import Graph
from polydyn.logs import progress
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.program.plan import HostPlan
from polydyn.search.records import Records


@dataclass(frozen=True)
class Kernels:
    """The groups of a fusion plan with their kernels, in launch order; ``notes``: the decisions on the way."""

    plan: FusionPlan
    placed: Sequence[PlacedGroup]
    notes: tuple[str, ...] = ()


KERNELS = "generating kernels"
"""The stage in the progress of a compilation."""


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
        return fusion_plan(graph, self.without, self.on_device, self.options.winograd, self.rounded, self.unit)

    @property
    def rounded(self) -> bool:
        """Whether float32 products may round their operands to bfloat16."""
        return self.options.precision == BF16

    @property
    def unit(self) -> bool:
        """Whether a matrix unit of the processor multiplies such operands."""
        return False

    @abstractmethod
    def builder(self, plan: FusionPlan, records: Records | None = None) -> Builder:
        """Return the builder that places the groups of a plan. ``records`` provide the tiles of products."""

    def place(self, builder: Builder, report: Callable[[Sequence[PlacedGroup]], None] = lambda _: None) -> Kernels:
        """Return the kernels of all groups: lowered, scheduled, proven, generated. After each group, ``report`` gets
        all kernels so far."""
        placed: list[PlacedGroup] = []
        groups = builder.plan.groups
        progress(KERNELS, 0, len(groups))
        for number, group in enumerate(groups, 1):
            step = planning(f"the kernel of {group.nodes[-1].output}", (n.origin for n in group.nodes))
            with step, section("lowering"):
                placed += builder.place(group)
            report(placed)
            progress(KERNELS, number, len(groups))
        unproven = (f"{x}: its addresses are right by construction, they are not proven" for x in builder.unproven)
        notes = (*builder.notes, *builder.roundings, *builder.untuned, *dict.fromkeys(unproven))
        return Kernels(builder.plan, placed, notes)

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]:
        """Maps file name -> text of the headers that kernels include."""

    def finished(self) -> Mapping[str, Any]:
        """Check what is known only after all parts of a model are planned; return what its manifest says of that."""
        return {}

    def finish(self, plan: HostPlan) -> HostPlan:
        """Return the host plan after the changes of this target."""
        return plan
