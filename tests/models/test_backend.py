"""The onnx backend interface, on ONNX's own node cases."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import polydyn.backend as backend
from polydyn.errors import InputError, UnsupportedError
from polydyn.testing.conformance import cases_of
from tests.support.one_node import check_case

NAMES = ("test_relu", "test_add_bcast", "test_softmax_axis_1", "test_gemm_all_attributes", "test_transpose_default")
CASES = {c.name: c for c in cases_of(("Relu", "Add", "Softmax", "Gemm", "Transpose"))}


@pytest.mark.parametrize("name", NAMES)
def test_onnx_node_cases_pass(name: str) -> None:
    check_case(CASES[name])


def test_one_node_runs_with_its_shape_as_a_constant() -> None:
    x = np.arange(6, dtype=np.float32)
    node = helper.make_node("Reshape", ["x", "shape"], ["y"])
    (y,) = backend.run_node(node, [x, np.array([2, -1])], threads=1)
    assert (y == x.reshape(2, 3)).all()


def test_inputs_by_name_in_order_or_alone() -> None:
    rep = backend.prepare(CASES["test_relu"].model, threads=1)
    x = np.array([[[-1, 2]]] * 3, np.float32).reshape(1, 1, 6).repeat(3, 0).repeat(4, 1)[:, :, :5]
    (a,), (b,), (c,) = rep.run([x]), rep.run({"x": x}), rep.run(x)
    assert (a == np.maximum(x, 0)).all() and (a == b).all() and (a == c).all()
    with pytest.raises(InputError, match="no input 'input 1'"):
        rep.run([x, x])


def test_other_devices_and_operators_are_refused() -> None:
    assert backend.supports_device("CPU") and backend.supports_device("CPU:0") and not backend.supports_device("CUDA")
    with pytest.raises(UnsupportedError, match="device CUDA"):
        backend.prepare(CASES["test_relu"].model, "CUDA")
    graph = onnx.ModelProto()
    graph.CopyFrom(CASES["test_relu"].model)
    graph.graph.node[0].op_type = "Frobnicate"
    assert backend.is_compatible(CASES["test_relu"].model) and not backend.is_compatible(graph)
