"""GEMM merging: contractions that share their row operand become one, readers that differ in constants follow."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from polydyn.compiler import Options, compile
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.ir import Compute
from polydyn.graph.passes.merge import merge_contractions
from polydyn.graph.reference import evaluate
from polydyn.graph.verify import verify_graph
from tests.tiny import model, node

R = np.random.default_rng(0)
WEIGHTS = {f"w{i}": R.standard_normal((12, n)).astype(np.float32) for i, n in enumerate((5, 7, 16))}
BIASES = {f"b{i}": R.standard_normal(n).astype(np.float32) for i, n in enumerate((5, 7, 16))}
X = {"x": ("float32", ["B", "L", 12])}


def contractions(m: onnx.ModelProto) -> int:
    graph = merge_contractions(fold(import_model(m)))
    verify_graph(graph)
    return sum(isinstance(n, Compute) and n.reduce == "sum" for n in graph.nodes)


def products(*extra: onnx.NodeProto, outputs: tuple[str, ...] = ("y0", "y1", "y2")) -> onnx.ModelProto:
    nodes = [node("MatMul", f"x w{i}", f"m{i}") for i in range(3)]
    return model([*nodes, *extra], X, outputs, WEIGHTS | BIASES)


BIASED = products(*(node("Add", f"m{i} b{i}", f"y{i}") for i in range(3)))
MIXED = products(node("Add", "m0 b0", "y0"), node("Relu", "m1", "y1"), node("Add", "m2 b2", "y2"))
READ_TWICE = products(node("Add", "m0 b0", "y0"), node("Add", "m1 b1", "y1"), node("Neg", "m2", "y2"), outputs=(
    "y0", "y1", "y2", "m2"))  # fmt: skip


@pytest.mark.parametrize("m", [BIASED, MIXED, READ_TWICE], ids=["biased", "mixed", "read twice"])
def test_merged_graphs_compute_the_same(m: onnx.ModelProto) -> None:
    assert contractions(m) == 1
    graph = fold(import_model(m))
    program = compile(m, threads=1)
    for b, n in ((1, 1), (2, 7), (0, 3), (3, 33)):
        feeds = {"x": R.standard_normal((b, n, 12)).astype(np.float32)}
        expected = evaluate(graph, feeds)
        for name, got in program.run(feeds).items():
            np.testing.assert_allclose(got, expected[name], rtol=0, atol=1e-5, err_msg=f"{name} {b, n}")


def test_biases_stay_epilogues_of_one_kernel() -> None:
    labels = compile(BIASED).launches
    assert sum(x.startswith("contract ") for x in labels) == 1
    apart = compile(BIASED, options=Options(without=frozenset({"merge"}))).launches
    assert sum(x.startswith("contract ") for x in apart) == 3


def test_other_rows_or_other_reductions_are_not_merged() -> None:
    nodes = [node("MatMul", "x w0", "y0"), node("MatMul", "z w1", "y1")]
    assert contractions(model(nodes, X | {"z": ("float32", ["B", "L", 12])}, ["y0", "y1"], WEIGHTS)) == 2
    dynamic = X | {"v": ("float32", [12, "N"])}
    nodes = [node("MatMul", "x w0", "y0"), node("MatMul", "x v", "y1")]
    assert contractions(model(nodes, dynamic, ["y0", "y1"], WEIGHTS)) == 2


def test_transposed_constants_merge_too() -> None:
    nodes = [node("Gemm", "x t0 b0", "y0", transB=1), node("Gemm", "x w1 b1", "y1")]
    constants = WEIGHTS | BIASES | {"t0": np.ascontiguousarray(WEIGHTS["w0"].T)}
    m = model(nodes, {"x": ("float32", ["B", 12])}, ["y0", "y1"], constants)
    assert contractions(m) == 1
    feeds = {"x": R.standard_normal((9, 12)).astype(np.float32)}
    got = compile(m).run(feeds)
    for i in range(2):
        expected = feeds["x"] @ WEIGHTS[f"w{i}"] + BIASES[f"b{i}"]
        np.testing.assert_allclose(got[f"y{i}"], expected, rtol=0, atol=1e-5)


def test_reasons_are_noted() -> None:
    graph = merge_contractions(fold(import_model(BIASED)))
    assert any("share their row operand" in n for n in graph.notes)
