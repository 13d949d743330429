"""``polydyn.to_half``: which tensors become 16-bit floats, and that results stay right where 16 bits do not suffice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.errors import InputError
from polydyn.quantization.types import infer_types
from polydyn.schedules.expr import Array
from tests.support.stored import path_of

RNG = np.random.default_rng(0)
F, I64 = TensorProto.FLOAT, TensorProto.INT64
info = helper.make_tensor_value_info


def model(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[Any], outputs: Sequence[Any], constants: Mapping[str, Array] = {},
    opset: int = 17,
) -> onnx.ModelProto:  # fmt: skip
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs),
                              [numpy_helper.from_array(a, n) for n, a in constants.items()])  # fmt: skip
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)], ir_version=8
    )


def by_onnxruntime(m: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    onnx.checker.check_model(m)
    session = ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    types = {i.name: i.type for i in session.get_inputs()}
    halves = {n: a.astype(np.float16) if types[n] == "tensor(float16)" else a for n, a in feeds.items()}
    results: list[Array] = session.run(None, halves)
    return results


def relative(got: Array, expected: Array) -> float:
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(got - wide) / np.linalg.norm(wide))


@pytest.mark.parametrize("keep_io", [False, True])
def test_models_run_in_halves_in_onnxruntime(keep_io: bool) -> None:
    source = path_of("gpt2_past_tiny")
    made = polydyn.to_half(source, keep_io=keep_io).model
    assert isinstance(made, onnx.ModelProto)
    kind = "float32" if keep_io else "float16"
    names = [v.name for v in made.graph.input if "past" in v.name]
    past = {n: RNG.standard_normal((2, 4, 5, 8)).astype(np.float32) for n in names}
    feeds = past | {"input_ids": RNG.integers(0, 100, (2, 3)), "attention_mask": np.ones((2, 8), np.int64)}
    for theirs, e in zip(by_onnxruntime(made, feeds), by_onnxruntime(onnx.load(source), feeds), strict=True):
        assert theirs.dtype == kind and relative(theirs, e) < 5e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_both_types_run_in_polydyn_and_their_caches_too(dtype: str) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Concat", ["past", "h"], ["present"], axis=0),
        helper.make_node("Softmax", ["present"], ["y"], axis=0),
    ]
    m = model(nodes, [info("x", F, ["L", 24]), info("past", F, ["P", 32])],
              [info("y", F, ["T", 32]), info("present", F, ["T", 32])],
              {"w": RNG.standard_normal((24, 32)).astype(np.float32)})  # fmt: skip
    made = polydyn.to_half(m, dtype=dtype, compare={"L": 3, "P": 5})
    program = polydyn.compile(made.model, threads=1)
    assert program.appendable == {"present": "past"} and program.inputs["past"].startswith(dtype)
    high = 5e-3 if dtype == "float16" else 0.03
    assert set(made.report.outputs) == {"y", "present"} and all(1e-5 < e < high for e in made.report.outputs.values())


def test_angles_of_positions_stay_exact() -> None:
    nodes = [
        helper.make_node("Cast", ["positions"], ["p"], to=F),
        helper.make_node("Mul", ["p", "frequencies"], ["angles"]),
        helper.make_node("Sin", ["angles"], ["sines"]),
        helper.make_node("Mul", ["x", "sines"], ["y"]),
    ]
    frequencies = (10.0 ** -np.arange(0, 4, 0.5)).astype(np.float32)
    m = model(nodes, [info("positions", I64, ["L", 1]), info("x", F, ["L", 8])], [info("y", F, ["L", 8])],
              {"frequencies": frequencies})  # fmt: skip
    feeds = {"positions": np.array([[3001], [4097], [7]]), "x": np.ones((3, 8), np.float32)}
    (expected,) = by_onnxruntime(m, feeds)
    made = polydyn.to_half(m).model
    assert isinstance(made, onnx.ModelProto)
    assert relative(by_onnxruntime(made, feeds)[0], expected) < 1e-3
    assert {t.name for t in made.graph.initializer} == {"frequencies_float", "half_min", "half_max"}
    naive = np.sin((feeds["positions"].astype(np.float16) * frequencies.astype(np.float16)).astype(np.float32))
    assert relative(naive, expected) > 0.1, "the control: rounded angles are wrong"


def test_masks_of_the_lowest_float_stay_finite() -> None:
    nodes = [
        helper.make_node("Cast", ["mask"], ["m"], to=F),
        helper.make_node("Sub", ["one", "m"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "lowest"], ["bias"]),
        helper.make_node("Add", ["x", "bias"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"], axis=-1),
    ]
    constants = {"one": np.array(1, np.float32), "lowest": np.array(np.finfo(np.float32).min)}
    m = model(nodes, [info("mask", I64, ["B", "L"]), info("x", F, ["B", "L"])], [info("y", F, ["B", "L"])], constants)
    feeds = {"mask": np.array([[0, 0, 0], [1, 0, 1]]), "x": np.zeros((2, 3), np.float32)}
    made = polydyn.to_half(m).model
    assert isinstance(made, onnx.ModelProto)
    np.testing.assert_allclose(by_onnxruntime(made, feeds)[0], [[1 / 3] * 3, [0.5, 0, 0.5]], atol=1e-3)


def body_of_a_loop() -> onnx.GraphProto:
    nodes = [
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.array(2, np.float32))),
        helper.make_node("Mul", ["state", "two"], ["doubled"]),
        helper.make_node("Add", ["doubled", "inner"], ["next"]),
        helper.make_node("Add", ["next", "outer"], ["seen"]),
        helper.make_node("Identity", ["go"], ["go_on"]),
    ]
    return helper.make_graph(
        nodes, "body", [info("k", I64, []), info("go", TensorProto.BOOL, []), info("state", F, ["N"])],
        [info("go_on", TensorProto.BOOL, []), info("next", F, ["N"]), info("seen", F, ["N"])],
        [numpy_helper.from_array(np.array([0.5], np.float32), "inner")],
    )  # fmt: skip


def test_loops_their_constants_and_operators_without_halves() -> None:
    nodes = [
        helper.make_node("Loop", ["times", "", "x"], ["last", "all"], "loop", body=body_of_a_loop()),
        helper.make_node("ConstantOfShape", ["shape"], ["threes"],
                         value=numpy_helper.from_array(np.array([3], np.float32))),
        helper.make_node("Add", ["last", "threes"], ["shifted"]),
        helper.make_node("DynamicQuantizeLinear", ["shifted"], ["q", "scale", "zero"], "bytes"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["back"]),
        helper.make_node("Mul", ["back", "outer"], ["y"]),
    ]  # fmt: skip
    constants = {"outer": np.array([0.25], np.float32), "times": np.array(3), "shape": np.array([4])}
    m = model(nodes, [info("x", F, ["N"])], [info("y", F, ["N"]), info("all", F, ["T", "N"])], constants)
    types = infer_types(m)
    assert types["last"] == types["doubled"] == types["scale"] == types["back"] == F
    assert types["q"] == TensorProto.UINT8 and types["go_on"] == TensorProto.BOOL
    feeds = {"x": RNG.standard_normal(4).astype(np.float32)}
    made = polydyn.to_half(m)
    assert isinstance(made.model, onnx.ModelProto)
    for got, e in zip(by_onnxruntime(made.model, feeds), by_onnxruntime(m, feeds), strict=True):
        assert got.dtype == np.float16 and relative(got, e) < 5e-3


def test_what_keep_names_stays_float32_and_large_numbers_are_counted() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "first"], ["h"], "first_product"),
        helper.make_node("Gelu", ["h"], ["g"], "gelu", domain="com.microsoft"),
        helper.make_node("MatMul", ["g", "second"], ["y"], "second_product"),
    ]
    first = RNG.standard_normal((64, 64)).astype(np.float32)
    first[0, :3] = 1e6
    m = model(nodes, [info("x", F, ["M", 64])], [info("y", F, ["M", 64])],
              {"first": first, "second": RNG.standard_normal((64, 64)).astype(np.float32)})  # fmt: skip
    plain = polydyn.to_half(m)
    assert [x.bits for x in plain.report.layers] == [16, 16]
    assert plain.report.notes == ("first: 3 numbers beyond float16 became its largest",)
    kept = polydyn.to_half(m, keep=["first_*"])
    assert isinstance(kept.model, onnx.ModelProto)
    layers = {x.name: x for x in kept.report.layers}
    assert layers["first"].bits == 32 and "keep" in layers["first"].reason and layers["second"].bits == 16
    assert kept.report.notes == ("first_product computes in float32: keep names it",)
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 1e-2
    assert relative(by_onnxruntime(kept.model, {"x": x})[0], by_onnxruntime(m, {"x": x})[0]) < 1e-2


def test_files_and_wrong_arguments(tmp_path: Path) -> None:
    out = tmp_path / "half.onnx"
    made = polydyn.to_half(path_of("bert_tiny"), out)
    assert made.model == out and made.report.bytes_after < 0.6 * made.report.bytes_before
    onnx.checker.check_model(str(out))
    with pytest.raises(InputError, match="dtype is 'float8'"):
        polydyn.to_half(path_of("bert_tiny"), dtype="float8")
    with pytest.raises(InputError, match="cannot write"):
        polydyn.to_half(path_of("bert_tiny"), tmp_path / "none" / "half.onnx")


def test_sparse_constants_become_dense_halves() -> None:
    values = numpy_helper.from_array(np.array([1.5, -2], np.float32), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([1, 5])), [3, 2])
    constant = helper.make_node("Constant", [], ["v"], sparse_value=sparse)
    nodes = [constant, helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["x", "v"], ["b"]),
             helper.make_node("Add", ["a", "b"], ["y"])]  # fmt: skip
    source = model(nodes, [info("x", F, ["N", 3])], [info("y", F, ["N", 2])], opset=13)
    source.graph.sparse_initializer.append(sparse)
    made = polydyn.to_half(source).model
    assert isinstance(made, onnx.ModelProto) and source.graph.sparse_initializer
    x = np.arange(6, dtype=np.float16).reshape(2, 3)
    expected = 2 * x @ np.array([[0, 1.5], [0, 0], [0, -2]], np.float16)
    assert np.array_equal(polydyn.compile(made, threads=1).run({"x": x})["y"], expected)
