"""GEMM batching: independent products of provably equal shapes; and merging and batching of random graphs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from polydyn.compiler import Options, plan_graph
from polydyn.graph.ir import Compute, Graph
from polydyn.graph.passes.batch import batch_contractions
from polydyn.graph.passes.merge import merge_contractions
from polydyn.graph.reference import evaluate
from polydyn.graph.verify import verify_graph
from polydyn.schedules.expr import op
from polydyn.schedules.index import Index
from polydyn.testing.fuzz import compile_graph
from polydyn.testing.random_graphs import random_feeds, random_graph
from tests.support.graphs import Sheet, matmul, random_inputs, wrong

RNG = np.random.default_rng(1)


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def batched(graph: Graph) -> Graph:
    out = batch_contractions(graph)
    verify_graph(out)
    return out


def sums(graph: Graph) -> int:
    return sum(isinstance(n, Compute) and n.reduce == "sum" for n in graph.nodes)


def map_of(s: Sheet, name: str, source: str, operation: str = "tanh") -> None:
    shape = s.tensors[source].shape
    s.let(name, shape, op(operation, s.at(source, *(f"d{a}" for a in range(len(shape))))))


def top_of(s: Sheet, name: str, source: str) -> None:
    """Add a reader that is not an epilogue."""
    shape = s.tensors[source].shape
    s.let(name, shape[:-1], s.at(source, *(f"d{a}" for a in range(len(shape) - 1)), "r0"), shape[-1:], "max")


def towers(*rows: str, depth: int = 2, cut: int = 8) -> Sheet:
    """Build independent towers of ``x -> tanh -> x @ w + b -> rows minus their maximum -> ...``, one for each number of
    rows. Of each result's 12 + ``cut`` columns 12 go on.
    """
    s = Sheet(**{f"x{k}": (m, 12) for k, m in enumerate(rows)})
    for k, m in enumerate(rows):
        t = f"x{k}"
        for d in range(depth):
            s.constant(f"w{k}{d}", weights(12, 12 + cut))
            s.constant(f"b{k}{d}", weights(12 + cut))
            s.let(f"e{k}{d}", (m, 12), op("tanh", s.at(t, "d0", "d1")))
            matmul(s, f"m{k}{d}", f"e{k}{d}", f"w{k}{d}")
            s.let(f"c{k}{d}", (m, 12 + cut), op("add", s.at(f"m{k}{d}", "d0", "d1"), s.at(f"b{k}{d}", "d1")))
            s.let(f"n{k}{d}", (m,), s.at(f"c{k}{d}", "d0", "r0"), (12 + cut,), "max")
            t = f"t{k}{d}"
            s.let(t, (m, 12 + cut), op("sub", s.at(f"c{k}{d}", "d0", "d1"), s.at(f"n{k}{d}", "d0")))
        top_of(s, f"o{k}", t)
    return s


ROWS = [{"M": 0}, {"M": 1}, {"M": 7}, {"M": 33}, {"M": 130}]


def test_towers_become_batched_products() -> None:
    graph = towers("M", "M", "M").graph("o0", "o1", "o2")
    out = batched(graph)
    assert sums(graph) == 6 and sums(out) == 2
    assert sum("merged into one batched contraction" in n for n in out.notes) == 2
    for sizes in ROWS:
        feeds = random_inputs(graph, **sizes)
        want, got = evaluate(graph, feeds), evaluate(out, feeds)
        assert all(np.allclose(got[o], want[o], rtol=0, atol=1e-5) for o in graph.outputs)
    assert not wrong(graph, *ROWS)


def test_biases_are_stacked_into_the_epilogue() -> None:
    one, _ = compile_graph(towers("M", "M").graph("o0", "o1"))
    assert sum(x.startswith("contract ") for x in one.launches) == 2
    assert not any("is a copy of" in n for n in one.manifest["notes"])


def test_the_switch_leaves_products_apart() -> None:
    graph = towers("M", "M").graph("o0", "o1")
    for options, count in ((Options(), 2), (Options(frozenset({"batch"})), 4)):
        kinds = [x.kind for x in plan_graph(graph, options=options).launches]
        assert kinds.count("contract") == count


def test_equal_sizes_under_two_names_are_not_guessed() -> None:
    graph = towers("M", "N").graph("o0", "o1")
    out = batched(graph)
    assert sums(out) == sums(graph)
    assert any("m00, m10" in n and "not merged: whether M equals N is not decided" in n for n in out.notes)


def test_sizes_that_surely_differ_get_no_note() -> None:
    s = Sheet(x=("M", 12), y=("M", 13))
    for k, t in enumerate("xy"):
        s.constant(f"w{t}", weights(12 + k, 5))
        map_of(s, f"e{t}", t)
        matmul(s, f"m{t}", f"e{t}", f"w{t}")
        top_of(s, f"o{t}", f"m{t}")
    out = batched(s.graph("ox", "oy"))
    assert sums(out) == 2 and not out.notes


def test_equal_sums_of_symbols_are_equal() -> None:
    """M + N in one tower, N + M in the other."""
    m, n = Index.of("M"), Index.of("N")
    s = Sheet(x=("M", 12), y=("N", 12))
    map_of(s, "ex", "x")
    map_of(s, "ey", "y")
    s.concat("a", ["ex", "ey"], 0)
    s.let("b", (n + m, 12), op("neg", s.at("a", m + n - 1 - Index.of("d0"), "d1")))
    map_of(s, "c", "a")
    for k, t in enumerate("bc"):
        s.constant(f"w{k}", weights(12, 7))
        matmul(s, f"m{k}", t, f"w{k}")
        top_of(s, f"o{k}", f"m{k}")
    graph = s.graph("o0", "o1")
    assert sums(batched(graph)) == 1
    assert not wrong(graph, {"M": 0, "N": 0}, {"M": 3, "N": 4}, {"M": 17, "N": 1})


def test_batches_of_activations_only() -> None:
    """Both operands are computed: q @ k for two heads, written into parts of two stacked tensors."""
    s = Sheet(**dict.fromkeys(("q0", "q1"), ("M", "K")), **dict.fromkeys(("k0", "k1"), ("K", "N")))
    for k in range(2):
        map_of(s, f"eq{k}", f"q{k}")
        map_of(s, f"ek{k}", f"k{k}")
        matmul(s, f"m{k}", f"eq{k}", f"ek{k}")
        map_of(s, f"r{k}", f"m{k}", "abs")
        top_of(s, f"o{k}", f"r{k}")
    graph = s.graph("o0", "o1")
    assert sums(batched(graph)) == 1
    assert not wrong(graph, *({"M": m, "N": n, "K": k} for m, n, k in ((0, 2, 3), (3, 0, 1), (5, 6, 0), (17, 33, 9))))


def test_what_attention_would_keep_in_one_kernel_stays_apart() -> None:
    graph = towers("M", "M", cut=0).graph("o0", "o1")
    out = batched(graph)
    assert any("m00, m10" in n and "may be one attention kernel" in n for n in out.notes)
    assert "m01, m11: merged into one batched contraction" in "\n".join(out.notes)


def test_a_dependent_pair_is_never_batched() -> None:
    graph = towers("M", depth=3).graph("o0")
    out = batched(graph)
    assert sums(out) == 3 and any("one depends on another" in n for n in out.notes)
    crossed = towers("M", "M", depth=1)
    crossed.let("x2", ("M", 12), op("add", crossed.at("t00", "d0", "d1"), crossed.at("t10", "d0", "d1")))
    crossed.constant("w2", weights(12, 12))
    matmul(crossed, "m2", "x2", "w2")
    top_of(crossed, "o2", "m2")
    out = batched(crossed.graph("o0", "o1", "o2"))
    assert sums(out) == 2, "the two that feed the third, and the third alone"


# -- random graphs ---------------------------------------------------------------------------------------------------


def random_products(seed: int) -> Graph:
    """Build products, maps and row reductions over few shapes and few weights, so that many can be merged."""
    r = random.Random(seed)
    rows = ["M", "N"]
    s = Sheet(**{f"x{k}": (r.choice(rows), 8) for k in range(3)})
    s.tensors["size_M"], s.tensors["size_N"] = (
        s.tensors["x0"].__class__(f"size_{m}", "float32", (Index.of(m),)) for m in rows
    )
    s.inputs += ["size_M", "size_N"]
    for k in range(3):
        s.constant(f"w{k}", weights(8, r.choice((8, 8, 5))))
        s.constant(f"b{k}", weights(8))
    live = ["x0", "x1", "x2"]
    for k in range(r.randint(6, 14)):
        t, name = r.choice(live), f"t{k}"
        shape = s.tensors[t].shape
        what = r.random()
        if what < 0.45 and shape[1] == 8:
            matmul(s, name, t, f"w{r.randrange(3)}")
        elif what < 0.55 and shape[1] == 8:
            s.let(name, shape, op("add", s.at(t, "d0", "d1"), s.at(f"b{r.randrange(3)}", "d1")))
        elif what < 0.75:
            map_of(s, name, t, r.choice(("tanh", "neg", "abs")))
        elif what < 0.9:
            s.let(f"r{k}", shape[:1], s.at(t, "d0", "r0"), shape[1:], "max")
            s.let(name, shape, op("tanh", op("sub", s.at(t, "d0", "d1"), s.at(f"r{k}", "d0"))))
        else:
            others = [u for u in live if s.tensors[u].shape == shape]
            u = r.choice(others)
            s.let(name, shape, op("add", s.at(t, "d0", "d1"), s.at(u, "d0", "d1")))
        live.append(name)
    read = {t for n in s.nodes for t in n.inputs}
    ends = [n.output for n in s.nodes if n.output not in read]
    for k, t in enumerate(ends):
        top_of(s, f"o{k}", t)
    return s.graph(*(f"o{k}" for k in range(len(ends))))


def test_random_products_keep_their_meaning() -> None:
    fewer = 0
    for seed in range(150):
        graph = random_products(seed)
        once = merge_contractions(graph)
        verify_graph(once)
        both = batched(once)
        fewer += sums(graph) - sums(both)
        feeds = random_inputs(graph, seed, M=seed % 4, N=(seed + 1) % 5)
        want, got = evaluate(graph, feeds), evaluate(both, feeds)
        for o in graph.outputs:
            np.testing.assert_allclose(got[o], want[o], rtol=0, atol=1e-4, err_msg=f"seed {seed}")
    assert fewer > 50, "the generator makes what can be merged"


@pytest.mark.parametrize("seed", [3, 11, 42])
def test_random_products_run_right(seed: int) -> None:
    assert not wrong(random_products(seed), *({"M": m, "N": n} for m, n in ((0, 3), (1, 1), (5, 17), (33, 2))))


def test_random_graphs_keep_their_meaning() -> None:
    for seed in range(60):
        graph = random_graph(seed)
        out = batched(merge_contractions(graph))
        feeds = random_feeds(graph, seed)
        want, got = evaluate(graph, feeds), evaluate(out, feeds)
        for o in graph.outputs:
            np.testing.assert_allclose(
                got[o].astype(np.float64), want[o].astype(np.float64), rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}"
            )
