"""From fused groups to CPU kernels: schedules, proofs, and one kernel for all groups of equal structure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from polydyn.codegen.cpu.attention import AttentionKernel
from polydyn.codegen.cpu.decoding import tile_vectors
from polydyn.codegen.cpu.order import OrderKernel
from polydyn.codegen.cpu.serial import SerialKernel
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering import alternatives
from polydyn.lowering.alternatives import Rows
from polydyn.lowering.argsort import ArgSortGroup, lower_argsort
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.blocked_window import with_blocked_form
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.cpu_tables import NESTS, PRODUCTS, NestForms, ProductForms, Tuner, sized_offer
from polydyn.lowering.flatten import CPU_DTYPES
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.handmade import Fitting, Handmade, written_by_hand, written_kernel
from polydyn.lowering.k_packing import BF16X2, INT8X4, INT16X2
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.lowering.prologue import prove_prologue
from polydyn.lowering.rounding import round_once
from polydyn.lowering.serial import SerialGroup, lower_serial
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import walk
from polydyn.schedules.model import Group, verify_group
from polydyn.schedules.solution.schedule import attention_groups, schedule_attention

Form: TypeAlias = ContractGroup | AttentionGroup | SerialGroup | ArgSortGroup | LoweredGroup
NO_SCHEDULES = Handmade()

KERNEL_PREFIXES: dict[type, str] = {
    ContractGroup: "contract", AttentionGroup: "attention", SerialGroup: "serial", ArgSortGroup: "order",
    LoweredGroup: "nest",
}  # fmt: skip
"""Prefixes of kernel names."""


class KernelBuilder(Builder):
    """Schedules, proves and builds each distinct kernel once.

    ``forms``: the form that each group was built from, by key. ``groups``: groups of kernels that differ from the group
    of their site, by name. ``products``: whether each float32 product rounds its operands, by output. ``sized``: groups
    other than products whose kernels a search may choose, by key.
    """

    dtypes, device = CPU_DTYPES, "CPU"

    def __init__(
        self, plan: FusionPlan, target: CpuTarget, tuner: Tuner | None = None, rounded: bool = False,
        handmade: Handmade = NO_SCHEDULES,
    ) -> None:  # fmt: skip
        """``rounded``: float32 products may round their operands to bfloat16. ``handmade``: schedules for groups."""
        super().__init__(plan, tuner)
        self.target, self.tuner, self.rounded, self.handmade = target, tuner, rounded, handmade
        self.forms: dict[str, Form] = {}
        self.groups: dict[str, Group] = {}
        self.attentions: dict[str, AttentionKernel] = {}
        self.sized: dict[str, NestForms | AttentionKernel] = {}
        self.products: dict[str, bool] = {}

    def build_group(self, group: FusedGroup) -> PlacedGroup:
        """See ``Builder``."""
        if fitting := self.handmade.fitting(self.plan, group):
            return self._written(group, fitting)
        if group.kind == "order":
            return self._placed(group, lower_argsort(self.plan, group))
        if group.kind in ("scatter", "scan"):
            return self._placed(group, lower_serial(self.plan, group))
        product = self._product(group) if group.kind == "contract" else None
        if isinstance(product, ContractGroup):
            return self._placed(group, product)
        nest = with_blocked_form(self.plan, _settled(lower_nest(self.plan, group)), self.target_of(group).width)
        placed = self._placed(group, nest)
        return placed if product is None else replace(placed, declined=(("product", str(product)), *placed.declined))

    def _written(self, group: FusedGroup, fitting: Fitting) -> PlacedGroup:
        """Return the kernel of a schedule that a person wrote."""
        lowered, steps = fitting.form.lowered, fitting.written.steps
        key = lowered.key(fitting.form.roles, steps, self.target)
        placed = self.reuse_kernel(group, lowered, key)
        if placed is None:
            verify_group(lowered.group)
            name = f"written_{key[:12]}"
            self.show(group, name, lowered.group)
            if self.tuner:
                self.tuner.untuned(key, f"{group.outputs[0]} has a schedule written by hand")
            reason = f"a schedule written by hand ({fitting.written.label})"
            with written_by_hand(fitting.written):
                kernel = written_kernel(name, fitting.draft, self.target)
            placed = self.placed[key] = PlacedGroup(group, lowered, key, (kernel,), reasons=(reason,))
        return placed

    def _product(self, group: FusedGroup) -> ContractGroup | Declined:
        target = self.target_of(group)
        rounded = self.rounded and group.nodes[0].body.dtype == "float32"
        vectors = tile_vectors(target.core)
        quads = replace(INT8X4, vectors=1 if target.amx else vectors)  # tiles of the unit require single vectors
        bytes_ = (quads, replace(INT16X2, least=INT8X4.least)) if target.quads else (INT16X2,)
        kinds = (*bytes_, *((BF16X2,) if rounded else ()))
        form = lower_contract(
            self.plan, group, target.width, promotion=True, kinds=kinds, shared=target.core.shared,
            vectors=vectors,
        )  # fmt: skip
        if rounded:
            self.products[group.nodes[0].output] = isinstance(form, ContractGroup) and form.k_packed
        return form if isinstance(form, Declined) else replace(form, lowered=_settled(form.lowered))

    @property
    def roundings(self) -> tuple[str, ...]:
        """See ``Builder``."""
        if not self.rounded:
            return ()
        unrounded = [name for name, words in self.products.items() if not words]
        all_, some = len(self.products), len(self.products) - len(unrounded)
        line = f"precision bf16: {some} of {all_} products round their operands to bfloat16"
        reason = "no constant operand, or few columns or steps"
        return (line, *([f"in float32 stay ({reason}) {', '.join(unrounded)}"] if unrounded else []))

    def attention(self, group: FusedGroup) -> PlacedGroup | Declined:
        """See ``Builder``."""
        if any(self.handmade.find(self.plan, x) for x in group.parts):
            return Declined("a part has a schedule written by hand")
        form = lower_attention(self.plan, group, wide=True)
        if isinstance(form, Declined):
            return form
        target = self.target_of(group)
        return self._attention(form, self._key(form, target), target).declined or self._placed(group, form)

    def target_of(self, group: FusedGroup) -> CpuTarget:
        """Return the description of the processor for a group: that for 8-byte elements if a value is a float64."""
        values = (x for n in group.nodes for x in walk(n.body))
        return self.target.for_doubles if any(x.dtype == "float64" for x in values) else self.target

    def _placed(self, group: FusedGroup, form: Form) -> PlacedGroup:
        lowered = form if isinstance(form, LoweredGroup) else form.lowered
        self.unproven += prove_prologue(self.plan, group)
        target = self.target_of(group)
        key = self._key(form, target)
        placed = self.reuse_kernel(group, lowered, key)
        if placed is None:
            verify_group(lowered.group)
            self.forms[key] = form
            self.show(group, _name(form, key), *_solved(form))
            placed = self._build(form, PlacedGroup(group, lowered, key, ()), target)
            if target is not self.target:
                placed = replace(placed, kernels=tuple(_in_lanes(k, target.width) for k in placed.kernels))
            self.placed[key] = placed
        return placed

    def _key(self, form: Form, target: CpuTarget) -> str:
        if isinstance(form, ContractGroup):
            transposed = (form.transposed.roles,) if form.transposed else ()
            more = (*transposed, form.window) if form.window else transposed
            kind = (form.roles, sorted(form.packed), form.dot, form.fill, form.footprint, *more)
            return form.lowered.key(*kind, target)
        if isinstance(form, AttentionGroup):
            return form.lowered.key(form.parts, target)
        if isinstance(form, ArgSortGroup):
            sizes = (form.count, form.stride, form.positions, form.step)
            return form.lowered.key(form.band, sizes, form.largest, target)
        if isinstance(form, SerialGroup):
            return form.lowered.key(form.band, form.tiled, form.conditions, target)
        return form.key(target, *((form.blocked,) if form.blocked else ()))

    def _build(self, form: Form, place: PlacedGroup, target: CpuTarget) -> PlacedGroup:
        """Build the kernels of a group for ``target``. Only kernels for the whole processor are tuned."""
        key, name = place.key, _name(form, place.key)
        tuner = self.tuner if target is self.target else None
        if self.tuner and not tuner:
            self.tuner.untuned(key, f"{place.fused.outputs[0]} computes in float64")
        if isinstance(form, ContractGroup):
            product = ProductForms(form, key, name, target, tuner, self.groups)
            return alternatives.place(PRODUCTS, product, place, product.searched)
        if isinstance(form, LoweredGroup):
            nest = self.sized[key] = NestForms(form, key, target, tuner, self.groups)
            return alternatives.place(NESTS, nest, place, nest.searched)
        if isinstance(form, ArgSortGroup):
            order = OrderKernel(
                name, form.lowered.group, form.band, form.count, form.stride, form.positions, form.step, form.largest,
            )  # fmt: skip
            return replace(place, kernels=(order.build(),))
        if isinstance(form, SerialGroup):
            serial = SerialKernel(name, form.lowered.group, form.band, form.tiled, form.conditions, target)
            return replace(place, kernels=(serial.build(),))
        kernel = self.sized[key] = self._attention(form, key, target)
        offer = sized_offer(tuner.sized(key, kernel, Rows()) if tuner else None, kernel.build)
        return replace(place, kernels=offer.build(), decision=offer.decision, reasons=offer.reasons)

    def _attention(self, form: AttentionGroup, key: str, target: CpuTarget) -> AttentionKernel:
        if key not in self.attentions:
            name, parts = _name(form, key), schedule_attention(form.parts)
            self.attentions[key] = AttentionKernel(name, form.lowered.group, parts, target, frozenset())
        return self.attentions[key]


def _settled(lowered: LoweredGroup) -> LoweredGroup:
    """Merge roundings where two in sequence differ from one (``round_once``)."""
    return replace(lowered, group=round_once(lowered.group))


def _in_lanes(kernel: Kernel, lanes: int) -> Kernel:
    """Return a kernel, and those after it, with the number of lanes that they were built for."""
    return replace(kernel, lanes=lanes, after=tuple(_in_lanes(k, lanes) for k in kernel.after))


def _name(form: Form, key: str) -> str:
    """Return the name of the kernel of a form."""
    return f"{KERNEL_PREFIXES[type(form)]}_{key[:12]}"


def _solved(form: Form) -> tuple[Group, ...]:
    """Return the groups whose schedules are solved."""
    if isinstance(form, AttentionGroup):
        return attention_groups(form.parts)
    return (form.group if isinstance(form, LoweredGroup) else form.lowered.group,)
