"""Stored models are float32; ``of_type`` makes their float16 and bfloat16 twins; bounds of their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from polydyn.testing.halves import HALVES, in_type

ONNX_TYPE = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
NUMPY_TYPE: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
                              "float8": ml_dtypes.float8_e4m3fn}  # fmt: skip
BOUND = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""Tolerated error of a whole model, over the scale of its output, against the float32 model."""


def of_type(path: Path, dtype: str) -> onnx.ModelProto:
    """Return the stored model in a type."""
    model = onnx.load(path)
    return in_type(model, dtype) if dtype in HALVES else model
