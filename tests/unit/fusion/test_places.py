"""Which views a product or window reads through a copy, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from tests.support.one_node import import_model
from tests.support.tiny import model, node

IMAGE = ("float32", ["N", 8, "H", "W"])
RNG = np.random.default_rng(0)
UP = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
CONSTANTS = {
    "w": RNG.standard_normal((8, 8, 3, 3)).astype(np.float32),
    "d": RNG.standard_normal((8, 1, 3, 3)).astype(np.float32),
    "one": RNG.standard_normal((8, 8, 1, 1)).astype(np.float32),
    "s": np.array([1, 1, 2, 2], np.float32), "p": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "t": np.array([1, 1, 1, 3]),
    "a": np.array([-1]), "b": np.array([-(2**62)]), "c": np.array([3]),
}  # fmt: skip


def kernels(*nodes: onnx.NodeProto, cuda: bool = False, **inputs: Any) -> list[str]:
    """The outputs of the groups that compute ``y``."""
    used = {x for n in nodes for x in n.input}
    m = model(nodes, {"x": IMAGE, **inputs}, ["y"], {n: a for n, a in CONSTANTS.items() if n in used}, opset=19)
    plan = fusion_plan(rewrite_graph(import_model(m), cuda=cuda), cuda=cuda)
    return [t for g in plan.groups for t in g.outputs]


VIEWS = {
    "reflected": node("Pad", "x p", "v", mode="reflect"),
    "resized": node("Resize", "x - s", "v", **UP),
    "repeated": node("Tile", "x t", "v"),
    "reversed": node("Slice", "x a b c a", "v"),
    "turned": node("Transpose", "x", "v", perm=[0, 1, 3, 2]),
}


@pytest.mark.parametrize("reader", ["Conv", "depthwise", "padded", "MaxPool"])
@pytest.mark.parametrize("view", ["reflected", "resized", "repeated"])
def test_products_and_windows_read_scattered_elements_in_order(view: str, reader: str) -> None:
    last = {
        "Conv": node("Conv", "v w", "y"), "depthwise": node("Conv", "v d", "y", group=8),
        "padded": node("Conv", "v w", "y", pads=[1, 1, 1, 1]),
        "MaxPool": node("MaxPool", "v", "y", kernel_shape=[3, 3]),
    }[reader]  # fmt: skip
    assert len(kernels(VIEWS[view], last)) >= 2


@pytest.mark.parametrize("view", ["reversed", "turned"])
def test_affine_views_are_read_where_they_are(view: str) -> None:
    assert kernels(VIEWS[view], node("Conv", "v w", "y")) == ["y"]


@pytest.mark.parametrize(
    "last", [node("Relu", "v", "y"), node("ReduceMax", "v", "y", keepdims=0), node("Add", "v v", "y")]
)
def test_maps_and_plain_reductions_read_scattered_elements(last: onnx.NodeProto) -> None:
    assert kernels(VIEWS["reflected"], last) == ["y"]


def test_a_map_of_scattered_elements_does_not_join_a_product() -> None:
    maps = (VIEWS["resized"], node("Relu", "v", "r"))
    assert len(kernels(*maps, node("Conv", "r one", "y"))) == 2
    assert len(kernels(node("Relu", "x", "r"), node("Conv", "r one", "y"))) == 1


def test_heads_that_share_a_key_are_batches() -> None:
    """Keys that several heads read are not copied for each head: the quotient is the number of a batch."""
    nodes = (
        node("Unsqueeze", "x two", "u"), node("Expand", "u e", "v"), node("Reshape", "v h", "k"),
        node("MatMul", "q k", "y"),
    )  # fmt: skip
    CONSTANTS.update(two=np.array([2]), e=np.array([1, 1, 4, 1, 1]), h=np.array([0, 32, 64, -1]))
    found = kernels(*nodes, x=("float32", ["N", 8, 64, "W"]), q=("float32", ["N", 32, "M", 64]))
    assert found == ["y"]


@pytest.mark.parametrize("view", ["reflected", "resized", "repeated"])
@pytest.mark.parametrize("pads", [[0] * 4, [1] * 4])
def test_on_a_gpu_views_are_read_where_they_are(view: str, pads: list[int]) -> None:
    assert kernels(VIEWS[view], node("Conv", "v w", "y", pads=pads), cuda=True) == ["y"]
