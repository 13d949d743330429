"""From fused groups to CPU kernels: schedules, proofs, and one kernel for all groups of equal structure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeAlias, TypeVar

from polydyn.codegen.cpu.attention import AttentionKernel
from polydyn.codegen.cpu.decoding import FEW_ROWS, DecodingKernel, tile_vectors
from polydyn.codegen.cpu.dot import COLUMNS, LEAST_ROWS, LEAST_STEPS, DotKernel
from polydyn.codegen.cpu.matrix import MatrixKernel
from polydyn.codegen.cpu.order import OrderKernel
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.serial import SerialKernel
from polydyn.codegen.cpu.shares import FEW_TILES, has_shares
from polydyn.codegen.cpu.split import SplitDot, SplitKernel, SplitNest
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.cpu.turned import TurnedWindowKernel
from polydyn.codegen.cpu.windows import Axes, WindowKernel, fits, window_extra_cost
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.passes.matrix import SIDE
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering.argsort import ArgSortGroup, lower_argsort
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.blocked_window import with_blocked_form
from polydyn.lowering.contract import ContractGroup, lower_contract, transpose_cost
from polydyn.lowering.flatten import CPU_DTYPES
from polydyn.lowering.group import LoweredGroup, TurnedWindow
from polydyn.lowering.k_packing import BF16X2, INT8X4, INT16X2
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.place import Builder, PlacedGroup, RecordTileChooser
from polydyn.lowering.prologue import prove_prologue
from polydyn.lowering.rounding import round_once
from polydyn.lowering.serial import SerialGroup, lower_serial
from polydyn.schedules.decision import ONLY, Decision, Leaf, Split
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.schedules.model import Group, verify_group
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.solution.schedule import NestSchedule, attention_groups, schedule_attention
from polydyn.schedules.tree.rewrites import permute_reduction

Form: TypeAlias = ContractGroup | AttentionGroup | SerialGroup | ArgSortGroup | LoweredGroup


KERNEL_PREFIXES: dict[type, str] = {
    ContractGroup: "contract", AttentionGroup: "attention", SerialGroup: "serial", ArgSortGroup: "order",
    LoweredGroup: "nest",
}  # fmt: skip
"""Prefixes of kernel names."""


AMX_REASON = f"from {SIDE} rows on: tiles of the matrix unit (AMX)"
"""Reason for an AMX kernel of a product."""
WINDOW_REASON = "results in planes, of few channels: vectors along lines of pixels"
"""Reason for a window kernel of a convolution."""
SizedKernel: TypeAlias = NestKernel | AttentionKernel
"""Builder of a kernel other than a product, whose sizes a search may choose (``choices``)."""
K = TypeVar("K", ContractKernel, SizedKernel)


class Tuner(RecordTileChooser, Protocol):
    """Chooses sizes of kernels from measurements, such as ``polydyn.search.outcomes.ChosenByRecords``."""

    def builders(self, key: str, form: ContractGroup) -> TunedBuilders[ContractKernel] | None:
        """Return the tuned forms of a product whose roles are solved, or None without a record."""

    def sized(self, key: str, kernel: SizedKernel) -> TunedBuilders[SizedKernel] | None:
        """Return the tuned forms of another kernel, or None without a record."""


@dataclass(frozen=True)
class TunedBuilders(Generic[K]):
    """Tuned forms of one group, before they are proven and built: a builder and a launch for each option."""

    options: tuple[tuple[K, dict[str, Index]], ...]
    decision: Decision
    reasons: tuple[str, ...] = ()


class KernelBuilder(Builder):
    """Schedules, proves and builds each distinct kernel once.

    ``forms``: the form that each group was built from, by key. ``groups``: groups of kernels that differ from the group
    of their site, by name. ``products``: whether each float32 product rounds its operands, by output. ``sized``: the
    builders of kernels whose sizes a search may choose, by key.
    """

    dtypes, device = CPU_DTYPES, "CPU"

    def __init__(self, plan: FusionPlan, target: CpuTarget, tuner: Tuner | None = None, rounded: bool = False) -> None:
        """``rounded``: float32 products may round their operands to bfloat16."""
        super().__init__(plan, tuner)
        self.target, self.tuner, self.rounded = target, tuner, rounded
        self.forms: dict[str, Form] = {}
        self.groups: dict[str, Group] = {}
        self.attentions: dict[str, AttentionKernel] = {}
        self.sized: dict[str, SizedKernel] = {}
        self.products: dict[str, bool] = {}

    def build_group(self, group: FusedGroup) -> PlacedGroup:
        """See ``Builder``."""
        if group.kind == "order":
            return self._placed(group, lower_argsort(self.plan, group))
        if group.kind in ("scatter", "scan"):
            return self._placed(group, lower_serial(self.plan, group))
        form = self._product(group) if group.kind == "contract" else None
        lowered = form or with_blocked_form(self.plan, _settled(lower_nest(self.plan, group)), self.target.width)
        return self._placed(group, lowered)

    def _product(self, group: FusedGroup) -> ContractGroup | None:
        rounded = self.rounded and group.nodes[0].body.dtype == "float32"
        vectors = tile_vectors(self.target.core)
        quads = replace(INT8X4, vectors=1 if self.target.amx else vectors)  # tiles of the unit require single vectors
        bytes_ = (quads, replace(INT16X2, least=INT8X4.least)) if self.target.quads else (INT16X2,)
        kinds = (*bytes_, *((BF16X2,) if rounded else ()))
        form = lower_contract(
            self.plan, group, self.target.width, promotion=True, kinds=kinds, shared=self.target.core.shared,
            vectors=vectors,
        )  # fmt: skip
        if rounded:
            self.products[group.nodes[0].output] = form is not None and form.k_packed
        return form and replace(form, lowered=_settled(form.lowered))

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

    def attention(self, group: FusedGroup) -> PlacedGroup | None:
        """See ``Builder``."""
        form = lower_attention(self.plan, group, wide=True)
        if form is None:
            return None
        if refused := self._attention(form, self._key(form)).declined:
            self.notes.append(f"{group.outputs[0]}: attention in parts: {refused}")
            return None
        return self._placed(group, form)

    def _placed(self, group: FusedGroup, form: Form) -> PlacedGroup:
        lowered = form if isinstance(form, LoweredGroup) else form.lowered
        self.unproven += prove_prologue(self.plan, group)
        key = self._key(form)
        placed = self.reuse_kernel(group, lowered, key)
        if placed is None:
            verify_group(lowered.group)
            self.forms[key] = form
            self.show(group, _name(form, key), *_solved(form))
            placed = self.placed[key] = self._build(form, PlacedGroup(group, lowered, key, ()))
        return placed

    def _key(self, form: Form) -> str:
        if isinstance(form, ContractGroup):
            transposed = (form.transposed.roles,) if form.transposed else ()
            more = (*transposed, form.window) if form.window else transposed
            kind = (form.roles, sorted(form.packed), form.dot, form.fill, form.footprint, *more)
            return form.lowered.key(*kind, self.target)
        if isinstance(form, AttentionGroup):
            return form.lowered.key(form.parts, self.target)
        if isinstance(form, ArgSortGroup):
            sizes = (form.count, form.stride, form.positions, form.step)
            return form.lowered.key(form.band, sizes, form.largest, self.target)
        if isinstance(form, SerialGroup):
            return form.lowered.key(form.band, form.tiled, form.conditions, self.target)
        return form.key(self.target, *((form.blocked,) if form.blocked else ()))

    def _build(self, form: Form, place: PlacedGroup) -> PlacedGroup:
        """Build the kernels of a group."""
        if isinstance(form, ContractGroup):
            return self._contract(form, place)
        if isinstance(form, LoweredGroup):
            return self._nest(form, place)
        if isinstance(form, ArgSortGroup):
            order = OrderKernel(
                _name(form, place.key), form.lowered.group, form.band, form.count, form.stride, form.positions,
                form.step, form.largest,
            )  # fmt: skip
            return replace(place, kernels=(order.build(),))
        if isinstance(form, SerialGroup):
            group, name = form.lowered.group, _name(form, place.key)
            serial = SerialKernel(name, group, form.band, form.tiled, form.conditions, self.target)
            return replace(place, kernels=(serial.build(),))
        kernel = self._attention(form, place.key)
        return self._tuned(kernel, place, kernel.build())

    def _contract(self, form: ContractGroup, place: PlacedGroup) -> PlacedGroup:
        group = form.lowered.group
        roles = Solver(group).contract(form.roles)
        build = DotKernel if form.dot else ContractKernel
        kernel = build(_name(form, place.key), group, roles, self.target, form.packed, None, form.fill, form.footprint)
        tuned = self.tuner.builders(place.key, replace(form, roles=roles)) if self.tuner and not form.dot else None
        few = None
        if kernel.product.decodes:
            few = DecodingKernel(f"few_{place.key[:12]}", group, roles, self.target, form.packed, None, form.fill)
            if few.product.in_bytes:
                return replace(place, kernels=(few.build(),))
        matrix = self._matrix(kernel, form, place)
        if matrix is not None and matrix.product.rows.constant is not None:
            return replace(place, kernels=(matrix.build(),), reasons=(AMX_REASON,))
        if tuned is None:
            placed = replace(place, kernels=(kernel.build(),))
        else:
            placed = _with_tuned(tuned, place)
        if few is not None:
            return _with_few(few, placed)
        if has_shares(kernel.product, kernel.plan):
            in_shares = SplitDot if form.dot else SplitKernel
            split = in_shares(f"split_{place.key[:12]}", group, form.roles, self.target, form.packed)
            placed = _with_split(split, placed)
        if form.transposed:
            placed = self._with_transposed(form.transposed, placed)
        if form.window:
            placed = self._with_window(form.window, kernel, placed)
        if matrix is not None:
            return _with(placed, matrix.build(), SIDE - matrix.product.rows, 0, AMX_REASON)
        if form.dot or form.fill or not DotKernel.fits(group, roles):
            return placed
        dot = DotKernel(f"dot_{place.key[:12]}", group, roles, self.target, form.packed)
        return _with_dot(dot, placed)

    def _matrix(self, other: ContractKernel, form: ContractGroup, place: PlacedGroup) -> MatrixKernel | None:
        """Return the builder of the AMX kernel if ``other`` has such a form, else None."""
        x = other.product
        if not MatrixKernel.fits(x, form.fill):
            return None
        return MatrixKernel(f"matrix_{place.key[:12]}", x.group, x.roles, x.target, form.packed, None, form.fill)

    def _with_transposed(self, form: ContractGroup, placed: PlacedGroup) -> PlacedGroup:
        """Add the transposed kernel, for columns that would leave much of their vectors empty. The number of rows is
        exact.
        """
        group = form.lowered.group
        roles = Solver(group).contract(form.roles)
        kernel = ContractKernel(f"turned_{placed.key[:12]}", group, roles, self.target, form.packed)
        self.groups[kernel.name] = group
        x = kernel.product
        extra_cost = transpose_cost(x.columns, x.rows, self.target.width)
        reason = "vectors along the columns would be too empty: they are rows"
        return _with(placed, kernel.build(), extra_cost, 0, reason)

    def _tuned(self, kernel: SizedKernel, place: PlacedGroup, built: Kernel) -> PlacedGroup:
        """Add ``built``, the default kernel of ``kernel``, or the kernels that a search chose."""
        self.sized[place.key] = kernel
        tuned = self.tuner.sized(place.key, kernel) if self.tuner else None
        return replace(place, kernels=(built,)) if tuned is None else _with_tuned(tuned, place)

    def _nest(self, form: LoweredGroup, place: PlacedGroup) -> PlacedGroup:
        group = form.group
        schedule = Solver(group).nest()
        window = self._window(group, place, schedule)
        if isinstance(window, PlacedGroup):
            return self._with_blocked_window(form.blocked, window) if form.blocked else window
        reasons = () if window is None else (f"no register tiles of the window: {window}",)
        kernel = NestKernel(f"nest_{place.key[:12]}", group, schedule.band, schedule.phases, self.target, paired=True)
        built = kernel.build()
        placed = self._tuned(kernel, place, replace(built, notes=(*built.notes, *schedule.notes, *reasons)))
        if not SplitNest.fits(group, schedule.band):
            return placed
        split = SplitNest(f"split_{place.key[:12]}", group, schedule.band, self.target)
        if not split.is_useful:
            return placed
        return _with_split(split, placed)

    def _window(self, group: Group, place: PlacedGroup, schedule: NestSchedule) -> PlacedGroup | Declined | None:
        """Add a window kernel in register tiles. Returns the reason if that fails, or None if the group is not a
        window.
        """
        axes = fits(group, schedule.band, self.target.width, self.target.core.sums)
        if axes is None:
            return None
        kernel = _in_tiles(f"window_{place.key[:12]}", group, axes, schedule, self.target)
        built = kernel.build_vectors()
        return built if isinstance(built, Declined) else self._tuned(kernel, place, built)

    def _with_window(self, group: Group, product: ContractKernel, placed: PlacedGroup) -> PlacedGroup:
        """Add the window kernel of a convolution if vectors along image rows need fewer operations."""
        schedule = Solver(group).nest()
        axes = fits(group, schedule.band, self.target.width, self.target.core.sums)
        extra_cost = None if axes is None else window_extra_cost(product, group, axes)
        if axes is None or extra_cost is None or (extra_cost.constant or 0) > 0:
            return placed
        kernel = _in_tiles(f"window_{placed.key[:12]}", group, axes, schedule, self.target)
        built = kernel.build_vectors()
        if isinstance(built, Declined):
            return placed
        self.groups[built.name] = group
        if extra_cost.constant is not None:
            return replace(placed, kernels=(built,), decision=ONLY, reasons=(WINDOW_REASON,))
        return _with(placed, built, extra_cost, 0, WINDOW_REASON)

    def _with_blocked_window(self, form: TurnedWindow, placed: PlacedGroup) -> PlacedGroup:
        """Add the blocked kernel, for planes whose rows would leave much of their vectors empty."""
        kernel = TurnedWindowKernel(f"turned_{placed.key[:12]}", form.group, form.pixels, self.target)
        constant_cost = kernel.extra_cost.constant
        if constant_cost is not None and constant_cost > 0:
            return placed
        self.groups[kernel.name] = form.group
        if constant_cost is not None:
            return replace(placed, kernels=(kernel.build(),), decision=ONLY)
        return _with(
            placed, kernel.build(), kernel.extra_cost, 0, "vectors along lines would be too empty: planes lie in lanes"
        )

    def _attention(self, form: AttentionGroup, key: str) -> AttentionKernel:
        if key not in self.attentions:
            name, parts = _name(form, key), schedule_attention(form.parts)
            self.attentions[key] = AttentionKernel(name, form.lowered.group, parts, self.target, frozenset())
        return self.attentions[key]


def _settled(lowered: LoweredGroup) -> LoweredGroup:
    """Merge roundings where two in sequence differ from one (``round_once``)."""
    return replace(lowered, group=round_once(lowered.group))


def _name(form: Form, key: str) -> str:
    """Return the name of the kernel of a form."""
    return f"{KERNEL_PREFIXES[type(form)]}_{key[:12]}"


def _solved(form: Form) -> tuple[Group, ...]:
    """Return the groups whose schedules are solved."""
    if isinstance(form, AttentionGroup):
        return attention_groups(form.parts)
    return (form.group if isinstance(form, LoweredGroup) else form.lowered.group,)


def _in_tiles(name: str, group: Group, axes: Axes, schedule: NestSchedule, target: CpuTarget) -> WindowKernel:
    """Return the builder of a window kernel."""
    if axes.taps != group.backbone.iterators[-len(axes.taps) :]:
        group = permute_reduction(group, axes.taps)
        schedule = Solver(group).nest()
    return WindowKernel(name, group, axes, schedule.phases, target)


def _with_tuned(tuned: TunedBuilders[K], place: PlacedGroup) -> PlacedGroup:
    """Add the kernels that a search chose, each built once."""
    built: dict[str, Kernel] = {}
    for builder, _ in tuned.options:
        if builder.name not in built:
            built[builder.name] = builder.build()
    options = tuple(replace(built[b.name], launch=launch) for b, launch in tuned.options)
    return replace(place, kernels=options, decision=tuned.decision, reasons=tuned.reasons)


def _with_split(split: SplitKernel | SplitNest, placed: PlacedGroup) -> PlacedGroup:
    """Add the split-K kernel, for few results of a long reduction, and the kernel that adds its partial sums."""
    decision = Split(split.count, 0, placed.decision, Leaf(len(placed.kernels)))
    reason = f"up to {FEW_TILES} tiles of a long reduction: it is split"
    return replace(
        placed, kernels=(*placed.kernels, split.build()), decision=decision, reasons=(*placed.reasons, reason)
    )


def _with_few(few: DecodingKernel, placed: PlacedGroup) -> PlacedGroup:
    """Add the kernel for few rows."""
    return _with(
        placed, few.build(), few.product.rows, FEW_ROWS, f"up to {FEW_ROWS} rows: weights decoded in registers"
    )


def _with_dot(dot: DotKernel, placed: PlacedGroup) -> PlacedGroup:
    """Add the kernel for few columns with enough rows and steps."""
    x = dot.product
    rows = minimum(LEAST_ROWS - x.rows, x.columns - 1)  # one column needs no packing
    extra_cost = maximum(x.columns - COLUMNS, LEAST_STEPS - x.steps, rows)
    return _with(placed, dot.build(), extra_cost, 0, f"up to {COLUMNS} columns: vectors along the reduction")


def _with_matrix(matrix: MatrixKernel, placed: PlacedGroup) -> PlacedGroup:
    """Add the AMX kernel, for rows that fill a tile of the matrix unit."""
    return _with(placed, matrix.build(), SIDE - matrix.product.rows, 0, AMX_REASON)


def _with(placed: PlacedGroup, kernel: Kernel, measure: Index, max_measure: int, reason: str) -> PlacedGroup:
    """Add a kernel that is selected if ``measure`` is at most ``max_measure``."""
    decision = Split(measure, max_measure, Leaf(len(placed.kernels)), placed.decision)
    return replace(placed, kernels=(*placed.kernels, kernel), decision=decision, reasons=(*placed.reasons, reason))
