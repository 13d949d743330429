"""From fused groups to kernels: lowering, code generation, one kernel for all groups of equal structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from polydyn.codegen.cpu_attention import AttentionKernel, SeparateKernels
from polydyn.codegen.cpu_contract import ContractKernel
from polydyn.codegen.cpu_dot import COLUMNS, LEAST_ROWS, LEAST_STEPS, DotKernel
from polydyn.codegen.cpu_nest import NestKernel
from polydyn.codegen.kernel import CpuTarget, Kernel
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.products import is_contraction
from polydyn.graph.ir import iterators
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.flatten import CPU_DTYPES, check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.prologue import prove_prologue
from polydyn.schedules.addresses import check_addresses
from polydyn.schedules.decision import Decision, Leaf, Split
from polydyn.schedules.index import ZERO, Index, maximum, minimum, product
from polydyn.schedules.model import Group, verify_group
from polydyn.schedules.proof_attention import prove_attention
from polydyn.schedules.reuse import Proofs
from polydyn.schedules.schedule import schedule_attention


@dataclass(frozen=True)
class Alternatives:
    """The kernels that a group chooses among at run time, and how.

    ``kernels``: one for each option; options with equal names share a binary and differ in ``launch``. ``decision``:
    over the group's parameters and ``nth``. ``reasons``: lines for ``explain``.
    """

    kernels: tuple[Kernel, ...]
    decision: Decision
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedKernel:
    """A fused group with its kernel: ``lowered`` binds the kernel's names to this place of the model."""

    fused: FusedGroup
    lowered: LoweredGroup
    kernel: Kernel
    key: str
    flops: Index
    alternatives: Alternatives | None = None


Form: TypeAlias = ContractGroup | AttentionGroup | LoweredGroup


class Tuner(Protocol):
    """What chooses a contraction's sizes from measurements; ``polydyn.searches.ChosenByRecords`` is one."""

    def builders(self, key: str, form: ContractGroup) -> TunedBuilders | None:
        """The tuned forms of a group whose roles are solved; None when nothing is known of it."""


@dataclass(frozen=True)
class TunedBuilders:
    """Tuned forms of one group, before they are proven and built: a builder and launch for each option."""

    options: tuple[tuple[ContractKernel, dict[str, Index]], ...]
    decision: Decision
    reasons: tuple[str, ...] = ()


