"""float64 operators with numeric arguments: torch's exporter writes every number as a float32.

Such a number becomes a tensor built from its bits (``number``). Operators whose numbers are ONNX attributes, such as
the epsilon of a norm, are decomposed by torch's rules, where numbers are operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from polydyn.torch_backend.translations.common import aten, inexact, number, translate

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _double(args: Any) -> torch.Tensor | None:
    """Return the first float64 tensor among arguments."""
    leaves = _pytree.tree_leaves(args)
    return next((x for x in leaves if isinstance(x, torch.Tensor) and x.dtype == torch.float64), None)


def _by_bits(args: Any, operator: Any) -> Any:
    """Call the operator with inexact numbers as tensors. Returns NotImplemented if there are none."""
    x = _double(args)
    if x is None or not any(inexact(a) for a in args):
        return NotImplemented
    return operator(*(number(a, x) if inexact(a) else a for a in args))


def _binary(operator: Any) -> Callable[..., Any]:
    return lambda *args: _by_bits(args, operator)


for _name in ("mul", "div"):
    translate(f"{_name}.Tensor")(_binary(getattr(aten, _name).Tensor))
for _name in COMPARISONS:
    translate(f"{_name}.Scalar", f"{_name}.Tensor")(_binary(getattr(aten, _name).Tensor))
translate("pow.Tensor_Scalar", "pow.Scalar")(_binary(aten.pow.Tensor_Tensor))


def _sum(args: Any, alpha: Any, operator: Any) -> Any:
    x = _double(args)
    if x is None or not (inexact(alpha) or any(inexact(a) for a in args)):
        return NotImplemented
    first, second = (number(a, x) if inexact(a) else a for a in args)
    return operator(first, second if alpha == 1 else second * alpha)


@translate("add.Tensor")
def add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """Compute ``a + alpha b``."""
    return _sum((a, b), alpha, aten.add.Tensor)


@translate("sub.Tensor")
def sub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    """Compute ``a - alpha b``."""
    return _sum((a, b), alpha, aten.sub.Tensor)


@translate("rsub.Scalar", "rsub.Tensor")
def rsub(a: Any, b: Any, alpha: Any = 1) -> Any:
    """Compute ``b - alpha a``."""
    x = _double((a, b))
    if x is None or not (inexact(alpha) or inexact(b)):
        return NotImplemented
    return (number(b, x) if inexact(b) else b) - (a if alpha == 1 else a * alpha)


@translate("masked_fill.Scalar")
def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> Any:
    """Write a number where the mask is set."""
    return torch.where(mask, number(value, x), x) if x.dtype == torch.float64 and inexact(value) else NotImplemented


@translate("full")
def full(size: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Fill a tensor with one number."""
    if dtype != torch.float64 or not isinstance(value, float) or not inexact(value):
        return NotImplemented
    return number(value, torch.zeros((), dtype=dtype, device=device)).expand(size).clone()


@translate("full_like")
def full_like(x: torch.Tensor, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Fill a tensor of the shape of another one with one number."""
    if (dtype or x.dtype) != torch.float64 or not isinstance(value, float) or not inexact(value):
        return NotImplemented
    return number(value, x.to(torch.float64)).expand(x.shape).clone()


@translate("scalar_tensor")
def scalar_tensor(value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Return a number as a tensor."""
    return full((), value, dtype=dtype, device=device)


@translate("hardsigmoid")
def hardsigmoid(x: torch.Tensor) -> Any:
    """Compute a line from 0 at -3 to 1 at 3."""
    return torch.clamp(x + 3, 0, 6) / 6 if x.dtype == torch.float64 else NotImplemented


@translate("deg2rad")
def deg2rad(x: torch.Tensor) -> Any:
    """Convert degrees to radians."""
    return x * (math.pi / 180) if x.dtype == torch.float64 else NotImplemented


@translate("rad2deg")
def rad2deg(x: torch.Tensor) -> Any:
    """Convert radians to degrees."""
    return x * (180 / math.pi) if x.dtype == torch.float64 else NotImplemented


@translate("addbmm")
def addbmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Compute ``beta x`` plus alpha times the sum of a batch of products."""
    if x.dtype != torch.float64:
        return NotImplemented
    total = torch.sum(torch.bmm(a, b), 0) * alpha
    return total if beta == 0 else x * beta + total


def _normalized(x: torch.Tensor, axes: Sequence[int], eps: float) -> torch.Tensor:
    centered = x - torch.mean(x, axes, True)
    return centered * torch.rsqrt(torch.mean(centered * centered, axes, True) + eps)


@translate("layer_norm")
def layer_norm(
    x: torch.Tensor, shape: Sequence[Any], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Normalize the last axes to mean 0 and variance 1."""
    if x.dtype != torch.float64:
        return NotImplemented
    made = _normalized(x, list(range(-len(shape), 0)), eps)
    made = made if weight is None else made * weight
    return made if bias is None else made + bias


@translate("group_norm")
def group_norm(x: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> Any:
    """Normalize groups of channels to mean 0 and variance 1."""
    if x.dtype != torch.float64:
        return NotImplemented
    parted = x.reshape((x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]))
    made = _normalized(parted, list(range(2, parted.dim())), eps).reshape(x.shape)
    channels = (-1, *(1,) * (x.dim() - 2))
    made = made if weight is None else made * weight.reshape(channels)
    return made if bias is None else made + bias.reshape(channels)


@translate("instance_norm")
def instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float,
    *_: Any,
) -> Any:  # fmt: skip
    """Normalize every channel of every image to mean 0 and variance 1."""
    if x.dtype != torch.float64 or not use_input_stats or mean is not None:
        return NotImplemented
    return group_norm(x, x.shape[1], weight, bias, eps)


@translate("_native_batch_norm_legit_no_training")
def batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, var: torch.Tensor, momentum: float, eps: float
) -> Any:
    """Normalize every channel by the statistics of training. Return two empty buffers as well."""
    if x.dtype != torch.float64:
        return NotImplemented
    channels = (-1, *(1,) * (x.dim() - 2))
    made = (x - mean.reshape(channels)) * torch.rsqrt(var.reshape(channels) + eps)
    made = made if weight is None else made * weight.reshape(channels)
    made = made if bias is None else made + bias.reshape(channels)
    return made, x.new_zeros((0,)), x.new_zeros((0,))


Rules = Mapping[Any, Callable[..., Any]]


def decompositions(exported: Iterable[Any], rules: Rules) -> dict[Any, Callable[..., Any]]:
    """Return torch's rules for exported operators with numbers, applied only to float64 tensors.

    Batch norms that update their statistics are left out: torch's rule computes means that cannot be exported.
    """
    chosen = [op for op in exported if op in rules and _has_number(op) and "batch_norm_legit" not in str(op)]
    return {op: _of_doubles(rules[op]) for op in chosen}


def _has_number(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(str(a.type) in ("float", "number") for a in schema.arguments)


def _of_doubles(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **more: rule(*args, **more) if _double(args) is not None else NotImplemented
