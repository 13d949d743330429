"""Sequences in loops, and those whose number of elements is a size, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper

import polydyn
from polydyn.errors import UnsupportedError
from polydyn.graph.expand import import_model
from tests.support.marks import slow

RNG = np.random.default_rng(3)
Nodes = list[onnx.NodeProto]


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    names = ["" if x == "-" else x for x in inputs.split()]
    return helper.make_node(op, names, outputs.split(), name=f"{op}_{outputs.split()[0]}", **attributes)


def value(name: str, kind: int, is_sequence: bool = False) -> onnx.ValueInfoProto:
    make = helper.make_tensor_sequence_value_info if is_sequence else helper.make_tensor_value_info
    return make(name, kind, None)


def body(nodes: Nodes, states: Mapping[str, str], sequences: str = "", scans: str = "") -> onnx.GraphProto:
    """Build a body. ``states``: maps each state to its result; ``sequences``: those that are sequences."""
    kinds = [(x in sequences.split()) for x in states]
    ins = [helper.make_tensor_value_info("i", T.INT64, []), helper.make_tensor_value_info("go", T.BOOL, [])]
    ins += [*(value(x, 1, k) for x, k in zip(states, kinds, strict=True))]
    outs = [value("on", T.BOOL), *(value(x, 1, k) for x, k in zip(states.values(), kinds, strict=True))]
    return helper.make_graph(nodes, "body", ins, [*outs, *(value(x, 1) for x in scans.split())])


ROWS: Nodes = [
    node("Shape", "x", "n_", start=0, end=1), node("Squeeze", "n_", "n"), node("SequenceEmpty", "", "none", dtype=1),
    node("Loop", "n - none", "rows", body=body(
        [node("Identity", "go", "on"), node("Gather", "x i", "row"), node("Relu", "row", "e"),
         node("SequenceInsert", "s e", "t")], {"s": "t"}, "s",
    )),
]  # fmt: skip
"""A Loop that appends every row of x."""


START = [node("Gather", "x zero", "first"), node("Sub", "first first", "start")]


def model(nodes: Nodes, rank: int, outputs: str = "y", constants: Mapping[str, Any] | None = None) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "sequences", [helper.make_tensor_value_info("x", 1, [f"d{a}" for a in range(rank)])],
        [helper.make_empty_tensor_value_info(o) for o in outputs.split()],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def check(m: onnx.ModelProto, *shapes: Sequence[int]) -> None:
    program = polydyn.compile(m, threads=1)
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    for shape in shapes:
        x = RNG.standard_normal(shape).astype(np.float32)
        for (name, got), want in zip(program.run({"x": x}).items(), session.run(None, {"x": x}), strict=True):
            assert (got.dtype, got.shape) == (want.dtype, want.shape), name
            np.testing.assert_allclose(got, want, 1e-6, err_msg=name)


SHAPES = (3, 2, 4), (1, 1, 1), (5, 7, 2), (2, 3, 0)


@pytest.mark.parametrize("new_axis", [0, 1])
@pytest.mark.parametrize("axis", [0, slow(1), -1, slow(-2)])
def test_rows_appended_in_a_loop_are_concatenated(axis: int, new_axis: int) -> None:
    check(model([*ROWS, node("ConcatFromSequence", "rows", "y", axis=axis, new_axis=new_axis)], 3), *SHAPES)


@pytest.mark.parametrize("new_axis", [0, 1])
@pytest.mark.parametrize("axis", [0, slow(1), -1])
def test_rows_appended_to_known_elements(axis: int, new_axis: int) -> None:
    nodes = [*ROWS[:2], *START, node("Exp", "first", "second"), node("SequenceConstruct", "first second", "none")]
    last = node("ConcatFromSequence", "rows", "y", axis=axis, new_axis=new_axis)
    check(model([*nodes, ROWS[3], last], 3, "y", {"zero": np.array(0)}), *SHAPES)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("axis", "target", "new_axis"), [(0, 1, 0), (1, -1, 1), slow(-1, 0, 0), slow(-2, 1, 1)])
def test_slices_are_concatenated(given: bool, keepdims: int, axis: int, target: int, new_axis: int) -> None:
    nodes = [node("SplitToSequence", "x one" if given else "x", "s", axis=axis, keepdims=keepdims)]
    nodes += [node("ConcatFromSequence", "s", "y", axis=target, new_axis=new_axis)]
    check(model(nodes, 3, "y", {"one": np.array(1)}), *SHAPES[:3])


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_loop_reads_slices(keepdims: int) -> None:
    step = [
        node("Identity", "go", "on"), node("SequenceAt", "s i", "e"), node("Add", "sum e", "total"),
        node("Mul", "total two", "o"),
    ]  # fmt: skip
    nodes = [
        node("SplitToSequence", "x", "s", axis=1, keepdims=keepdims), node("SequenceLength", "s", "n"),
        node("SequenceAt", "s zero", "first"), node("Sub", "first first", "start"),
        node("Loop", "n - start", "y z", body=body(step, {"sum": "total"}, "", "o")),
    ]  # fmt: skip
    check(model(nodes, 2, "y z n", {"zero": np.array(0), "two": np.float32(2)}), (3, 4), (1, 1), (2, 9))


def test_two_sequences_a_state_and_a_scan_output_of_one_loop() -> None:
    step = [
        node("Identity", "go", "on"), node("Gather", "x i", "row"), node("Add", "sum row", "total"),
        node("SequenceInsert", "s total", "s2"), node("Neg", "row", "minus"), node("SequenceInsert", "t minus", "t2"),
        node("Abs", "row", "o"),
    ]  # fmt: skip
    nodes = [
        *ROWS[:3], node("SequenceEmpty", "", "none2", dtype=1), *START,
        node("Loop", "n - none start none2", "a total b scan",
             body=body(step, {"s": "s2", "sum": "total", "t": "t2"}, "s t", "o")),
        node("ConcatFromSequence", "a", "y", axis=0, new_axis=1), node("ConcatFromSequence", "b", "z", axis=0),
        node("SequenceLength", "a", "count"), node("SequenceAt", "b minus_one", "last"),
    ]  # fmt: skip
    m = model(nodes, 2, "y total z scan count last", {"minus_one": np.array(-1), "zero": np.array(0)})
    check(m, (3, 4), (1, 1), (9, 2))


def test_a_second_loop_reads_what_the_first_appended() -> None:
    step = [node("Identity", "go", "on"), node("SequenceAt", "rows i", "e"), node("Add", "sum e", "total")]
    nodes = [*ROWS, *START, node("Loop", "n - start", "y", body=body(step, {"sum": "total"}))]
    check(model(nodes, 2, "y", {"zero": np.array(0)}), (3, 4), (1, 1), (9, 2))


def test_a_body_is_mapped_over_known_elements() -> None:
    """The body reads an element of each sequence, a tensor of the call, one from outside, and has a constant."""
    values = [value(x, 1) for x in ("e", "f", "g")]
    inner = [node("Mul", "e f", "p"), node("Add", "p g", "q"), node("Sub", "q x", "d"), node("Mul", "e half", "h")]
    half = onnx.numpy_helper.from_array(np.float32(0.5), "half")
    mapped = helper.make_graph(inner, "body", values, [value("d", 1), value("h", 1)], [half])
    nodes = [
        node("Exp", "x", "a"), node("SequenceConstruct", "a x", "s"), node("SequenceConstruct", "x a", "t"),
        node("SequenceMap", "s t x", "u v", body=mapped), node("ConcatFromSequence", "u", "y", axis=0),
        node("SequenceAt", "v last", "z"),
    ]  # fmt: skip
    proto = model(nodes, 2, "y z", {"last": np.array(-1)})
    program = polydyn.compile(proto, threads=1)
    for shape in ((3, 2), (1, 1), (5, 33)):
        x = RNG.standard_normal(shape).astype(np.float32)
        got = program.run({"x": x})
        np.testing.assert_allclose(got["y"], np.concatenate([np.exp(x) * x] * 2), 1e-5, 1e-6)
        np.testing.assert_allclose(got["z"], x / 2, 1e-6)


@pytest.mark.parametrize("change", ["front", "length", "twice", "result"])
def test_other_uses_of_a_sequence_in_a_loop_are_refused_by_name(change: str) -> None:
    step: dict[str, Nodes] = {
        "front": [node("SequenceInsert", "s e zero", "t")], "twice": [node("SequenceInsert", "s e", "u"),
        node("SequenceInsert", "u e", "t")], "result": [node("SequenceInsert", "s e", "t")],
        "length": [node("SequenceLength", "s", "k"), node("SequenceInsert", "s e", "t")],
    }  # fmt: skip
    inner = [node("Identity", "go", "on"), node("Gather", "x i", "e"), *step[change]]
    nodes = [*ROWS[:3], node("Loop", "n - none", "rows", body=body(inner, {"s": "t"}, "s"))]
    last = [] if change == "result" else [node("ConcatFromSequence", "rows", "y", axis=0)]
    with pytest.raises(UnsupportedError, match=r"Sequence(?s:.)*use tensors"):
        import_model(model([*nodes, *last], 2, "rows" if change == "result" else "y", {"zero": np.array(0)}))


def test_a_split_into_an_unknown_number_of_parts_names_what_sequences_may_be() -> None:
    nodes = [node("SplitToSequence", "x two", "s", axis=0), node("ConcatFromSequence", "s", "y", axis=0)]
    inputs = [helper.make_tensor_value_info("x", T.FLOAT, ["N", 4])]
    two = onnx.numpy_helper.from_array(np.array(2), "two")
    graph = helper.make_graph(nodes, "m", inputs, [helper.make_empty_tensor_value_info("y")], [two])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    with pytest.raises(UnsupportedError, match=r"SplitToSequence(?s:.)*known number of elements(?s:.)*use tensors"):
        polydyn.compile(proto)
    x = RNG.random((5, 4), np.float32)
    with pytest.warns(polydyn.errors.FallbackWarning):
        program = polydyn.compile(proto, threads=1, options=polydyn.Options(fallback="onnxruntime"))
    np.testing.assert_array_equal(program.run({"x": x})["y"], x)
