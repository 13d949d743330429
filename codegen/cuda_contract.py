"""CUDA kernels for matmul-like groups: which tiles, widths of copies, shares of the reduction a group is built for."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from polydyn.codegen.cuda_emit import needed, ordered
from polydyn.codegen.cuda_gemv import gemv_versions
from polydyn.codegen.cuda_kernel import MULTIPROCESSORS, CudaKernel
from polydyn.codegen.cuda_nest import CudaNestKernel
from polydyn.codegen.cuda_product import CudaTile, ProductGroup, TiledProduct
from polydyn.codegen.cuda_split import SHARES, combining_group, partial_group
from polydyn.codegen.cuda_wgmma import wgmma_versions, without_wgmma
from polydyn.codegen.ir import Compare
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.gpu_tiling import gpu_contract_tree
from polydyn.schedules.index import Index, maximum, minimum, product
from polydyn.schedules.model import Group
from polydyn.schedules.proof_gpu import prove_gpu_contract
from polydyn.schedules.tiling import Roles

V = Index.of
SHARE_BYTES = 512
"""Bytes of a row of the reduction that a share of a split reduction has at least, when there are enough."""
WAVES = 2
"""Blocks for each multiprocessor that a split reduction fills the device with."""
FMA_TILES = (CudaTile("fma", 128, 128, 16, 8, 8, 3, 1), CudaTile("fma", 64, 64, 16, 4, 4, 3, 2))
TF32_TILES = (CudaTile("tf32", 128, 128, 16, 64, 32, 4, 2), CudaTile("tf32", 64, 64, 16, 32, 32, 4, 4))
MMA_TILES = (CudaTile("mma", 128, 128, 32, 64, 32, 4, 2), CudaTile("mma", 64, 64, 32, 32, 32, 4, 4))
IMMA_TILES = (CudaTile("imma", 128, 128, 64, 64, 32, 4, 2), CudaTile("imma", 64, 64, 64, 32, 32, 4, 4))
TILES = {
    "float32": FMA_TILES, "int32": FMA_TILES, **dict.fromkeys(HALF, MMA_TILES), **dict.fromkeys(BYTES, IMMA_TILES),
}  # fmt: skip
"""Dtype of stored operands -> tiles, largest first."""
MORE_TILES = (CudaTile("mma", 64, 128, 32, 32, 64, 4, 3), CudaTile("mma", 16, 64, 64, 16, 32, 4, 4))
"""Tiles between the largest and the smallest, and one for few rows: only where copies of 16 bytes are allowed."""
FEW = 16
"""Rows of a tile for few rows, whose reduction is split too."""


class CudaContractKernel:
    """Builds the versions of one matmul-like group.

    ``arch``: those of newer architectures only when asked for; ``tf32``: float32 on tensor cores, rounded to tf32.
    """

    def __init__(self, name: str, group: Group, roles: Roles, arch: str = "sm_80", tf32: bool = False) -> None:
        self.name, self.group, self.roles, self.arch, self.tf32 = name, group, roles, arch, tf32
        self.product = ProductGroup(name, group, roles)
        self.tiles = TF32_TILES if tf32 and self.product.dtype == "float32" else TILES[self.product.dtype]

    def versions(self, tiles: tuple[CudaTile, ...] | None = None) -> tuple[CudaKernel, ...]:
        """A version for each tile and each width of copies that the addresses may allow, widest first.

        Before them those for few rows, and those of the smallest tiles with a split reduction, for shapes that leave
        multiprocessors idle. The last one is total; estimates of time decide among those that may be launched.
        """
        chosen = tiles or self._useful(self.tiles)
        more = () if tiles else self._more()
        for t in (*more, *chosen):
            tree = gpu_contract_tree(self.group, self.roles, t.kind.warp)
            prove_gpu_contract(self.group, self.roles, tree, t.proven())
        whole = {t: _of_tile(self.product, t, t in more) for t in (*chosen[:-1], *more, chosen[-1])}
        split = [self._split(t, t in more) for t in (chosen[-1], *(t for t in more if t.bm <= FEW))]
        hopper = wgmma_versions(self.product, self.tf32) if self.arch == "sm_90a" and not tiles else []
        return ordered((*self.few_rows(), *chain(*split), *hopper, *chain(*whole.values())))

    def few_rows(self) -> list[CudaKernel]:
        """The versions for few rows."""
        return gemv_versions(self.product)

    def without_wgmma(self) -> str | None:
        """Why warps' own instructions multiply on sm_90a too, where those of warpgroups are wanted and do not fit."""
        return without_wgmma(self.product, self.tf32) if self.arch == "sm_90a" else None

    def _split(self, tile: CudaTile, wide_only: bool) -> list[CudaKernel]:
        """The versions whose reduction is split, when it can be long enough; ``wide_only`` as for ``_of_tile``."""
        p = self.product
        steps = p.K.ceildiv(tile.bk)
        least = max(1, SHARE_BYTES // (tile.bk * ITEMSIZE[p.dtype]))
        if (steps.constant or 2 * least) < 2 * least:
            return []
        batch = product(p.extents[x] for x in self.roles.batch)
        blocks = batch * p.M.ceildiv(tile.bm) * p.N.ceildiv(tile.bn)
        shares = minimum(V(MULTIPROCESSORS) * WAVES // maximum(1, blocks), steps // least)
        parts = ProductGroup(self.name, partial_group(self.group), self.roles, V(SHARES))
        again = CudaNestKernel(f"{self.name}_sum", *combining_group(self.group)).build("thread")[-1]
        size = V(SHARES) * batch * p.M * p.N * ITEMSIZE[p.sums]
        split = Compare(">=", V(SHARES), V(2))
        return [
            replace(k, conditions=(split, *k.conditions), launch={SHARES: shares}, workspace=size, after=(again,))
            for k in _of_tile(parts, tile, wide_only)
        ]

    def _more(self) -> tuple[CudaTile, ...]:
        """Tiles besides those that serve all shapes, without those that a constant extent would leave half empty."""
        m, n = self.product.M.constant, self.product.N.constant
        if self.product.dtype not in HALF or self.roles.inner:
            return ()

        def useful(t: CudaTile) -> bool:
            few = m is None or (m <= 4 * t.bm if t.bm <= FEW else 2 * m > t.bm)
            return few and (n is None or 2 * n > t.bn)

        return tuple(filter(useful, MORE_TILES))

    def _useful(self, tiles: tuple[CudaTile, ...]) -> tuple[CudaTile, ...]:
        """Tiles from the largest to the smallest, without those that a constant extent would leave half empty."""
        m, n = self.product.M.constant, self.product.N.constant

        def useful(t: CudaTile) -> bool:
            return (m is None or 2 * m > t.bm) and (n is None or 2 * n > t.bn)

        return tuple(t for t in tiles if t is tiles[-1] or useful(t))


def _of_tile(product: ProductGroup, tile: CudaTile, wide_only: bool) -> list[CudaKernel]:
    """The versions of one tile, without those that may be launched only where an earlier one may.

    ``wide_only``: those whose copies are 16 bytes wide, none when an operand has no such copies.
    """
    size = ITEMSIZE[product.dtype]
    widths = [w for w in (16, 8, 4) if w >= size and not (w == 8 and size == 4)] + [size] * (size < 4)
    accesses = [(widths[0], True), *((w, False) for w in (widths[:1] if wide_only else widths))]
    made = [TiledProduct(product, tile, width, wide) for width, wide in accesses]
    if wide_only and any(c.bytes < widths[0] for c in made[0].copies):
        return []
    return needed(x.build() for x in made)
