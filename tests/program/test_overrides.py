"""Initializers that are also inputs, compared with ONNX Runtime: passed, omitted, saved, required as constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

import polydyn
from polydyn.errors import InputError

X = np.arange(6, dtype=np.float32).reshape(2, 3)
SEVEN = np.array([5, 6, 7], np.float32)


def model(nodes: list[onnx.NodeProto], outputs: dict[str, int], ir_version: int = 9, **free: Any) -> onnx.ModelProto:
    """Build a model. ``free``: initializers that are inputs, an array or a list of texts each."""
    constants = [
        numpy_helper.from_array(a, n) if isinstance(a, np.ndarray)
        else helper.make_tensor(n, T.STRING, [len(a)], [t.encode() for t in a]) for n, a in free.items()
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info(c.name, c.data_type, list(c.dims)) for c in constants]
    inputs.insert(0, helper.make_tensor_value_info("x", T.FLOAT, ["N", 3]))
    results = [helper.make_tensor_value_info(n, t, None) for n, t in outputs.items()]
    graph = helper.make_graph(nodes, "g", inputs, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=ir_version)


def product(**more: Any) -> onnx.ModelProto:
    """Build ``y = x * w``; the initializer is an output too."""
    return model([helper.make_node("Mul", ["x", "w"], ["y"])], {"y": T.FLOAT, "w": T.FLOAT},
                 w=np.array([1, 2, 3], np.float32), **more)  # fmt: skip


def same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_a_call_gives_an_initializer_or_leaves_it_out(tmp_path: Path) -> None:
    m = product()
    program, theirs = polydyn.compile(m, threads=1), onnxruntime.InferenceSession(m.SerializeToString())
    program.save(tmp_path / "p")
    loaded, mine = polydyn.load(tmp_path / "p"), polydyn.InferenceSession(m.SerializeToString())
    assert [i.name for i in mine.get_inputs()] == ["x"] and list(program.inputs) == ["x"]
    ours, them = mine.get_overridable_initializers(), theirs.get_overridable_initializers()
    assert [(i.name, i.type, i.shape) for i in ours] == [(i.name, i.type, i.shape) for i in them]
    for feeds in ({"x": X}, {"x": X, "w": SEVEN}, {"x": X, "w": np.array([1, 2, 3], np.float32)}):
        expected = theirs.run(None, feeds)
        for results in (program.run(feeds).values(), loaded.run(feeds).values(), mine.run(None, feeds)):
            same(results, expected)
        same(program.bind(feeds)().values(), expected)
    for wrong in (SEVEN[:2], SEVEN.astype(np.float64)):
        with pytest.raises(InputError):
            program.run({"x": X, "w": wrong})
    with pytest.raises(InputError, match="no input 'w'"):
        polydyn.compile(product(ir_version=3), threads=1).run({"x": X, "w": SEVEN})


def test_an_initializer_as_a_shape_and_one_that_must_be_constant() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["m"]), helper.make_node("Reshape", ["m", "s"], ["y"]),
        helper.make_node("CumSum", ["m", "axis"], ["z"]),
    ]  # fmt: skip
    m = model(nodes, {"y": T.FLOAT, "z": T.FLOAT}, w=SEVEN, s=np.array([-1, 3]), axis=np.array(0))
    program, session = polydyn.compile(m, threads=1), onnxruntime.InferenceSession(m.SerializeToString())
    for more in ({}, {"s": np.array([3, -1])}, {"w": SEVEN + 1, "axis": np.array(0)}):
        same(program.run({"x": X, **more}).values(), session.run(None, {"x": X, **more}))
    with pytest.raises(InputError, match=r"'axis' must keep the model's value: axis of CumSum must be constant"):
        program.run({"x": X, "axis": np.array(1)})


def test_texts_that_are_initializers_and_inputs() -> None:
    nodes = [helper.make_node("Greater", ["x", "w"], ["c"]), helper.make_node("Where", ["c", "t", "u"], ["y"])]
    m = model(nodes, {"y": T.STRING}, w=SEVEN / 3, t=["a"], u=["b"])
    program, session = polydyn.compile(m, threads=1), onnxruntime.InferenceSession(m.SerializeToString())
    for more in ({}, {"t": np.array(["hello"], object)}, {"w": SEVEN / 4}):
        same(program.run({"x": X, **more}).values(), session.run(None, {"x": X, **more}))


def test_large_initializers_stay_constant() -> None:
    w = np.ones((3, 90000), np.float32)
    program = polydyn.compile(model([helper.make_node("MatMul", ["x", "w"], ["y"])], {"y": T.FLOAT}, w=w), threads=1)
    assert program.run({"x": X, "w": w})["y"].shape == (2, 90000)
    with pytest.raises(InputError, match="more than 1048576 bytes"):
        program.run({"x": X, "w": w + 1})
