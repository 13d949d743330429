"""Tensors between kernels as bfloat16, with ``Options(precision="bf16")`` (``fusion/halves.py``)."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import polydyn
from polydyn import Options
from polydyn.backends import target_of
from polydyn.build.compiler import why_elsewhere
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from tests.support.tiny import model, node

BF16 = Options(precision="bf16")
R = np.random.default_rng(5)


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {n: (R.standard_normal(s) / 8).astype(np.float32) for n, s in shapes.items()}


def plan(made: onnx.ModelProto, options: Options = BF16) -> FusionPlan:
    backend = target_of("cpu:avx512", options)
    return backend.fuse(backend.rewrite(import_model(made)))


def halves(made: onnx.ModelProto) -> list[str]:
    """Return the tensors that kernels store as bfloat16, without the pass' mark."""
    p = plan(made)
    outputs = [o for g in p.groups for o in g.outputs]
    return sorted(o.split("@")[0] for o in outputs if p.graph.tensors[o].dtype == "bfloat16")


def chain() -> onnx.ModelProto:
    """Build a product, its activation, and a product that reads only that."""
    nodes = [node("MatMul", "x w", "t"), node("Gelu", "t", "u"), node("MatMul", "u v", "y")]
    return model(nodes, {"x": ("float32", ["M", 64])}, ["y"], weights(w=(64, 96), v=(96, 48)), opset=20)


def residual(norm: bool) -> onnx.ModelProto:
    """Build products with a residual; with ``norm`` their sum is normalised."""
    nodes = [node("MatMul", "x w", "t"), node("Relu", "t", "u"), node("MatMul", "u v", "a"), node("Add", "a u", "s")]
    nodes += [node("LayerNormalization", "s one", "n")] if norm else [node("Relu", "s", "n")]
    nodes += [node("MatMul", "n w", "y")]
    more = {"one": np.ones(64, np.float32)} if norm else {}
    return model(nodes, {"x": ("float32", ["M", 64])}, ["y"], weights(w=(64, 64), v=(64, 64)) | more, opset=20)


def image() -> onnx.ModelProto:
    """Build convolutions around a padded one, a pooling and a depthwise one."""
    nodes = [
        node("Conv", "x a", "t"), node("Relu", "t", "u"), node("Conv", "u b", "v", pads=[1] * 4),
        node("MaxPool", "v", "p", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4),
        node("Conv", "p c", "q"), node("Conv", "q d", "r", pads=[1] * 4, group=32), node("Conv", "r c", "y"),
    ]  # fmt: skip
    ws = weights(a=(32, 16, 1, 1), b=(32, 32, 3, 3), c=(32, 32, 1, 1), d=(32, 1, 3, 3))
    return model(nodes, {"x": ("float32", ["N", 16, "H", "W"])}, ["y"], ws)


def test_what_only_rounding_products_read_changes_no_number() -> None:
    made = chain()
    assert halves(made) == ["u"] and not [o for o in plan(made, Options()).graph.tensors if "bf16" in o]
    plain = Options(frozenset({"halves"}), precision="bf16")
    for rows in (0, 1, 7, 40):
        x = {"x": R.standard_normal((rows, 64)).astype(np.float32)}
        y, same = (polydyn.compile(made, options=o).run(x)["y"] for o in (BF16, plain))
        np.testing.assert_array_equal(y, same)


def test_what_a_norm_reads_stays_exact() -> None:
    assert halves(residual(norm=False)) == ["n", "u"]
    assert "u" not in halves(residual(norm=True))


def test_outputs_and_second_readers_stay_exact() -> None:
    made = chain()
    made.graph.output.append(onnx.helper.make_tensor_value_info("u", onnx.TensorProto.FLOAT, ["M", 96]))
    assert halves(made) == []
    made = chain()
    made.graph.node.append(node("Softmax", "u", "s"))
    made.graph.output.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, ["M", 96]))
    assert halves(made) == []


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2", "cpu:amx-emulated"])
def test_images_are_stored_once_and_read_by_windows(target: str) -> None:
    if why := why_elsewhere(target):
        pytest.skip(why)
    made = image()
    assert {"u", "p", "r"} <= set(halves(made))
    exact, program = polydyn.compile(made), polydyn.compile(made, target=target, options=BF16)
    for n, h, w in ((1, 8, 8), (2, 5, 9), (1, 1, 1), (0, 4, 4)):
        x = {"x": R.standard_normal((n, 16, h, w)).astype(np.float32)}
        y, want = program.run(x)["y"], exact.run(x)["y"]
        np.testing.assert_allclose(y, want, 0, 0.03 * np.abs(want).max(initial=1.0))
