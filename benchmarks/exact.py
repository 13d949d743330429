"""An ONNX model in float64: floats of the file become doubles, and ONNX's reference evaluates it.

Slow but independent. Convolutions are sums over windows here: ONNX's reference takes minutes for an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

DOMAIN = "exact"
"""Domain of operators of this module."""
NEWER = 15
"""Older opsets are converted: for some of them ONNX's reference trains batch norms and takes softmax over one axis."""


def in_float64(given: Path | onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """Return the results of a model in float64. Exceptions of many classes: ONNX's reference lacks an operator."""
    model = onnx.ModelProto()
    model.CopyFrom(onnx.load(given) if isinstance(given, Path) else given)
    if any(s.domain == "" and s.version < NEWER for s in model.opset_import):
        model = version_converter.convert_version(model, NEWER)
    for graph in _graphs(model.graph):
        for t in graph.initializer:
            t.CopyFrom(_double(t))
        for v in (*graph.input, *graph.output):
            if v.type.tensor_type.elem_type == TensorProto.FLOAT:
                v.type.tensor_type.elem_type = TensorProto.DOUBLE
        del graph.value_info[:]
        nodes = [part for n in graph.node for part in _widened(n)]
        del graph.node[:]
        graph.node.extend(nodes)
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    with np.errstate(all="ignore"):
        results: list[Any] = ReferenceEvaluator(model, new_ops=OPERATORS).run(None, wide)
    return results


class LRN(OpRun):
    """LRN, which ONNX's reference computes for batches that are not larger than the number of channels only."""

    def _run(self, x: Any, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0, size: int = 1) -> tuple[Any]:
        sums = [(x[:, max(0, c - (size - 1) // 2) : c + size // 2 + 1] ** 2).sum(1) for c in range(x.shape[1])]
        return (x / (bias + alpha / size * np.stack(sums, 1)) ** beta,)


class ToFloat32(OpRun):
    """Round doubles to float32 before they become integers.

    A number that is an integer in exact arithmetic (T5's buckets: log(2) / log(16) * 8) may be less than it in float64.
    """

    op_domain = DOMAIN

    def _run(self, x: Any) -> tuple[Any]:
        return (x.astype(np.float32).astype(np.float64) if x.dtype == np.float64 else x,)


class Conv(OpRun):
    """Conv as one product of windows and weights for each group."""

    def _run(self, x: Any, w: Any, b: Any = None, **given: Any) -> tuple[Any]:
        rank = w.ndim - 2
        steps, apart = (given.get(n) or [1] * rank for n in ("strides", "dilations"))
        reach = [d * (k - 1) + 1 for d, k in zip(apart, w.shape[2:], strict=True)]
        pads = _pads(given.get("auto_pad") or "NOTSET", given.get("pads") or [0] * 2 * rank, x.shape[2:], reach, steps)
        padded = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(2, 2 + rank)))
        windows = windows[(..., *(slice(None, None, s) for s in steps), *(slice(None, None, d) for d in apart))]
        group, axes = given.get("group") or 1, list(range(2 + rank, 2 + 2 * rank))
        parts = [
            np.tensordot(v, u, ([1, *axes], list(range(1, 2 + rank))))
            for v, u in zip(np.split(windows, group, 1), np.split(w, group, 0), strict=True)
        ]
        y = np.moveaxis(np.concatenate(parts, -1), -1, 1)
        return (np.ascontiguousarray(y if b is None else y + b.reshape(-1, *[1] * rank)),)


def _pads(auto: str, pads: list[int], sizes: Any, reach: list[int], steps: list[int]) -> list[int]:
    """Return the padding before each axis, then that behind each."""
    if auto == "NOTSET":
        return list(pads)
    if auto == "VALID":
        return [0] * len(pads)
    total = [max(0, (-(-n // s) - 1) * s + r - n) for n, s, r in zip(sizes, steps, reach, strict=True)]
    less, more = [t // 2 for t in total], [t - t // 2 for t in total]
    return [*less, *more] if auto == "SAME_UPPER" else [*more, *less]


class GatherElements(OpRun):
    """GatherElements, which ONNX's reference rejects for some shapes of indices, (1, 7) among them."""

    def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
        axis %= data.ndim
        kept = tuple(slice(None if a == axis else n) for a, n in enumerate(indices.shape))
        return (np.take_along_axis(data[kept], indices, axis),)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs inside its nodes."""
    yield graph
    for n in graph.node:
        for a in n.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(a.g)


def _widened(n: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Turn float32 constants, and casts to float32, into float64; casts to integers round to float32 before."""
    to = next((a.i for a in n.attribute if a.name == "to"), 0) if n.op_type == "Cast" else 0
    before = []
    if to and np.issubdtype(helper.tensor_dtype_to_np_dtype(to), np.integer):
        rounded = f"{n.output[0]}.float32"
        before = [helper.make_node("ToFloat32", [n.input[0]], [rounded], domain=DOMAIN)]
        n.input[0] = rounded
    for a in n.attribute:
        if a.type == onnx.AttributeProto.TENSOR:
            a.t.CopyFrom(_double(a.t))
        elif n.op_type == "Cast" and a.name == "to" and a.i == TensorProto.FLOAT:
            a.i = TensorProto.DOUBLE
        elif n.op_type == "Constant" and a.name in ("value_float", "value_floats"):
            value = np.float64(a.f) if a.name == "value_float" else np.array(a.floats, np.float64)
            a.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(np.asarray(value))))
    return [*before, n]


def _double(t: onnx.TensorProto) -> onnx.TensorProto:
    """Return the tensor with doubles in place of floats."""
    if t.data_type != TensorProto.FLOAT:
        return t
    return numpy_helper.from_array(numpy_helper.to_array(t).astype(np.float64), t.name)


OPERATORS = [Conv, GatherElements, LRN, ToFloat32]
