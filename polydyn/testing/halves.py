"""Models in other types of floats, made from float32 models."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import Array
from polydyn.schedules.laws.masks import LARGEST

HALVES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
CODES = HALVES | {"float64": TensorProto.DOUBLE}


def in_type(model: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """Return the model with all its float32 tensors, casts included, in another type.

    Numbers out of range become the type's largest number; infinities stay.
    """
    code = CODES[dtype]
    made = onnx.ModelProto()
    made.CopyFrom(model)

    def tensor(x: onnx.TensorProto) -> None:
        if x.data_type == TensorProto.FLOAT:
            x.CopyFrom(_narrow(numpy_helper.to_array(x), x.name, dtype))

    for x in made.graph.initializer:
        tensor(x)
    for a in (a for n in made.graph.node for a in n.attribute):
        if a.type == AttributeProto.TENSOR:
            tensor(a.t)
        elif a.name == "to" and a.i == TensorProto.FLOAT:
            a.i = code
        elif a.name in ("value_float", "value_floats"):  # attributes of Constant
            value = np.array(a.f if a.name == "value_float" else list(a.floats), np.float32)
            a.CopyFrom(helper.make_attribute("value", _narrow(value, "", dtype)))
    for v in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        if v.type.tensor_type.elem_type == TensorProto.FLOAT:
            v.type.tensor_type.elem_type = code
    return made


def _narrow(a: Array, name: str, dtype: str) -> onnx.TensorProto:
    wide = a.astype(np.float64)
    inside = np.where(np.isinf(wide), wide, np.clip(wide, -LARGEST[dtype], LARGEST[dtype]))
    data = inside.astype(numpy_dtype(dtype)).tobytes()
    return helper.make_tensor(name, CODES[dtype], list(a.shape), data, raw=True)


def rounded(x: Array, dtype: str) -> Array:
    """Return the array in the type; integers are unchanged."""
    return x.astype(numpy_dtype(dtype)) if x.dtype == np.float32 else x


def widened(x: Array, dtype: str) -> Array:
    """Convert a program's array of the type (bfloat16 is passed as bits) to float32."""
    return np.asarray(x.view(numpy_dtype(dtype)), np.float32)
