"""Reductions, running reductions, and sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from polydyn.torch_backend.translations.common import axis_of, computed_type, elementwise, number, onnx, translate


def _summed(dtype: torch.dtype | None, x: torch.Tensor) -> torch.dtype:
    """Return the dtype of a sum or product."""
    return dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)


def _holds(x: torch.Tensor, dims: Sequence[int] | None, keepdim: bool) -> torch.Tensor:
    """Count the nonzero elements over some axes, or over all axes if none are given."""
    axes = list(range(x.dim())) if dims is None else list(dims)
    one = (x != 0).to(torch.int32)
    return torch.sum(one, axes, keepdim, dtype=torch.int32) if axes else one


def _boolean(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return found.to(torch.uint8) if x.dtype == torch.uint8 else found


@translate("any", "any.dim", "any.dims")
def any_of(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """Compute whether any element is nonzero; False for no elements."""
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return _boolean(_holds(x, dims, keepdim) > 0, x)


@translate("all", "all.dim", "all.dims")
def all_of(x: torch.Tensor, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
    """Compute whether all elements are nonzero; True for no elements."""
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return _boolean(_holds(x == 0, dims, keepdim) == 0, x)


@translate("sum", "sum.dim_IntList")
def sum_of(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Sum 16-bit floats along axes in float32 and round the result to 16 bits. Other dtypes are exported unchanged."""
    result = _summed(dtype, x)
    wide = computed_type(x.to(result))
    if wide == result:
        return NotImplemented
    return torch.sum(x.to(wide), dim, keepdim).to(result)


@translate("prod")
def prod(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the product of all elements."""
    return prod_dim(x.reshape((-1,)), 0, False, dtype=dtype)


@translate("prod.dim_int")
def prod_dim(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the product along an axis; 16-bit floats in float32."""
    result = _summed(dtype, x)
    x = x.to(result)
    if not x.dim():
        return x.clone()
    x, axis = x.to(computed_type(x)), dim % x.dim()
    shape = [n for k, n in enumerate(x.shape) if k != axis or keepdim]
    if keepdim:
        shape[axis] = 1
    axes = torch.full((1,), axis, dtype=torch.int64, device=x.device)
    return onnx("ReduceProd", x, axes, shape=shape, keepdims=int(keepdim)).to(result)


@translate("linalg_vector_norm")
def vector_norm(
    x: torch.Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute the norm of the elements along some axes; 16-bit floats in float32."""
    result = dtype or x.dtype
    size = torch.abs(x.to(result).to(computed_type(x.to(result))))
    dims = list(range(x.dim())) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        return ((size != 0).to(size.dtype) if order == 0 else size).to(result)
    if order in (math.inf, -math.inf):
        return (torch.amax if order > 0 else torch.amin)(size, dims, keepdim).to(result)
    if order == 0:
        return torch.sum((size != 0).to(size.dtype), dims, keepdim).to(result)
    if order in (1, 2):
        total = torch.sum(size if order == 1 else size * size, dims, keepdim)
        return (total if order == 1 else torch.sqrt(total)).to(result)
    return torch.pow(torch.sum(torch.pow(size, order), dims, keepdim), 1 / order).to(result)


@translate("mse_loss")
def mse_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """Compute the squared differences (0), their mean (1) or their sum (2)."""

    @elementwise()
    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        squares = (a - b) * (a - b)
        return squares if reduction == 0 else torch.mean(squares) if reduction == 1 else torch.sum(squares)

    result: torch.Tensor = loss(x, target)
    return result


def _running(name: str, x: torch.Tensor, dim: int) -> torch.Tensor:
    return onnx(name, x, axis_of(dim, x), shape=x.shape)


@translate("cumsum")
def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the sums up to each element; 16-bit floats in float32."""
    result = _summed(dtype, x)
    x = x.to(result)
    if not x.dim():
        return x.clone()
    wide = x.to(computed_type(x))
    if wide.dtype.is_floating_point:
        wide = wide + number(0, wide)  # eager's sums begin at 0, so no sum is -0
    return _running("CumSum", wide, dim).to(result)


@translate("cumprod")
def cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Compute the products up to each element; 16-bit floats in float32."""
    result = _summed(dtype, x)
    x = x.to(result)
    return _running("CumProd", x.to(computed_type(x)), dim).to(result) if x.dim() else x.clone()


@translate("logcumsumexp")
def logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Compute ``log(sum(exp(x)))`` up to each element."""
    return _running("polydyn::CumLogSumExp", x, dim) if x.dim() else x.clone()


def _extreme(name: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the extremes up to each element, and the last positions that hold them."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values = _running(name, x.to(torch.int32) if x.dtype == torch.bool else x, dim).to(x.dtype)
    shape = [-1 if k == dim % x.dim() else 1 for k in range(x.dim())]
    places = torch.arange(x.shape[dim], device=x.device).reshape(shape)
    holds = (x == values) | (x != x)
    return values, _running("polydyn::CumMax", torch.where(holds, places, -1), dim)


@translate("cummax")
def cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the maximum up to each element, and its last position."""
    return _extreme("polydyn::CumMax", x, dim)


@translate("cummin")
def cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the minimum up to each element, and its last position."""
    return _extreme("polydyn::CumMin", x, dim)


@translate("sort.stable")
def sort_stable(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort all elements. Equal elements keep their order."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = torch.topk(x, x.shape[dim], dim, descending, True)
    return values, places


@translate("argsort.stable")
def argsort_stable(x: torch.Tensor, *, stable: bool, dim: int = -1, descending: bool = False) -> torch.Tensor:
    """Compute the positions of all elements in sorted order."""
    return sort_stable(x, dim=dim, descending=descending)[1]


@translate("kthvalue")
def kthvalue(x: torch.Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the k-th smallest element along an axis, and its position."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = torch.topk(x, k, dim, False, True)
    last = [t.narrow(dim, k - 1, 1) for t in (values, places)]
    return (last[0], last[1]) if keepdim else (last[0].squeeze(dim), last[1].squeeze(dim))


@translate("median.dim")
def median_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the lower median along an axis, and its position; NaN if an element is NaN."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, places = kthvalue(x, (x.shape[dim] + 1) // 2, dim, True)
    if x.dtype.is_floating_point:
        first = torch.argmax((x != x).to(torch.int32), dim, True)
        bad = any_of(x != x, dim, True)
        values, places = torch.where(bad, float("nan"), values), torch.where(bad, first, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


@translate("median")
def median(x: torch.Tensor) -> torch.Tensor:
    """Compute the lower median of all elements."""
    return median_dim(x.reshape((-1,)), 0)[0]


NEUTRAL = {"sum": 0, "mean": 0, "prod": 1, "amax": -math.inf, "amin": math.inf}
"""The value that a reduction ignores, of floats."""


@translate("scatter_reduce.two")
def scatter_reduce(
    x: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Reduce what is scattered to a place: means, which torch's exporter replaces by the last value, and infinities."""
    if not x.dim() or (reduce != "mean" and (include_self or not x.dtype.is_floating_point)):
        return NotImplemented
    start = x if include_self else torch.scatter(x, dim, index, NEUTRAL[reduce])
    if reduce != "mean":
        return torch.scatter_reduce(start, dim, index, src, reduce)
    ones = torch.ones_like(x) if include_self else torch.zeros_like(x)
    count = torch.scatter_add(ones, dim, index, torch.ones_like(src))
    count = torch.where(count == 0, torch.ones_like(count), count)
    total = torch.scatter_add(start, dim, index, src)
    return total / count if x.dtype.is_floating_point else torch.div(total, count, rounding_mode="floor")
