"""From fused groups to kernels: what both targets share.

Each distinct group is built once; its places in the model differ in buffers and sizes.
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
from polydyn.schedules.group.addresses import check_addresses
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import Group
from polydyn.schedules.show import show_group, show_schedule


@dataclass(frozen=True)
class Placed:
    """A fused group with the kernels that a launch of it may be.

    ``lowered`` binds the kernels' names to this place of the model. ``key``: of the group's structure. ``decision``:
    over the group's parameters and ``nth``, among positions in ``kernels``. ``reasons``: why it has these, lines for
    ``explain``.
    """

    fused: FusedGroup
    lowered: LoweredGroup
    key: str
    kernels: tuple[Kernel, ...]
    decision: Decision = ONLY
    reasons: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """The buffers that it writes."""
        lowered = self.lowered
        return tuple(lowered.buffers[n] for n, a in lowered.group.arrays.items() if a.role == "output")

    @property
    def read(self) -> tuple[str, ...]:
        """The buffers whose elements it finds in memory, each once: also those that it writes other elements of."""
        lowered = self.lowered
        found = (lowered.buffers[n] for n, a in lowered.group.arrays.items() if a.role in ("input", "constant"))
        return tuple(dict.fromkeys(found))


class Noting(Protocol):
    """What chooses tiles of products from records; ``notes``: of which groups it knows none."""

    notes: list[str]


class Builder(ABC):
    """Places the groups of a fusion plan. ``placed``: the first place of every group by its key; ``notes``: what was
    decided, by output; ``untuned``: of which groups the records say nothing. ``unproven``: outputs whose addresses are
    injective, and tensors that prologues read in bounds, by construction only.
    """

    dtypes: tuple[str, ...]
    device: str

    def __init__(self, plan: FusionPlan, tuner: Noting | None) -> None:
        self.plan, self.untuned = plan, tuner.notes if tuner else []
        self.placed: dict[str, Placed] = {}
        self.notes: list[str] = []
        self.unproven: list[str] = []

    def place(self, group: FusedGroup) -> tuple[Placed, ...]:
        """The kernels of one group; those of its parts, when an attention is better run in parts.

        UnsupportedError: not built, by name. LegalityError: two elements of an output share an address.
        """
        for n in group.nodes:
            check_dtypes(n, self.dtypes, self.device)
        if group.kind != "attention":
            return (self._with_addresses(self.one(group)),)
        whole = self.attention(group)
        if whole is not None:
            return (self._with_addresses(whole),)
        return tuple(p for part in group.parts for p in self.place(part))

    def _with_addresses(self, p: Placed) -> Placed:
        """A place whose outputs have an address for each element."""
        free = {x for names in self.plan.strides.values() for x in names}
        unproven = check_addresses(p.lowered.group, p.lowered.params, free, size_facts(self.plan.graph.guards))
        self.unproven += [p.lowered.buffers[a] for a in unproven]
        return p

    @abstractmethod
    def one(self, group: FusedGroup) -> Placed:
        """The kernels of a product or a nest."""

    @abstractmethod
    def attention(self, group: FusedGroup) -> Placed | None:
        """The kernels of a whole attention; None, mostly with a note, when it is better run in parts."""

    @property
    def roundings(self) -> tuple[str, ...]:
        """Which products round their operands to fewer bits, as ``Options.precision`` asks; lines for people."""
        return ()

    def show(self, group: FusedGroup, name: str, *solved: Group) -> None:
        """Shows a group before it is built as the kernel ``name``. ``solved``: the groups that have a schedule."""
        show(Level.GROUPS, name, "group", lambda: show_fused(self.plan, group) + "".join(map(show_group, solved)))
        show(Level.SCHEDULES, name, "matrix", lambda: "\n".join(map(show_schedule, solved)))

    def again(self, group: FusedGroup, lowered: LoweredGroup, key: str) -> Placed | None:
        """A place of a group that was built before."""
        return replace(self.placed[key], fused=group, lowered=lowered) if key in self.placed else None


def flops(plan: FusionPlan, group: FusedGroup) -> Index:
    """Operations of a group over the model's symbols."""
    return sum((_flops(plan, group, i) for i in range(len(group.nodes))), ZERO)


def _flops(plan: FusionPlan, group: FusedGroup, i: int) -> Index:
    """Operations of one node: a contraction counts two for each product, a scatter one for each update, all else one
    for each element.
    """
    node = group.nodes[i]
    extents = dict(iterators(plan.graph, node))
    if group.kind in ("scan", "order"):
        return product(plan.graph.tensors[node.output].shape)
    if group.kind == "scatter" and (found := node_scatter(plan, node)):
        return product(e for x, e in extents.items() if x not in found.places)
    size = product(extents.values())
    return size * 2 if group.kind != "nest" and is_contraction(node) else size
