"""Convert torch tensors to the arrays of a program, and back, without copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from polydyn.errors import UnsupportedError

BIT_TYPES = {torch.bfloat16: torch.uint16} | {
    getattr(torch, name): torch.uint8
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
"""Dtypes that numpy lacks, with the unsigned integer dtypes that carry their bits."""


def check_tensor(tensor: Any, subject: str) -> None:
    """Raise UnsupportedError unless a tensor is dense and has a supported dtype."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"{subject} is a {tensor.layout} tensor", rule="dense tensors", remedy="call to_dense()")
    if tensor.is_complex() or tensor.is_quantized:
        raise UnsupportedError(
            f"{subject} is {tensor.dtype}", rule="types of elements", remedy="pass real tensors, or torch.view_as_real"
        )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gradient, negative bit and conjugate bit; a copy only if one of the bits is set."""
    return tensor.detach().resolve_neg().resolve_conj()


def array_of(tensor: torch.Tensor) -> Any:
    """Return the numpy array of a CPU tensor, in the same memory. Dtypes that numpy lacks appear as their bits."""
    tensor = plain(tensor)
    carrier = BIT_TYPES.get(tensor.dtype)
    return (tensor if carrier is None else tensor.view(carrier)).numpy()


def tensor_of(result: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a program's output, in the same memory.

    ``result``: a numpy array, or device memory. ``dtype``: the tensor's dtype, with as many bytes as the result's.
    """
    tensor = torch.from_numpy(result) if isinstance(result, np.ndarray) else torch.from_dlpack(result)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
