"""Stored models are float32; their float16 and bfloat16 twins are made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ONNX_TYPE = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
NUMPY_TYPE: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
                              "float8": ml_dtypes.float8_e4m3fn}  # fmt: skip
BOUND = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 2e-1}
"""Tolerated error of a whole model, over the scale of its output, against the float32 model."""


def of_type(path: Path, dtype: str) -> onnx.ModelProto:
    """The stored model with every float32 tensor, attribute and cast of the given type."""
    model = onnx.load(path)
    if dtype == "float32":
        return model
    kind, single = ONNX_TYPE[dtype], TensorProto.FLOAT
    graph = model.graph
    for t in graph.initializer:
        if t.data_type == single:
            t.CopyFrom(_tensor(t, dtype))
    for v in (*graph.input, *graph.output, *graph.value_info):
        if v.type.tensor_type.elem_type == single:
            v.type.tensor_type.elem_type = kind
    for n in graph.node:
        for a in n.attribute:
            if a.type == onnx.AttributeProto.TENSOR and a.t.data_type == single:
                a.t.CopyFrom(_tensor(a.t, dtype))
            elif n.op_type == "Cast" and a.name == "to" and a.i == single:
                a.i = kind
            elif n.op_type == "Constant" and a.name in ("value_float", "value_floats"):
                value = np.array(a.f if a.name == "value_float" else list(a.floats), np.float32)
                a.CopyFrom(helper.make_attribute("value", _tensor(numpy_helper.from_array(value), dtype)))
    return model


def _tensor(t: onnx.TensorProto, dtype: str) -> onnx.TensorProto:
    value = numpy_helper.to_array(t)
    limit = float(np.finfo(np.float16).max) if dtype == "float16" else np.inf
    narrow = np.clip(value, -limit, limit) if np.isfinite(value).all() else value  # a mask of -3e38 stays finite
    raw = narrow.astype(NUMPY_TYPE[dtype]).tobytes()
    return helper.make_tensor(t.name, ONNX_TYPE[dtype], list(value.shape), raw, raw=True)
