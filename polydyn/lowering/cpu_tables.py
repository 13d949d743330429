"""The kernels that can compute a group on a CPU, as ordered tables (``alternatives``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Generic, Protocol, TypeAlias, TypeVar

from polydyn.codegen.alternatives import Alternative
from polydyn.codegen.cpu.attention import AttentionKernel
from polydyn.codegen.cpu.decoding import FEW_ROWS, DecodingKernel
from polydyn.codegen.cpu.dot import COLUMNS, LEAST_ROWS, LEAST_STEPS, DotKernel
from polydyn.codegen.cpu.matrix import MatrixKernel
from polydyn.codegen.cpu.plan import REDUCTION_BLOCK, ContractTuple
from polydyn.codegen.cpu.product import ContractKernel
from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.shares import FEW_TILES, split_refusal
from polydyn.codegen.cpu.split import SplitDot, SplitKernel, SplitNest
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.cpu.turned import TurnedWindowKernel
from polydyn.codegen.cpu.windows import Axes, WindowKernel, window_axes, window_extra_cost
from polydyn.codegen.kernel import Kernel
from polydyn.lowering.alternatives import Offer, RowChoice, Rows, Serves, rows_of
from polydyn.lowering.contract import ContractGroup, transpose_cost
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.place import RecordTileChooser
from polydyn.lowering.row_choices import in_slices, in_tiles, slices_refusal, with_sizes, without_sizes
from polydyn.schedules.decision import Decision
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.schedules.model import Group
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.solution.schedule import NestSchedule
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.rewrites import permute_reduction

AMX_REASON = "tiles of the matrix unit (AMX)"
"""Reason for an AMX kernel of a product."""
WINDOW_REASON = "results in planes, of few channels: vectors along lines of pixels"
"""Reason for a window kernel of a convolution."""
DECODED_IN_REGISTERS = "its 4-bit weights are decoded in registers at all sizes"
ON_MATRIX_UNIT = "the matrix unit computes it at all sizes"
"""Reasons why a product is not tuned."""
SPLIT_REASON = f"up to {FEW_TILES} tiles of a long reduction: it is split"
"""Reason for a split-K kernel."""
SizedKernel: TypeAlias = NestKernel | AttentionKernel
"""Builder of a kernel other than a product, whose sizes a search may choose (``choices``)."""
K = TypeVar("K", ContractKernel, SizedKernel)


@dataclass(frozen=True)
class TunedBuilders(Generic[K]):
    """Tuned forms of one group, before they are proven and built: a builder and a launch for each option.

    ``groups``: groups of kernels that differ from the group that was tuned, by name. ``rows``: whether the search
    compared the rows of the group's table, and its decision replaces them.
    """

    options: tuple[tuple[K, dict[str, Index]], ...]
    decision: Decision
    reasons: tuple[str, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    rows: bool = False

    def offer(self) -> Offer:
        """Offer the kernels that a search chose, each built once."""
        return Offer(self._kernels, decision=self.decision, reasons=self.reasons)

    def _kernels(self) -> tuple[Kernel, ...]:
        built: dict[str, Kernel] = {}
        for builder, _ in self.options:
            if builder.name not in built:
                built[builder.name] = builder.build()
        return tuple(replace(built[b.name], launch=launch) for b, launch in self.options)


class Tuner(RecordTileChooser, Protocol):
    """Chooses sizes of kernels from measurements, such as ``polydyn.search.outcomes.ChosenByRecords``."""

    def builders(self, key: str, form: ContractGroup, rows: Rows) -> TunedBuilders[ContractKernel] | None:
        """Return the tuned forms of a product whose roles are solved, or None without a record. ``rows``: the rows of
        its table that a search may have chosen.
        """

    def untuned(self, key: str, reason: str) -> None:
        """Note that the kernel of a group has no tuned sizes."""

    def sized(self, key: str, kernel: SizedKernel, rows: Rows) -> TunedBuilders[SizedKernel] | None:
        """Return the tuned forms of another kernel, or None without a record. ``rows``: as for ``builders``."""


def sized_offer(tuned: TunedBuilders[SizedKernel] | None, build: Callable[[], Kernel]) -> Offer:
    """Offer the kernels that a search chose, or the one that ``build`` makes, for every size."""
    return Offer(lambda: (build(),)) if tuned is None else tuned.offer()


class RowsKernel(NestKernel):
    """A kernel of rows or vectors, which may process rows in pairs."""

    def resized(self, name: str, built: Mapping[str, int]) -> RowsKernel:
        """Return the kernel under another name; it has no build-time sizes."""
        return RowsKernel(name, self.group, self.prefix, self.phases, self.target, paired=True)


@dataclass(frozen=True)
class ProductForms:
    """A product whose kernels are chosen.

    ``name``: the name of its default kernel. ``groups``: groups of kernels that differ from the product's own, by name;
    rows add to it.
    """

    form: ContractGroup
    key: str
    name: str
    target: CpuTarget
    tuner: Tuner | None
    groups: dict[str, Group]

    @property
    def group(self) -> Group:
        """The computation."""
        return self.form.lowered.group

    @cached_property
    def roles(self) -> Roles:
        """The roles of its iterators, solved."""
        return Solver(self.group).contract(self.form.roles)

    @cached_property
    def kernel(self) -> ContractKernel:
        """The builder of its default kernel."""
        form, build = self.form, DotKernel if self.form.dot else ContractKernel
        return build(self.name, self.group, self.roles, self.target, form.packed, None, form.fill, form.footprint)

    @property
    def alternatives(self) -> Rows:
        """The rows that a search may choose beside register tiles."""
        return rows_of(PRODUCTS, self, TILES)

    @cached_property
    def tuned(self) -> TunedBuilders[ContractKernel] | None:
        """The kernels that a search chose, or None without a record."""
        if self.tuner is None or self.form.dot:
            return None
        tuned = self.tuner.builders(self.key, replace(self.form, roles=self.roles), self.alternatives)
        self.groups.update(tuned.groups if tuned else {})
        return tuned

    @property
    def searched(self) -> Offer | None:
        """The offer of a search that compared the rows of the table, or None."""
        return self.tuned.offer() if self.tuned and self.tuned.rows else None

    def _named(self, prefix: str) -> str:
        return f"{prefix}_{self.key[:12]}"

    def decoding(self) -> Offer | Declined:
        """Offer the kernel that decodes weights in registers, for few rows, or if rows are bytes for any number."""
        if not self.kernel.product.decodes:
            return Declined("it has no weights of 4 bits")
        few = DecodingKernel(
            self._named("few"), self.group, self.roles, self.target, self.form.packed, None, self.form.fill
        )
        if few.product.in_bytes:
            return Offer(lambda: (few.build(),))
        reason = f"up to {FEW_ROWS} rows: weights decoded in registers"
        return Offer(lambda: (few.build(),), Serves(few.product.rows, FEW_ROWS), reasons=(reason,))

    def lanes_of_steps(self) -> Offer | Declined:
        """Offer the kernel for few computed columns, whose vectors run along the reduction."""
        if self.form.dot or self.form.fill:
            return Declined("its rows are copied" if self.form.fill else "its only kernel is of this kind")
        if refusal := DotKernel.refusal(self.group, self.roles):
            return refusal

        def build(name: str) -> DotKernel:
            return DotKernel(name, self.group, self.roles, self.target, self.form.packed)

        dot = build(self._named("dot"))
        x = dot.product
        rows = minimum(LEAST_ROWS - x.rows, x.columns - 1)  # one column needs no packing
        extra_cost = maximum(x.columns - COLUMNS, LEAST_STEPS - x.steps, rows)
        reason = f"up to {COLUMNS} columns: vectors along the reduction"
        choice = without_sizes("dot", self.group, build)
        return Offer(lambda: (dot.build(),), Serves(extra_cost), reasons=(reason,), choice=lambda: choice)

    def matrix_unit(self) -> Offer | Declined:
        """Offer the AMX kernel for any number of rows. A tile with fewer rows takes less time."""
        x = self.kernel.product
        if refusal := MatrixKernel.refusal(x, self.form.fill):
            return refusal
        matrix = MatrixKernel(
            self._named("matrix"), x.group, x.roles, x.target, self.form.packed, None, self.form.fill, x.footprint
        )  # fmt: skip
        return Offer(lambda: (matrix.build(),), reasons=(AMX_REASON,))

    def window(self) -> Offer | Declined:
        """Offer the window kernel of a convolution if vectors along image rows need fewer operations."""
        group = self.form.window
        if group is None:
            return Declined("it is not a float32 convolution whose weights fit the cache")
        schedule = Solver(group).nest()
        axes = window_axes(group, schedule.band, self.target.width, self.target.core.sums)
        if isinstance(axes, Declined):
            return axes
        builder = window_kernel(self._named("window"), group, axes, schedule, self.target)

        def choice() -> RowChoice | Declined:
            built = builder.build_vectors()
            return built if isinstance(built, Declined) else with_sizes("window", builder)

        cost = window_extra_cost(self.kernel, group, axes)
        against = cost.reason if isinstance(cost, Declined) else "vectors along channels need fewer operations"
        if isinstance(cost, Declined) or (cost.constant or 0) > 0:
            return Offer(lambda: (builder.build(),), choice=choice, against=against)
        built = builder.build_vectors()
        if isinstance(built, Declined):
            return built
        kernel: Kernel = built
        self.groups[kernel.name] = group
        where = Serves(cost) if cost.constant is None else None
        return Offer(lambda: (kernel,), where, reasons=(WINDOW_REASON,), choice=lambda: with_sizes("window", builder))

    def transposed(self) -> Offer | Declined:
        """Offer the transposed kernel, for columns that would leave much of their vectors empty. The number of rows is
        exact.
        """
        form = self.form.transposed
        if form is None:
            return Declined("its rows are not the many rows of a constant, or its columns are one too")
        group = form.lowered.group
        roles = Solver(group).contract(form.roles)
        kernel = ContractKernel(self._named("turned"), group, roles, self.target, form.packed)
        self.groups[kernel.name] = group
        x, plan = kernel.product, kernel.plan
        heights = {v: r for r, v in self.target.tiles} | {plan.vectors: plan.rows}

        def build(name: str, vectors: int) -> ContractKernel:
            tile = ContractTuple(heights[vectors], vectors, int(plan.block.constant or REDUCTION_BLOCK), plan.unroll)
            return ContractKernel(name, group, roles, self.target, form.packed, tile)

        extra_cost = transpose_cost(x.columns, x.rows, self.target.width)
        reason = "vectors along the columns would be too empty: they are rows"
        choice = in_tiles("turned", kernel, build)
        return Offer(lambda: (kernel.build(),), Serves(extra_cost), reasons=(reason,), choice=lambda: choice)

    def split(self) -> Offer | Declined:
        """Offer the split-K kernel, for few results of a long reduction, and the kernel that adds its partial sums."""
        if refusal := slices_refusal(self.kernel):
            return refusal
        kind = SplitDot if self.form.dot else SplitKernel

        def build(name: str) -> SplitKernel:
            return kind(name, self.group, self.form.roles, self.target, self.form.packed)

        x = self.kernel.product
        against = split_refusal(x, self.kernel.plan)
        return split_offer(build(self._named("split")), lambda: in_slices(self.group, x.steps, build), against)

    def register_tiles(self) -> Offer | Declined:
        """Offer the default kernel, or those that a search chose."""
        return Offer(lambda: (self.kernel.build(),)) if self.tuned is None else self.tuned.offer()


def split_offer(
    split: SplitKernel | SplitNest, choice: Callable[[], RowChoice | Declined], against: Declined | None
) -> Offer:
    """Offer the kernel of a split reduction where it has slices. ``against``: why it has none at any default size."""
    where = None if against else Serves(split.count, 0, above=True)
    reason = against.reason if against else ""
    return Offer(lambda: (split.build(),), where, reasons=(SPLIT_REASON,), choice=choice, against=reason)


TILES, WINDOW, ROWS = "register tiles", "window", "rows"
"""Rows whose sizes are searched whether their table has other rows or not."""
PRODUCTS: tuple[Alternative[ProductForms, Offer], ...] = (
    Alternative("decoding in registers", ProductForms.decoding),
    Alternative("vectors along the reduction", ProductForms.lanes_of_steps),
    Alternative("matrix unit", ProductForms.matrix_unit),
    Alternative("window", ProductForms.window),
    Alternative("transposed product", ProductForms.transposed),
    Alternative("split reduction", ProductForms.split),
    Alternative(TILES, ProductForms.register_tiles),
)
"""The kernels of a product."""


@dataclass(frozen=True)
class NestForms:
    """A group other than a product, whose kernels are chosen.

    ``groups``: a table of the builder (``KernelBuilder``). Rows add to it.
    """

    form: LoweredGroup
    key: str
    target: CpuTarget
    tuner: Tuner | None
    groups: dict[str, Group]

    @property
    def group(self) -> Group:
        """The computation."""
        return self.form.group

    @property
    def main(self) -> str:
        """The row whose sizes are searched: the window, or without one the kernel of rows or vectors."""
        return ROWS if isinstance(self._window, Declined) else WINDOW

    @property
    def source(self) -> WindowKernel | RowsKernel:
        """The kernel of ``main`` with its default sizes."""
        return self._rows if isinstance(self._window, Declined) else self._window[0]

    @property
    def alternatives(self) -> Rows:
        """The rows that a search may choose beside ``main``."""
        return rows_of(NESTS, self, self.main)

    @cached_property
    def tuned(self) -> TunedBuilders[SizedKernel] | None:
        """The kernels that a search chose, or None without a record."""
        tuned = self.tuner.sized(self.key, self.source, self.alternatives) if self.tuner else None
        self.groups.update(tuned.groups if tuned else {})
        return tuned

    @property
    def searched(self) -> Offer | None:
        """The offer of a search that compared the rows of the table, or None."""
        return self.tuned.offer() if self.tuned and self.tuned.rows else None

    @cached_property
    def _rows(self) -> RowsKernel:
        band, phases = self.schedule.band, self.schedule.phases
        return RowsKernel(f"nest_{self.key[:12]}", self.group, band, phases, self.target, paired=True)

    @cached_property
    def schedule(self) -> NestSchedule:
        """The band that its statements share."""
        return Solver(self.group).nest()

    @cached_property
    def _window(self) -> tuple[WindowKernel, Kernel] | Declined:
        """The window kernel in register tiles, and its builder."""
        axes = window_axes(self.group, self.schedule.band, self.target.width, self.target.core.sums)
        if isinstance(axes, Declined):
            return axes
        kernel = window_kernel(f"window_{self.key[:12]}", self.group, axes, self.schedule, self.target)
        built = kernel.build_vectors()
        return built if isinstance(built, Declined) else (kernel, built)

    def planes_in_lanes(self) -> Offer | Declined:
        """Offer the blocked kernel, for planes whose rows would leave much of their vectors empty."""
        if isinstance(self._window, Declined):
            return self._window
        form = self.form.blocked
        if form is None:
            return Declined("it is not a float32 window over planes of pixels with constant weights")
        group, pixels = form.group, form.pixels

        def build(name: str) -> TurnedWindowKernel:
            return TurnedWindowKernel(name, group, pixels, self.target)

        kernel = build(f"turned_{self.key[:12]}")
        cost, choice = kernel.extra_cost, lambda: without_sizes("turned", group, build)
        if cost.constant is not None and cost.constant > 0:
            against = "vectors along lines of pixels need fewer operations, or the planes exceed the cache"
            return Offer(lambda: (kernel.build(),), choice=choice, against=against)
        self.groups[kernel.name] = group
        if cost.constant is not None:
            return Offer(lambda: (kernel.build(),), choice=choice)
        reason = "vectors along lines would be too empty: planes lie in lanes"
        return Offer(lambda: (kernel.build(),), Serves(cost), reasons=(reason,), choice=choice)

    def window(self) -> Offer | Declined:
        """Offer the window kernel in register tiles."""
        if isinstance(self._window, Declined):
            return self._window
        _, built = self._window
        return sized_offer(self.tuned, lambda: built)

    def split(self) -> Offer | Declined:
        """Offer the kernel of a split reduction, for few results, and the kernel that adds its partial sums."""
        if refusal := SplitNest.refusal(self.group, self.schedule.band):
            return refusal

        def build(name: str) -> SplitNest:
            return SplitNest(name, self.group, self.schedule.band, self.target)

        split = build(f"split_{self.key[:12]}")
        steps = split.extents[split.steps_of]
        return split_offer(split, lambda: in_slices(self.group, steps, build), split.useless)

    def rows(self) -> Offer | Declined:
        """Offer the kernel of rows or vectors of any group."""
        if self.main != ROWS:
            return Offer(lambda: (self._rows.build(),), choice=lambda: with_sizes("nest", self._rows))

        def build() -> Kernel:
            built = self._rows.build()
            return replace(built, notes=(*built.notes, *self.schedule.notes))

        return sized_offer(self.tuned, build)


NESTS: tuple[Alternative[NestForms, Offer], ...] = (
    Alternative("window of planes in lanes", NestForms.planes_in_lanes),
    Alternative(WINDOW, NestForms.window),
    Alternative("split reduction", NestForms.split),
    Alternative(ROWS, NestForms.rows),
)
"""The kernels of a group other than a product."""


def window_kernel(name: str, group: Group, axes: Axes, schedule: NestSchedule, target: CpuTarget) -> WindowKernel:
    """Return the builder of a window kernel in register tiles."""
    if axes.taps != group.backbone.iterators[-len(axes.taps) :]:
        group = permute_reduction(group, axes.taps)
        schedule = Solver(group).nest()
    return WindowKernel(name, group, axes, schedule.phases, target)
