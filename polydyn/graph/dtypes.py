"""Names of dtypes: ONNX's enum, polydyn's names (those of numpy and ml_dtypes), numpy's dtypes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx

from polydyn.errors import UnsupportedError
from polydyn.schedules.expr import DTYPES, SMALL, Array

_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.DOUBLE: "float64", onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.INT8: "int8", onnx.TensorProto.INT16: "int16", onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64", onnx.TensorProto.UINT8: "uint8", onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32", onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.FLOAT8E4M3FN: "float8_e4m3fn", onnx.TensorProto.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
    onnx.TensorProto.FLOAT8E5M2: "float8_e5m2", onnx.TensorProto.FLOAT8E5M2FNUZ: "float8_e5m2fnuz",
    onnx.TensorProto.UINT4: "uint4", onnx.TensorProto.INT4: "int4",
}  # fmt: skip


_NEWER = {
    "FLOAT4E2M1": "float4_e2m1fn", "FLOAT8E8M0": "float8_e8m0fnu", "UINT2": "uint2", "INT2": "int2",
}  # fmt: skip
"""Types that older releases of onnx lack."""
_CODES = dict(onnx.TensorProto.DataType.items())
_NAMES |= {_CODES[k]: v for k, v in _NEWER.items() if k in _CODES}


def onnx_dtype(code: int, *, tensor: str | None = None) -> str:
    """Return the name of an ONNX element type. Raises UnsupportedError for strings, complex and 6-bit types."""
    if code not in _NAMES:
        known = {v: k for k, v in onnx.TensorProto.DataType.items()}
        raise UnsupportedError(
            f"element type {known.get(code, code)} is not supported", tensor=tensor,
            remedy=f"cast the tensor to one of {', '.join(DTYPES)}",
        )  # fmt: skip
    return _NAMES[code]


PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
"""Bits per element in a model's file if several elements share a byte. The first element is in the low bits."""


def unpacked(data: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Unpack elements of a packed type to one byte each. Raises ValueError for a wrong number of bytes."""
    bits, count = PACKED[dtype.name], math.prod(shape)
    if data.size != -(-count * bits // 8):
        raise ValueError(f"{data.size} bytes for {count} elements of {bits} bits")
    parts = data[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8(2**bits - 1)
    return np.ascontiguousarray(parts.reshape(-1)[:count]).view(dtype).reshape(shape)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a dtype's name (ml_dtypes, which onnx requires anyway, provides those that numpy
    lacks).
    """
    if name == "bfloat16" or name in SMALL:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
    return np.dtype(name)
