"""Operators that torch itself composes of others, where its exporter has a version that differs.

Second names of operators (``divide``) keep operands of mixed types in the exporter, whose pass of types only knows the
first names. Its ``isclose`` compares the difference of two roundings with the tolerance. Its ``cross_entropy_loss``
takes classes only, not their probabilities.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polydyn.torch_backend.translations.common import TABLE, aten, translate

NAMES = (
    "divide.Tensor", "divide.Scalar", "true_divide.Tensor", "true_divide.Scalar", "multiply.Tensor", "multiply.Scalar",
    "subtract.Tensor", "subtract.Scalar", "greater.Tensor", "greater.Scalar", "greater_equal.Tensor",
    "greater_equal.Scalar", "less.Tensor", "less.Scalar", "less_equal.Tensor", "less_equal.Scalar", "not_equal.Tensor",
    "not_equal.Scalar", "isclose",
)  # fmt: skip


def _composed(operator: Any) -> Any:
    """torch's own rule of a composite operator."""
    return partial(operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


for name in NAMES:
    packet, _, overload = name.partition(".")
    found = getattr(getattr(aten, packet), overload or "default")
    TABLE[found] = _composed(found)


@translate("cross_entropy_loss")
def cross_entropy_loss(x: torch.Tensor, target: torch.Tensor, *args: Any, **more: Any) -> Any:
    """The loss against probabilities of classes. Against classes it is exported as it is."""
    if not target.dtype.is_floating_point:
        return NotImplemented
    return _composed(aten.cross_entropy_loss.default)(x, target, *args, **more)
