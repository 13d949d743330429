"""GEMM merging: contractions that share an operand become one, equal readers follow, nothing is copied."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from polydyn.compiler import Options, compile
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.ir import Compute, Concat, Graph
from polydyn.graph.passes.merge import merge_contractions
from polydyn.graph.passes.order import Dependences, in_order
from polydyn.graph.reference import evaluate
from polydyn.graph.verify import verify_graph
from polydyn.schedules.expr import op
from polydyn.testing.fuzz import compile_graph
from tests.support.graphs import Sheet, matmul, random_inputs, wrong
from tests.support.tiny import model, node

RNG = np.random.default_rng(0)
WEIGHTS = {f"w{i}": RNG.standard_normal((12, n)).astype(np.float32) for i, n in enumerate((5, 7, 16))}
BIASES = {f"b{i}": RNG.standard_normal(n).astype(np.float32) for i, n in enumerate((5, 7, 16))}
X = {"x": ("float32", ["B", "L", 12])}


def merged(graph: Graph) -> Graph:
    out = merge_contractions(graph)
    verify_graph(out)
    return out


def sums(graph: Graph) -> int:
    return sum(isinstance(n, Compute) and n.reduce == "sum" for n in graph.nodes)


def contractions(m: onnx.ModelProto) -> int:
    return sums(merged(fold(import_model(m))))


def products(*extra: onnx.NodeProto, outputs: tuple[str, ...] = ("y0", "y1", "y2")) -> onnx.ModelProto:
    """Build three products of x; each result that is an output is transposed first, so that it is not part of a whole.
    """
    nodes = [node("MatMul", f"x w{i}", f"m{i}") for i in range(3)]
    return model([*nodes, *extra], X, outputs, WEIGHTS | BIASES)


def turned(*names: str) -> list[onnx.NodeProto]:
    return [node("Transpose", t, f"y{i}", perm=[1, 0, 2]) for i, t in enumerate(names)]


WITH_BIASES = products(*(node("Add", f"m{i} b{i}", f"a{i}") for i in range(3)), *turned("a0", "a1", "a2"))
WITH_CHAINS = products(
    *(node("Add", f"m{i} b{i}", f"a{i}") for i in range(3)), *(node("Relu", f"a{i}", f"c{i}") for i in range(3)),
    *turned("c0", "c1", "c2"),
)  # fmt: skip
PLAIN = products(*turned("m0", "m1", "m2"))
WITH_MIXTURE = products(node("Add", "m0 b0", "a0"), node("Relu", "m1", "a1"), node("Add", "m2 b2", "a2"),
                 *turned("a0", "a1", "a2"))  # fmt: skip
WITH_COPIES = products(*(node("Add", f"m{i} b{i}", f"y{i}") for i in range(3)))
WITH_CONCAT = products(node("Concat", "m0 m1", "y0", axis=2), node("Neg", "m2", "y1"), outputs=("y0", "y1"))


@pytest.mark.parametrize(
    ("m", "kernels"),
    [(WITH_BIASES, 1), (WITH_CHAINS, 1), (PLAIN, 1), (WITH_MIXTURE, 2), (WITH_COPIES, 3), (WITH_CONCAT, 3)],
    ids=["biased", "chained", "plain", "mixed", "copied", "joined"],
)
def test_merged_graphs_compute_the_same(m: onnx.ModelProto, kernels: int) -> None:
    assert contractions(m) == kernels
    graph = fold(import_model(m))
    program = compile(m, threads=1)
    for b, n in ((1, 1), (2, 7), (0, 3), (3, 33)):
        feeds = {"x": RNG.standard_normal((b, n, 12)).astype(np.float32)}
        expected = evaluate(graph, feeds)
        for name, got in program.run(feeds).items():
            np.testing.assert_allclose(got, expected[name], rtol=0, atol=1e-5, err_msg=f"{name} {b, n}")


@pytest.mark.parametrize(
    ("m", "reason"),
    [
        (WITH_MIXTURE, "an epilogue would become a kernel of its own"),
        (WITH_COPIES, "an output of the model would have to be copied"),
        (WITH_CONCAT, "a part of a concatenation would have to be copied"),
        (WITH_BIASES, "merged into one contraction (they share the operand x)"),
    ],
)
def test_reasons_are_noted(m: onnx.ModelProto, reason: str) -> None:
    assert any(reason in n for n in merged(fold(import_model(m))).notes)


def test_biases_and_what_follows_stay_epilogues_of_one_kernel() -> None:
    labels = compile(WITH_CHAINS).launches
    assert sum(x.startswith("contract ") for x in labels) == 1
    apart = compile(WITH_CHAINS, options=Options(without=frozenset({"merge", "batch"}))).launches
    assert sum(x.startswith("contract ") for x in apart) == 3


def test_other_rows_or_other_reductions_are_not_merged() -> None:
    nodes = [node("MatMul", "x w0", "m0"), node("MatMul", "z w1", "m1"), *turned("m0", "m1")]
    assert contractions(model(nodes, X | {"z": ("float32", ["B", "L", 12])}, ["y0", "y1"], WEIGHTS)) == 2
    dynamic = X | {"v": ("float32", [12, "N"])}
    nodes = [node("MatMul", "x w0", "m0"), node("MatMul", "x v", "m1"), *turned("m0", "m1")]
    m = model(nodes, dynamic, ["y0", "y1"], WEIGHTS)
    assert contractions(m) == 2
    notes = merged(fold(import_model(m))).notes
    assert "an operand is a constant in one and computed in another" in "\n".join(notes)


def test_transposed_constants_merge_too() -> None:
    nodes = [node("Gemm", "x t0 b0", "m0", transB=1), node("Gemm", "x w1 b1", "m1")]
    nodes += [node("Transpose", f"m{i}", f"y{i}", perm=[1, 0]) for i in range(2)]
    constants = WEIGHTS | BIASES | {"t0": np.ascontiguousarray(WEIGHTS["w0"].T)}
    m = model(nodes, {"x": ("float32", ["B", 12])}, ["y0", "y1"], constants)
    assert contractions(m) == 1
    feeds = {"x": RNG.standard_normal((9, 12)).astype(np.float32)}
    got = compile(m).run(feeds)
    for i in range(2):
        expected = feeds["x"] @ WEIGHTS[f"w{i}"] + BIASES[f"b{i}"]
        np.testing.assert_allclose(got[f"y{i}"].T, expected, rtol=0, atol=1e-5)


# -- operands that are computed --------------------------------------------------------------------------------------


def exp_of(s: Sheet, name: str, source: str) -> None:
    shape = s.tensors[source].shape
    s.let(name, shape, op("tanh", s.at(source, *(f"d{a}" for a in range(len(shape))))))


def total_of(s: Sheet, name: str, source: str) -> None:
    """Add a reader that is not an epilogue: sums along the last axis."""
    shape = s.tensors[source].shape
    s.let(name, (shape[0],), s.at(source, "d0", "r0"), (shape[1],), "sum")


def shared_row() -> Sheet:
    """Build ``a @ tanh(p)`` and ``a @ tanh(q)``: columns of unknown numbers."""
    s = Sheet(a=("M", "K"), p=("K", "N"), q=("K", "J"))
    for t in "pq":
        exp_of(s, f"e{t}", t)
        matmul(s, f"m{t}", "a", f"e{t}")
        total_of(s, f"o{t}", f"m{t}")
    return s


def shared_column(inputs: bool = False) -> Sheet:
    """Build ``tanh(p) @ w`` and ``tanh(q) @ w`` with a constant w: unknown numbers of rows, then a bias and a relu."""
    s = Sheet(p=("M", 12), q=("N", 12))
    s.constant("w", WEIGHTS["w1"])
    s.constant("b", BIASES["b1"])
    for t in "pq":
        if not inputs:
            exp_of(s, f"e{t}", t)
        matmul(s, f"m{t}", t if inputs else f"e{t}", "w")
        s.let(f"c{t}", s.tensors[f"m{t}"].shape, op("add", s.at(f"m{t}", "d0", "d1"), s.at("b", "d1")))
        total_of(s, f"o{t}", f"c{t}")
    return s


SIZES = [{"M": m, "N": n, "K": k, "J": j} for m, n, k, j in ((0, 3, 2, 1), (1, 1, 1, 1), (5, 0, 7, 33), (31, 17, 0, 2),
                                                             (33, 16, 9, 0), (40, 50, 60, 70))]  # fmt: skip


@pytest.mark.parametrize("make", [shared_row, shared_column])
def test_producers_write_into_their_part(make) -> None:
    graph = make().graph("op", "oq")
    out = merged(graph)
    assert sums(graph) == 4 and sums(out) == 3 and sum(isinstance(n, Concat) for n in out.nodes) == 1
    for sizes in SIZES:
        feeds = random_inputs(graph, **sizes)
        want, got = evaluate(graph, feeds), evaluate(out, feeds)
        assert all(np.allclose(got[o], want[o], rtol=0, atol=1e-5) for o in graph.outputs)
    assert not wrong(graph, *SIZES)


def test_nothing_is_copied_for_a_merge() -> None:
    one, two = compile_graph(shared_column().graph("op", "oq"))
    assert sum(x.startswith("contract ") for x in one.launches) == 1
    assert not any("is a copy of" in n for n in one.manifest["notes"])
    for p in (one, two):
        p.run(random_inputs(shared_column().graph("op", "oq"), M=5, N=6))
        assert p.counters["bytes_copied"] == 0


def note_of(s: Sheet, *outputs: str) -> str:
    graph = s.graph(*outputs)
    out = merged(graph)
    assert sums(out) == sums(graph)
    return "\n".join(out.notes)


def test_operands_that_would_be_copied_are_refused() -> None:
    assert "an operand is an input of the model" in note_of(shared_column(inputs=True), "op", "oq")
    s = shared_column()
    total_of(s, "again", "ep")
    assert "an operand is read by others too" in note_of(s, "op", "oq", "again")
    assert "is a view, a concatenation or an output" in note_of(shared_column(), "op", "oq", "ep")


def test_a_dependent_pair_is_never_merged() -> None:
    """The second product's rows are made from the first one's: they share the weight only."""
    s = Sheet(x=("M", 12))
    s.constant("w", RNG.standard_normal((12, 12)).astype(np.float32))
    exp_of(s, "e0", "x")
    for k in range(3):
        matmul(s, f"m{k}", f"e{k}", "w")
        s.let(f"t{k}", ("M", 12), s.at(f"m{k}", "d0", "r0"), (12,), "max")
        exp_of(s, f"e{k + 1}", f"t{k}")
    assert "one depends on another" in note_of(s, "e3")
    assert not wrong(s.graph("e3"), {"M": 0}, {"M": 1}, {"M": 13})


def test_merges_that_were_made_count_as_paths() -> None:
    """``b1 -> a0`` and ``a1 -> b0``: either pair may be merged; then the other one depends on itself through it."""
    s = Sheet(p=("M", 12), q=(12, "N"), z=(12, 12))
    s.constant("u", WEIGHTS["w1"])
    exp_of(s, "ez", "z")
    matmul(s, "b1", "ez", "u")
    total_of(s, "s1", "b1")
    s.let("e0", (12, 9), op("tanh", s.at("s1", "d0")))
    exp_of(s, "e1", "q")
    matmul(s, "a0", "p", "e0")
    matmul(s, "a1", "p", "e1")
    total_of(s, "o0", "a0")
    total_of(s, "s0", "a1")
    s.let("t0", ("M", 12), op("tanh", s.at("s0", "d0")))
    matmul(s, "b0", "t0", "u")
    total_of(s, "o1", "b0")
    graph = s.graph("o0", "o1")
    assert Dependences(graph).independent(["a0", "a1"]) and Dependences(graph).independent(["b0", "b1"])
    out = merged(graph)
    assert sums(out) == sums(graph) - 1
    assert "not merged: one depends on another" in "\n".join(out.notes)
    assert not wrong(graph, {"M": 1, "N": 1}, {"M": 9, "N": 20})


def test_sizes_that_are_not_decided_keep_products_apart() -> None:
    s = Sheet(p=("M", "H", 12), q=("N", "L", 12))
    s.constant("w", WEIGHTS["w1"])
    for t in "pq":
        exp_of(s, f"e{t}", t)
        m, n, _ = s.tensors[t].shape
        s.let(f"m{t}", (m, n, 7), op("mul", s.at(f"e{t}", "d0", "d1", "r0"), s.at("w", "r0", "d2")), (12,), "sum")
        s.let(f"o{t}", (m, n), s.at(f"m{t}", "d0", "d1", "r0"), (7,), "max")
    text = note_of(s, "op", "oq")
    assert "whether M equals N is not decided" in text and "whether H equals L is not decided" in text


def test_keys_and_values_of_all_decoder_layers_are_one_product_of_the_encoding() -> None:
    """Grouped queries too: keys and values are narrower than queries, and queries read another tensor."""
    s = Sheet(encoding=("L", 12), x=("T", 12))
    s.constant("wq", RNG.standard_normal((12, 16)).astype(np.float32))
    exp_of(s, "q0", "x")
    for layer in range(2):
        matmul(s, f"pq{layer}", f"q{layer}", "wq")
        for kind in "kv":
            s.constant(f"w{kind}{layer}", RNG.standard_normal((12, 4)).astype(np.float32))
            matmul(s, f"p{kind}{layer}", "encoding", f"w{kind}{layer}")
            total_of(s, f"s{kind}{layer}", f"p{kind}{layer}")
        s.let(f"z{layer}", (), s.at(f"sk{layer}", "r0"), ("L",), "sum")
        total_of(s, f"sq{layer}", f"pq{layer}")
        s.let(f"q{layer + 1}", ("T", 12), op("tanh", op("add", s.at(f"sq{layer}", "d0"), s.at(f"z{layer}"))))
    graph = s.graph("q2", "sv0", "sv1")
    out = merged(graph)
    assert sums(graph) - sums(out) == 3
    assert "pk0, pv0, pk1, pv1: merged into one contraction" in "\n".join(out.notes)
    assert "pq0, pq1: not merged: one depends on another" in "\n".join(out.notes)
    assert not wrong(graph, {"L": 0, "T": 3}, {"L": 9, "T": 1})


def test_dependences_and_order() -> None:
    graph = shared_row().graph("op", "oq")
    d = Dependences(graph)
    assert d.independent(["mp", "mq"]) and not d.independent(["ep", "op"]) and not d.independent(["op", "ep"])
    assert in_order(graph.nodes) == graph.nodes
    assert [n.output for n in in_order(reversed(graph.nodes))][-1] == "op"
    verify_graph(Graph(**(vars(graph) | {"nodes": in_order(reversed(graph.nodes))})))
