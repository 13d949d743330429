"""Operators that torch composes from others, where its exporter's version differs.

Alternative names of operators (``divide``) keep operands of mixed dtypes in the exporter, because its dtype pass knows
only the first names. Its ``isclose`` compares the difference of two roundings with the tolerance. Its
``cross_entropy_loss`` takes only classes, not their probabilities, and ignores label smoothing.
"""

from __future__ import annotations

from typing import Any

import torch

from polydyn.torch_backend.translations.common import TABLE, aten, composed, translate

NAMES = (
    "divide.Tensor", "divide.Scalar", "true_divide.Tensor", "true_divide.Scalar", "multiply.Tensor", "multiply.Scalar",
    "subtract.Tensor", "subtract.Scalar", "greater.Tensor", "greater.Scalar", "greater_equal.Tensor",
    "greater_equal.Scalar", "less.Tensor", "less.Scalar", "less_equal.Tensor", "less_equal.Scalar", "not_equal.Tensor",
    "not_equal.Scalar", "isclose",
)  # fmt: skip


for name in NAMES:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(aten, packet), overload or "default")
    TABLE[found] = composed(found)


@translate("cross_entropy_loss")
def cross_entropy_loss(
    x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = 1, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Compute the loss against class probabilities or smoothed labels. Other losses are exported unchanged."""
    if not target.dtype.is_floating_point and not label_smoothing:
        return NotImplemented
    rule = composed(aten.cross_entropy_loss.default)
    return rule(x, target, weight, reduction, ignore_index, label_smoothing)


@translate("mul.Scalar")
def mul_scalar(x: torch.Tensor, value: Any) -> Any:
    """Multiply x by a number that depends on sizes, which torch's exporter treats as a constant."""
    return x * _of_sizes(value, x) if isinstance(value, SYMBOLIC) and x.dtype.is_floating_point else NotImplemented


@translate("div.Scalar")
def div_scalar(x: torch.Tensor, value: Any) -> Any:
    """Divide x by a number that depends on sizes, which torch's exporter treats as a constant."""
    return x / _of_sizes(value, x) if isinstance(value, SYMBOLIC) and x.dtype.is_floating_point else NotImplemented


SYMBOLIC = (torch.SymInt, torch.SymFloat)


def _of_sizes(value: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)
