"""Reference results of a model: ONNX Runtime without optimisations, and onnx.reference as a second opinion.

ONNX Runtime lacks kernels for some operators of opsets 1 to 6; such a model is converted to opset 15 with the sizes of
the call as constants. For these opsets, onnx.reference is not used for operators whose meaning changed later.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper, version_converter
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
MIN_OPSET = 7
"""The first opset for which ONNX Runtime has all kernels."""
TARGET_OPSET = 15
"""The opset that older models are converted to."""
NO_ADAPTER = ("And", "Or", "Xor", "Greater", "Less", "Equal")
"""Operators of opsets 1 to 6 for which ONNX's converter has no adapter."""
WRONG_ADAPTERS = {
    "Upsample": "gives Upsample other coordinates",
    "Hardmax": "lets Hardmax work along one axis, not over all axes from it on",
}
"""Operators whose meaning the converter changes, and the change."""
HELD_DOMAIN = "held"
"""The domain of these nodes while all others are converted."""

ort.set_default_logger_severity(4)


class Refused(Exception):
    """An authority does not run the model, or not at these sizes."""


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators."""
    return int(next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")))


class Runtime:
    """ONNX Runtime. Refused, at once or by ``run``: it does not run the model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.names = model, [o.name for o in model.graph.output]
        self.session: ort.InferenceSession | None = None
        try:
            self.session = _session(model)
        except Refused:
            if opset_of(model) >= MIN_OPSET:
                raise

    def run(self, feeds: Arrays) -> dict[str, Array]:
        """Return the outputs."""
        session = self.session or _session(_converted(self.model, feeds))
        try:
            return dict(zip(self.names, session.run(self.names, dict(feeds)), strict=True))
        except Exception as e:  # ONNX Runtime has several kinds
            raise Refused(str(e)) from e


def _session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.x64quantprecision", "1")  # no sums of 16 bits, which saturate
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise Refused(str(e)) from e


def _converted(model: onnx.ModelProto, feeds: Arrays) -> onnx.ModelProto:
    """Return the model in a newer opset. The converter needs sizes, and the types that shape inference finds."""
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    for value in fixed.graph.input:
        if value.name in feeds:
            del value.type.tensor_type.shape.dim[:]
            for size in feeds[value.name].shape:
                value.type.tensor_type.shape.dim.add().dim_value = size
    for o in fixed.graph.output:
        if o.HasField("type"):
            o.type.tensor_type.ClearField("shape")
    del fixed.graph.value_info[:]
    for operator, why in WRONG_ADAPTERS.items():
        if any(n.op_type == operator for n in fixed.graph.node):
            raise Refused(f"ONNX's converter {why}")
    try:
        made = version_converter.convert_version(_aligned(onnx.shape_inference.infer_shapes(fixed)), TARGET_OPSET)
    except Exception as e:
        raise Refused(str(e)) from e
    del made.graph.value_info[:]  # values that the converter adds have no type there
    for n in made.graph.node:
        n.domain = "" if n.domain == HELD_DOMAIN else n.domain
    del made.opset_import[1:]
    return made