class KernelBuilder:
    """Schedules, proves and builds each distinct kernel once.

    ``forms``: what each kernel was built from, by key. ``proven``: keys of the kernels in order. ``unproven``: outputs
    whose addresses are injective, and tensors that prologues read in bounds, by construction only.
    """

    def __init__(self, plan: FusionPlan, target: CpuTarget, tuner: Tuner | None = None) -> None:
        self.plan, self.target, self.tuner = plan, target, tuner
        self.alternatives: dict[str, Alternatives] = {}
        self.kernels: dict[str, Kernel] = {}
        self.forms: dict[str, Form] = {}
        self.notes: list[str] = []
        self.proven: list[str] = []
        self.unproven: list[str] = []

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
        form = lower_contract(self.plan, group, self.target.width, promotion=True) if group.kind == "contract" else None
        return self._placed(group, form or lower_nest(self.plan, group))

    def _placed(self, group: FusedGroup, form: Form) -> PlacedKernel:
        lowered = form if isinstance(form, LoweredGroup) else form.lowered
        verify_group(lowered.group)
        self.unproven += prove_prologue(self.plan, group)
        free = {x for names in self.plan.strides.values() for x in names}
        self.unproven += [lowered.buffers[a] for a in check_addresses(lowered.group, lowered.params, free)]
        key = self._key(form)
        if key not in self.kernels:
            self.forms[key] = form
            self.kernels[key] = self._build(form, key)
            self.proven.append(key)
        return PlacedKernel(group, lowered, self.kernels[key], key, flops(self.plan, group), self.alternatives.get(key))

    def _key(self, form: Form) -> str:
        if isinstance(form, ContractGroup):
            return form.lowered.key(form.roles, sorted(form.packed), form.dot, form.fill, self.target)
        if isinstance(form, AttentionGroup):
            return form.lowered.key(form.parts, self.target)
        return form.key(self.target)

    def _build(self, form: Form, key: str) -> Kernel:
        if isinstance(form, ContractGroup):
            return self._contract(form, key)
        if isinstance(form, AttentionGroup):
            return self._attention(form, key)
        return self._nest(form.group, key)

    def _contract(self, form: ContractGroup, key: str) -> Kernel:
        group = form.lowered.group
        proofs = Proofs(group)
        roles = proofs.contract(form.roles)
        build = DotKernel if form.dot else ContractKernel
        kernel = build(f"contract_{key[:12]}", group, roles, self.target, form.packed, fill=form.fill)
        proofs.prove_contract(kernel.schedule, kernel.tiles())
        tuned = self.tuner.builders(key, replace(form, roles=roles)) if self.tuner and not form.dot else None
        found = None
        if tuned is not None:
            built: dict[str, Kernel] = {}
            for builder, _ in tuned.options:
                if builder.name not in built:
                    proofs.prove_contract(builder.schedule, builder.tiles())
                    built[builder.name] = builder.build()
            options = tuple(replace(built[b.name], launch=launch) for b, launch in tuned.options)
            found = Alternatives(options, tuned.decision, tuned.reasons)
        if not form.dot and not form.fill and DotKernel.fits(group, roles):
            dot = DotKernel(f"dot_{key[:12]}", group, roles, self.target, form.packed)
            proofs.prove_contract(dot.schedule, dot.tiles())
            found = _with_dot(dot, found or Alternatives((kernel.build(),), Leaf(0)))
        if found is None:
            return kernel.build()
        self.alternatives[key] = found
        return found.kernels[0]

    def _nest(self, group: Group, key: str) -> Kernel:
        proofs = Proofs(group)
        schedule = proofs.nest()
        kernel = NestKernel(f"nest_{key[:12]}", group, schedule.band, schedule.phases, self.target)
        proofs.prove_nest(kernel.schedule, schedule.band, schedule.phases)
        built = kernel.build()
        return replace(built, notes=(*built.notes, *schedule.notes))

    def _attention(self, form: AttentionGroup, key: str) -> Kernel:
        parts = schedule_attention(form.parts)
        kernel = AttentionKernel(f"attention_{key[:12]}", form.lowered.group, parts, self.target, frozenset())
        prove_attention(form.lowered.group, parts, kernel.tree(), kernel.tiles())
        return kernel.build()


def _with_dot(dot: DotKernel, others: Alternatives) -> Alternatives:
    """The alternatives with one more, for few columns and enough rows and steps."""
    rows = minimum(LEAST_ROWS - dot.M, dot.N - 1)  # one column costs nothing to pack
    missing = maximum(dot.N - COLUMNS, LEAST_STEPS - dot.K, rows)
    decision = Split(missing, 0, Leaf(len(others.kernels)), others.decision)
    reason = f"up to {COLUMNS} columns: vectors along the reduction"
    return Alternatives((*others.kernels, dot.build()), decision, (*others.reasons, reason))


def flops(plan: FusionPlan, group: FusedGroup) -> Index:
    """Operations of a group over the model's symbols."""
    return sum((_flops(plan, group, i) for i in range(len(group.nodes))), ZERO)


def _flops(plan: FusionPlan, group: FusedGroup, i: int) -> Index:
    """Operations of one node: a contraction counts two for each product, everything else one for each element."""
    node = group.nodes[i]
    size = product(e for _, e in iterators(plan.graph, node))
    return size * 2 if group.kind != "nest" and is_contraction(node) else size


def bind(symbols: Mapping[str, Index], e: Index) -> Index:
    """An expression over a kernel's symbols, over the model's symbols instead."""
    return e.subs({s: f"%{s}" for s in symbols}).subs({f"%{s}": v for s, v in symbols.items()})
