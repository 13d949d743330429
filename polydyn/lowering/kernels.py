"""From fused groups to kernels: lowering, code generation, one kernel for all groups of equal structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from polydyn.codegen.cpu_attention import AttentionKernel, SeparateKernels
from polydyn.codegen.cpu_contract import ContractKernel
from polydyn.codegen.cpu_nest import NestKernel
from polydyn.codegen.kernel import CpuTarget, Kernel
from polydyn.fusion.grouping import is_contraction
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import iterators
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.flatten import CPU_DTYPES, check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import NestGroup, lower_nest
from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.model import verify_group


@dataclass(frozen=True)
class PlacedKernel:
    """A fused group with its kernel: ``lowered`` binds the kernel's names to this place of the model."""

    fused: FusedGroup
    lowered: LoweredGroup
    kernel: Kernel
    key: str
    flops: Index


Form: TypeAlias = ContractGroup | NestGroup | AttentionGroup


class KernelBuilder:
    """Builds each distinct kernel once."""

    def __init__(self, plan: FusionPlan, target: CpuTarget) -> None:
        self.plan, self.target = plan, target
        self.kernels: dict[str, Kernel] = {}
        self.notes: list[str] = []

    def place(self, group: FusedGroup) -> tuple[PlacedKernel, ...]:
        """The kernel of one group (those of its parts, when an attention does not line up)."""
        for n in group.nodes:
            check_dtypes(n, CPU_DTYPES, "CPU")
        if group.kind != "attention":
            return (self._place(group),)
        form = lower_attention(self.plan, group)
        if form is not None:
            try:
                return (self._placed(group, form),)
            except SeparateKernels as e:
                self.notes.append(f"{group.outputs[0]}: attention in parts: {e}")
        return tuple(map(self._place, group.parts))

    def _place(self, group: FusedGroup) -> PlacedKernel:
        form: ContractGroup | NestGroup | None = None
        if group.kind == "contract":
            form = lower_contract(self.plan, group, self.target.width)
        if form is None:
            form = lower_nest(self.plan, group)
        return self._placed(group, form)

    def _placed(self, group: FusedGroup, form: Form) -> PlacedKernel:
        verify_group(form.lowered.group)
        key = self._key(form)
        if key not in self.kernels:
            self.kernels[key] = self._build(form, key)
        flops = sum((_flops(self.plan, group, i) for i in range(len(group.nodes))), ZERO)
        return PlacedKernel(group, form.lowered, self.kernels[key], key, flops)

    def _key(self, form: Form) -> str:
        if isinstance(form, ContractGroup):
            return form.lowered.key(form.roles, sorted(form.packed), self.target)
        if isinstance(form, AttentionGroup):
            return form.lowered.key(form.parts, self.target)
        return form.lowered.key(form.prefix, sorted(form.phases.items()), self.target)

    def _build(self, form: Form, key: str) -> Kernel:
        group = form.lowered.group
        if isinstance(form, ContractGroup):
            return ContractKernel(f"contract_{key[:12]}", group, form.roles, self.target, form.packed).build()
        if isinstance(form, AttentionGroup):
            return AttentionKernel(f"attention_{key[:12]}", group, form.parts, self.target, frozenset()).build()
        return NestKernel(f"nest_{key[:12]}", group, form.prefix, form.phases, self.target).build()


def _flops(plan: FusionPlan, group: FusedGroup, i: int) -> Index:
    """Operations of one node: a contraction counts two for each product, everything else one for each element."""
    node = group.nodes[i]
    size = product(e for _, e in iterators(plan.graph, node))
    return size * 2 if group.kind != "nest" and is_contraction(node) else size


def bind(symbols: Mapping[str, Index], e: Index) -> Index:
    """An expression over a kernel's symbols, over the model's symbols instead."""
    return e.subs({s: f"%{s}" for s in symbols}).subs({f"%{s}": v for s, v in symbols.items()})