def _aligned(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with newer forms of nodes that the converter lacks, in a domain that it leaves unchanged.

    An operand that broadcasts along ``axis`` gets axes of one element after its own. Refused: its rank is not known.
    """
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    ranks = {x.name: len(x.type.tensor_type.shape.dim) for x in values if x.type.tensor_type.HasField("shape")}
    nodes: list[onnx.NodeProto] = []
    for n in model.graph.node:
        given = {a.name: a.i for a in n.attribute}
        if n.op_type in NO_ADAPTER:
            if not set(n.input) <= ranks.keys():
                raise Refused(f"{n.op_type}: the rank of an operand is not known")
            first, second = (ranks[x] for x in n.input)
            axis = given.get("axis", first - second) if given.get("broadcast") else first - second
            behind = first - axis % max(first, 1) - second
            operand = n.input[1]
            if behind > 0:
                operand = f"{n.output[0]} aligned"
                axes = list(range(second, second + behind))
                nodes.append(helper.make_node("Unsqueeze", [n.input[1]], [operand], axes=axes))
            nodes.append(helper.make_node(n.op_type, [n.input[0], operand], list(n.output), domain=HELD_DOMAIN))
        else:
            nodes.append(n)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    made.opset_import.append(helper.make_opsetid(HELD_DOMAIN, 1))
    return made


def _has_old_meaning(node: onnx.NodeProto) -> bool:
    old = node.op_type in ("PRelu", "Concat", "Softmax", "LogSoftmax", "Hardmax")
    return old or any(a.name == "broadcast" for a in node.attribute)


def second_opinion(model: onnx.ModelProto, feeds: Arrays) -> dict[str, Array]:
    """Return onnx.reference's outputs. Refused: it does not run the model."""
    if opset_of(model) < MIN_OPSET and any(map(_has_old_meaning, model.graph.node)):
        raise Refused("onnx.reference has later meanings of these operators")
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ReferenceEvaluator(_axes_in_order(model, feeds)).run(None, dict(feeds))
    except Exception as e:
        raise Refused(f"{type(e).__name__}: {e}") from e
    return {o.name: np.asarray(a) for o, a in zip(model.graph.output, found, strict=True)}


def _axes_in_order(model: onnx.ModelProto, feeds: Arrays) -> onnx.ModelProto:
    """Return the model with the axes of every Resize of an input in order, counted from the front.

    onnx.reference supports no others, and ONNX Runtime forgets negative ones if ``keep_aspect_ratio_policy`` is set.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    constants = {c.name: c for c in made.graph.initializer}
    for n in made.graph.node:
        axes = next((a for a in n.attribute if a.name == "axes"), None)
        operands = [x for x in n.input[1:] if x]
        if n.op_type != "Resize" or axes is None or n.input[0] not in feeds or not set(operands) <= constants.keys():
            continue
        front = [a % feeds[n.input[0]].ndim for a in axes.ints]
        order = sorted(range(len(front)), key=front.__getitem__)
        axes.ints[:] = [front[k] for k in order]
        for x in operands:  # starts, then ends of roi
            rows = numpy_helper.to_array(constants[x]).reshape(-1, len(order))
            constants[x].CopyFrom(numpy_helper.from_array(rows[:, order].ravel(), x))
    return made


# -- distance of two answers -------------------------------------------------------------------------------------------

RELATIVE = {"float64": 2e-5, "float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
"""Tolerated error by type, over the largest finite magnitude of the output (at least 1)."""


def distance(got: Array, want: Array) -> float:
    """Return the largest difference of two arrays over their scale; infinite if types, shapes or special values differ.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if want.dtype.kind not in "fV":
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    with np.errstate(all="ignore"):
        off = np.abs(a - b)[~same].max()
    scale = np.abs(b[np.isfinite(b)]).max(initial=1.0)
    return float(off / scale) if np.isfinite(off) else float("inf")


def difference(got: Arrays, want: Arrays, rounding: float = 0.0) -> str:
    """Return the first error in the outputs, or an empty string. NaN equals NaN; integers and booleans are exact.

    ``rounding``: tolerated error of floats if that is more than their type's.
    """
    for name, w in want.items():
        if name not in got:
            return f"{name} is missing"
        g = np.asarray(got[name])
        if g.dtype != w.dtype or g.shape != w.shape:
            return f"{name} is {g.dtype}{list(g.shape)}, expected {w.dtype}{list(w.shape)}"
        off = distance(g, w)
        if off > max(RELATIVE.get(w.dtype.name, 0.0), rounding * (w.dtype.kind == "f")):
            bad = np.argwhere(~((g == w) | ((g != g) & (w != w))))
            at = tuple(map(int, bad[0]))
            return f"{name}{list(at)} is {g[at]!r}, expected {w[at]!r}; {len(bad)} of {w.size} differ, by {off:.3g}"
    return ""


def nudged(
    model: onnx.ModelProto, feeds: Arrays, seed: int, part: float = 1e-6
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return model and inputs with every float moved by up to ``part`` of it: the resulting change is rounding."""
    numbers = np.random.default_rng(seed)

    def moved(a: Array) -> Array:
        least = 1e-3 if a.dtype == np.float16 else 0.0
        with np.errstate(all="ignore"):
            made = np.asarray(a + a * max(part, least) * numbers.uniform(-1, 1, a.shape), a.dtype)
        return np.where(np.isfinite(made), made, a)  # the end of a type stays finite, or any difference is rounding

    other = onnx.ModelProto()
    other.CopyFrom(model)
    kept = {x for n in model.graph.node if n.op_type in ("Resize", "Upsample", "Range") for x in n.input}
    for c in other.graph.initializer:
        if c.data_type in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16) and c.name not in kept:
            c.CopyFrom(numpy_helper.from_array(moved(numpy_helper.to_array(c)), c.name))
    return other, {n: moved(a) if a.dtype.kind == "f" else a for n, a in feeds.items()}
