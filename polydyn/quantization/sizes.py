"""Bytes of tensors."""

from __future__ import annotations

import math

from onnx import TensorProto, helper


def bits_of(code: int) -> int:
    """Return the bits of an element; 8 for texts."""
    if code == TensorProto.STRING:
        return 8
    packed = code in (TensorProto.INT4, TensorProto.UINT4)
    return 4 if packed else 8 * int(helper.tensor_dtype_to_np_dtype(code).itemsize)


def tensor_bytes(t: TensorProto) -> int:
    """Return the bytes of a tensor's elements."""
    return int(math.prod(t.dims) * bits_of(t.data_type) // 8)
