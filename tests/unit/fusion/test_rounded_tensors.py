"""Which tensors between kernels become bfloat16: those that products round anyway, and images; no input of a norm."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn import Options
from polydyn.compiler import plan_program
from polydyn.fusion.halves import SUFFIX
from polydyn.fusion.pipeline import prepared_graph, rewrite_graph
from polydyn.graph.expand import import_model
from tests.support.quantized import quantized_model
from tests.support.tiny import node

IMAGE = {"x": ("float32", ["N", 16, "H", "W"])}
ROWS = {"x": ("float32", ["M", 16])}
W4 = np.ones((16, 16, 1, 1), np.float32)
CONSTANTS = {
    "a": W4, "b": W4, "c": W4, "e": W4, "d": np.ones((16, 1, 3, 3), np.float32), "m": np.eye(16, dtype=np.float32),
    "two": np.array(2, np.float32), "last": np.array([-1]),
}  # fmt: skip
FIRST, LAST = node("Conv", "x a", "t"), node("Conv", "u b", "y")
DEPTHWISE = node("Conv", "t d", "u", group=16, pads=[1, 1, 1, 1])
POOL = node("MaxPool", "t", "u", kernel_shape=[3, 3])
GATE = [node("GlobalAveragePool", "t", "g"), node("Conv", "g c", "h"), node("Sigmoid", "h", "s"),
        node("Mul", "t s", "u")]  # fmt: skip
SUM = [node("Relu", "x", "z"), node("Conv", "z e", "v"), node("Add", "t v", "u")]
MEAN = [node("GlobalAveragePool", "t", "u")]
PRODUCT, END = node("MatMul", "x m", "t"), node("MatMul", "u m", "y")
SCALED = [node("Pow", "t two", "q"), node("ReduceMean", "q last", "r"), node("Sqrt", "r", "s"), node("Div", "t s", "u")]
CENTRED = [node("ReduceMean", "t last", "r"), node("Sub", "t r", "u")]


def rounded(inputs: dict, *nodes: object) -> set[str]:
    """Return the names of the float32 tensors that are stored as bfloat16."""
    m = quantized_model(list(nodes), inputs, ["y"], opset=18, **CONSTANTS)
    graph = prepared_graph(rewrite_graph(import_model(m)), rounded=True)
    return {n.output.split("@")[0] for n in graph.nodes if n.output.endswith(SUFFIX)}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([FIRST, DEPTHWISE, LAST], {"t", "Conv_u.1", "u"}),  # the second is the padded image
        ([FIRST, POOL, LAST], {"t", "u"}),
        ([FIRST, *GATE, LAST], {"t", "g", "u"}),
        ([FIRST, *SUM, LAST], {"t", "z", "u"}),
        ([FIRST, *MEAN, LAST], {"u"}),
    ],
    ids=["depthwise", "largest", "gate", "sum", "mean"],
)
def test_images_are_rounded(nodes: list, expected: set[str]) -> None:
    assert rounded(IMAGE, *nodes) == expected


@pytest.mark.parametrize("norm", [SCALED, CENTRED], ids=["root of mean squares", "mean"])
def test_what_a_norm_reads_is_not_rounded(norm: list) -> None:
    got = rounded(ROWS, PRODUCT, *norm, END)
    assert "t" not in got and "u" in got, got


@pytest.mark.parametrize("options", [Options(), Options(precision="bf16")], ids=["float32", "bf16"])
def test_a_long_chain_of_maps_does_not_become_one_expression(options: Options) -> None:
    """Expressions are walked recursively, so a prologue has a bounded number of operations."""
    chain = [node("Sin" if k % 2 else "Tanh", f"s{k}", f"s{k + 1}") for k in range(300)]
    nodes = [PRODUCT, node("ReduceMean", "t last", "s0"), *chain, node("Mul", "x s300", "u"), END]
    m = quantized_model(nodes, ROWS, ["y"], opset=18, **CONSTANTS)
    assert plan_program(m, target="cpu:avx512", options=options).kernels
