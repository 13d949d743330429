"""From fused groups to kernels: lowering, code generation, one kernel for all groups of equal structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polydyn.codegen.cpu_contract import ContractKernel
from polydyn.codegen.cpu_nest import NestKernel
from polydyn.codegen.kernel import CpuTarget, Kernel
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import iterators
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.schedules.addresses import check_addresses
from polydyn.schedules.dependence import analyse
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import Group, verify_group
from polydyn.schedules.polyhedra import context
from polydyn.schedules.proof import prove_contract, prove_nest
from polydyn.schedules.schedule import schedule_contract, schedule_nest


@dataclass(frozen=True)
class PlacedKernel:
    """A fused group with its kernel: ``lowered`` binds the kernel's names to this place of the model."""

    fused: FusedGroup
    lowered: LoweredGroup
    kernel: Kernel
    key: str
    flops: Index


class KernelBuilder:
    """Schedules, proves and builds each distinct kernel once.

    ``proven``: keys of the kernels in order. ``unproven``: outputs whose addresses are injective by construction only.
    """

    def __init__(self, plan: FusionPlan, target: CpuTarget) -> None:
        self.plan, self.target = plan, target
        self.kernels: dict[str, Kernel] = {}
        self.proven: list[str] = []
        self.unproven: list[str] = []

    def place(self, group: FusedGroup) -> PlacedKernel:
        """The kernel for one group."""
        form = lower_contract(self.plan, group, self.target.width) if group.kind == "contract" else None
        lowered = lower_nest(self.plan, group) if form is None else form.lowered
        verify_group(lowered.group)
        unproven = check_addresses(lowered.group, lowered.params)
        self.unproven += [lowered.buffers[a] for a in unproven]
        key = lowered.key(form and (form.roles, sorted(form.packed)), self.target)
        if key not in self.kernels:
            self.kernels[key] = self._nest(lowered.group, key) if form is None else self._contract(form, key)
        flops = sum((_flops(self.plan, group, i) for i in range(len(group.nodes))), ZERO)
        return PlacedKernel(group, lowered, self.kernels[key], key, flops)

    def _contract(self, form: ContractGroup, key: str) -> Kernel:
        group = form.lowered.group
        deps = analyse(group, positive=False)
        roles, _ = schedule_contract(group, form.roles, deps.under(context(group)))
        kernel = ContractKernel(f"contract_{key[:12]}", group, roles, self.target, form.packed)
        prove_contract(group, roles, kernel.tree(), kernel.tiles(), deps)
        self.proven.append(key)
        return kernel.build()

    def _nest(self, group: Group, key: str) -> Kernel:
        deps = analyse(group, positive=False)
        schedule = schedule_nest(group, deps.under(context(group)))
        kernel = NestKernel(f"nest_{key[:12]}", group, schedule.band, schedule.phases, self.target)
        prove_nest(group, kernel.tree(), schedule.band, schedule.phases, deps)
        self.proven.append(key)
        built = kernel.build()
        return replace(built, notes=(*built.notes, *schedule.notes))


def _flops(plan: FusionPlan, group: FusedGroup, i: int) -> Index:
    """Operations of one node: a contraction counts two for each product, everything else one for each element."""
    node = group.nodes[i]
    size = product(e for _, e in iterators(plan.graph, node))
    return size * 2 if group.kind == "contract" and i == 0 else size


def bind(symbols: Mapping[str, Index], e: Index) -> Index:
    """An expression over a kernel's symbols, over the model's symbols instead."""
    return e.subs({s: f"%{s}" for s in symbols}).subs({f"%{s}": v for s, v in symbols.items()})
