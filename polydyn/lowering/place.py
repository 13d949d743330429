"""From fused groups to kernels: the code that both targets share.

Each distinct group is built once. Its sites in the model differ in buffers and sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

from polydyn.codegen.kernel import Kernel
from polydyn.debug import Level, show
from polydyn.fusion.facts import size_facts
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.products import is_contraction
from polydyn.fusion.scatter import node_scatter
from polydyn.fusion.show import show_group as show_fused
from polydyn.graph.ir import iterators
from polydyn.lowering.flatten import check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.schedules.decision import ONLY, Decision
from polydyn.schedules.errors import Declined
from polydyn.schedules.group.addresses import check_addresses
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import Group
from polydyn.schedules.show import show_group, show_schedule


@dataclass(frozen=True)
class PlacedGroup:
    """A fused group with the kernels that can run it.

    ``lowered`` binds the kernels' names to this site of the model. ``key``: hash of the group's structure.
    ``decision``: over the group's parameters and ``nth``; it selects positions in ``kernels``. ``reasons``: lines for
    ``explain`` that say why the group has these kernels. ``declined``: other kinds of kernels, and why they do not
    compute this group.
    """

    fused: FusedGroup
    lowered: LoweredGroup
    key: str
    kernels: tuple[Kernel, ...]
    decision: Decision = ONLY
    reasons: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """Buffers that the group writes."""
        lowered = self.lowered
        return tuple(lowered.buffers[n] for n, a in lowered.group.arrays.items() if a.role == "output")

    @property
    def read(self) -> tuple[str, ...]:
        """Buffers whose elements the group reads from memory, each once. A buffer may also be one that it writes
        elsewhere.
        """
        lowered = self.lowered
        found = (lowered.buffers[n] for n, a in lowered.group.arrays.items() if a.role in ("input", "constant"))
        return tuple(dict.fromkeys(found))


class RecordTileChooser(Protocol):
    """Chooses tiles from tuning records. ``notes`` lists the groups that have no record."""

    notes: list[str]


class Builder(ABC):
    """Builds the kernels for the groups of a fusion plan.

    ``placed``: the first site of each group, by key. ``notes``: decisions, by output. ``untuned``: groups without
    tuning records. ``unproven``: outputs whose addresses are injective, and tensors that prologues read in bounds, by
    construction only.
    """

    dtypes: tuple[str, ...]
    device: str

    def __init__(self, plan: FusionPlan, tuner: RecordTileChooser | None) -> None:
        self.plan, self.untuned = plan, tuner.notes if tuner else []
        self.placed: dict[str, PlacedGroup] = {}
        self.notes: list[str] = []
        self.unproven: list[str] = []

    def place(self, group: FusedGroup) -> tuple[PlacedGroup, ...]:
        """Return the kernels of one group, or of its parts if an attention runs better in parts.

        Raises UnsupportedError for an unsupported group, and LegalityError if two elements of an output share an
        address.
        """
        for n in group.nodes:
            check_dtypes(n, self.dtypes, self.device)
        if group.kind != "attention":
            return (self._with_addresses(self.build_group(group)),)
        whole = self.attention(group)
        if isinstance(whole, PlacedGroup):
            return (self._with_addresses(whole),)
        self.notes.append(f"{group.outputs[0]}: attention in parts: {whole}")
        return tuple(p for part in group.parts for p in self.place(part))

    def _with_addresses(self, p: PlacedGroup) -> PlacedGroup:
        """Check that each output of a group has a separate address for each element."""
        free = {x for names in self.plan.strides.values() for x in names}
        unproven = check_addresses(p.lowered.group, p.lowered.params, free, size_facts(self.plan.graph.facts))
        self.unproven += [p.lowered.buffers[a] for a in unproven]
        return p

    @abstractmethod
    def build_group(self, group: FusedGroup) -> PlacedGroup:
        """Build the kernels of a product or a nest."""

    @abstractmethod
    def attention(self, group: FusedGroup) -> PlacedGroup | Declined:
        """Build the kernels of a whole attention; declined if it runs better in parts."""

    @property
    def roundings(self) -> tuple[str, ...]:
        """Lines that report which products round their operands to fewer bits (``Options.precision``)."""
        return ()

    def show(self, group: FusedGroup, name: str, *solved: Group) -> None:
        """Show a group before the kernel ``name`` is built from it. ``solved``: the groups that have a schedule."""
        show(Level.GROUPS, name, "group", lambda: show_fused(self.plan, group) + "".join(map(show_group, solved)))
        show(Level.SCHEDULES, name, "matrix", lambda: "\n".join(map(show_schedule, solved)))

    def reuse_kernel(self, group: FusedGroup, lowered: LoweredGroup, key: str) -> PlacedGroup | None:
        """Return another site of a group that was built before, or None."""
        return replace(self.placed[key], fused=group, lowered=lowered) if key in self.placed else None


def flops(plan: FusionPlan, group: FusedGroup) -> Index:
    """Return the operations of a group over the model's symbols."""
    return sum((_flops(plan, group, i) for i in range(len(group.nodes))), ZERO)


def _flops(plan: FusionPlan, group: FusedGroup, i: int) -> Index:
    """Return the operations of one node.

    A contraction counts two for each product, a scatter one for each update, all other nodes one for each element.
    """
    node = group.nodes[i]
    extents = dict(iterators(plan.graph, node))
    if group.kind in ("scan", "order"):
        return product(plan.graph.tensors[node.output].shape)
    if group.kind == "scatter" and (scatter := node_scatter(plan, node)):
        return product(e for x, e in extents.items() if x not in scatter.places)
    size = product(extents.values())
    return size * 2 if group.kind != "nest" and is_contraction(node) else size
