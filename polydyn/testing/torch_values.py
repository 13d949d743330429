"""Tensors for fuzzing ``torch.compile``: special values, rows of one value, layouts of memory, sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

FLOATS_OF_8_BITS = tuple(
    getattr(torch, n)
    for n in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, n)
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.bool)


def special_values(dtype: Any) -> list[Any]:
    """Return critical numbers of a type: zeros, subnormals, the largest, infinities, NaN, halves."""
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_complex:
        return [0.0, 1.0, -1.0]
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        chosen = [0, 1, -1, 2, -2, 3, -3, 7, 100, 2**24 + 1, -(2**24) - 1, 2**40 + 1, limits.max, limits.min + 1]
        return [v for v in chosen if limits.min <= v <= limits.max]
    limits = torch.finfo(dtype)
    near = [0.0, -0.0, 1e-8, -1e-8, 1e-3, -1e-3, 0.5, -0.5, 1.0, -1.0, 1.5, -2.5, 3.0, 20.0, -20.0, 100.0, -100.0]
    return [*near, math.nan, math.inf, -math.inf, limits.tiny, -limits.tiny, limits.tiny / 4, limits.max, -limits.max]


def with_special_values(x: torch.Tensor, r: random.Random, share: float = 0.3) -> torch.Tensor:
    """Return a copy in which some elements are special values, and perhaps one whole row."""
    values = special_values(x.dtype)
    made = x.clone(memory_format=torch.contiguous_format)
    flat = made.view(-1)
    for k in range(flat.numel()):
        if r.random() < share:
            flat[k] = r.choice(values)
    if x.dim() and x.numel() and r.random() < 0.3:
        axis = r.randrange(x.dim())
        made.select(axis, r.randrange(x.shape[axis])).fill_(r.choice(values))
    return made


def random_tensor(shape: Sequence[int], dtype: Any, r: random.Random, special: float = 0.0) -> torch.Tensor:
    """Return numbers of moderate size, or with special values in a share of the elements."""
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    if dtype == torch.bool:
        made = torch.rand(tuple(shape), generator=generator) < 0.6
    elif dtype.is_floating_point:
        made = (torch.randn(tuple(shape), generator=generator) * r.choice([0.5, 1.0, 3.0])).to(dtype)
    else:
        made = torch.randint(-9, 10, tuple(shape), generator=generator).to(dtype)
    return with_special_values(made, r, special) if special else made


# -- layouts -----------------------------------------------------------------------------------------------------------


def _permuted(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Store the axes in another order in memory."""
    order = r.sample(range(x.dim()), x.dim())
    return x.permute(order).contiguous().permute(tuple(order.index(k) for k in range(x.dim())))


def _spaced(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Store in every second element of an axis of other memory, after an offset."""
    axis = r.randrange(x.dim())
    shape = [n * 2 + 1 if k == axis else n for k, n in enumerate(x.shape)]
    memory = torch.zeros(shape, dtype=x.dtype)
    view = memory.narrow(axis, 1, 2 * x.shape[axis])
    view = view[tuple(slice(None, None, 2) if k == axis else slice(None) for k in range(x.dim()))]
    view.copy_(x)
    return view


def _expanded(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Read one slice repeatedly along an axis. The values change."""
    axis = r.randrange(x.dim())
    return x.narrow(axis, 0, 1).expand(x.shape) if x.shape[axis] else x


def _negated(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Return a lazy negation: the imaginary part of a conjugate."""
    if x.dtype not in (torch.float32, torch.float64):
        return x
    return torch.complex(torch.zeros_like(x), -x).conj().imag


LAYOUTS: tuple[Callable[[torch.Tensor, random.Random], torch.Tensor], ...] = (_permuted, _spaced, _expanded, _negated)


def laid_out(x: torch.Tensor, r: random.Random) -> torch.Tensor:
    """Return the tensor in another memory layout."""
    return r.choice(LAYOUTS)(x, r) if x.dim() else x


# -- arguments of functions --------------------------------------------------------------------------------------------


def split(arguments: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """Return the tensors in a tree of arguments, and a function that replaces them."""
    leaves, spec = _pytree.tree_flatten(arguments)
    places = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def rebuilt(tensors: Sequence[torch.Tensor]) -> Any:
        again = list(leaves)
        for k, t in zip(places, tensors, strict=True):
            again[k] = t
        return _pytree.tree_unflatten(again, spec)

    return [leaves[k] for k in places], rebuilt


def resized(tensors: Sequence[torch.Tensor], r: random.Random) -> list[torch.Tensor]:
    """Give all axes of one size another size: 0, 1, or one more. Elements are repeated."""
    sizes = sorted({n for t in tensors for n in t.shape})
    if not sizes:
        return list(tensors)
    old = r.choice(sizes)
    new = r.choice([0, 0, 1, old + 1, old + 3])
    made = []
    for t in tensors:
        for axis, n in enumerate(t.shape):
            if n == old and (n or not new):
                t = t.index_select(axis, torch.arange(new) % max(n, 1))
            elif n == old:
                t = torch.zeros([new if k == axis else s for k, s in enumerate(t.shape)], dtype=t.dtype)
        made.append(t)
    return made
