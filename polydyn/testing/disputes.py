"""Find out why two runtimes may give different answers to a model, node by node.

A whole model is often too much for ``onnx.reference``: it lacks one of the operators. A single node, with the values
that ONNX Runtime computed for its inputs, has a second opinion more often. If polydyn and ``onnx.reference`` agree on
such a node against ONNX Runtime, the model's answer is disputed there. Cases that ONNX leaves open have no second
opinion; ``open_question`` lists them, and docs/operators.md describes polydyn's results.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.graph.operators.resize import simplest
from polydyn.testing.authorities import Array, Arrays, Refused, Runtime, difference, second_opinion

POOLS = ("MaxPool", "AveragePool", "LpPool")
SUMS = ("ReduceMean", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum")


def disputed_node(model: onnx.ModelProto, arrays: Arrays) -> str:
    """Return the operator of the first node whose answer is disputed or open, or an empty string.

    ``arrays``: every tensor of a call, as computed by ONNX Runtime.
    """
    known = {**{c.name: numpy_helper.to_array(c) for c in model.graph.initializer}, **arrays}
    for node in model.graph.node:
        stacked = node.output[len(node.input) - 2 :] if node.op_type == "Loop" else ()
        if any(known[o].shape[0] == 0 for o in stacked if o in known):
            return "Loop"  # ONNX Runtime forgets the other sizes of results of no iterations
        if any(a.type == onnx.AttributeProto.GRAPH for a in node.attribute):
            continue
        if not {x for x in (*node.input, *node.output) if x} <= known.keys():
            continue
        if open_question(node, known):
            return str(node.op_type)
        alone, feeds = single(model, node, known)
        theirs = {o: known[o] for o in node.output if o}
        if node.op_type == "Resize" and known[node.input[0]].dtype.kind in "iu":
            if _rounds_to_nearest(alone, feeds):
                return "Resize"
            continue
        try:
            ours = {n: np.asarray(a) for n, a in reference.evaluate(import_model(alone), feeds).items()}
            if difference(ours, theirs) and not difference(ours, second_opinion(alone, feeds)):
                return str(node.op_type)
        except Refused:
            continue
        except Exception:  # polydyn's own failure on a node is found in the whole model
            continue
    return ""


def single(model: onnx.ModelProto, node: onnx.NodeProto, arrays: Arrays) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model of one node with its inputs. Constants of the model stay constants."""
    constants = [c for c in model.graph.initializer if c.name in node.input]
    names = {c.name for c in constants}
    feeds = {x: arrays[x] for x in dict.fromkeys(node.input) if x and x not in names}
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info(o, TensorProto.UNDEFINED, None) for o in node.output if o]
    for o in outputs:
        o.ClearField("type")
    graph = helper.make_graph([node], "node", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version), feeds


def _rounds_to_nearest(alone: onnx.ModelProto, feeds: Arrays) -> bool:
    """Return whether polydyn rounds a Resize of integers to nearest.

    ONNX Runtime truncates; ONNX does not specify it.
    """
    real = onnx.ModelProto()
    real.CopyFrom(alone)
    (x, *_), (y, *_) = real.graph.input, real.graph.node[0].output
    x.type.tensor_type.elem_type = TensorProto.FLOAT
    given = {**feeds, x.name: feeds[x.name].astype(np.float32)}
    limits = np.iinfo(feeds[x.name].dtype)

    def is_nearest(interpolate: Callable[[], Arrays]) -> bool:
        try:
            exact = np.clip(interpolate()[y].astype(np.float64), limits.min, limits.max)
        except Exception:  # this authority does not run the node
            return False
        return ours.shape == exact.shape and bool((np.abs(ours - exact) <= 0.5 + 1e-5 * np.abs(exact)).all())

    try:
        ours = np.asarray(reference.evaluate(import_model(alone), feeds)[y], np.float64)
    except Exception:
        return False
    # both interpolate floats without rounding; they differ where sizes are rounded (docs/operators.md)
    return is_nearest(lambda: second_opinion(real, given)) or is_nearest(lambda: Runtime(real).run(given))


