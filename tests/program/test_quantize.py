"""``polydyn.quantize``: which weights it rounds, how well, and that ONNX Runtime and polydyn agree on the result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.errors import InputError, ModelError
from polydyn.quantization.blocks import pack_bits, round_blocks
from polydyn.quantization.model_file import LARGE, open_model
from polydyn.schedules.expr import Array
from tests.support.marks import slow
from tests.support.stored import path_of

RNG = np.random.default_rng(0)
K, N = 64, 48


def weight(*shape: int) -> Array:
    """Draw weights of mean square 1 over the sum."""
    return (RNG.standard_normal(shape) / np.sqrt(K)).astype(np.float32)


def inner_graph(output: str, weights: str, constants: dict[str, Array]) -> onnx.GraphProto:
    """Build a branch of an If: a product by a weight of the branch or of the graph around it."""
    return helper.make_graph(
        [helper.make_node("MatMul", ["x", weights], [output], f"{output}_product")], output, [],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, [None, None])],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )  # fmt: skip


def every_kind() -> onnx.ModelProto:
    """Build a model in which weights are read in all ways that quantize distinguishes."""
    nodes = [
        helper.make_node("MatMul", ["x", "plain"], ["y0"], "plain_product"),
        helper.make_node("Transpose", ["turned"], ["turned_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "turned_t"], ["y1"], "turned_product"),
        helper.make_node("Gemm", ["x", "turned", "bias"], ["y2"], "gemm", transB=1, alpha=0.5),
        helper.make_node("MatMul", ["x", "plain"], ["y3"], "second_reader"),
        helper.make_node("MatMul", ["x3", "batched"], ["y4"], "batched_product"),
        helper.make_node("MatMul", ["x", "free"], ["y5"], "free_product"),
        helper.make_node("MatMul", ["left", "xt"], ["y6"], "left_product"),
        helper.make_node("MatMul", ["x50", "odd"], ["y7"], "odd_product"),
        helper.make_node("MatMul", ["x48", "half"], ["y8"], "half_product"),
        helper.make_node("Constant", [], ["made"], value=numpy_helper.from_array(weight(K, N), "made")),
        helper.make_node("MatMul", ["x", "made"], ["y9"], "made_product"),
        helper.make_node("Gather", ["tied", "ids"], ["rows"], "embedding"),
        helper.make_node("Transpose", ["tied"], ["tied_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["rows", "tied_t"], ["y10"], "head"),
        helper.make_node("MatMul", ["x", "kept"], ["y11"], "kept_product"),
        helper.make_node("If", ["choose"], ["y12"], "branches",
                         then_branch=inner_graph("a", "plain", {}),
                         else_branch=inner_graph("b", "inside", {"inside": weight(K, N)})),
        helper.make_node("Slice", ["x", "zero", "fifty", "one"], ["x50"]),
        helper.make_node("Slice", ["x", "zero", "most", "one"], ["x48"]),
        helper.make_node("Unsqueeze", ["x", "zero"], ["x3"]),
        helper.make_node("Transpose", ["x48"], ["xt"], perm=[1, 0]),
    ]  # fmt: skip
    nodes = [*nodes[17:], *nodes[:17]]
    floats = {"plain": weight(K, N), "turned": weight(N, K), "bias": weight(N), "batched": weight(3, K, N),
              "free": weight(K, N), "left": weight(80, 48), "odd": weight(50, 96), "half": weight(48, 96),
              "tied": weight(100, K), "kept": weight(K, N)}  # fmt: skip
    integers = {"zero": [0], "one": [1], "fifty": [50], "most": [48]}
    f = TensorProto.FLOAT
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "kinds",
        [info("x", f, ["M", K]), info("ids", TensorProto.INT64, ["I"]), info("choose", TensorProto.BOOL, []),
         info("free", f, [K, N])],
        [info(f"y{k}", f, [None] * (3 if k == 4 else 2)) for k in range(13)],
        [numpy_helper.from_array(a, n) for n, a in floats.items()]
        + [numpy_helper.from_array(np.array(a, np.int64), n) for n, a in integers.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def calls(rows: int = 5) -> dict[str, Array]:
    x = RNG.standard_normal((rows, K)).astype(np.float32)
    return {"x": x, "ids": np.array([3, 99, 0]), "choose": np.array(rows % 2 == 1)}


def by_onnxruntime(model: Any, feeds: dict[str, Array]) -> dict[str, Array]:
    data = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def by_reference(model: Any, feeds: dict[str, Array]) -> dict[str, Array]:
    """Return the results of ONNX's evaluator. Without VNNI, ONNX Runtime's products of bytes saturate at 16 bits."""
    session = onnx.reference.ReferenceEvaluator(model)
    return dict(zip(session.output_names, session.run(None, feeds), strict=True))


def relative(got: Array, expected: Array) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


FLOAT = {"batched_product", "free_product", "left_product", "odd_product", "kept_product", "embedding"}
"""Nodes of ``every_kind`` whose weights stay floats in blocks."""


COMPILED = (2, 4, 8, 10, 12)
"""Outputs of ``every_kind`` that most cases compile: Gemm, a batch, few steps, tied weights, the branches of an If."""


def only(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Return a copy of a model with these outputs alone."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [o for o in model.graph.output if o.name in outputs]
    del copy.graph.output[:]
    copy.graph.output.extend(kept)
    return copy


@pytest.mark.parametrize(
    ("settings", "low", "high", "compiled"),
    [
        ({"bits": 4, "symmetric": False, "search": False, "block": 16}, 0.03, 0.12, COMPILED),
        slow({"bits": 4, "symmetric": False, "search": False, "block": 16}, 0.03, 0.12, range(13)),
        slow({"bits": 4}, 0.03, 0.12, range(13)),
        slow({"bits": 8, "symmetric": False}, 1e-4, 0.01, range(13)),
        ({"method": "dynamic"}, 1e-3, 0.03, COMPILED),
        slow({"method": "dynamic"}, 1e-3, 0.03, range(13)),
    ],
)
def test_every_kind_of_weight_is_right_or_stays_a_float_for_a_reason(
    settings: dict[str, Any], low: float, high: float, compiled: Sequence[int]
) -> None:
    model = every_kind()
    before = model.SerializeToString()
    made = polydyn.quantize(model, keep=["kept*"], accuracy_level=0, **settings)
    assert model.SerializeToString() == before, "the given model is not changed"
    onnx.checker.check_model(made.model)
    rounded = {x.name for x in made.report.layers if x.bits <= 8}
    floats = FLOAT - {"batched_product", "odd_product"} if "method" in settings else FLOAT
    names = {x.name for x in made.report.layers}
    assert names - rounded == floats and all(x.reason for x in made.report.layers if x.bits > 8)
    program = polydyn.compile(only(made.model, [f"y{k}" for k in compiled]), threads=1)
    for rows in (5, 2):
        feeds = calls(rows)
        other = by_reference if "method" in settings else by_onnxruntime
        expected, theirs = by_onnxruntime(model, feeds), other(made.model, feeds)
        ours = program.run({n: feeds[n] for n in program.inputs})
        for k in range(13):
            y = f"y{k}"
            if k in compiled:
                np.testing.assert_allclose(ours[y], theirs[y], rtol=1e-3, atol=2e-3)
            stays = k in (4, 5, 6, 7, 11) and not ("method" in settings and k in (4, 7))
            assert stays == (relative(theirs[y], expected[y]) < low / 2), y
            assert relative(theirs[y], expected[y]) < high, y


def test_reasons_name_what_stands_against_a_weight() -> None:
    layers = {x.name: x for x in polydyn.quantize(every_kind(), keep=["kept_prod?ct"]).report.layers}
    expected = {
        "batched_product": "3 axes", "free_product": "input of the model", "left_product": "left operand",
        "odd_product": "no multiple of 16", "kept_product": "keep names it", "embedding": "Gather reads it",
    }  # fmt: skip
    for name, words in expected.items():
        assert words in layers[name].reason and layers[name].bits == 32, name
    assert "MatMulNBits" in layers["batched_product"].reason
    small = polydyn.quantize(every_kind(), block=64).report.layers
    assert next(x.reason for x in small if x.name == "half_product") == "its 48 steps are less than a block of 64"


def test_weights_read_twice_are_stored_once_and_tied_ones_keep_their_floats() -> None:
    made = polydyn.quantize(every_kind())
    names = [t.name for t in made.model.graph.initializer]
    assert len([n for n in names if n.startswith("plain")]) == 2, "integers and scales, for three products"
    assert {"tied", "tied_q4", "tied_scales"} <= set(names)
    assert "turned" not in names and not any(n.op_type == "Constant" for n in made.model.graph.node)
    assert len([n for n in names if n.startswith("turned_q4")]) == 2, "once with Gemm's alpha"
    branch = next(a.g for n in made.model.graph.node if n.op_type == "If" for a in n.attribute if a.name[0] == "e")
    assert not branch.initializer and branch.node[0].op_type == "MatMulNBits"


def test_halves_keep_their_type_and_other_floats_stay() -> None:
    def model(dtype: int, numpy_type: Any) -> onnx.ModelProto:
        w = numpy_helper.from_array(weight(K, N).astype(numpy_type), "w")
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [info("x", dtype, ["M", K])],
            [info("y", dtype, [None, None])], [w],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    half = model(TensorProto.FLOAT16, np.float16)
    made = polydyn.quantize(half, accuracy_level=0)
    x = RNG.standard_normal((3, K)).astype(np.float16)
    expected, theirs = (by_onnxruntime(m, {"x": x})["y"].astype(np.float32) for m in (half, made.model))
    ours = polydyn.compile(made.model, threads=1).run({"x": x})["y"].astype(np.float32)
    assert relative(theirs, expected) < 0.12 and relative(ours, theirs) < 5e-3
    assert "has no float16" in polydyn.quantize(half, method="dynamic").report.layers[0].reason
    assert "has no float64" in polydyn.quantize(model(TensorProto.DOUBLE, np.float64)).report.layers[0].reason


def test_a_bound_on_the_error_mixes_bits() -> None:
    smooth = np.broadcast_to(np.linspace(-1, 1, K, dtype=np.float32)[:, None], (K, 64)) / 8
    spiky = weight(K, 64)
    spiky[::32] *= 300
    nodes = [helper.make_node("MatMul", ["x", w], [f"y{k}"], w) for k, w in enumerate(("even", "normal", "spiky"))]
    info = helper.make_tensor_value_info
    values = {"even": smooth, "normal": weight(K, 64), "spiky": spiky}
    graph = helper.make_graph(
        nodes, "mix", [info("x", TensorProto.FLOAT, ["M", K])],
        [info(f"y{k}", TensorProto.FLOAT, [None, None]) for k in range(3)],
        [numpy_helper.from_array(a, n) for n, a in values.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def bits(bound: float) -> list[int]:
        report = polydyn.quantize(model, max_error=bound).report
        assert all((x.bits == 32) == (x.error == 0) for x in report.layers)
        assert all(x.error <= bound for x in report.layers)
        return [x.bits for x in report.layers]

    errors = [x.error for x in polydyn.quantize(model).report.layers]
    assert bits(1) == [4, 4, 4] and bits(max(errors) * 0.99).count(8) == 1
    assert bits(min(errors) * 0.99) == [8, 8, 8] and bits(1e-5) == [32, 32, 32]
    assert "above the bound" in polydyn.quantize(model, max_error=1e-5).report.layers[0].reason


def test_clip_search_and_zero_points_reduce_the_error() -> None:
    w = weight(256, 512)
    for bits in (4, 8):
        plain, searched = (round_blocks(w, bits, 32, search=s) for s in (False, True))
        points = round_blocks(w, bits, 32, symmetric=False)
        assert points.error < searched.error < plain.error
        for r in (plain, searched, points):
            zeros = np.float32(2 ** (bits - 1)) if r.zeros is None else r.zeros[..., None].astype(np.float32)
            back = ((r.q - zeros) * r.scales[..., None]).reshape(256, 512)
            assert abs(relative(back, w) - r.relative_error) < 1e-5
    assert not round_blocks(np.zeros((4, 32), np.float32), 4, 32).error, "a block of zeros"
    assert round_blocks(np.full((4, 40), 3, np.float32), 4, 32).relative_error < 1e-6


def test_importance_moves_the_error_to_steps_that_matter_less() -> None:
    w, importance = weight(128, 64), np.where(np.arange(64) % 4, 1e-3, 1.0)
    plain, weighed = round_blocks(w, 4, 32), round_blocks(w, 4, 32, importance=importance)

    def part(q: Any, steps: Any) -> float:
        return relative(((q.q - np.float32(8)) * q.scales[..., None]).reshape(128, 64)[:, steps], w[:, steps])

    assert part(weighed, slice(None, None, 4)) < 0.9 * part(plain, slice(None, None, 4))
    assert part(weighed, slice(1, None, 4)) > part(plain, slice(1, None, 4))


def test_calibration_reduces_the_error_of_outputs() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "one", [info("x", TensorProto.FLOAT, ["B", "M", K])], [info("y", TensorProto.FLOAT, [None] * 3)],
        [numpy_helper.from_array(weight(K, N), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)], ir_version=8)
    scale = np.where(np.arange(K) % 8, 0.05, 4)
    data = [{"x": (RNG.standard_normal((2, r, K)) * scale).astype(np.float32)} for r in (64, 33)]
    plain = polydyn.quantize(model, compare=data, accuracy_level=0).report
    weighed = polydyn.quantize(model, calibration=data, compare=data, accuracy_level=0).report
    assert 0.01 < weighed.outputs["y"] < 0.9 * plain.outputs["y"]
    assert "output y: relative error" in str(weighed) and weighed.to_json()["outputs"] == weighed.outputs


def test_bits_are_packed_low_bits_first() -> None:
    np.testing.assert_array_equal(pack_bits(np.array([[1, 2, 3]], np.uint8), 4), [[0x21, 0x03]])


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polydyn.quantization import model_file

    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save_model(every_kind(), str(source))
    feeds = calls()
    inline = polydyn.quantize(source, out, accuracy_level=0)
    assert inline.model == out and not (tmp_path / "out.onnx.data").exists()
    expected = by_onnxruntime(out, feeds)
    monkeypatch.setattr(model_file, "MAX_INLINE_BYTES", 0)
    external = tmp_path / "external.onnx"
    polydyn.quantize(source, external, accuracy_level=0)
    assert (tmp_path / "external.onnx.data").stat().st_size > LARGE
    for name, y in by_onnxruntime(external, feeds).items():
        np.testing.assert_array_equal(y, expected[name])
    again = polydyn.quantize(external, tmp_path / "again.onnx")  # reads its tensors from the data file
    assert not any(x.bits == 4 for x in again.report.layers)
    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", lambda self: 1 / 0)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError):
        polydyn.quantize(source, tmp_path / "failed.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_models_inside_a_file_are_read_by_tensor(tmp_path: Path) -> None:
    model = every_kind()
    path = tmp_path / "model.onnx"
    onnx.save_model(model, str(path))
    file = open_model(path)
    large = [t for t in file.proto.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert len(large) > 5 and not any(t.raw_data for t in large)
    for t, whole in zip(file.proto.graph.initializer, model.graph.initializer, strict=True):
        np.testing.assert_array_equal(file.read(t), numpy_helper.to_array(whole))
    assert file.whole().SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    data = path.read_bytes()
    for end in (10, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:end])
        with pytest.raises(ModelError, match=r"truncated|no graph"):
            polydyn.quantize(path)
    with pytest.raises(FileNotFoundError):
        polydyn.quantize(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="not a model"):
        polydyn.quantize(3)  # type: ignore[arg-type]


PEAK = """
import resource, sys
import polydyn
polydyn.quantize(sys.argv[1], sys.argv[2] + "/first.onnx", bits=8)  # what imports take
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
polydyn.quantize(sys.argv[3], sys.argv[2] + "/out.onnx", search=False)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024)
"""


@pytest.mark.parametrize("external", [False, True])
def test_memory_is_that_of_a_tensor_and_not_of_the_model(external: bool, tmp_path: Path) -> None:
    count, side = 12, 1024
    nodes = [helper.make_node("MatMul", [f"h{k}", f"w{k}"], [f"h{k + 1}"]) for k in range(count)]
    info = helper.make_tensor_value_info
    w = (np.arange(side * side, dtype=np.float32) % 1013 - 500) / 500
    graph = helper.make_graph(
        nodes, "deep", [info("h0", TensorProto.FLOAT, ["M", side])],
        [info(f"h{count}", TensorProto.FLOAT, [None, None])],
        [numpy_helper.from_array(w.reshape(side, side), f"w{k}") for k in range(count)],
    )  # fmt: skip
    path = tmp_path / "deep.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(model, str(path), save_as_external_data=external)
    del model, graph
    command = [sys.executable, "-c", PEAK, path_of("bert_tiny"), str(tmp_path), str(path)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak < 1.6 * 4 * count * side * side, "an upper bound; a tensor has 4 MiB"


def test_wrong_arguments_are_named() -> None:
    model = every_kind()
    wrong: dict[str, dict[str, Any]] = {
        "bits is 3": {"bits": 3}, "block is 20": {"block": 20}, "method is 'other'": {"method": "other"},
        "max_error": {"max_error": -1}, "accuracy_level is 9": {"accuracy_level": 9},
        "calibration has no inputs": {"calibration": []}, "compare has no inputs": {"compare": [3]},
    }  # fmt: skip
    for message, settings in wrong.items():
        with pytest.raises(InputError, match=message):
            polydyn.quantize(model, **settings)
    model.opset_import[0].version = 10
    with pytest.raises(InputError, match="opset 10"):
        polydyn.quantize(model, method="dynamic")
