"""Names of dtypes: ONNX's enum, ours (numpy names and ``bfloat16``), numpy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from polydyn.errors import UnsupportedError
from polydyn.schedules.expr import DTYPES

_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.DOUBLE: "float64", onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.INT8: "int8", onnx.TensorProto.INT16: "int16", onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64", onnx.TensorProto.UINT8: "uint8", onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32", onnx.TensorProto.UINT64: "uint64",
}  # fmt: skip


def onnx_dtype(code: int, *, tensor: str | None = None) -> str:
    """The name of an ONNX element type; UnsupportedError for strings, complex and sub-byte types."""
    if code not in _NAMES:
        known = {v: k for k, v in onnx.TensorProto.DataType.items()}
        raise UnsupportedError(
            f"element type {known.get(code, code)} is not supported", tensor=tensor,
            remedy=f"cast the tensor to one of {', '.join(DTYPES)}",
        )  # fmt: skip
    return _NAMES[code]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of a dtype's name (``bfloat16`` comes from ml_dtypes, which onnx needs anyway)."""
    if name == "bfloat16":
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    return np.dtype(name)
