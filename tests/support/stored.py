"""The models stored in tests/data, planned once, and one of them altered slightly, for controls that must fail."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx
from onnx import numpy_helper

from polydyn.compiler import plan_program
from polydyn.program.assemble import build_artifact
from polydyn.program.plan import HostPlan
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program
from tests.support.paths import DATA

MODELS = sorted(p.stem for p in DATA.glob("*.onnx"))


def path_of(name: str) -> str:
    return str(DATA / f"{name}.onnx")


@cache
def planned(name: str, target: str = "cpu") -> HostPlan:
    """Plan a stored model, once for all tests of this process."""
    return plan_program(path_of(name), target=target)


@cache
def _artifact(name: str, target: str) -> Artifact:
    return build_artifact(planned(name, target), target)[0]


def compiled(name: str, threads: int, target: str = "cpu") -> Program:
    """Open a new program, as ``polydyn.compile`` does; all tests of this process share its artifact."""
    return open_program(_artifact(name, target), threads=threads)


def load(name: str) -> onnx.ModelProto:
    return onnx.load(path_of(name))


def one_head_scaled(factor: float) -> onnx.ModelProto:
    """Return bert_tiny with the queries of the first of four heads in the first layer multiplied by ``factor``."""
    model = load("bert_tiny")
    bias = next(t for t in model.graph.initializer if t.name.endswith("layer.0.attention.self.query.bias"))
    add = next(n for n in model.graph.node if bias.name in n.input)
    product = next(n for n in model.graph.node if n.output[0] in add.input)
    weight = next(t for t in model.graph.initializer if t.name == product.input[1])
    for tensor in (bias, weight):
        array = numpy_helper.to_array(tensor).copy()
        array[..., :8] *= np.float32(factor)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model