def open_question(node: onnx.NodeProto, arrays: Arrays) -> bool:
    """Return whether ONNX leaves open what a node computes for these inputs."""
    x = arrays[node.input[0]] if node.input and node.input[0] else np.zeros(0)
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Upsample":  # interpolated integers: onnx.reference has no Upsample, and rounds in Resize
        return x.dtype.kind in "iu" and given.get("mode", b"nearest") != b"nearest"
    if node.op_type in ("ArgMax", "ArgMin", "Hardmax"):  # NaN is an extreme for numpy and polydyn
        return x.dtype.kind == "f" and bool(np.isnan(x).any())
    if node.op_type in ("RNN", "GRU", "LSTM"):  # no steps: ONNX Runtime's last state is 0, polydyn's the first one
        return bool(x.shape[0] == 0)
    if node.op_type in ("GlobalMaxPool", "MaxPool"):  # ONNX Runtime starts at the lowest number and skips some NaN
        return x.dtype.kind == "f" and bool((np.isnan(x) | (x == -np.inf)).any())
    if node.op_type == "Pow":  # an integer beyond 2^53: exact here, rounded by way of float64 in ONNX Runtime
        return x.dtype.kind in "iu" and _largest(arrays.get(node.output[0], x)) > 2.0**53
    if node.op_type == "PRelu":  # before opset 7 slopes belong to channels; ONNX Runtime broadcasts them if it can
        return arrays.get(node.output[0], x).shape != x.shape
    if node.op_type in SUMS:  # integers that overflow wrap here; ONNX Runtime sums them in float64
        terms = np.abs(x.astype(np.float64)) ** (2 if node.op_type in ("ReduceSumSquare", "ReduceL2") else 1)
        return x.dtype.kind in "iu" and float(terms.sum()) > np.iinfo(x.dtype).max
    if node.op_type == "Resize":  # the fraction that a scale represents, or its float32
        scales = arrays.get(node.input[2], np.zeros(0)) if len(node.input) > 2 else np.zeros(0)
        return given.get("mode", b"nearest") == b"nearest" and any(
            simplest(s) != Fraction(s) for s in map(float, scales)
        )
    if node.op_type in ("Conv", "ConvTranspose", "MatMul", "Gemm"):  # the order of terms decides which sums overflow
        return x.dtype.kind == "f" and _may_overflow(x)
    if node.op_type == "GridSample":  # a coordinate that is not finite: as torch here, ONNX Runtime differs
        return not np.isfinite(arrays[node.input[1]].astype(np.float64)).all()
    if node.op_type in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"):  # the mean of nothing: NaN in torch
        return x.size == 0 and given.get("reduction", b"mean") == b"mean"
    if node.op_type == "LRN":  # ONNX Runtime adds and subtracts as the window moves: one infinity spoils a whole row
        return x.dtype.kind == "f" and not np.isfinite(x).all()
    if node.op_type == "MeanVarianceNormalization":  # ONNX Runtime takes axes that a tensor lacks, and adds no epsilon
        return any(a >= x.ndim for a in given.get("axes", (0, 2, 3)))
    if node.op_type == "ReduceLogSumExp":  # ONNX Runtime rounds exponentials to integers, onnx.reference fails
        return x.dtype.kind in "iu"
    if node.op_type == "DynamicQuantizeLinear":  # no scale is finite
        with np.errstate(all="ignore"):
            return not np.isfinite(np.max(x, initial=0) - np.min(x, initial=0))
    if node.op_type == "QuantizeLinear":  # NaN as an integer: 0 here, an end of the range in ONNX Runtime
        return arrays.get(node.output[0], x).dtype.kind in "iu" and bool(np.isnan(x).any())
    if node.op_type in POOLS and given.get("auto_pad", b"NOTSET").startswith(b"SAME"):
        window = given["kernel_shape"]
        strides, steps = given.get("strides", [1] * len(window)), given.get("dilations", [1] * len(window))
        return any(d > 1 or t < s for t, s, d in zip(window, strides, steps, strict=True))  # pads below 0
    return False


def stretches(model: onnx.ModelProto, arrays: Arrays, message: str) -> bool:
    """Return whether a call is rejected because an axis of size 1 meets a longer one, of sizes that else are equal.

    ``message``: polydyn's error, a guard of a broadcast. ``arrays``: ONNX Runtime's results, without constants.
    docs/ROADMAP.md 9 has this limit.
    """
    for operator, axis in re.findall(r"(\w+) \S+ broadcasts axis (\d+)", message):
        for n in model.graph.node:  # of several guards on a size the strictest gives the message
            shapes = [arrays[x].shape for x in n.input if x in arrays and n.op_type == operator]
            sizes = {s[int(axis)] for s in shapes if len(s) > int(axis)}
            if len(sizes) > 1 and 1 in sizes:
                return True
    return False


def _may_overflow(x: Array) -> bool:
    """Return whether a sum of a few hundred elements may exceed the largest finite number."""
    finite = np.abs(x[np.isfinite(x)].astype(np.float64))
    return float(finite.max(initial=0)) > float(np.finfo(x.dtype).max) / 256


def _largest(x: Array) -> float:
    return float(np.abs(x.astype(np.float64)).max(initial=0))


def goes_beyond(model: onnx.ModelProto, arrays: Arrays) -> bool:
    """Return whether ONNX Runtime runs a model that ONNX does not allow.

    Such a model has a concatenation of tensors of other sizes, one of them without elements, a pool whose window is
    larger than its padded map, or an output of another rank than it declares. ``arrays``: ONNX Runtime's results.
    """
    for o in model.graph.output:
        kind = o.type.tensor_type
        if o.name in arrays and kind.HasField("shape") and len(kind.shape.dim) != arrays[o.name].ndim:
            return True
    for n in model.graph.node:
        given = {a.name: helper.get_attribute_value(a) for a in n.attribute}
        shapes = [arrays[x].shape for x in n.input if x in arrays]
        if n.op_type == "Concat" and len(shapes) == len(n.input):
            axis = given.get("axis", 1) % len(shapes[0])
            if len({(*s[:axis], *s[axis + 1 :]) for s in shapes}) > 1:
                return True
        if n.op_type in POOLS and shapes:
            window = given["kernel_shape"]
            pads, steps = given.get("pads", [0] * 2 * len(window)), given.get("dilations", [1] * len(window))
            same = given.get("auto_pad", b"NOTSET").startswith(b"SAME")
            for k, (size, taps) in enumerate(zip(shapes[0][2:], window, strict=True)):
                if not same and size + pads[k] + pads[k + len(window)] < steps[k] * (taps - 1) + 1:
                    return True
    return False
