"""The table of translations, ONNX operators in torch graphs, and torch's dtype rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.onnx.ops
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

aten = torch.ops.aten
TABLE: dict[Any, Callable[..., Any]] = {}
F = TypeVar("F", bound=Callable[..., Any])


def translate(*names: str) -> Callable[[F], F]:
    """Register a translation of aten overloads such as ``remainder.Tensor``. Overloads missing in this torch are
    skipped.
    """

    def register(function: F) -> F:
        for name in names:
            packet, _, overload = name.partition(".")
            found = getattr(getattr(aten, packet, None), overload or "default", None)
            if found is not None:
                TABLE[found] = function
        return function

    return register


def onnx(
    operator: str, *inputs: torch.Tensor, dtype: torch.dtype | None = None, shape: Sequence[Any] | None = None,
    **attributes: Any,
) -> torch.Tensor:  # fmt: skip
    """Insert an ONNX operator, such as ``Mod`` or ``polydyn::Expm1``, into a torch graph.

    ``dtype``: the result's, by default the first input's. ``shape``: the result's, by default the inputs' broadcast.
    """
    return torch.onnx.ops.symbolic(
        operator, inputs, attributes, dtype=dtype or inputs[0].dtype,
        shape=torch.broadcast_shapes(*(x.shape for x in inputs)) if shape is None else shape,
        version=1 if "::" in operator else None,
    )  # fmt: skip


def elementwise(kind: Any = KIND.DEFAULT) -> Callable[[F], F]:
    """Convert operands to torch's computation dtype (16-bit floats to float32), and the result to torch's result dtype.

    Keyword arguments pass unchanged. Numbers become tensors without axes.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def promoted(*operands: Any, **more: Any) -> Any:
            computed, given = elementwise_dtypes(*operands, type_promotion_kind=kind)
            device = next(x.device for x in operands if isinstance(x, torch.Tensor))
            own = given if given.is_floating_point else computed  # eager rounds a number to the result's dtype
            values = [(x if isinstance(x, torch.Tensor) else _number(x, own, device)).to(computed) for x in operands]
            return function(*values, **more).to(given)

        return promoted  # type: ignore[return-value]

    return decorate


def computed_type(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which torch computes a tensor's elements: float32 for 16-bit floats."""
    if not x.dtype.is_floating_point:
        return x.dtype
    computed: torch.dtype = elementwise_dtypes(x, type_promotion_kind=KIND.DEFAULT)[0]
    return computed


FLOAT = KIND.INT_TO_FLOAT
"""Type promotion that converts integers to floats."""


def inexact(value: Any) -> bool:
    """Check for a number that float32 cannot represent, or that depends on sizes. The exporter would make it a
    float32.
    """
    if isinstance(value, torch.SymFloat):
        return True
    return isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) != value


def number(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor without axes, of another tensor's dtype."""
    return _number(value, like.dtype, like.device)


def _number(value: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    if dtype == torch.float64 and isinstance(value, float) and inexact(value):
        bits = torch.full((), int(np.float64(value).view(np.int64)), dtype=torch.int64, device=device)
        return onnx("polydyn::FromBits", bits, dtype=dtype)
    return torch.full((), value, dtype=dtype, device=device)


def composed(operator: Any) -> Callable[..., Any]:
    """Return torch's own rule of a composite operator."""
    return functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def axis_of(dim: int, like: torch.Tensor) -> torch.Tensor:
    """Return an axis as an input of an ONNX operator."""
    return torch.full((), dim % max(like.dim(), 1), dtype=torch.int64, device=like.device)
