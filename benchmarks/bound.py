"""The minimum time of a model at a shape, by the machine's own limits.

ONNX Runtime runs the model once, unoptimised, and its profile gives the sizes at every node. Each product (MatMul,
Gemm, Conv) is one group that must do its operations and move its operands once; everything else is assumed free.
t_bound = sum over groups of max(operations / peak, bytes / bandwidth). Bytes count as read from memory, except
constants that an earlier product of the same run has read (shared layers): these count as read from a cache. For a
model that fits into the caches this is a yardstick, not a bound.
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
from polydyn.testing.inputs import feeds

Sizes = list[int]
SUFFIX = "_kernel_time"


def bound(path: str, shape: Mapping[str, int], limits: Limits) -> float:
    """Return seconds by the formula above, for fp32 and direct convolutions. ``limits`` must include caches."""
    _, again_rate = limits.cached[-1]
    return sum(
        max(limits.seconds(flops, fresh), fresh / limits.bandwidth + again / again_rate)
        for flops, fresh, again in products(path, shape)
    )


def products(path: str, shape: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Return (operations, bytes, bytes of constants read before) of every product in the model at the shape."""
    return _products(path, tuple(shape.items()))


@functools.cache
def _products(path: str, shape: tuple[tuple[str, int], ...]) -> list[tuple[int, int, int]]:
    model = onnx.load(path)
    same = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Identity"}
    constants = {t.name for t in model.graph.initializer}
    nodes = {n.name: [_source(i, same) for i in n.input] for n in model.graph.node if n.name}
    read: set[str] = set()
    costs = []
    for e in _events(path, model, dict(shape)):
        if e["args"].get("op_name") in ("MatMul", "Gemm", "Conv"):
            flops, sizes, output = _cost(e["args"])
            names = nodes.get(e["name"].removesuffix(SUFFIX), [])
            again = sum(size for name, size in zip(names, sizes, strict=False) if name in read)
            costs.append((flops, sum(sizes) + output - again, again))
            read.update(constants.intersection(names))
    return costs


def _source(name: str, same: Mapping[str, str]) -> str:
    while name in same:
        name = same[name]
    return name


def _events(path: str, model: onnx.ModelProto, shape: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.add_session_config_entry("session.disable_prepacking", "1")  # packed weights are missing in the profile
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        session.run(None, feeds(model, shape))
        events = json.loads(Path(session.end_profiling()).read_text())
    yield from (e for e in events if e["name"].endswith(SUFFIX))


def _cost(arguments: dict[str, Any]) -> tuple[int, list[int], int]:
    """Return operations, bytes of each input, and bytes of the output."""
    inputs: list[Sizes] = [next(iter(t.values())) for t in arguments["input_type_shape"]]
    (output,) = (next(iter(t.values())) for t in arguments["output_type_shape"])
    if arguments["op_name"] == "Conv":  # each output sums over a filter: (channels of a group, window)
        depth = math.prod(inputs[1][1:])
    elif arguments["op_name"] == "Gemm":  # either operand may be transposed; the sizes determine the depth
        depth = math.isqrt(math.prod(inputs[0]) * math.prod(inputs[1]) // max(1, math.prod(output)))
    else:
        depth = inputs[0][-1]
    return 2 * depth * math.prod(output), [4 * math.prod(t) for t in inputs], 4 * math.prod(output)
