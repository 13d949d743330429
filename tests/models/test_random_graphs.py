"""Random graphs through the whole compiler; ``python -m polydyn.testing.fuzz`` tries more of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polydyn.backends.cpu import cpu_target
from polydyn.graph.ir import Compute, Graph
from polydyn.graph.reference import evaluate
from polydyn.graph.verify import verify_graph
from polydyn.schedules.expr import FromIndex, op
from polydyn.schedules.index import Index
from polydyn.testing import fuzz_layers
from polydyn.testing.accuracy import TOLERANCE, error, reference
from polydyn.testing.fuzz import attempt, difference, run_seeds, shrink, text
from polydyn.testing.inputs import feeds, shapes
from polydyn.testing.random_graphs import random_feeds, random_graph, random_sizes
from polydyn.testing.random_layers import FAMILIES, random_layer
from tests.support.graphs import Sheet, matmul, random_inputs, wrong
from tests.support.marks import slow
from tests.support.stored import compiled, load, path_of

EXTREMES = ({"M": 0, "N": 5, "K": 3}, {"M": 5, "N": 0, "K": 3}, {"M": 5, "N": 37, "K": 0}, {"M": 1, "N": 1, "K": 1})
LARGER = (
    {"M": 13, "N": 31, "K": 1},
    {"M": 1, "N": 130, "K": 7},
    {"M": 9, "N": 49, "K": 1601},
    {"M": 33, "N": 2, "K": 768},
)
SIZES = (*EXTREMES, *LARGER)


def native(name: str) -> str:
    """Return ``cpu:<name>``; skip if this machine cannot run it."""
    if name == "avx512" and cpu_target("cpu").name != "avx512":
        pytest.skip("this machine has no AVX-512")
    return f"cpu:{name}"


@pytest.mark.parametrize("first", [0, slow(12)])
def test_random_graphs_agree_with_the_reference(first: int) -> None:
    assert run_seeds(range(first, first + 12), "cpu", feeds=3) == []


def test_random_layers() -> None:
    """A seed determines its layer; one layer is right, and a wrong number is detected.

    GPU: make fuzz-layers.
    """
    for family in FAMILIES:
        one, two = random_layer(family, 5), random_layer(family, 5)
        assert one.shapes == two.shapes and one.model.SerializeToString() == two.model.SerializeToString()
    layer = random_layer("rows", 3)
    assert fuzz_layers.run_layer(layer, "float32", "cpu", forced=0) == []
    want = np.array([1, -2, np.inf], np.float32)
    for wrong_number in (np.nan, 2, -1.99):
        assert fuzz_layers.difference(np.array([1, wrong_number, np.inf], np.float32), want, 1e-3)
    assert not fuzz_layers.difference(want, want, 0)


@pytest.mark.slow
def test_random_graphs_on_narrower_vectors() -> None:
    assert run_seeds(range(24, 34), native("avx2"), feeds=3) == []


def test_the_same_seed_gives_the_same_graph_and_feeds() -> None:
    for seed in range(30):
        graph = random_graph(seed)
        verify_graph(graph)
        assert text(graph) == text(random_graph(seed))
        a, b = random_feeds(graph, 1), random_feeds(random_graph(seed), 1)
        assert all(np.array_equal(a[x], b[x]) for x in graph.inputs)
    sizes = {n for seed in range(200) for n in random_sizes(random_graph(seed % 5), seed).values()}
    assert {0, 1, 2, 17, 31} <= sizes


def doubled(graph: Graph) -> Graph:
    """Return the graph with its last node's result doubled, so that it disagrees."""
    n = graph.nodes[-1]
    assert isinstance(n, Compute)
    return replace(graph, nodes=(*graph.nodes[:-1], replace(n, body=op("add", n.body, n.body))))


def test_a_wrong_result_is_seen() -> None:
    s = Sheet(a=("M", "K"), b=("K", "N"))
    matmul(s, "y", "a", "b")
    graph = s.graph("y")
    feeds = random_inputs(graph, M=3, K=4, N=5)
    want = evaluate(graph, feeds)
    assert difference(graph, feeds, want, want) == ""
    assert "off by" in difference(graph, feeds, evaluate(doubled(graph), feeds), want)
    assert "off by" in difference(graph, feeds, {"y": np.where(want["y"] == want["y"].max(), np.nan, want["y"])}, want)
    assert "expected" in difference(graph, feeds, {"y": want["y"].T}, want)


