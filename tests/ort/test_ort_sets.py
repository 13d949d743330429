"""The sets of nodes that are compiled: convex, as few as possible, without tensors that cannot pass."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import helper

from polydyn.ort.partition import Partition, partition, shapes_in, stages
from tests.support.tiny import model, node

F = "float32"


def random_nodes(seed: int) -> list[onnx.NodeProto]:
    r = random.Random(seed)
    names = ["x"]
    nodes = []
    for k in range(30):
        nodes.append(helper.make_node("Sum", r.sample(names, min(len(names), r.randint(1, 3))), [f"t{k}"]))
        names.append(f"t{k}")
    return nodes


def reaches(nodes: list[onnx.NodeProto]) -> list[set[int]]:
    """Return for every node the nodes after it that depend on it."""
    maker = {o: k for k, n in enumerate(nodes) for o in n.output}
    after: list[set[int]] = [set() for _ in nodes]
    for k in reversed(range(len(nodes))):
        for x in nodes[k].input:
            if x in maker:
                after[maker[x]] |= {k} | after[k]
    return after


def returning_paths(nodes: list[onnx.NodeProto], sets: list[int]) -> list[tuple[int, int, int]]:
    """Return triples of dependent nodes of which only the first and the last are in one set."""
    after = reaches(nodes)
    return [
        (a, b, c) for a in range(len(nodes)) if sets[a] >= 0 for b in after[a] if sets[b] != sets[a]
        for c in after[b] if sets[c] == sets[a]
    ]  # fmt: skip


def test_sets_of_random_graphs_are_convex() -> None:
    for seed in range(40):
        nodes = random_nodes(seed)
        left = {k for k in range(len(nodes)) if random.Random(seed * 31 + k).random() < 0.3}
        sets = stages(nodes, left)
        assert {k for k, s in enumerate(sets) if s < 0} == left
        assert returning_paths(nodes, sets) == []
        together = [0 if k not in left else -1 for k in range(len(nodes))]
        assert seed or returning_paths(nodes, together), "one set of all would not be convex"


def tfidf(x: str, y: str) -> onnx.NodeProto:
    """Return a node whose operator polydyn does not have."""
    return node(
        "TfIdfVectorizer", x, y, max_gram_length=1, max_skip_count=0, min_gram_length=1, mode="TF", ngram_counts=[0],
        ngram_indexes=[0, 1, 2], pool_int64s=[0, 1, 2],
    )  # fmt: skip


def encoder() -> onnx.ModelProto:
    return model(
        [
            node("MatMul", "x w", "a"), node("Relu", "a", "b"), node("Cast", "b", "i", to=6),
            tfidf("i", "v"), node("Mul", "v v", "s"), node("Exp", "s", "y"),
        ],
        {"x": (F, ["B", 4])}, ["y"], {"w": np.eye(4, 6, dtype=F)}, opset=17,
    )  # fmt: skip


def test_a_node_that_is_not_built_divides_the_graph() -> None:
    found = partition(encoder())
    assert found.sets == [0, 0, 0, -1, 1, 1]
    assert list(found.reasons.values()) == ["TfIdfVectorizer_v (TfIdfVectorizer): the operator is not built"]
    text = found.text()
    assert text.splitlines()[:3] == [
        "polydyn-sets 1 6 2 1", "0 0 0 -1 1 1", "left TfIdfVectorizer_v (TfIdfVectorizer): the operator is not built"
    ]  # fmt: skip
    assert shapes_in(text)["i"] == ["B", 6]


def test_small_sets_stay_with_onnx_runtime() -> None:
    assert partition(encoder(), min_nodes=3).sets == [0, 0, 0, -1, -1, -1]
    one = model([node("Exp", "x", "y")], {"x": (F, ["N"])}, ["y"])
    assert partition(one, min_nodes=3).sets == [0], "a whole graph is never too small"


def test_excluded_operators_and_nodes_are_left() -> None:
    found = partition(encoder(), exclude=["Exp", "Relu_b"], min_nodes=1)
    assert found.sets == [0, -1, 1, -1, 2, -1] and found.reasons[5] == "Exp_y (Exp): the option exclude names it"
    assert partition(encoder(), exclude=["Missing"]).sets == partition(encoder()).sets


def test_a_body_with_an_unknown_operator_leaves_its_node() -> None:
    then = helper.make_graph([node("Cast", "x", "i", to=6), tfidf("i", "t")], "t", [],
                             [helper.make_tensor_value_info("t", 1, [3])])  # fmt: skip
    other = helper.make_graph([node("Neg", "x", "e")], "e", [], [helper.make_tensor_value_info("e", 1, ["N"])])
    nodes = [
        node("ReduceSum", "x", "s", keepdims=0), node("Greater", "s z", "c"), node("Mul", "x x", "q"),
        helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other), node("Abs", "y", "r"),
        node("Exp", "r", "u"),
    ]  # fmt: skip
    assert partition(model(nodes, {"x": (F, ["N"])}, ["u", "q"], {"z": np.float32(0)})).sets == [0, 0, 0, -1, 1, 1]


def test_elements_of_four_bits_do_not_pass() -> None:
    nodes = [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "d"), node("Add", "d x", "y")]
    zero = onnx.numpy_helper.from_array(np.array(0, np.int8), "z")
    m = model(nodes, {"x": (F, ["N"])}, ["y", "q"], {"s": np.float32(0.5)}, opset=21)
    zero.data_type = onnx.TensorProto.INT4
    m.graph.initializer.append(zero)
    found = partition(m, min_nodes=1)
    assert found.sets == [-1, -1, 0] and "q is int4, which does not pass" in found.reasons[0]
    del m.graph.output[1]
    assert partition(m).sets == [0, 0, 0], "inside a set they are no obstacle"


def test_the_text_of_an_empty_partition_is_read() -> None:
    assert Partition([]).text().startswith("polydyn-sets 1 0 0 0\n\nshapes {}") and shapes_in("") == {}
