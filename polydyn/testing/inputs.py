"""Inputs for any model, and the shapes that the stored models are run at.

``feeds`` needs only the model: it finds which inputs are token ids and how large they may be by following them to the
table they index. ``SHAPES`` holds eight assignments of symbols per model: (1, 1) or the smallest size that the
architecture allows, primes, a batch above 1; masks always hold zeros where there is room.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

Shape = Mapping[str, int]
Array = npt.NDArray[Any]


def _text(*pairs: tuple[int, int]) -> list[Shape]:
    return [{"B": b, "L": length} for b, length in pairs]


def _past(*triples: tuple[int, int, int]) -> list[Shape]:
    return [{"B": b, "L": length, "P": past, "T": past + length} for b, length, past in triples]


def _batch(*sizes: int) -> list[Shape]:
    return [{"N": n} for n in sizes]


def _images(*triples: tuple[int, int, int]) -> list[Shape]:
    return [{"N": n, "H": h, "W": w} for n, h, w in triples]


_TEXT = _text((1, 1), (1, 7), (1, 32), (2, 13), (3, 31), (5, 17), (4, 61), (1, 128))
_PAST = _past((1, 1, 0), (1, 1, 1), (1, 1, 63), (2, 7, 0), (3, 1, 31), (2, 3, 5), (4, 5, 13), (1, 17, 101))
_LARGE = ((3, 64, 64), (1, 97, 131), (2, 128, 113), (1, 193, 257), (1, 224, 224))
_FREE = _images((1, 1, 1), (1, 31, 47), (2, 33, 32), *_LARGE)
_VIT_FREE = _images((1, 16, 16), (1, 17, 41), (2, 32, 48), *_LARGE)
_DENSE = _images((1, 37, 37), (1, 31, 47), (2, 33, 32), *_LARGE)

SHAPES: dict[str, list[Shape]] = {
    "bert": _TEXT,
    "albert": _TEXT,
    "gpt2": _TEXT,
    "t5": _TEXT,
    "gpt2_past": _PAST,
    "llama": _PAST,
    "vit": _batch(1, 2, 3, 4, 5, 6, 7, 8),
    "vit_hw": _VIT_FREE,
    "resnet": _FREE,
    "densenet121": _DENSE,
    "squeezenet": _DENSE,
    "alexnet": _batch(1, 2, 3, 4, 5, 6, 7, 8),
    "googlenet": _batch(1, 2, 3, 4, 5, 6, 7, 8),
    "shufflenet": _batch(1, 2, 3, 4, 5, 6, 7, 8),
}


def family(name: str) -> str:
    """The key of SHAPES for a model's name: ``bert_tiny`` and ``bert_base`` are ``bert``; KeyError when unknown."""
    parts = [p for p in name.split("_") if p not in ("tiny", "base", "small", "large")]
    key = "_".join(parts).replace("resnet50", "resnet")
    if key not in SHAPES:
        raise KeyError(f"no shapes are stored for the model {name!r}; known: {', '.join(SHAPES)}")
    return key


def shapes(name: str) -> list[Shape]:
    """The eight shapes of a stored model."""
    return SHAPES[family(name)]


def model_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs a caller must give (initializers listed as inputs are not)."""
    constants = {t.name for t in model.graph.initializer}
    return [v for v in model.graph.input if v.name not in constants]


def symbols(model: onnx.ModelProto) -> list[str]:
    """Names of the symbolic input dims, in order of first appearance."""
    dims = [d.dim_param for v in model_inputs(model) for d in v.type.tensor_type.shape.dim]
    return list(dict.fromkeys(d for d in dims if d))


def feeds(model: onnx.ModelProto, shape: Shape, seed: int = 0) -> dict[str, Array]:
    """Arrays for every input of the model at ``shape`` (symbol -> size).

    Integer inputs named like masks hold ones and zeros (position 0 of each row is 1, so none is all zero; a row of
    two or more has a zero), other integers are indices within the table they reach, floats are standard normal.
    ValueError names a symbol that ``shape`` lacks.
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
    """The smallest table that the input indexes; 2 when none is found (token types and the like)."""
    sizes = {t.name: t.dims[0] for t in model.graph.initializer if t.dims}
    reached = list(_followers(model, name))
    tables = [n.input[0] for n in model.graph.node if n.op_type == "Gather" and n.input[1] in reached]
    same = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity"}
    limits = [sizes[same.get(t, t)] for t in tables if same.get(t, t) in sizes]
    return min(limits, default=2)


def _followers(model: onnx.ModelProto, name: str) -> Iterator[str]:
    """The tensor and those that hold the same integers in another shape."""
    same = {name}
    yield name
    for n in model.graph.node:
        if n.op_type in ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten") and n.input[0] in same:
            same.add(n.output[0])
            yield n.output[0]