def test_a_failing_graph_is_shrunk_to_what_fails() -> None:
    graph = random_graph(7)
    assert len(graph.nodes) > 3
    guilty = graph.nodes[-1].output
    small = shrink(graph, lambda g: any(n.output == guilty for n in g.nodes))
    assert [n.output for n in small.nodes] == [guilty]
    verify_graph(small)
    assert attempt(small, random_feeds, 0, "cpu") == ""


@pytest.mark.parametrize("target", ["avx512", slow("avx2")])
@pytest.mark.parametrize("form", ["ab", slow("aTb"), slow("abT"), "transposed out", "constant", "dot rows"])
def test_products_at_ugly_sizes(form: str, target: str) -> None:
    """K of 0 runs initialiser and epilogue; K beyond a block runs LOAD and SAVE; a strided column is packed."""
    s = Sheet(a=("M", "K"), at=("K", "M"), b=("K", "N"), bt=("N", "K"))
    s.constant("c", np.random.default_rng(0).standard_normal((1601, 50)).astype(np.float32))
    out, k = ("M", "N"), "K"
    i, j = ("d1", "d0") if form == "transposed out" else ("d0", "d1")
    left = s.at("at", "r0", i) if form == "aTb" else s.at("a", i, "r0")
    right = s.at("bt", j, "r0") if form == "abT" else s.at("b", "r0", j)
    if form == "transposed out":
        out = ("N", "M")
    if form == "constant":
        s.tensors["a"] = replace(s.tensors["a"], shape=(Index.of("M"), Index.of(1601)))
        left, right, out, k = s.at("a", "d0", "r0"), s.at("c", "r0", "d1"), ("M", 50), 1601
    if form == "dot rows":
        left, right, out = s.at("a", "d0", "r0"), s.at("b", "r0", 0), ("M",)
        s.tensors["b"] = replace(s.tensors["b"], shape=(Index.of("K"), Index.of(1)))
    s.let("x", out, op("mul", left, right), (k,), "sum")
    names = [f"d{a}" for a in range(len(out))]
    s.let("y", out, op("add", op("tanh", s.at("x", *names)), FromIndex("float32", Index.of("d0"))))
    assert not wrong(s.graph("x", "y"), *SIZES, target=native(target))


def test_a_product_of_dims_used_whole_and_apart() -> None:
    """B*L rows in one tensor, B and L in another, and a batch that is collapsed on one side only."""
    s = Sheet(x=("B", "L", 6), y=("L", "B", 4), w=(6, 4))
    s.let("p", ("B", "L", 4), op("mul", s.at("x", "d0", "d1", "r0"), s.at("w", "r0", "d2")), (6,), "sum")
    s.let("q", ("B", "L", 4), op("add", s.at("p", "d0", "d1", "d2"), s.at("y", "d1", "d0", "d2")))
    row, length = Index.of("d0"), Index.of("L")
    s.let("flat", (Index.of("B") * "L", 4), op("neg", s.at("q", row // length, row % length, "d1")))
    s.let("total", (4,), s.at("flat", "r0", "d0"), (Index.of("B") * "L",), "sum")
    s.let("top", ("B", 4), s.at("q", "d0", "r0", "d1"), ("L",), "max")
    sizes = [{"B": b, "L": n} for b, n in ((0, 3), (3, 0), (1, 1), (1, 7), (7, 1), (3, 5), (4, 33))]
    assert not wrong(s.graph("p", "flat", "total", "top"), *sizes)


def test_rows_and_columns_of_every_remainder() -> None:
    """Every number of live rows and of live lanes of a register tile, masks and switches included."""
    s = Sheet(a=("M", 5), b=(5, "N"))
    matmul(s, "x", "a", "b")
    s.let("y", ("M", "N"), op("max", s.at("x", "d0", "d1"), s.at("b", 0, "d1")))
    sizes = [{"M": m, "N": 17} for m in range(1, 19)] + [{"M": 7, "N": n} for n in range(1, 100, 3)]
    assert not wrong(s.graph("y"), *sizes)


def test_a_stored_model_on_narrower_vectors() -> None:
    program = compiled("bert_tiny", 1, native("avx2"))
    wanted = shapes("bert_tiny")
    for shape, want in zip(wanted, reference(path_of("bert_tiny"), wanted), strict=True):
        assert error(program.run(feeds(load("bert_tiny"), shape)), want) <= TOLERANCE
