"""Whole models quantized by ONNX Runtime, compared with ONNX Runtime at several shapes.

Both sides quantize the same numbers, but floats before a quantization may differ in their last bits, so that a quotient
next to a half rounds to one step more or less. Quantization costs every number up to a step anyway. So the difference
is compared with the error of quantization itself: ONNX Runtime's quantized model against its float model on the same
inputs. A part ``FLIPS`` of it is allowed. A wrong scale, zero point or rounding rule exceeds this by far
(``test_a_zero_point_off_by_one_is_seen``). ONNX Runtime runs without graph optimizations, because some of these replace
quantized sequences by operators that compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import polydyn
from polydyn.compiler import plan_program
from polydyn.testing.accuracy import Outputs, error
from polydyn.testing.inputs import Shape, feeds
from polydyn.testing.quantizer import quantize
from tests.support.stored import load, path_of

FLIPS = 0.25
"""Part of the quantization error that rounding up or down may cause."""
STANDARD = ("", "ai.onnx")
TEXT: list[Shape] = [{"B": 1, "L": 1}, {"B": 1, "L": 7}, {"B": 2, "L": 13}, {"B": 3, "L": 31}]
IMAGES: list[Shape] = [{"N": 1, "H": 1, "W": 1}, {"N": 1, "H": 31, "W": 47}, {"N": 2, "H": 33, "W": 32}]
EMPTY: dict[str, Shape] = {"bert_tiny": {"B": 0, "L": 7}, "resnet_tiny": {"N": 0, "H": 32, "W": 32}}

WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("bert_tiny", "dynamic", {"weight_type": "QUInt8"}),
    ("bert_tiny", "dynamic", {"weight_type": "QInt8", "per_channel": True, "reduce_range": True}),
    ("bert_tiny", "QDQ", {"activation_type": "QUInt8", "per_channel": True}),
    ("bert_tiny", "QOperator", {"op_types_to_quantize": ["MatMul"], "activation_type": "QUInt8", "reduce_range": True}),
    ("resnet_tiny", "dynamic", {"weight_type": "QUInt8"}),
    ("resnet_tiny", "QDQ", {"activation_type": "QUInt8", "per_channel": True}),
    ("resnet_tiny", "QOperator", {"op_types_to_quantize": ["Conv"], "activation_type": "QUInt8", "per_channel": True}),
]  # fmt: skip
"""QOperator is used for products only: for Add, Gemm, Softmax and pools it makes operators outside ONNX."""
QUICK = (WAYS[0],)
"""Other ways compile longer: attentions and products with long epilogues, other numbers in each layer."""


def shapes_of(name: str) -> list[Shape]:
    return TEXT if name == "bert_tiny" else IMAGES


def run(path: str, requested: Sequence[Shape], name: str) -> list[Outputs]:
    """Return ONNX Runtime's outputs, with every operator computed unchanged."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return [dict(zip(names, session.run(names, feeds(load(name), s)), strict=True)) for s in requested]


def quantized(name: str, scheme: str, options: dict[str, Any], folder: Path) -> str:
    calibration = [feeds(load(name), s, seed=3) for s in shapes_of(name)]
    path = quantize(path_of(name), folder / "q.onnx", scheme, calibration, **options)
    assert {n.domain for n in onnx.load(path).graph.node} <= set(STANDARD), "only ONNX's own operators"
    return path


@pytest.mark.parametrize(
    ("name", "scheme", "options"), [pytest.param(*w, marks=() if w in QUICK else pytest.mark.slow) for w in WAYS]
)
def test_quantized_by_onnxruntime(name: str, scheme: str, options: dict[str, Any], tmp_path: Path) -> None:
    path, wanted = quantized(name, scheme, options, tmp_path), shapes_of(name)
    program = polydyn.compile(path, threads=2)
    for s, plain, other in zip(wanted, run(path_of(name), wanted, name), run(path, wanted, name), strict=True):
        got = program.run(feeds(load(name), s))
        coarse = error(other, plain)
        assert 0 < coarse < 1, "quantization costs something, and not everything"
        assert error(got, other) <= FLIPS * coarse, f"{dict(s)}: {error(got, other)} of {coarse}"
    nothing = program.run(feeds(load(name), EMPTY[name]))
    assert all(0 in a.shape for a in nothing.values())


def test_a_zero_point_off_by_one_is_seen(tmp_path: Path) -> None:
    """Control: the comparison above must fail for a model with one wrong number."""
    path = quantized("bert_tiny", "dynamic", {"weight_type": "QUInt8"}, tmp_path)
    model = onnx.load(path)
    weight = next(n.input[3] for n in model.graph.node if n.op_type == "MatMulInteger")
    zero = next(t for t in model.graph.initializer if t.name == weight)
    moved = numpy_helper.to_array(zero) + np.uint8(1)
    zero.CopyFrom(numpy_helper.from_array(np.asarray(moved, np.uint8), zero.name))
    program = polydyn.compile(model, threads=1)
    wanted = TEXT[1:]
    for s, plain, other in zip(wanted, run(path_of("bert_tiny"), wanted, "bert_tiny"), run(path, wanted, "bert_tiny"),
                               strict=True):  # fmt: skip
        assert error(program.run(feeds(load("bert_tiny"), s)), other) > FLIPS * error(other, plain)


def test_a_dynamically_quantized_model_is_few_kernels(tmp_path: Path) -> None:
    """Every product has neighbours in its kernel: sums are scaled, and for a single reader rows are quantized inside
    it.
    """
    path = quantized("bert_tiny", "dynamic", {"weight_type": "QUInt8"}, tmp_path)
    nodes = [n.op_type for n in onnx.load(path).graph.node]
    plan = plan_program(path)
    products = [launch for launch in plan.launches if launch.kind == "contract"]
    assert nodes.count("MatMulInteger") <= len(products)
    assert all("int32" not in {plan.buffers[b].dtype for b in launch.writes} for launch in products)
    assert len(plan.launches) < len(nodes) / 3
    scales = [x for x in plan.launches if any(b.endswith("_scale") for b in x.writes or ())]
    kernels = {x.candidates[0].kernel for x in scales}
    assert len(kernels) == 2 < len(scales), "scales of weights are operands: one kernel for three products, one for one"


def test_layers_of_a_qdq_model_share_their_kernels(tmp_path: Path) -> None:
    """Scales and zero points are operands, because they differ from layer to layer."""
    plan = plan_program(quantized("bert_tiny", "QDQ", {"activation_type": "QUInt8", "per_channel": True}, tmp_path))
    kernels = [x.candidates[0].kernel for x in plan.launches if x.kind in ("contract", "attention")]
    assert len(kernels) == 10 and {kernels.count(k) for k in kernels} == {2}, "five in each of two layers"
