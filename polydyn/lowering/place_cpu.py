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
from polydyn.codegen.cpu.windows import Axes, WindowKernel, fits, missing_to_be_window
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.passes.matrix import SIDE
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.lowering.attention import AttentionGroup, lower_attention
from polydyn.lowering.contract import ContractGroup, lower_contract, missing_to_turn
from polydyn.lowering.flatten import CPU_DTYPES
from polydyn.lowering.group import LoweredGroup, TurnedWindow
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.order import OrderGroup, lower_order
from polydyn.lowering.place import Builder, Noting, Placed
from polydyn.lowering.prologue import prove_prologue
from polydyn.lowering.rounding import round_once
from polydyn.lowering.serial import SerialGroup, lower_serial
from polydyn.lowering.turned import with_turned
from polydyn.lowering.words import PAIRS, QUADS, ROUNDED
from polydyn.schedules.decision import ONLY, Decision, Leaf, Split
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.schedules.model import Group, verify_group
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.solution.schedule import NestSchedule, attention_groups, schedule_attention
from polydyn.schedules.tree.rewrites import permute_reduction

Form: TypeAlias = ContractGroup | AttentionGroup | SerialGroup | OrderGroup | LoweredGroup


KINDS: dict[type, str] = {
    ContractGroup: "contract", AttentionGroup: "attention", SerialGroup: "serial", OrderGroup: "order",
    LoweredGroup: "nest",
}  # fmt: skip
"""What names of kernels begin with."""


IN_TILES = f"from {SIDE} rows on: tiles of the matrix unit (AMX)"
"""Why a product has a kernel of that kind."""
ALONG_LINES = "results in planes, of few channels: vectors along lines of pixels"
"""Why a convolution has a kernel that is a window."""
SizedKernel: TypeAlias = NestKernel | AttentionKernel
"""What builds a kernel that is no product, with the sizes that it may have (``choices``)."""
K = TypeVar("K", ContractKernel, SizedKernel)


class Tuner(Noting, Protocol):
    """What chooses sizes of kernels from measurements; ``polydyn.search.outcomes.ChosenByRecords`` is one."""

    def builders(self, key: str, form: ContractGroup) -> TunedBuilders[ContractKernel] | None:
        """The tuned forms of a product whose roles are solved; None when nothing is known of it."""

    def sized(self, key: str, kernel: SizedKernel) -> TunedBuilders[SizedKernel] | None:
        """The tuned forms of another kernel; None when nothing is known of it."""


@dataclass(frozen=True)
class TunedBuilders(Generic[K]):
    """Tuned forms of one group, before they are proven and built: a builder and launch for each option."""

    options: tuple[tuple[K, dict[str, Index]], ...]
    decision: Decision
    reasons: tuple[str, ...] = ()


