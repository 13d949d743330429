"""The operands that warpgroups can multiply on sm_90a: their kinds, and their tensor maps."""

from __future__ import annotations

from dataclasses import replace

from polydyn.codegen.cuda.boxes import TensorOperand, tensor_operand
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.images import Im2colOperand, im2col_operand, tapped_operand
from polydyn.codegen.cuda.wgmma_tiles import STEP
from polydyn.codegen.printers.cuda_values import BYTES, HALF
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import FLOAT8, ITEMSIZE
from polydyn.schedules.index import Index
from polydyn.schedules.tree.rewrites import merge, pad_reduction

V = Index.of
Maps = tuple[TensorOperand | Im2colOperand, TensorOperand]
"""The operands of rows and of columns."""


def wgmma_refusal(product: ProductGroup, tf32: bool = False) -> Declined | None:
    """Return why warpgroups cannot multiply the product; None if they can."""
    kind = kind_of(product, tf32)
    found = kind if isinstance(kind, Declined) else tensor_operands(with_one_reduction(product))
    return found if isinstance(found, Declined) else None


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


def kind_of(product: ProductGroup, tf32: bool) -> str | Declined:
    """Return the warp instruction on the same operands (``cuda_instructions``); declined if wgmma has no such types."""
    dtypes = set(product.dtypes)
    if dtypes <= set(BYTES):
        return "imma"
    if dtypes <= set(FLOAT8):
        return "qmma"
    if dtypes <= set(HALF):
        return "mma"
    return "tf32" if tf32 and dtypes == {"float32"} else Declined(f"it multiplies {' and '.join(sorted(dtypes))}")


def tensor_operands(product: ProductGroup) -> Maps | Declined:
    """Return the operands with tensor maps; declined if one cannot have one."""
    r = product.roles
    if r.inner:
        return Declined("it sums over several dims")
    batch, (a, b) = {x: product.extents[x] for x in r.batch}, product.values
    rows: TensorOperand | Im2colOperand | Declined = tensor_operand(product.group, a, r.row, r.block, batch)
    if isinstance(rows, Declined):
        image = im2col_operand(product.group, a, r, STEP // ITEMSIZE[product.dtype])
        rows = rows if isinstance(image, Declined) else image
    columns = tensor_operand(product.group, b, r.col, r.block, batch)
    if isinstance(columns, Declined):
        tapped = tapped_operand(product.group, b, r, batch)
        columns = columns if isinstance(tapped, Declined) else tapped
    for side, m in (("row", rows), ("column", columns)):
        if isinstance(m, Declined):
            return Declined(f"TMA does not reach its {side} operand: {m}")
        if not m.along_k and (side == "row" or m.dtype not in HALF):
            return Declined(f"its {side} operand is not contiguous along the reduction")
    assert not isinstance(rows, Declined) and not isinstance(columns, Declined)
    return rows, columns
