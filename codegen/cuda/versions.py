"""CUDA kernels for matmul-like groups: the tiles, copy widths and K splits that a group is built for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

from polydyn.capability import capability, runs_on
from polydyn.codegen.cuda.emit import LONG_SUFFIX, drop_covered_versions, narrow_indices_first
from polydyn.codegen.cuda.families import FamilyFactors, WarpgroupProducts
from polydyn.codegen.cuda.few_rows import gemv_versions, loads_along_k
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import FLOAT8_ARCH
from polydyn.codegen.cuda.limits import TF32, broken_rule
from polydyn.codegen.cuda.product import MAX_COPY_BYTES, TiledProduct
from polydyn.codegen.cuda.rows import CudaNestKernel
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.wgmma import wgmma_versions
from polydyn.codegen.cuda.wgmma_operands import wgmma_refusal
from polydyn.codegen.cuda.wgmma_tiles import GRID_SPLIT_K_TILE, STEP, cluster_split_k_tiles
from polydyn.codegen.cuda.work import split_k_factor
from polydyn.codegen.kernel import UNIT, WORKERS, Kernel, with_block
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.codegen.sharing import SplitLaunch
from polydyn.codegen.split import combining_group, partial_group
from polydyn.schedules.errors import Declined, ScheduleError, first_refusal
from polydyn.schedules.expr import FLOAT8, ITEMSIZE
from polydyn.schedules.index import Index, maximum, minimum, product
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles

V = Index.of
SHARE_BYTES = 512
"""Minimum bytes of a reduction row in a K slice, if the row is long enough."""
SPLIT_K_BLOCKS_PER_SM = 2
"""Blocks per multiprocessor that a split-K launch should have."""
FMA_TILES = (CudaTile("fma", 128, 128, 16, 8, 8, 3, 1), CudaTile("fma", 64, 64, 16, 4, 4, 3, 2))
TF32_TILES = (CudaTile("tf32", 128, 128, 16, 64, 64, 4, 2), CudaTile("tf32", 64, 64, 16, 32, 32, 4, 4))
TF32X3_TILES = (CudaTile("tf32x3", 128, 128, 16, 64, 32, 4), CudaTile("tf32x3", 64, 64, 16, 32, 32, 4, 3))
MMA_TILES = (CudaTile("mma", 128, 128, 32, 64, 64, 4, 2), CudaTile("mma", 64, 64, 32, 32, 32, 4, 4))
IMMA_TILES = (CudaTile("imma", 128, 128, 64, 64, 64, 4, 2), CudaTile("imma", 64, 64, 64, 32, 32, 4, 4))
QMMA_TILES = tuple(replace(t, instruction="qmma") for t in IMMA_TILES)
TILES = {
    "float32": FMA_TILES, "int32": FMA_TILES, **dict.fromkeys(HALF, MMA_TILES), **dict.fromkeys(BYTES, IMMA_TILES),
    **dict.fromkeys(FLOAT8, QMMA_TILES),
}  # fmt: skip
"""Dtype of stored operands -> tiles, largest first."""
MORE_TILES = (
    CudaTile("mma", 64, 128, 32, 32, 64, 4, 3), CudaTile("mma", 128, 64, 32, 64, 32, 4, 3),
    CudaTile("mma", 16, 64, 64, 16, 32, 4, 4),
)  # fmt: skip
"""Tiles between the largest and the smallest, and one for skinny GEMM. They require 16-byte copies."""
MORE_FMA_TILES = (CudaTile("fma", 32, 32, 16, 4, 4, 4, 4), CudaTile("fma", 8, 64, 16, 2, 4, 4, 4))
"""The corresponding tiles for float32 on CUDA cores. 64x256 is never better than 128x128."""
LONG_STEPS = 256
"""Minimum K steps for warpgroup products with more K splits than a cluster has blocks."""
SKINNY_TILE_ROWS = 16
"""Rows of a tile for skinny GEMM, whose reduction is split too."""


@dataclass(frozen=True)
class TileFactors:
    """The tuned tiles of a group, each with the factor of its estimates (``Block.factor``).

    ``others``: the factor of versions that were not measured.
    """

    tiles: tuple[tuple[CudaTile, int], ...]
    others: int = UNIT


class CudaContractKernel:
    """Builds the versions of one matmul-like group.

    ``arch``: versions for newer architectures are built only on request. ``tf32``: float32 on tensor cores, rounded to
    tf32. ``thrice``: float32 in two parts there; three products of them are nearly float32's. Products of 8-bit floats
    end with versions that widen them, for devices and shapes without their instructions. ``kept``: the tuned tiles of
    ``family``, in place of its default tiles. ``fixed``: no launch writes the column operand.
    """

    def __init__(
        self, name: str, group: Group, roles: Roles, arch: str = "sm_80", tf32: bool = False, thrice: bool = False,
        fixed: bool = False,
    ) -> None:  # fmt: skip
        self.kept: FamilyFactors | None = None
        self.name, self.group, self.roles, self.arch, self.tf32 = name, group, roles, arch, tf32
        self.product = ProductGroup(name, group, roles, fixed=fixed)
        single = TF32_TILES if tf32 else TF32X3_TILES if thrice else FMA_TILES
        self.tiles = single if self.product.dtype == "float32" else TILES[self.product.dtype]
        self.total = self.product
        if self.product.dtype in FLOAT8:
            self.total = ProductGroup(f"{name}_widened", group, roles, widened=True)

    @property
    def dtype(self) -> str:
        """The dtype that its tiles are for: that of the rows as stored, or ``TF32``."""
        return TF32 if self.tiles is TF32_TILES else self.product.dtype

    @property
    def tunable(self) -> bool:
        """Whether tiles of records use its instructions."""
        return self.tiles is not TF32X3_TILES

    @property
    def defaults(self) -> tuple[CudaTile, ...]:
        """The tiles of the group's versions without tuning."""
        return (*self._more(), *self._suitable(self.tiles))

    def versions(self, tiles: tuple[CudaTile, ...] | None = None) -> tuple[Kernel, ...]:
        """Build a version for each tile and each width of copies that the addresses may allow, widest first.

        GEMV versions, and split-K versions of the smallest tiles, precede them, for shapes that leave multiprocessors
        idle. The last version supports every shape; time estimates decide among the versions that may be launched.
        """
        if self.total is not self.product and not runs_on(FLOAT8_ARCH, capability(self.arch)):
            return narrow_indices_first((*self.gemv_kernels(), *self._widened()))
        chosen = tiles or self._suitable(self.tiles)
        special = [] if tiles else self._hopper()
        skinny_only = bool(special)  # warpgroups have the larger tiles
        more = () if tiles else tuple(t for t in self._more() if t.bm <= SKINNY_TILE_ROWS or not skinny_only)
        beside = (t for t in more if t.kind.warp or t.bm > SKINNY_TILE_ROWS)  # CUDA cores are too slow for few blocks
        whole = {t: _of_tile(self.product, t, t in more) for t in (*chosen[:-1], *beside, chosen[-1])}
        shared = () if tiles or special else self._counted((*(t for t in more if t.bm <= SKINNY_TILE_ROWS), chosen[-1]))
        splits = (*shared, *self._splits(chosen, more))
        every = (*self.gemv_kernels(), *splits, *special, *chain(*whole.values()), *self._widened())
        return narrow_indices_first(self._times(every, self.kept.others) if self.kept else every)

    def _widened(self) -> Iterator[Kernel]:
        """Yield the versions for every device, if the others need newer instructions."""
        if self.total is self.product:
            return
        for t in self._suitable(FMA_TILES):
            yield from _of_tile(self.total, t, False)

    def tuned_versions(self, factors: TileFactors) -> tuple[Kernel, ...]:
        """Build the versions of the tuned tiles in place of the default ones, next to those that no tile replaces.

        GEMV, split-K, wgmma and narrow copies are as without tuning. The last version, for every shape, has the
        smallest default tile. ScheduleError: a tile breaks a rule, by name.
        """
        tiles, chosen, more = tuple(t for t, _ in factors.tiles), self._suitable(self.tiles), self._more()
        for t in tiles:
            if rule := broken_rule(t, self.product.dtypes):
                raise ScheduleError(f"{t} is not built", rule=rule, remedy="tune the group again")
        every = enumerate(factors.tiles)
        of_tiles = [
            replace(with_block(k, factor=factor), tile=n) for n, (t, factor) in every for k in self._of_tuned(t)
        ]
        multiples = [set(k.multiples) for k in of_tiles]
        narrow = [k for t in chosen[:-1] for k in _of_tile(self.product, t, False, multiples)]
        first = (*self.gemv_kernels(), *self._splits(chosen, more), *self._hopper(), *narrow)
        last = _of_tile(self.product, chosen[-1], False)
        rest = tuple(self._times(x, factors.others) for x in (first, last))
        return narrow_indices_first((*rest[0], *of_tiles, *rest[1]))

    def forms(self, tile: CudaTile) -> Iterator[TiledProduct]:
        """Yield the versions of a tuned tile before they are built, widest copies first.

        Their names contain the unit's part, which distinguishes tiles of equal blocks.
        """
        product = ProductGroup(f"{self.name}_{tile.wm}x{tile.wn}", self.group, self.roles)
        return (TiledProduct(product, tile, *a) for a in accesses(product.dtype))

    def _of_tuned(self, tile: CudaTile) -> list[Kernel]:
        """Return the versions with 16-byte copies if the operands may have them, else all."""
        forms = list(self.forms(tile))
        wide = [x for x in forms if all(c.bytes == MAX_COPY_BYTES for c in x.copies)]
        return name_by_unit(tile, drop_covered_versions(wide or forms))

    def _splits(self, chosen: tuple[CudaTile, ...], more: tuple[CudaTile, ...]) -> Iterator[Kernel]:
        for t in (chosen[-1], *(t for t in more if t.bm <= SKINNY_TILE_ROWS)):
            build = partial(self._parts, tile=t, wide_only=t in more)
            yield from self._split((t.bm, t.bn, t.bk), SPLIT_K_BLOCKS_PER_SM, build)

    def _counted(self, tiles: Iterable[CudaTile]) -> Iterator[Kernel]:
        """Yield the 16-bit versions with split-K and arrival counters, in one launch, if warpgroups have none.

        They use the widest copies and 32-bit indices. Other versions handle the remaining shapes.
        """
        p = self.product
        if self._counted_refusal:
            return
        for t in tiles:
            if (parts := split_k_factor(p.N.ceildiv(t.bn), p.K.ceildiv(t.bk))) > 1:
                made = TiledProduct(p, t, MAX_COPY_BYTES, True, parts)
                if all(c.bytes == MAX_COPY_BYTES for c in made.copies):
                    yield from made.build()[:1]

    def _parts(self, parts: ProductGroup, tile: CudaTile, wide_only: bool) -> list[Kernel]:
        return _of_tile(parts, tile, wide_only)

    def _hopper(self) -> list[Kernel]:
        if self.arch != "sm_90a":
            return []
        if self.kept:
            return [*self._warpgroup_shares(), *self._of_family]
        p, step = self.product, STEP // ITEMSIZE[self.product.dtype]
        n, steps = (x.constant for x in (p.N, p.K.ceildiv(step)))
        # with 8-bit floats the sums of a step take the registers
        tiles = () if p.dtype in FLOAT8 else cluster_split_k_tiles(n, steps)
        parts = wgmma_versions(p, self.tf32, tiles) if tiles else []
        return [*self._warpgroup_shares(), *wgmma_versions(p, self.tf32), *parts]

    def _warpgroup_shares(self) -> list[Kernel]:
        """Return the warpgroup versions whose reduction is split over launches."""
        p, step = self.product, STEP // ITEMSIZE[self.product.dtype]
        m, n, steps = (x.constant for x in (p.M, p.N, p.K.ceildiv(step)))
        long = steps is None or steps >= LONG_STEPS
        tile = GRID_SPLIT_K_TILE
        if long and (m is None or 2 * m > tile.rows) and (n is None or 2 * n > tile.columns):
            block = (tile.rows, tile.columns, step)
            return self._split(block, tile.blocks, lambda parts: wgmma_versions(parts, self.tf32, (tile,)))
        return []

    @cached_property
    def _of_family(self) -> list[Kernel]:
        """The versions of the tuned tiles of its family."""
        return self.kept.versions(self.family) if self.kept else []

    def _times(self, kernels: Iterable[Kernel], factor: int) -> list[Kernel]:
        """Return versions with their estimates multiplied by a factor, unless they have one of their own."""
        own = {k.name for k in self._of_family}
        return [k if k.name in own else with_block(k, factor=factor) for k in kernels]

    @property
    def family(self) -> WarpgroupProducts:
        """The family of its warpgroup kernels."""
        return WarpgroupProducts(self.product, self.tf32)

    def gemv_kernels(self) -> list[Kernel]:
        """Return the versions for GEMV and skinny GEMM."""
        return gemv_versions(self.product, self.arch == "sm_90a")

    @property
    def declined(self) -> tuple[tuple[str, str], ...]:
        """The kinds of versions that it does not have, and why."""
        few, warpgroups = loads_along_k(self.product), wgmma_refusal(self.product, self.tf32)
        if self.arch != "sm_90a":
            warpgroups = Declined(f"the target is {self.arch}, not sm_90a")
        kinds = (("few rows", few), ("warpgroups", warpgroups), ("counted sums", self._counted_refusal))
        return tuple((name, x.reason) for name, x in kinds if isinstance(x, Declined))

    @property
    def _counted_refusal(self) -> Declined | None:
        return first_refusal(
            (self.product.dtype not in HALF, f"it multiplies {self.product.dtype}"),
            (bool(self.roles.inner), "it has several reductions"),
        )

    def _split(
        self, block: tuple[int, int, int], waves: int, build: Callable[[ProductGroup], Sequence[Kernel]]
    ) -> list[Kernel]:
        """Return the split-K versions, if the reduction may be long enough.

        ``block``: rows, columns and steps of a tile; ``waves``: blocks per multiprocessor; ``build``: builds the
        slices' kernels.
        """
        (rows, columns, step), p = block, self.product
        steps = p.K.ceildiv(step)
        least = max(1, SHARE_BYTES // (step * ITEMSIZE[p.dtype]))
        if (steps.constant or 2 * least) < 2 * least:
            return []
        batch = product(p.extents[x] for x in self.roles.batch)
        blocks = batch * p.M.ceildiv(rows) * p.N.ceildiv(columns)
        shares = minimum(V(WORKERS) * waves // maximum(1, blocks), steps // least)
        sums = CudaNestKernel(f"{self.name}_sum", *combining_group(self.group))
        slices = partial_group(self.group)
        sharing = SplitLaunch(group=slices, count=shares, add=lambda: sums.build("thread")[-1])
        return list(build(ProductGroup(self.name, slices, self.roles, sharing)))

    def _more(self) -> tuple[CudaTile, ...]:
        """Return the additional tiles, except those that a constant extent would leave half empty."""
        m, n = self.product.M.constant, self.product.N.constant
        single = self.tiles is FMA_TILES and self.product.dtype == "float32" and not self.roles.inner
        tiles = MORE_TILES if self.product.dtype in HALF else MORE_FMA_TILES if single else ()

        def useful(t: CudaTile) -> bool:
            few = m is None or (m <= 4 * t.bm if t.bm <= SKINNY_TILE_ROWS else 2 * m > t.bm)
            if t.bn < t.bm:  # only if a square tile would be half empty
                return few and n is not None and 0 < n % t.bm <= t.bn
            return few and (n is None or 2 * n > t.bn)

        return tuple(filter(useful, tiles))

    def _suitable(self, tiles: tuple[CudaTile, ...]) -> tuple[CudaTile, ...]:
        """Return the tiles, largest first, except those that a constant extent would leave half empty."""
        m, n = self.product.M.constant, self.product.N.constant

        def useful(t: CudaTile) -> bool:
            return (m is None or 2 * m > t.bm) and (n is None or 2 * n > t.bn)

        return tuple(t for t in tiles if t is tiles[-1] or useful(t))


def name_by_unit(tile: CudaTile, kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return versions of a tuned tile with names that contain the unit's part."""

    def name(version: str) -> str:
        short = version.removesuffix(LONG_SUFFIX)
        return f"{short} of {tile.wm}x{tile.wn}{version[len(short) :]}"

    return [replace(k, version=name(k.version)) for k in kernels]


def accesses(dtype: str) -> list[tuple[int, bool]]:
    """Return (maximum bytes of copies, whether epilogues store 16 bytes at once), the widest first."""
    size = ITEMSIZE[dtype]
    widths = [w for w in (MAX_COPY_BYTES, 8, 4) if w >= size and not (w == 8 and size == 4)] + [size] * (size < 4)
    return [(MAX_COPY_BYTES, True), *((w, False) for w in widths)]


def _of_tile(
    product: ProductGroup, tile: CudaTile, wide_only: bool, others: Sequence[set[tuple[Index, int]]] = ()
) -> list[Kernel]:
    """Return the versions of one tile, except those that may be launched only if an earlier one may.

    ``wide_only``: versions with 16-byte copies, or a row per thread; empty if an operand has no such copies. On CUDA
    cores one version, with 32-bit indices. ``others``: the requirements of other versions; versions that require at
    least as much are dropped.
    """
    one = wide_only and not tile.kind.warp
    forms = [TiledProduct(product, tile, *a) for a in accesses(product.dtype)[: 2 if wide_only else None]]
    if wide_only and any(c.bytes < MAX_COPY_BYTES for c in forms[0].copies) and not forms[0].row_each:
        return []
    return drop_covered_versions(forms, others)[: 1 if one else None]
