"""Operators that are replaced by their bodies: names, outputs, attributes."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from polydyn.graph import reference
from polydyn.graph.expand import import_model
from tests.support.one_node import check, expected


def chained(names: tuple[str, str], op: str = "Hardmax") -> onnx.ModelProto:
    """Build two consecutive nodes; ``names`` are the tensor between them and the result."""
    nodes = [helper.make_node("Neg", ["x"], [names[0]]), helper.make_node(op, [names[0]], [names[1]])]
    graph = helper.make_graph(
        nodes, "two", [helper.make_tensor_value_info("x", 1, ["B", 5])], [helper.make_empty_tensor_value_info(names[1])]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_names_inside_a_body_are_no_names_outside() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    for op, inner in (("Hardmax", "ArgMax_0"), ("Hardmax", ".ArgMax_0"), ("Shrink", "Lambd"), ("Shrink", ".Lambd")):
        model = chained((inner, "y"), op)
        check(model, {"x": x})


def test_a_result_that_is_read_inside_too_is_not_copied() -> None:
    """The sum of SkipLayerNormalization is an output and also the input of its normalization."""
    node = helper.make_node(
        "SkipSimplifiedLayerNormalization", ["x", "x", "g"], ["y", "", "", "t"], domain="com.microsoft"
    )
    graph = helper.make_graph(
        [node], "one", [helper.make_tensor_value_info("x", 1, ["B", 5]), helper.make_tensor_value_info("g", 1, [5])],
        [helper.make_empty_tensor_value_info(o) for o in "yt"],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    imported = import_model(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    readers = [n.output for n in imported.nodes if "t" in n.inputs]
    assert "t" in {n.output for n in imported.nodes} and len(readers) >= 2
    x = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal(reference.evaluate(imported, {"x": x, "g": x[0]})["t"], 2 * x)


def test_a_function_reads_attributes_that_the_node_leaves_out() -> None:
    model = chained(("a", "y"), "Shrink")
    assert expected(model, {"x": np.ones((1, 5), np.float32)})[0].shape == (1, 5)
    check(model, {"x": np.array([[-2, -0.2, 0, 0.2, 2]], np.float32)})