class KernelBuilder(Builder):
    """Schedules, proves and builds each distinct kernel once.

    ``forms``: what each group was built from, by key. ``groups``: of kernels whose group is not that of their place, by
    name. ``products``: whether those of float32 round their operands, by output. ``sized``: what built the kernels of
    groups whose sizes a search may choose, by key.
    """

    dtypes, device = CPU_DTYPES, "CPU"

    def __init__(self, plan: FusionPlan, target: CpuTarget, tuner: Tuner | None = None, rounded: bool = False) -> None:
        """``rounded``: products of float32 may round their operands to bfloat16."""
        super().__init__(plan, tuner)
        self.target, self.tuner, self.rounded = target, tuner, rounded
        self.forms: dict[str, Form] = {}
        self.groups: dict[str, Group] = {}
        self.attentions: dict[str, AttentionKernel] = {}
        self.sized: dict[str, SizedKernel] = {}
        self.products: dict[str, bool] = {}

    def one(self, group: FusedGroup) -> Placed:
        """As ``Builder``."""
        if group.kind == "order":
            return self._placed(group, lower_order(self.plan, group))
        if group.kind in ("scatter", "scan"):
            return self._placed(group, lower_serial(self.plan, group))
        form = self._product(group) if group.kind == "contract" else None
        lowered = form or with_turned(self.plan, _settled(lower_nest(self.plan, group)), self.target.width)
        return self._placed(group, lowered)

    def _product(self, group: FusedGroup) -> ContractGroup | None:
        rounded = self.rounded and group.nodes[0].body.dtype == "float32"
        vectors = tile_vectors(self.target.core)
        quads = replace(QUADS, vectors=1 if self.target.amx else vectors)  # tiles of the unit want single vectors
        bytes_ = (quads, replace(PAIRS, least=QUADS.least)) if self.target.quads else (PAIRS,)
        kinds = (*bytes_, *((ROUNDED,) if rounded else ()))
        form = lower_contract(
            self.plan, group, self.target.width, promotion=True, kinds=kinds, shared=self.target.core.shared,
            vectors=vectors,
        )  # fmt: skip
        if rounded:
            self.products[group.nodes[0].output] = form is not None and form.in_words
        return form and replace(form, lowered=_settled(form.lowered))

    @property
    def roundings(self) -> tuple[str, ...]:
        """As ``Builder``."""
        if not self.rounded:
            return ()
        kept = [name for name, words in self.products.items() if not words]
        all_, some = len(self.products), len(self.products) - len(kept)
        line = f"precision bf16: {some} of {all_} products round their operands to bfloat16"
        why = "no constant operand, or few columns or steps"
        return (line, *([f"in float32 stay ({why}) {', '.join(kept)}"] if kept else []))

    def attention(self, group: FusedGroup) -> Placed | None:
        """As ``Builder``."""
        form = lower_attention(self.plan, group, wide=True)
        if form is None:
            return None
        if refused := self._attention(form, self._key(form)).declined:
            self.notes.append(f"{group.outputs[0]}: attention in parts: {refused}")
            return None
        return self._placed(group, form)

    def _placed(self, group: FusedGroup, form: Form) -> Placed:
        lowered = form if isinstance(form, LoweredGroup) else form.lowered
        self.unproven += prove_prologue(self.plan, group)
        key = self._key(form)
        found = self.again(group, lowered, key)
        if found is None:
            verify_group(lowered.group)
            self.forms[key] = form
            self.show(group, _name(form, key), *_solved(form))
            found = self.placed[key] = self._build(form, Placed(group, lowered, key, ()))
        return found

    def _key(self, form: Form) -> str:
        if isinstance(form, ContractGroup):
            turned = (form.turned.roles,) if form.turned else ()
            more = (*turned, form.window) if form.window else turned
            kind = (form.roles, sorted(form.packed), form.dot, form.fill, form.footprint, *more)
            return form.lowered.key(*kind, self.target)
        if isinstance(form, AttentionGroup):
            return form.lowered.key(form.parts, self.target)
        if isinstance(form, OrderGroup):
            sizes = (form.count, form.stride, form.most, form.step)
            return form.lowered.key(form.band, sizes, form.largest, self.target)
        if isinstance(form, SerialGroup):
            return form.lowered.key(form.band, form.tiled, form.conditions, self.target)
        return form.key(self.target, *((form.turned,) if form.turned else ()))

    def _build(self, form: Form, place: Placed) -> Placed:
        """The place with its kernels."""
        if isinstance(form, ContractGroup):
            return self._contract(form, place)
        if isinstance(form, LoweredGroup):
            return self._nest(form, place)
        if isinstance(form, OrderGroup):
            order = OrderKernel(
                _name(form, place.key), form.lowered.group, form.band, form.count, form.stride, form.most, form.step,
                form.largest,
            )  # fmt: skip
            return replace(place, kernels=(order.build(),))
        if isinstance(form, SerialGroup):
            group, name = form.lowered.group, _name(form, place.key)
            serial = SerialKernel(name, group, form.band, form.tiled, form.conditions, self.target)
            return replace(place, kernels=(serial.build(),))
        kernel = self._attention(form, place.key)
        return self._tuned(kernel, place, kernel.build())

    def _contract(self, form: ContractGroup, place: Placed) -> Placed:
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
            return replace(place, kernels=(matrix.build(),), reasons=(IN_TILES,))
        if tuned is None:
            found = replace(place, kernels=(kernel.build(),))
        else:
            found = _with_tuned(tuned, place)
        if few is not None:
            return _with_few(few, found)
        if has_shares(kernel.product, kernel.plan):
            in_shares = SplitDot if form.dot else SplitKernel
            split = in_shares(f"split_{place.key[:12]}", group, form.roles, self.target, form.packed)
            found = _with_split(split, found)
        if form.turned:
            found = self._with_turned(form.turned, found)
        if form.window:
            found = self._with_window(form.window, kernel, found)
        if matrix is not None:
            return _with(found, matrix.build(), SIDE - matrix.product.rows, 0, IN_TILES)
        if form.dot or form.fill or not DotKernel.fits(group, roles):
            return found
        dot = DotKernel(f"dot_{place.key[:12]}", group, roles, self.target, form.packed)
        return _with_dot(dot, found)

    def _matrix(self, other: ContractKernel, form: ContractGroup, place: Placed) -> MatrixKernel | None:
        """What builds the kernel in tiles of a matrix unit, where ``other`` has such a form."""
        x = other.product
        if not MatrixKernel.fits(x, form.fill):
            return None
        return MatrixKernel(f"matrix_{place.key[:12]}", x.group, x.roles, x.target, form.packed, None, form.fill)

    def _with_turned(self, form: ContractGroup, others: Placed) -> Placed:
        """The place with one kernel more, for columns that leave much of their vectors empty: rows are exact."""
        group = form.lowered.group
        roles = Solver(group).contract(form.roles)
        kernel = ContractKernel(f"turned_{others.key[:12]}", group, roles, self.target, form.packed)
        self.groups[kernel.name] = group
        x = kernel.product
        missing = missing_to_turn(x.columns, x.rows, self.target.width)
        return _with(others, kernel.build(), missing, 0, "vectors along the columns would be too empty: they are rows")

    def _tuned(self, kernel: SizedKernel, place: Placed, built: Kernel) -> Placed:
        """The place with ``built``, what ``kernel`` builds by rule, or with the kernels that a search chose."""
        self.sized[place.key] = kernel
        tuned = self.tuner.sized(place.key, kernel) if self.tuner else None
        return replace(place, kernels=(built,)) if tuned is None else _with_tuned(tuned, place)

    def _nest(self, form: LoweredGroup, place: Placed) -> Placed:
        group = form.group
        schedule = Solver(group).nest()
        window = self._window(group, place, schedule)
        if isinstance(window, Placed):
            return self._with_turned_window(form.turned, window) if form.turned else window
        why = () if window is None else (f"no register tiles of the window: {window}",)
        kernel = NestKernel(f"nest_{place.key[:12]}", group, schedule.band, schedule.phases, self.target, paired=True)
        built = kernel.build()
        found = self._tuned(kernel, place, replace(built, notes=(*built.notes, *schedule.notes, *why)))
        if not SplitNest.fits(group, schedule.band):
            return found
        split = SplitNest(f"split_{place.key[:12]}", group, schedule.band, self.target)
        if not split.useful:
            return found
        return _with_split(split, found)

    def _window(self, group: Group, place: Placed, schedule: NestSchedule) -> Placed | Declined | None:
        """The place with a window in register tiles, or why it has none; None where the group is no window."""
        axes = fits(group, schedule.band, self.target.width, self.target.core.sums)
        if axes is None:
            return None
        kernel = _in_tiles(f"window_{place.key[:12]}", group, axes, schedule, self.target)
        built = kernel.build_vectors()
        return built if isinstance(built, Declined) else self._tuned(kernel, place, built)

    def _with_window(self, group: Group, product: ContractKernel, others: Placed) -> Placed:
        """The place with one kernel more, for a convolution whose vectors along lines are fewer operations."""
        schedule = Solver(group).nest()
        axes = fits(group, schedule.band, self.target.width, self.target.core.sums)
        missing = None if axes is None else missing_to_be_window(product, group, axes)
        if axes is None or missing is None or (missing.constant or 0) > 0:
            return others
        kernel = _in_tiles(f"window_{others.key[:12]}", group, axes, schedule, self.target)
        built = kernel.build_vectors()
        if isinstance(built, Declined):
            return others
        self.groups[built.name] = group
        if missing.constant is not None:
            return replace(others, kernels=(built,), decision=ONLY, reasons=(ALONG_LINES,))
        return _with(others, built, missing, 0, ALONG_LINES)

    def _with_turned_window(self, form: TurnedWindow, others: Placed) -> Placed:
        """The place with one kernel more, for planes that leave much of their vectors empty."""
        kernel = TurnedWindowKernel(f"turned_{others.key[:12]}", form.group, form.pixels, self.target)
        known = kernel.missing.constant
        if known is not None and known > 0:
            return others
        self.groups[kernel.name] = form.group
        if known is not None:
            return replace(others, kernels=(kernel.build(),), decision=ONLY)
        return _with(
            others, kernel.build(), kernel.missing, 0, "vectors along lines would be too empty: planes lie in lanes"
        )

    def _attention(self, form: AttentionGroup, key: str) -> AttentionKernel:
        if key not in self.attentions:
            name, parts = _name(form, key), schedule_attention(form.parts)
            self.attentions[key] = AttentionKernel(name, form.lowered.group, parts, self.target, frozenset())
        return self.attentions[key]


