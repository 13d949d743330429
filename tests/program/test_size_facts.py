"""Sizes that are related by facts: what a guard or an operator promises, and shapes of different forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper

import polydyn
from polydyn.errors import PolydynError
from polydyn.fusion.append import find_appends
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Guard
from polydyn.graph.verify import verify_graph
from polydyn.schedules.index import Index

RNG = np.random.default_rng(3)
Arrays = Mapping[str, Any]


def parsed(inputs: str, outputs: str, nodes: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{'
        " zero = Constant <value_ints = [0]> () two = Constant <value_int = 2> () four = Constant <value_int = 4> ()"
        " end = Constant <value_ints = [99]> () one = Constant <value_ints = [1]> ()"
        f" double = Constant <value_floats = [1.0, 1.0, 2.0, 2.0]> () {nodes} }}"
    )


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


DATA_SLICE = parsed(
    "float[N] x, int64[1] e, float[1, 8] w", "float[8] y", "t = Slice (x, zero, e, zero) u = Neg (t) y = MatMul (u, w)"
)
"""The product contracts a slice whose size depends on data, so that it must be 1."""
REMAINDER_SLICE = parsed(
    "float[N] x, float[1, 8] w", "float[8] y",
    "s = Shape (x) r = Mod (s, two) t = Slice (x, r, end, zero) m = Shape (t) k = Max (m, four) q = Div (k, m)"
    " p = Slice (t, zero, q, zero) u = Neg (p) y = MatMul (u, w)",
)  # fmt: skip
"""A size that is 1 by a guard with a quotient of sizes."""
PYRAMID = parsed(
    "float[1, 3, H, W] x, float[3, 1, 3, 3] w", "float[1, 6, P, Q] y",
    "a = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x)"
    " b = Conv <group = 3, pads = [1, 1, 1, 1], strides = [2, 2]> (a, w)"
    ' c = Resize <mode = "linear"> (b, , double) y = Concat <axis = 1> (a, c)',
)  # fmt: skip
"""A concatenation whose parts have equal sizes of different forms if a remainder is right."""
TWO_AXES = parsed(
    "float[B, 4, 6] x, float[B, 4, 1] t", "float[B, 4, 13] y, float[B, 8, 6] z",
    "y = Concat <axis = 2> (x, x, t) z = Concat <axis = 1> (x, x)",
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "feeds"),
    [
        (DATA_SLICE, {"x": floats(4), "e": np.array([1]), "w": floats(1, 8)}),
        (REMAINDER_SLICE, {"x": floats(4), "w": floats(1, 8)}),
        (PYRAMID, {"x": floats(1, 3, 7, 8), "w": floats(3, 1, 3, 3)}),
        (TWO_AXES, {"x": floats(3, 4, 6), "t": floats(3, 4, 1)}),
    ],
    ids=["slice by data", "slice by a remainder", "pyramid", "appended along two axes"],
)
def test_related_sizes_compile_and_are_right(model: onnx.ModelProto, feeds: Arrays) -> None:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = polydyn.compile(model).run(feeds)
    for (name, a), b in zip(got.items(), session.run(None, dict(feeds)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-5, err_msg=name)


def test_a_part_of_a_concatenation_may_read_nothing() -> None:
    """The halves of a rotation are one map. A part that follows from its position alone is no such half."""
    nodes = "e = EyeLike (x) n = Neg (x) c = Concat <axis = 1> (n, e) y = Relu (c)"
    got = polydyn.compile(parsed("float[A, 3] x", "float[A, 6] y", nodes)).run({"x": -np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(got["y"], np.concatenate([np.ones((2, 3)), np.eye(2, 3)], axis=1))


def test_an_input_that_is_appended_to_along_two_axes_is_a_view_along_the_first() -> None:
    assert [(a.output, a.axis) for a in find_appends(import_model(TWO_AXES))] == [("z", 1)]


def test_parts_of_a_concatenation_may_differ_in_form_but_not_in_size() -> None:
    graph = import_model(parsed("float[B, N] x, float[C, N] z", "float[D, N] y", "y = Concat <axis = 0> (x, z)"))
    n, z = Index.of("N"), graph.tensors["z"]
    changed = replace(graph, tensors={**graph.tensors, "z": replace(z, shape=(z.shape[0], n // 2 * 2))})
    verify_graph(replace(changed, guards=(Guard(n, "%==", Index.of(2), "N is even"),)))
    for guards in ((), (Guard(n, "<=", Index.of(9), "N is small"),)):
        with pytest.raises(PolydynError, match="broke an invariant: a part"):
            verify_graph(replace(changed, guards=guards))


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 2), (4, 3)])
def test_a_transposed_convolution_of_no_pixels_is_its_bias(kernel: int, stride: int) -> None:
    """The output has (H - 1) * stride + kernel pixels, also for H = 0, unless that is negative."""
    nodes = f"y = ConvTranspose <kernel_shape = [{kernel}], strides = [{stride}]> (x, w, b)"
    inputs = f"float[N, 2, H] x, float[2, 3, {kernel}] w, float[3] b"
    program = polydyn.compile(parsed(inputs, "float[N, 3, Q] y", nodes))
    bias = floats(3)
    got = program.run({"x": floats(2, 2, 0), "w": floats(2, 3, kernel), "b": bias})["y"]
    np.testing.assert_array_equal(got, np.broadcast_to(bias[:, None], (2, 3, kernel - stride)))


@pytest.mark.parametrize(
    ("kernel", "strides", "dilations"),
    [((3, 3), (2, 2), (1, 1)), ((1, 2), (2, 3), (1, 1)), ((3, 2), (2, 2), (2, 1)), ((2, 4), (3, 4), (2, 6))],
)
def test_an_infinite_element_changes_only_what_reads_it(
    kernel: tuple[int, int], strides: tuple[int, int], dilations: tuple[int, int]
) -> None:
    """A transposed convolution does not multiply by zeros in place of missing taps."""
    made = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=strides, dilations=dilations)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2, "H", "W"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3, "P", "Q"])],
        [onnx.numpy_helper.from_array(floats(2, 3, *kernel), "w")],
    )  # fmt: skip
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = floats(2, 2, 3, 4)
    x.ravel()[[1, 8, 20]] = np.inf, np.nan, -np.inf
    (want,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(polydyn.compile(model).run({"x": x})["y"], want, 1e-4, 1e-5)
