"""Nodes that are left to ONNX Runtime on request: results, warnings, notes, saved programs, rejections."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

import polydyn
from polydyn.errors import FallbackWarning, InputError, UnsupportedError
from polydyn.runtime import fallback_step
from tests.support.tiny import model, node

F, S = "float32", polydyn.Options(fallback="onnxruntime")


def pooled() -> onnx.ModelProto:
    """Build MaxRoiPool, which is not supported, between two compiled parts."""
    return model(
        [node("Mul", "x x", "q"), node("MaxRoiPool", "q rois", "p", pooled_shape=[2, 3]), node("Exp", "p", "y")],
        {"x": (F, ["N", 3, "H", "W"]), "rois": (F, ["R", 5])}, ["y"],
    )  # fmt: skip


def rois(n: int, images: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    first = rng.integers(0, 4, (n, 2))
    boxes = np.concatenate([rng.integers(0, max(images, 1), (n, 1)), first, first + rng.integers(0, 5, (n, 2))], 1)
    return boxes.astype(np.float32)


def expected(m: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    return onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds)


def compiled(m: onnx.ModelProto) -> polydyn.Program:
    with pytest.warns(FallbackWarning, match="runs in ONNX Runtime"):
        return polydyn.compile(m, options=S, threads=1)


@pytest.mark.parametrize(("n", "h", "w", "r"), [(1, 9, 9, 1), (2, 12, 11, 7), (1, 9, 10, 0), (3, 17, 9, 30)])
def test_a_node_that_is_not_built_runs_between_two_parts(n: int, h: int, w: int, r: int) -> None:
    m, rng = pooled(), np.random.default_rng(n + r)
    program = compiled(m)
    feeds = {"x": rng.standard_normal((n, 3, h, w)).astype(F), "rois": rois(r, n, rng)}
    np.testing.assert_allclose(program.run(feeds)["y"], expected(m, feeds)[0], rtol=1e-5)
    assert program.steps == ["onnxruntime of MaxRoiPool_p"]


def test_without_the_option_the_node_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="MaxRoiPool"):
        polydyn.compile(pooled())
    with pytest.raises(InputError, match="unknown fallback 'torch'"):
        polydyn.Options(fallback="torch")


def test_saved_programs_name_the_node_and_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m, rng = pooled(), np.random.default_rng(3)
    program = compiled(m)
    program.save(tmp_path / "m.polydyn")
    again = polydyn.load(tmp_path / "m.polydyn")
    note = "MaxRoiPool_p (MaxRoiPool) runs in ONNX Runtime: the operator is not built"
    assert note in again.manifest["notes"] and note in again.explain(N=1, H=9, W=9, R=2).details()
    feeds = {"x": rng.standard_normal((1, 3, 9, 9)).astype(F), "rois": rois(2, 1, rng)}
    np.testing.assert_array_equal(again.run(feeds)["y"], program.run(feeds)["y"])
    compiled(m).save(tmp_path / "n.polydyn")
    assert (tmp_path / "m.polydyn").read_bytes() == (tmp_path / "n.polydyn").read_bytes()
    fallback_step._session.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UnsupportedError, match="not installed"):
        again.run(feeds)
    with pytest.raises(UnsupportedError, match="not installed"):
        polydyn.compile(m, options=S)


def test_what_a_rule_refuses_is_left_too() -> None:
    """An unsupported form of a supported operator: a data-dependent number of samples."""
    align = node("RoiAlign", "a r k", "b", output_height=2, output_width=2, sampling_ratio=0)
    m = model(
        [node("Relu", "x", "a"), align, node("Exp", "b", "y")],
        {"x": (F, ["N", 1, 4, 4]), "r": (F, ["K", 4]), "k": ("int64", ["K"])}, ["y"],
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="sampling_ratio 0"):
        polydyn.compile(m)
    program = compiled(m)
    assert program.steps == ["onnxruntime of RoiAlign_b"]
    assert "RoiAlign_b (RoiAlign) runs in ONNX Runtime: RoiAlign: " in "\n".join(program.manifest["notes"])
    for n in (1, 3):
        feeds = {"x": np.random.default_rng(n).standard_normal((n, 1, 4, 4)).astype(F)}
        feeds |= {"r": np.array([[0, 0, 3, 3], [1, 0, 2, 3]], F), "k": np.array([0, n - 1])}
        np.testing.assert_allclose(program.run(feeds)["y"], expected(m, feeds)[0], rtol=1e-5)


def test_neighbours_run_as_one_region() -> None:
    """Numbers to strings and back: no string crosses.

    The program's own nodes precede, accompany and follow the region.
    """
    nodes = [node("Floor", "x", "a"), node("Cast", "a", "s", to=onnx.TensorProto.STRING), node("Exp", "a", "b")]
    nodes.append(
        helper.make_node("LabelEncoder", ["s"], ["n"], "labels", domain="ai.onnx.ml", keys_strings=["1", "3"],
                         values_floats=[5.0, 7.0], default_float=-1.0)
    )  # fmt: skip
    m = model([*nodes, node("Mul", "n b", "y")], {"x": (F, ["N"])}, ["y"])
    m.opset_import.append(helper.make_opsetid("ai.onnx.ml", 4))
    program = compiled(m)
    assert program.steps == ["onnxruntime of Cast_s and 1 more"]
    notes = [n for n in program.manifest["notes"] if "runs in ONNX Runtime" in n]
    assert notes == [
        "Cast_s (Cast) runs in ONNX Runtime: element type STRING is not supported",
        "labels (ai.onnx.ml::LabelEncoder) runs in ONNX Runtime: s is a tensor(string)",
    ]
    for n in (0, 1, 5):
        feeds = {"x": np.arange(n, dtype=F) + np.float32(0.5)}
        np.testing.assert_allclose(program.run(feeds)["y"], expected(m, feeds)[0], rtol=1e-5)


def test_a_node_that_onnx_runtime_does_not_know_is_refused_by_name() -> None:
    m = model([node("Relu", "x", "a")], {"x": (F, ["N"])}, ["y"])
    m.graph.node.append(helper.make_node("Mystery", ["a"], ["y"], "m0", domain="some.where"))
    m.opset_import.append(helper.make_opsetid("some.where", 1))
    with pytest.raises(UnsupportedError, match="cannot be left to ONNX Runtime"):
        polydyn.compile(m, options=S)


def test_a_failing_node_says_where() -> None:
    m = pooled()
    program = compiled(m)
    bad = {"x": np.ones((1, 3, 9, 9), F), "rois": np.array([[7, 0, 0, 3, 3]], F)}  # there is no image 7
    with pytest.raises(InputError, match="MaxRoiPool_p"):
        program.run(bad)


def test_what_a_node_hands_through_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    class Through:
        def run(self, names: None, feeds: dict[str, Any]) -> list[Any]:
            return [feeds["q"].reshape(-1, 3, 2, 3)]

    monkeypatch.setattr(fallback_step, "_session", lambda model: Through())
    m = model([node("Mul", "x x", "q"), node("MaxRoiPool", "q rois", "y", pooled_shape=[2, 3])],
              {"x": (F, ["N", 3, 2, 3]), "rois": (F, ["R", 5])}, ["y"])  # fmt: skip
    program, kept = compiled(m), []
    for n in (2, 2, 1):
        x = np.random.default_rng(n).standard_normal((n, 3, 2, 3)).astype(F) + len(kept)
        kept.append((program.run({"x": x, "rois": np.zeros((n, 5), F)})["y"], x * x))
    assert all(np.array_equal(got, want) for got, want in kept), "results of earlier calls stay as they are"


@pytest.mark.slow
def test_it_runs_between_parts_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    m, rng = pooled(), np.random.default_rng(8)
    with pytest.warns(FallbackWarning):
        program = polydyn.compile(m, options=S, target="cuda:emulated")
    feeds = {"x": rng.standard_normal((1, 3, 9, 9)).astype(F), "rois": rois(2, 1, rng)}
    np.testing.assert_allclose(program.run(feeds)["y"], expected(m, feeds)[0], rtol=1e-5)