def _settled(lowered: LoweredGroup) -> LoweredGroup:
    """The group with one rounding for each tensor that differs by one."""
    return replace(lowered, group=round_once(lowered.group))


def _name(form: Form, key: str) -> str:
    """The name of the kernel of a form."""
    return f"{KINDS[type(form)]}_{key[:12]}"


def _solved(form: Form) -> tuple[Group, ...]:
    """The groups whose schedules are solved."""
    if isinstance(form, AttentionGroup):
        return attention_groups(form.parts)
    return (form.group if isinstance(form, LoweredGroup) else form.lowered.group,)


def _in_tiles(name: str, group: Group, axes: Axes, schedule: NestSchedule, target: CpuTarget) -> WindowKernel:
    """What builds the kernel of a window."""
    if axes.taps != group.backbone.iterators[-len(axes.taps) :]:
        group = permute_reduction(group, axes.taps)
        schedule = Solver(group).nest()
    return WindowKernel(name, group, axes, schedule.phases, target)


def _with_tuned(tuned: TunedBuilders[K], place: Placed) -> Placed:
    """The place with the kernels that a search chose, each built once."""
    built: dict[str, Kernel] = {}
    for builder, _ in tuned.options:
        if builder.name not in built:
            built[builder.name] = builder.build()
    options = tuple(replace(built[b.name], launch=launch) for b, launch in tuned.options)
    return replace(place, kernels=options, decision=tuned.decision, reasons=tuned.reasons)


