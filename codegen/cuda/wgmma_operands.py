"""The operands that warpgroups can multiply on sm_90a: their kinds, and their tensor maps."""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cuda.boxes import TensorOperand, tensor_operand
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.images import Im2colOperand, im2col_operand, tapped_operand
from polydyn.codegen.cuda.wgmma_tiles import STEP
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.schedules.expr import FLOAT8, ITEMSIZE
from polydyn.schedules.index import Index
from polydyn.schedules.tree.rewrites import merge, pad_reduction

V = Index.of
Maps = tuple[TensorOperand | Im2colOperand, TensorOperand]
"""The operands of rows and of columns."""


def reaches_wgmma(product: ProductGroup, tf32: bool = False) -> bool:
    """Whether warpgroups can multiply the product."""
    return bool(kind_of(product, tf32)) and not isinstance(tensor_operands(with_one_reduction(product)), str)


def with_one_reduction(product: ProductGroup) -> ProductGroup:
    """Return the product with its reductions merged, if the result has a known number of steps."""
    r, group = product.roles, product.group
    whole = _whole_tiles(product) if r.inner else None
    group = group if whole is None else pad_reduction(group, r.inner[-1], whole)
    group, _ = merge(group, (r.block, *r.inner), r.block)
    if not r.inner or group.params != product.group.params:
        return product
    return ProductGroup(product.name, group, replace(r, inner=()), product.sharing, fixed=product.fixed)


def _whole_tiles(product: ProductGroup) -> Index | None:
    """Return the channels of a tap rounded up to whole tiles, or None.

    The result is None if they are whole already, or if rounding would double them or more.
    """
    channels, step = product.extents[product.roles.inner[-1]].constant, STEP // ITEMSIZE[product.dtype]
    if channels is None or channels % step == 0 or 2 * channels <= step:
        return None
    return V(channels).ceildiv(step) * step


def without_wgmma(product: ProductGroup, tf32: bool = False) -> str | None:
    """Return why a product of bytes, 8-bit floats or tf32 cannot use wgmma although 16-bit types might; else None."""
    maps = tensor_operands(with_one_reduction(product))
    return maps if kind_of(product, tf32) in ("imma", "qmma", "tf32") and isinstance(maps, str) else None


def kind_of(product: ProductGroup, tf32: bool) -> str | None:
    """Return the warp instruction on the same operands (``cuda_instructions``), or None if wgmma does not support them.
    """
    dtypes = set(product.dtypes)
    if dtypes <= set(BYTES):
        return "imma"
    if dtypes <= set(FLOAT8):
        return "qmma"
    return "mma" if dtypes <= set(HALF) else "tf32" if tf32 and dtypes == {"float32"} else None


def tensor_operands(product: ProductGroup) -> Maps | str:
    """Return the operands with tensor maps, or the reason why one cannot have one."""
    r = product.roles
    if r.inner:
        return "it sums over several dims"
    batch, (a, b) = {x: product.extents[x] for x in r.batch}, product.values
    rows: TensorOperand | Im2colOperand | None = tensor_operand(product.group, a, r.row, r.block, batch)
    rows = rows or im2col_operand(product.group, a, r, STEP // ITEMSIZE[product.dtype])
    columns = tensor_operand(product.group, b, r.col, r.block, batch) or tapped_operand(product.group, b, r, batch)
    for side, m in (("row", rows), ("column", columns)):
        if m is None:
            return f"TMA does not reach its {side} operand"
        if not m.along_k and (side == "row" or m.dtype not in HALF):
            return f"its {side} operand is not contiguous along the reduction"
    assert rows and columns
    return rows, columns
