"""Joining, splitting and indexing tensors; attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from polydyn.torch_backend.translations.common import number, onnx, translate


@translate("unbind.int")
def unbind(x: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """Return the slices along an axis."""
    return [torch.select(x, dim, k) for k in range(x.shape[dim])]


@translate("hstack")
def hstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the second axis, vectors along the first."""
    parts = [t.reshape((1,)) if not t.dim() else t for t in tensors]
    return torch.cat(parts, 0 if parts[0].dim() == 1 else 1)


def _rows(t: torch.Tensor) -> torch.Tensor:
    return t.reshape((1, 1)) if not t.dim() else t.unsqueeze(0) if t.dim() == 1 else t


@translate("vstack", "row_stack")
def vstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the first axis, vectors as rows."""
    return torch.cat([_rows(t) for t in tensors], 0)


@translate("dstack")
def dstack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the third axis."""
    parts = [_rows(t) for t in tensors]
    return torch.cat([t.unsqueeze(2) if t.dim() == 2 else t for t in parts], 2)


@translate("column_stack")
def column_stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join along the second axis, vectors as columns."""
    return torch.cat([t.reshape((-1, 1)) if t.dim() <= 1 else t for t in tensors], 1)


@translate("diagonal", "diagonal_copy")
def diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """Return the diagonals of two axes as the last axis."""
    rows, columns = x.shape[dim1], x.shape[dim2]
    rows, columns = rows + min(offset, 0), columns - max(offset, 0)
    count = torch.sym_max(torch.sym_min(rows, columns), 0)
    at = torch.arange(count, device=x.device)
    moved = torch.movedim(x, (dim1, dim2), (-2, -1))
    return moved[..., at + max(-offset, 0), at + max(offset, 0)]


# -- indices: eager torch rejects negative ones here, ONNX counts them from the end ---------------------------------


@translate("embedding")
def embedding(
    weight: torch.Tensor, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the rows of a table."""
    return onnx("polydyn::Gather", weight, indices, shape=(*indices.shape, *weight.shape[1:]), axis=0)


@translate("index_select")
def index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Return the slices of an axis at a vector of indices."""
    if not x.dim():
        return x.clone()
    axis, flat = dim % x.dim(), index.reshape((-1,))
    shape = (*x.shape[:axis], flat.shape[0], *x.shape[axis + 1 :])
    return onnx("polydyn::Gather", x, flat, shape=shape, axis=axis)


@translate("gather")
def gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, sparse_grad: bool = False) -> torch.Tensor:
    """Return the elements of an axis at indices, one for each element of the result."""
    if not x.dim() or not index.dim():
        return gather(x.reshape((-1,)), 0, index.reshape((-1,))).reshape(index.shape)
    return onnx("polydyn::GatherElements", x, index, shape=index.shape, axis=dim % x.dim())


# -- attention ---------------------------------------------------------------------------------------------------------


def _seen(mask: torch.Tensor) -> torch.Tensor:
    """Return the rows of a mask in which some key is visible, one element each."""
    open_ = mask if mask.dtype == torch.bool else mask != float("-inf")
    return torch.sum(open_.to(torch.int32), -1, True, dtype=torch.int32) > 0


@translate("scaled_dot_product_attention")
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute attention. A row whose keys are all hidden is 0."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key, value = (_repeated(t, query.shape[-3] // t.shape[-3]) for t in (key, value))
    root = math.sqrt(scale) if scale is not None else query.shape[-1] ** -0.25
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        attn_mask = columns <= rows[:, None]
    if attn_mask is None:
        return torch.softmax(scores, -1) @ value
    if attn_mask.dtype == torch.bool:
        bias = torch.where(attn_mask, number(0, scores), number(-math.inf if is_causal else lowest(scores), scores))
    else:
        bias = attn_mask.to(scores.dtype)
    result = torch.softmax(scores + bias, -1) @ value
    if is_causal:
        return result
    return torch.where(_seen(attn_mask), result, torch.sum(value * 0, -2, True))  # NaN if a value is not finite


def lowest(x: torch.Tensor) -> float:
    """Return the lowest number of a tensor's dtype."""
    return float(torch.finfo(x.dtype).min)


def _repeated(x: torch.Tensor, times: Any) -> torch.Tensor:
    """Repeat every head several times, each copy after the other."""
    *front, heads, rows, columns = x.shape
    spread = x.unsqueeze(-3).expand((*front, heads, times, rows, columns))
    return spread.reshape((*front, heads * times, rows, columns))
