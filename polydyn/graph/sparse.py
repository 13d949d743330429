"""Sparse constants of a model as dense arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from polydyn.errors import ModelError
from polydyn.schedules.expr import Array


def dense(name: str, values: Array, indices: Array, dims: Sequence[int]) -> Array:
    """Return a sparse tensor as an array of shape ``dims``, with zeros where it has no value.

    ``values``: a vector. ``indices``: a vector of positions in row-major order, or a matrix with a row of coordinates
    for each value. Raises ModelError for other shapes, and for indices that are outside of ``dims`` or occur twice.
    """
    shape = tuple(dims)
    if min(shape, default=0) < 0 or values.ndim != 1 or indices.dtype.kind not in "iu":
        raise _wrong(name, f"values of shape {list(values.shape)} and {indices.dtype} indices for dims {list(shape)}")
    if indices.shape == (len(values), len(shape)):
        inside = (indices >= 0).all() and (indices < np.array(shape, np.int64)).all()
        at = indices @ np.array([math.prod(shape[k + 1 :]) for k in range(len(shape))], np.int64)
    elif indices.shape == values.shape:
        inside, at = (indices >= 0).all() and (indices < math.prod(shape)).all(), indices
    else:
        raise _wrong(name, f"indices of shape {list(indices.shape)} for {len(values)} values of rank {len(shape)}")
    if not inside:
        raise _wrong(name, f"an index is outside of dims {list(shape)}")
    if len(np.unique(at)) < len(at):
        raise _wrong(name, "an index occurs twice")
    try:
        out = np.zeros(shape, values.dtype)
    except (MemoryError, ValueError) as e:
        raise _wrong(name, f"dims {list(shape)} do not fit into memory") from e
    out.reshape(-1)[at] = values
    return out


def make_dense(model: onnx.ModelProto) -> None:
    """Replace the sparse constants of a model, in place, by initializers and constants that are dense."""
    _make_dense(model.graph)
    for f in model.functions:
        _make_nodes_dense(f.node)


def _make_dense(graph: onnx.GraphProto) -> None:
    graph.initializer.extend(_tensor(t, t.values.name) for t in graph.sparse_initializer)
    del graph.sparse_initializer[:]
    _make_nodes_dense(graph.node)


def _make_nodes_dense(nodes: Iterable[onnx.NodeProto]) -> None:
    for n in nodes:
        for a in n.attribute:
            if a.type == onnx.AttributeProto.SPARSE_TENSOR and n.op_type == "Constant":
                value = _tensor(a.sparse_tensor, n.output[0])
                a.CopyFrom(onnx.helper.make_attribute("value", value))
            for g in (*a.graphs, *([a.g] if a.HasField("g") else [])):
                _make_dense(g)


def _tensor(t: onnx.SparseTensorProto, name: str) -> onnx.TensorProto:
    values, indices = numpy_helper.to_array(t.values), numpy_helper.to_array(t.indices)
    return numpy_helper.from_array(dense(name, values, indices, t.dims), name)


def _wrong(name: str, reason: str) -> ModelError:
    return ModelError(
        f"the sparse constant {name}: {reason}", tensor=name, remedy="the file may be damaged; export it again",
        rule="a sparse tensor has a vector of values, and an index inside its dims for each of them",
    )  # fmt: skip
