"""From fused groups to CUDA kernels: the same lowering as for the CPU, with other schedule trees and printers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from polydyn.codegen.alternatives import Alternative, gather
from polydyn.codegen.cuda.attention import CudaAttentionKernel
from polydyn.codegen.cuda.attention_limits import attention_refusal
from polydyn.codegen.cuda.emit import narrow_indices_first
from polydyn.codegen.cuda.families import Family, FamilyFactors
from polydyn.codegen.cuda.group import product_refusal
from polydyn.codegen.cuda.rows import CudaNestKernel
from polydyn.codegen.cuda.split_rows import CudaSplitNest
from polydyn.codegen.cuda.versions import CudaContractKernel, TileFactors
from polydyn.codegen.cuda.window_tiles import CudaWindowTile, tile_axes
from polydyn.codegen.cuda.windows import Axes, CudaWindowKernel, window_axes
from polydyn.codegen.ir import Compare
from polydyn.codegen.kernel import BASE, Kernel
from polydyn.codegen.operands import operands
from polydyn.errors import UnsupportedError
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.products import is_windowed
from polydyn.lowering.attention import ROW_ARRAYS, lower_attention
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.flatten import CUDA_DTYPES, check_dtypes
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.place import Builder, PlacedGroup, RecordTileChooser
from polydyn.lowering.prologue import prove_prologue
from polydyn.lowering.rounding import round_at_stores
from polydyn.lowering.weights import with_float_weights
from polydyn.schedules.decision import Decision, cheapest, members
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Op, Value, loads, symbols_of, walk
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group, verify_group
from polydyn.schedules.proof.obligations import check_row_blocks
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.solution.schedule import NestSchedule, attention_groups, schedule_attention
from polydyn.schedules.tree.rewrites import permute_reduction
from polydyn.shapes.context import ShapeContext

NO_PRODUCT = Declined("it is not a product")
SHARED_BYTES = 48 << 10
"""Bytes of dynamic shared memory per block that every device has."""


class CudaTuner(RecordTileChooser, Protocol):
    """Chooses a product's tiles from records, such as ``polydyn.search.outcomes.ChosenTiles``."""

    def tiles(self, key: str, form: ContractGroup) -> TunedTiles | None:
        """Return the tiles of a group, or None without a record."""

    def family(self, key: str, form: ContractGroup | Group, family: Family) -> FamilyFactors | None:
        """Return the tiles of a group's family, or None without a record."""


@dataclass(frozen=True)
class TunedTiles:
    """The tiles that tuning selected for one group.

    ``decision``: over the group's parameters; it selects positions in the tiles and drops tiles that cannot win at a
    size. ``reasons``: lines for ``explain``.
    """

    factors: TileFactors
    decision: Decision
    reasons: tuple[str, ...] = ()


def drop_replaced_versions(p: PlacedGroup, facts: ShapeContext) -> PlacedGroup:
    """Remove conditions that always hold and versions that another version always replaces."""
    params = p.lowered.params
    remaining: list[Kernel] = []

    def proven(c: Compare, launch: Mapping[str, Index]) -> bool:
        if c.relation not in ("<=", ">="):
            return False
        low, high = (c.left, c.right) if c.relation == "<=" else (c.right, c.left)
        low, high = low.subs(launch).subs(params), high.subs(launch).subs(params)
        return facts.nonnegative(high - low)

    for k in p.kernels:
        multiples = tuple((i, n) for i, n in k.multiples if not facts.is_multiple(i.subs(params), n))
        conditions = tuple(c for c in k.conditions if not proven(c, k.launch))
        k = replace(k, multiples=multiples, conditions=conditions)
        if not any(serves(earlier, k) for earlier in remaining):
            remaining.append(k)
    position = {k.name: n for n, k in enumerate(remaining)}
    numbers = {n: position[k.name] for n, k in enumerate(p.kernels) if k.name in position}
    decision = members(p.decision, lambda named: [numbers[n] for n in named if n in numbers])
    return replace(p, kernels=tuple(remaining), decision=decision)


