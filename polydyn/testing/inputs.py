"""Inputs for any model, and the shapes at which the stored models run.

``feeds`` needs only the model: it finds token ids and their maximum by following inputs to the table that they index.
``SHAPES`` holds eight assignments of symbols per model: (1, 1) or the smallest size that the architecture allows,
primes, a batch above 1; masks always hold zeros if they are long enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Shape = Mapping[str, int]
Array = npt.NDArray[Any]


def _stored() -> dict[str, list[Shape]]:
    found = json.loads((files("polydyn.testing") / "shapes.json").read_text())
    kinds: dict[str, list[Shape]] = {
        kind: [dict(zip(x["symbols"], sizes, strict=True)) for sizes in x["sizes"]]
        for kind, x in found["shapes"].items()
    }
    return {name: kinds[kind] for name, kind in found["models"].items()}


SHAPES = _stored()
"""Maps a model's name, without a word for its size, to shapes (``shapes.json``)."""


def family(name: str) -> str:
    """Return the key of SHAPES for a model: its name without a word for its size. KeyError: unknown."""
    key = "_".join(p for p in name.split("_") if p not in ("tiny", "base", "small", "large"))
    if key not in SHAPES:
        raise KeyError(f"no shapes are stored for the model {name!r}; known: {', '.join(SHAPES)}")
    return key


def shapes(name: str) -> list[Shape]:
    """Return the eight shapes of a stored model."""
    return SHAPES[family(name)]


def model_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the inputs that a caller must pass (without initializers that are listed as inputs)."""
    constants = {t.name for t in model.graph.initializer}
    return [v for v in model.graph.input if v.name not in constants]


def symbols(model: onnx.ModelProto) -> list[str]:
    """Return the names of the symbolic input dims, in order of first appearance."""
    dims = [d.dim_param for v in model_inputs(model) for d in v.type.tensor_type.shape.dim]
    return list(dict.fromkeys(d for d in dims if d))


def feeds(model: onnx.ModelProto, shape: Shape, seed: int = 0) -> dict[str, Array]:
    """Return arrays for every input of the model at ``shape``, which maps symbols to sizes.

    Integer inputs named like masks hold ones and zeros (position 0 of each row is 1, so none is all zero; a row of two
    or more has a zero), other integers are indices within the table they reach, floats are standard normal. ValueError
    names a symbol that ``shape`` lacks.
    """
    rng = np.random.default_rng(seed)
    return {v.name: _array(model, v, shape, rng) for v in model_inputs(model)}


def _array(model: onnx.ModelProto, value: onnx.ValueInfoProto, shape: Shape, rng: np.random.Generator) -> Array:
    dims = [_size(value.name, d, shape) for d in value.type.tensor_type.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if np.issubdtype(dtype, np.floating):
        return rng.standard_normal(dims).astype(dtype)
    if "mask" in value.name or dtype == np.bool_:
        return _mask(dims, rng).astype(dtype)
    return rng.integers(0, _index_limit(model, value.name), dims).astype(dtype)


def _size(name: str, dim: onnx.TensorShapeProto.Dimension, shape: Shape) -> int:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if dim.dim_param not in shape:
        raise ValueError(f"input {name!r} needs a size for its dim {dim.dim_param or '(without a name)'!r}")
    return shape[dim.dim_param]


def _mask(dims: list[int], rng: np.random.Generator) -> Array:
    mask = rng.random(dims) > 0.25
    if dims and dims[-1] > 1:
        mask[..., -1] = False
    mask[..., :1] = True
    return mask


def _index_limit(model: onnx.ModelProto, name: str) -> int:
    """Return the size of the smallest table that the input indexes; 2 if none is found (for example token types)."""
    sizes = {t.name: t.dims[0] for t in model.graph.initializer if t.dims}
    reached = list(_followers(model, name))
    tables = [n.input[0] for n in model.graph.node if n.op_type == "Gather" and n.input[1] in reached]
    same = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity"}
    limits = [sizes[same.get(t, t)] for t in tables if same.get(t, t) in sizes]
    return min(limits, default=2)


def _followers(model: onnx.ModelProto, name: str) -> Iterator[str]:
    """Yield the tensor and tensors with the same integers in another shape."""
    same = {name}
    yield name
    for n in model.graph.node:
        if n.op_type in ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten") and n.input[0] in same:
            same.add(n.output[0])
            yield n.output[0]
