"""Resizing on CUDA to sizes known at run time, on the CPU libcuda, compared with onnx.reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import polydyn
from tests.support.marks import slow

KINDS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
FORMS = tuple(itertools.product(("nearest", "linear", "cubic"), ("asymmetric", "half_pixel", "align_corners")))
SIZES = (((1, 5, 7), (10, 14)), ((2, 4, 6), (6, 3)), ((1, 1, 1), (3, 2)), ((1, 7, 3), (2, 5)), ((1, 6, 5), (1, 1)),
         ((0, 5, 5), (10, 10)), ((1, 5, 5), (0, 4)))  # fmt: skip
"""Images, rows and columns; rows and columns of the result: larger, smaller, one, none."""
RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    """Use the CPU libcuda."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYDYN_LIBCUDA", "emulated")
        yield


def resized(dtype: str, forms: tuple[tuple[str, str], ...]) -> onnx.ModelProto:
    """Build an output for each form, of one image and one vector of sizes."""
    nodes = [
        helper.make_node("Resize", ["x", "", "", "z"], [f"y{n}"], mode=mode, coordinate_transformation_mode=places)
        for n, (mode, places) in enumerate(forms)
    ]
    image = helper.make_tensor_value_info("x", KINDS[dtype], ["B", 2, "H", "W"])
    sizes = helper.make_tensor_value_info("z", TensorProto.INT64, [4])
    outputs = [helper.make_tensor_value_info(f"y{n}", KINDS[dtype], None) for n in range(len(forms))]
    graph = helper.make_graph(nodes, "g", [image, sizes], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


@pytest.mark.parametrize("dtype, forms", [
    ("float16", (("nearest", "asymmetric"), ("linear", "half_pixel"))),
    *(slow(t, (x,)) for t in KINDS for x in FORMS),
])  # fmt: skip
def test_images_of_any_size(dtype: str, forms: tuple[tuple[str, str], ...]) -> None:
    model = resized(dtype, forms)
    program, reference = polydyn.compile(model, target="cuda:emulated"), ReferenceEvaluator(model)
    for (images, *side), out in SIZES:
        x = RNG.standard_normal((images, 2, *side)).astype(dtype)
        feeds = {"x": x, "z": np.array([images, 2, *out], np.int64)}
        got = program.run(feeds)
        assert all(y.shape == (images, 2, *out) and y.dtype == x.dtype for y in got.values())
        if 0 not in (images, *out):  # the reference rejects empty results
            for y, want in zip(got.values(), reference.run(None, feeds), strict=True):
                assert np.abs(y.astype(np.float64) - want).max() <= (1e-5 if dtype == "float32" else 4e-3)