def serves(k: Kernel, other: Kernel) -> bool:
    """Check whether ``k`` may be launched whenever ``other`` may and takes no longer, as far as its work is known."""
    may = set(k.multiples) <= set(other.multiples) and set(k.conditions) <= set(other.conditions)
    block, rival = k.device, other.device
    may = may and k.launch == other.launch and block.arch in (BASE, rival.arch) and block.factor <= rival.factor
    may = may and set(block.features) <= set(rival.features)
    most = k.scratch.constant
    may = may and (k.scratch == other.scratch or (most is not None and most <= SHARED_BYTES))
    if not may or rival.work is None:
        return may
    alike = (k.tasks, block.threads) == (other.tasks, rival.threads) and k.after == other.after
    return alike and block.work is not None and block.work.no_slower(rival.work)


class CudaBuilder(Builder):
    """Builds each distinct kernel once. The kernels of a group are its versions, best first.

    ``arch``: ``sm_90a`` adds versions for that architecture only, for launchers that make tensor maps. ``tf32``: large
    float32 products run on tensor cores with operands rounded to tf32. ``tuner``: source of the products' tiles.
    ``tf32x3``: these products split each operand into two parts, which loses little accuracy. ``strict``: 16-bit floats
    are rounded after every node, and not only where they are stored.
    """

    dtypes, device = CUDA_DTYPES, "CUDA"

    def __init__(
        self, plan: FusionPlan, arch: str = BASE, tf32: bool = False, tuner: CudaTuner | None = None,
        strict: bool = False, tf32x3: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(plan, tuner)
        self.arch, self.tf32, self.tuner, self.strict, self.tf32x3 = arch, tf32, tuner, strict, tf32x3
        self.along_k = (
            ("float32",) if tf32 or tf32x3 else ()
        )  # required by wgmma and ldmatrix; pass ``steps`` does this for bytes
        self.attentions: dict[str, CudaAttentionKernel] = {}

    def products(self, group: FusedGroup) -> Iterator[tuple[str, FusedGroup, ContractGroup]]:
        """Yield the matmul-like groups that a group is built as, with their keys: itself, or parts of an attention."""
        for n in group.nodes:
            check_dtypes(n, self.dtypes, self.device)
        if group.kind == "attention":
            parts = group.parts if isinstance(self.attention_kernel(group), Declined) else ()
            yield from (x for part in parts for x in self.products(part))
        elif isinstance(form := self._product(group), ContractGroup):
            yield self._key(form), group, form

    def _product(self, group: FusedGroup) -> ContractGroup | Declined:
        if group.kind != "contract":
            return NO_PRODUCT
        windowed = group.prologue is not None or is_windowed(group.nodes[0])
        form = lower_contract(self.plan, group, 0, windowed, self.along_k)
        if isinstance(form, Declined):
            return form
        rows, columns = operands(form.lowered.group.backbone, form.roles)
        if form.roles.row == "one" and symbols_of(rows).isdisjoint((form.roles.block, *form.roles.inner)):
            return Declined("it is one number times sums of columns")
        read = {form.lowered.buffers[x.buffer] for x in loads(columns)}
        fixed = read <= {*self.plan.graph.constants, *form.lowered.packs}
        return replace(form, lowered=self._rounded(form.lowered, product=True), fixed=fixed)

    def _rounded(self, lowered: LoweredGroup, unstored: Collection[str] = (), product: bool = False) -> LoweredGroup:
        return lowered if self.strict else replace(lowered, group=round_at_stores(lowered.group, unstored, product))

    def _key(self, form: ContractGroup) -> str:
        return form.lowered.key(form.roles, "cuda", form.fixed)

    def build_group(self, group: FusedGroup) -> PlacedGroup:
        """See ``Builder``. Raises UnsupportedError for an unsupported group."""
        self.unproven += prove_prologue(self.plan, group)
        contract = self._product(group)
        placed = contract if isinstance(contract, Declined) else self._contract(group, contract)
        if isinstance(placed, PlacedGroup):
            return placed
        lowered = with_float_weights(self.plan, self._rounded(lower_nest(self.plan, group)))
        key = lowered.key("cuda")
        placed_group = self.reuse_kernel(group, lowered, key)
        if placed_group is None:
            self.show(group, f"nest_{key[:12]}", lowered.group)
            placed_group = self._new(group, lowered, key, *_nest(lowered.group, key))
        if placed is NO_PRODUCT:
            return placed_group
        return replace(placed_group, declined=(("product", str(placed)), *placed_group.declined))

    def _new(
        self, group: FusedGroup, lowered: LoweredGroup, key: str, kernels: tuple[Kernel, ...],
        declined: tuple[tuple[str, str], ...] = (), tuned: TunedTiles | None = None,
        family: FamilyFactors | None = None,
    ) -> PlacedGroup:  # fmt: skip
        reasons = (*(tuned.reasons if tuned else ()), *(family.reasons if family else ()))
        decision: Decision = cheapest(len(kernels))
        if tuned is not None:  # kernels without tiles compete at every size

            def rivals(tiles: frozenset[int]) -> list[int]:
                return [n for n, k in enumerate(kernels) if k.tile is None or k.tile in tiles]

            decision = members(tuned.decision, rivals)
        self.placed[key] = PlacedGroup(group, lowered, key, kernels, decision, reasons, declined)
        return self.placed[key]

    def _contract(self, group: FusedGroup, form: ContractGroup) -> PlacedGroup | Declined:
        """Return the kernels of a product; declined if it has one row and no vectors, so that nothing is shared or
        wide.
        """
        lowered, key = form.lowered, self._key(form)
        if refusal := product_refusal(lowered.group, form.roles):
            raise UnsupportedError(
                str(refusal), tensor=group.outputs[0],
                remedy="float32, float16, bfloat16, int32, or int8 and uint8 with sums in int32, or floats of 8 bits",
            )  # fmt: skip
        kernel = CudaContractKernel(
            f"contract_{key[:12]}", lowered.group, form.roles, self.arch, self.tf32, self.tf32x3, form.fixed
        )
        if form.roles.row == "one" and not kernel.gemv_kernels():
            return Declined("it has one row and no vectors")
        placed = self.reuse_kernel(group, lowered, key)
        if placed is None:
            verify_group(lowered.group)
            self.show(group, kernel.name, lowered.group)
            tuned = self.tuner.tiles(key, form) if self.tuner and kernel.tunable else None
            if self.tuner and kernel.tunable and self.arch == "sm_90a":
                kernel.kept = self.tuner.family(key, form, kernel.family)
            versions = kernel.tuned_versions(tuned.factors) if tuned else kernel.versions()
            placed = self._new(group, lowered, key, versions, kernel.declined, tuned, kernel.kept)
        return placed

    def attention(self, group: FusedGroup) -> PlacedGroup | Declined:
        """See ``Builder``."""
        lowered_kernel = self.attention_kernel(group)
        if isinstance(lowered_kernel, Declined):
            return lowered_kernel
        lowered, key, kernel = lowered_kernel
        placed = self.reuse_kernel(group, lowered, key)
        if placed is None:
            verify_group(lowered.group)
            self.show(group, kernel.name, *attention_groups(kernel.parts))
            check_row_blocks(lowered.group, kernel.parts)
            if self.tuner and self.arch == "sm_90a":
                kernel.kept = self.tuner.family(key, kernel.group, kernel.family)
            placed = self._new(group, lowered, key, *kernel.versions(), family=kernel.kept)
        return placed

    def attention_kernel(self, group: FusedGroup) -> tuple[LoweredGroup, str, CudaAttentionKernel] | Declined:
        """Return the lowered form, key and builder of an attention kernel; declined if its parts are separate kernels.
        """
        form = lower_attention(self.plan, group)
        if isinstance(form, Declined):
            return form
        lowered, parts = form.lowered, form.parts
        if not self.strict:
            unstored = () if _adds(parts.scores.epilogues[0].value) else ROW_ARRAYS[:1]
            lowered = self._rounded(lowered, unstored)
            scores, rows, values = (round_at_stores(x, unstored) for x in (parts.scores, parts.rows, parts.values))
            parts = replace(parts, scores=scores, rows=rows, values=values)
        key = lowered.key(parts, "cuda")
        if key not in self.attentions:
            parts = schedule_attention(parts)
            if refusal := attention_refusal(parts):
                return refusal
            self.attentions[key] = CudaAttentionKernel(
                f"attention_{key[:12]}", lowered.group, parts, self.arch, self.tf32
            )
        return lowered, key, self.attentions[key]


def _adds(score: Value) -> bool:
    """Check whether something, such as a mask, is added to a score. The sum is then rounded as the model specifies.

    The lowest 16-bit number plus a score rounds to the lowest number, so keys that are all masked get equal weights.
    """
    return any(isinstance(v, Op) and v.name in ("add", "sub") for v in walk(score))


@dataclass(frozen=True)
class _Nest:
    """A group other than a product, whose kernels are chosen."""

    name: str
    group: Group

    @cached_property
    def schedule(self) -> NestSchedule:
        """The band that its statements share."""
        return Solver(self.group).nest()

    @cached_property
    def axes(self) -> Axes | Declined:
        """The axes of its window."""
        return window_axes(self.group, self.schedule.band)

    def window_tile(self) -> tuple[Kernel, ...] | Declined:
        """Return the kernels of a large window whose image is copied to shared memory."""
        axes = tile_axes(self.group, self.schedule.band)
        if isinstance(axes, Declined):
            return axes
        group, nest = self._over(axes.taps)
        return _vectors(CudaWindowTile(self.name, group, nest.band, nest.phases, axes).versions())

    def window(self) -> tuple[Kernel, ...] | Declined:
        """Return the kernels of a window whose outputs share loads."""
        if isinstance(self.axes, Declined):
            return self.axes
        group, nest = self._over(self.axes.taps)
        return _vectors(CudaWindowKernel(self.name, group, nest.band, nest.phases, self.axes).versions())

    def _over(self, taps: tuple[str, ...]) -> tuple[Group, NestSchedule]:
        group = permute_reduction(self.group, taps)
        return group, Solver(group).nest()

    def split(self) -> tuple[Kernel, ...] | Declined:
        """Return the kernels of a split reduction."""
        if not isinstance(self.axes, Declined):
            return Declined("it is a window")
        if refusal := CudaSplitNest.refusal(self.group, self.schedule.band):
            return refusal
        return _vectors(CudaSplitNest(self.name, self.group, self.schedule.band).versions())

    def rows(self) -> tuple[Kernel, ...]:
        """Return the kernels of rows, columns and threads of any group."""
        return CudaNestKernel(self.name, self.group, self.schedule.band, self.schedule.phases).versions()


def _vectors(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...] | Declined:
    return kernels or Declined("its channels do not form vectors")


NESTS: tuple[Alternative[_Nest, tuple[Kernel, ...]], ...] = (
    Alternative("tiles of a window", _Nest.window_tile),
    Alternative("window", _Nest.window),
    Alternative("split reduction", _Nest.split),
    Alternative("rows", _Nest.rows),
)
"""The kernels of a group other than a product."""


def _nest(group: Group, key: str) -> tuple[tuple[Kernel, ...], tuple[tuple[str, str], ...]]:
    verify_group(group)
    kernels, declined = gather(NESTS, _Nest(f"nest_{key[:12]}", group))
    return narrow_indices_first(kernels), declined
