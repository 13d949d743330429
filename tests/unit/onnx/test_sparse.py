"""Sparse constants: read as dense arrays, and rejected if their indices do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.errors import ModelError
from polydyn.graph.expand import import_model
from polydyn.graph.importer import load_model
from tests.support.tiny import model, node, run

F = "float32"
X = {"x": (F, ["N", 4])}
LINEAR = [0, 5, 11]
PAIRS = [[0, 0], [1, 2], [3, 2]]
DENSE = np.zeros((4, 3), np.float32)
DENSE.reshape(-1)[LINEAR] = [1.5, -2, 3]


def sparse(
    name: str, indices: Sequence[object] = LINEAR, values: Sequence[float] = (1.5, -2, 3)
) -> onnx.SparseTensorProto:
    numbers = numpy_helper.from_array(np.array(values, np.float32), name)
    positions = np.array(indices, np.int64) if len(indices) else np.zeros(0, np.int64)
    return helper.make_sparse_tensor(numbers, numpy_helper.from_array(positions), [4, 3])


@pytest.mark.parametrize("indices", [LINEAR, PAIRS], ids=["linear", "pairs"])
def test_a_sparse_initializer_is_a_dense_constant(indices: Sequence[object]) -> None:
    m = model([node("MatMul", "x w", "y")], X, ["y"])
    m.graph.sparse_initializer.append(sparse("w", indices))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert np.array_equal(run(import_model(m), {"x": x})["y"], x @ DENSE)
    assert np.array_equal(load_model(m).constants["w"], DENSE)


def test_a_sparse_constant_may_be_an_attribute_and_empty() -> None:
    nodes = [helper.make_node("Constant", [], ["w"], sparse_value=sparse("", PAIRS)),
             helper.make_node("Constant", [], ["z"], sparse_value=sparse("", [], [])),
             node("MatMul", "x w", "a"), node("MatMul", "x z", "b")]  # fmt: skip
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    got = run(import_model(model(nodes, X, ["a", "b"])), {"x": x})
    assert np.array_equal(got["a"], x @ DENSE) and not got["b"].any() and got["b"].shape == (2, 3)


def test_a_sparse_initializer_of_a_branch_hides_nothing_outside() -> None:
    branches = []
    for op in ("Add", "Sub"):
        result = helper.make_tensor_value_info("r", TensorProto.FLOAT, None)
        branches.append(helper.make_graph([node(op, "x w", "r")], op, [], [result]))
        branches[-1].sparse_initializer.append(sparse("w"))
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])]
    m = model(nodes, {"x": (F, [4, 3])}, ["y"], {"c": np.array(False)})
    x = np.ones((4, 3), np.float32)
    assert np.array_equal(run(import_model(m), {"x": x})["y"], x - DENSE)


@pytest.mark.parametrize(("indices", "values", "message"), [
    ([0, 5, 12], (1, 2, 3), "an index is outside of dims"), ([0, -1, 2], (1, 2, 3), "an index is outside of dims"),
    ([[0, 0], [1, 2], [0, 3]], (1, 2, 3), "an index is outside of dims"), ([0, 5, 5], (1, 2, 3), "occurs twice"),
    ([0, 5], (1, 2, 3), r"indices of shape \[2\] for 3 values"),
])  # fmt: skip
def test_sparse_indices_that_do_not_fit_are_rejected(
    indices: Sequence[object], values: Sequence[float], message: str
) -> None:
    m = model([node("MatMul", "x w", "y")], X, ["y"])
    m.graph.sparse_initializer.append(sparse("w", indices, values))
    with pytest.raises(ModelError, match=rf"(?s)sparse constant w: .*{message}.*tensor: w.*remedy: "):
        load_model(m)


def test_sparse_initializers_have_names_of_their_own() -> None:
    m = model([node("MatMul", "x w", "y")], X, ["y"], {"w": DENSE})
    m.graph.sparse_initializer.append(sparse("w"))
    with pytest.raises(ModelError, match="the initializer w is there twice"):
        load_model(m)