def _with_split(split: SplitKernel | SplitNest, others: Placed) -> Placed:
    """The place with one kernel more, for few results of a long reduction, and the one that adds its shares."""
    decision = Split(split.count, 0, others.decision, Leaf(len(others.kernels)))
    reason = f"up to {FEW_TILES} tiles of a long reduction: it is split"
    return replace(
        others, kernels=(*others.kernels, split.build()), decision=decision, reasons=(*others.reasons, reason)
    )


def _with_few(few: DecodingKernel, others: Placed) -> Placed:
    """The place with one kernel more, for few rows."""
    return _with(
        others, few.build(), few.product.rows, FEW_ROWS, f"up to {FEW_ROWS} rows: weights decoded in registers"
    )


def _with_dot(dot: DotKernel, others: Placed) -> Placed:
    """The place with one kernel more, for few columns and enough rows and steps."""
    x = dot.product
    rows = minimum(LEAST_ROWS - x.rows, x.columns - 1)  # one column costs nothing to pack
    missing = maximum(x.columns - COLUMNS, LEAST_STEPS - x.steps, rows)
    return _with(others, dot.build(), missing, 0, f"up to {COLUMNS} columns: vectors along the reduction")


def _with_matrix(matrix: MatrixKernel, others: Placed) -> Placed:
    """The place with one kernel more, for rows that fill a tile of the matrix unit."""
    return _with(others, matrix.build(), SIDE - matrix.product.rows, 0, IN_TILES)


def _with(others: Placed, kernel: Kernel, measure: Index, most: int, reason: str) -> Placed:
    """The place with one kernel more, which is taken where ``measure`` is at most ``most``."""
    decision = Split(measure, most, Leaf(len(others.kernels)), others.decision)
    return replace(others, kernels=(*others.kernels, kernel), decision=decision, reasons=(*others.reasons, reason))
