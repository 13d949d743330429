"""An ONNX model in float64: floats of the file become doubles, and ONNX's reference evaluates it.

Slow but independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator


def in_float64(path: Path, feeds: Mapping[str, Any]) -> list[Any]:
    """Return the results of a model in float64. Exceptions of many classes: ONNX's reference lacks an operator."""
    model = onnx.load(path)
    for graph in _graphs(model.graph):
        for t in graph.initializer:
            t.CopyFrom(_double(t))
        for v in (*graph.input, *graph.output):
            if v.type.tensor_type.elem_type == TensorProto.FLOAT:
                v.type.tensor_type.elem_type = TensorProto.DOUBLE
        del graph.value_info[:]
        for n in graph.node:
            _widen(n)
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    results: list[Any] = ReferenceEvaluator(model).run(None, wide)
    return results


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs inside its nodes."""
    yield graph
    for n in graph.node:
        for a in n.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(a.g)


def _widen(n: onnx.NodeProto) -> None:
    """Turn float32 constants, and casts to float32, into float64."""
    for a in n.attribute:
        if a.type == onnx.AttributeProto.TENSOR:
            a.t.CopyFrom(_double(a.t))
        elif n.op_type == "Cast" and a.name == "to" and a.i == TensorProto.FLOAT:
            a.i = TensorProto.DOUBLE
        elif n.op_type == "Constant" and a.name in ("value_float", "value_floats"):
            value = np.float64(a.f) if a.name == "value_float" else np.array(a.floats, np.float64)
            a.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(np.asarray(value))))


def _double(t: onnx.TensorProto) -> onnx.TensorProto:
    """Return the tensor with doubles in place of floats."""
    if t.data_type != TensorProto.FLOAT:
        return t
    return numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name)
