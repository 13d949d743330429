"""The least time a model can take at a shape, by the machine's own limits.

ONNX Runtime, unoptimised and profiling itself, tells the sizes at every node of one real run. Each product
(MatMul, Gemm, Conv) is one group that must do its operations and move its operands once; everything else is taken to
be free. t_bound = sum over groups of max(operations / peak, bytes / bandwidth). Bytes count as read from memory: for
a model that fits into the caches this is a yardstick, not a bound.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from benchmarks.limits import Limits
from benchmarks.models.inputs import feeds

Sizes = list[int]


def bound(path: str, shape: Mapping[str, int], limits: Limits) -> float:
    """Seconds by the formula above; fp32, direct convolutions."""
    return sum(limits.seconds(flops, size) for flops, size in products(path, shape))


@functools.cache
def _products(path: str, shape: tuple[tuple[str, int], ...]) -> list[tuple[int, int]]:
    events = _events(path, dict(shape))
    return [_cost(e["args"]) for e in events if e["args"].get("op_name") in ("MatMul", "Gemm", "Conv")]


def products(path: str, shape: Mapping[str, int]) -> list[tuple[int, int]]:
    """(operations, bytes) of every product in the model at the shape."""
    return _products(path, tuple(shape.items()))


def _events(path: str, shape: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.add_session_config_entry("session.disable_prepacking", "1")  # packed weights are missing in the profile
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        session.run(None, feeds(onnx.load(path), shape))
        events = json.loads(Path(session.end_profiling()).read_text())
    yield from (e for e in events if e["name"].endswith("_kernel_time"))


def _cost(arguments: dict[str, Any]) -> tuple[int, int]:
    inputs: list[Sizes] = [next(iter(t.values())) for t in arguments["input_type_shape"]]
    (output,) = (next(iter(t.values())) for t in arguments["output_type_shape"])
    if arguments["op_name"] == "Conv":  # each output sums over a filter: (channels of a group, window)
        depth = math.prod(inputs[1][1:])
    elif arguments["op_name"] == "Gemm":  # either operand may be transposed; the sizes tell the depth
        depth = math.isqrt(math.prod(inputs[0]) * math.prod(inputs[1]) // max(1, math.prod(output)))
    else:
        depth = inputs[0][-1]
    elements = sum(math.prod(t) for t in inputs) + math.prod(output)
    return 2 * depth * math.prod(output), 4 * elements
