"""Rows that an exporter flattens and unflattens around a product do not keep the epilogue out of its kernel."""

from __future__ import annotations

import numpy as np

from polydyn.compiler import compile
from polydyn.fusion.pipeline import fusion_plan
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.reference import evaluate
from tests.support.tiny import model, node

RNG = np.random.default_rng(1)
CONSTANTS = {
    "flat": np.array([-1, 12]),
    "w": RNG.standard_normal((12, 20)).astype(np.float32),
    "b": RNG.standard_normal(20).astype(np.float32),
    "two": np.array(2, np.int64),
}
BEFORE = [
    node("Reshape", "x flat", "rows"),
    node("Gemm", "rows w b", "g"),
    node("Shape", "x", "s", start=0, end=2),
    node("Constant", "", "n", value_ints=[20]),
    node("Concat", "s n", "shape", axis=0),
]
X = {"x": ("float32", ["B", "L", 12]), "r": ("float32", ["B", "L", 20])}


def test_the_epilogue_joins_the_product() -> None:
    nodes = [*BEFORE, node("Reshape", "g shape", "u"), node("Relu", "u", "a"), node("Add", "a r", "y")]
    m = model(nodes, X, ["y"], CONSTANTS)
    graph = fold(import_model(m))
    (group,) = fusion_plan(graph).groups
    assert group.kind == "contract"
    program = compile(m, threads=2)
    for b, n in ((1, 1), (2, 7), (3, 33), (0, 5), (4, 0)):
        feeds = {"x": RNG.standard_normal((b, n, 12)), "r": RNG.standard_normal((b, n, 20))}
        feeds = {k: v.astype(np.float32) for k, v in feeds.items()}
        np.testing.assert_allclose(program.run(feeds)["y"], evaluate(graph, feeds)["y"], rtol=0, atol=1e-5)


def test_readers_of_the_flat_rows_still_find_them() -> None:
    nodes = [*BEFORE, node("Reshape", "g shape", "u"), node("Relu", "u", "y"), node("ReduceMax", "g", "z", axes=[1])]
    m = model(nodes, {"x": X["x"]}, ["y", "z"], CONSTANTS, opset=17)
    graph = fold(import_model(m))
    program = compile(m)
    for b, n in ((1, 1), (2, 7), (3, 33)):
        feeds = {"x": RNG.standard_normal((b, n, 12)).astype(np.float32)}
        expected = evaluate(graph, feeds)
        for name, got in program.run(feeds).items():
            np.testing.assert_allclose(got, expected[name], rtol=0, atol=1e-5)
