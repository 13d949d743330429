"""Outputs that are a tensor in another shape are written by the tensor's producer."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import polydyn
from polydyn.compiler import Options
from polydyn.testing import models

SHAPES = [(2, 3), (0, 4), (1, 1), (5, 17)]


def attention(*more: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    """Build an attention whose output y is o_t [B, L, 2, 8] as [B, L, 16]."""
    made = models.attention(heads=2, depth=8)
    made.graph.node.extend(more)
    del made.graph.output[:]
    made.graph.output.extend(helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in outputs)
    return made


def feeds(b: int, length: int) -> dict[str, np.ndarray]:
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((b, length, 16), np.float32) for _ in range(3))
    return {"q": q, "k": k, "v": v, "attention_mask": np.ones((b, length), np.int64)}


def expected(x: dict[str, np.ndarray]) -> np.ndarray:
    q, k, v = (x[n].reshape(*x[n].shape[:2], 2, 8).transpose(0, 2, 1, 3).astype(float) for n in "qkv")
    e = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(8))
    return (e / e.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x["q"].shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reshaped_output_is_not_copied(shape: tuple[int, int]) -> None:
    program = polydyn.compile(attention(), threads=1)
    x = feeds(*shape)
    np.testing.assert_allclose(program.run(x)["y"], expected(x), rtol=1e-4, atol=1e-5)
    assert program.launches == ["nest bias", "attention y"] and program.counters["bytes_copied"] == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reshaped_output_is_one_memory_where_axes_stay_merged(shape: tuple[int, int]) -> None:
    program = polydyn.compile(attention(), threads=1, options=Options({"split"}))
    x = feeds(*shape)
    np.testing.assert_allclose(program.run(x)["y"], expected(x), rtol=1e-4, atol=1e-5)
    assert "nest y" not in program.launches and program.counters["bytes_copied"] == 0
    assert "y is o_t in another shape: one memory" in program.manifest["notes"]


def test_others_may_read_what_became_the_output() -> None:
    more = helper.make_node("ReduceMax", ["o_t"], ["z"], keepdims=0)
    program = polydyn.compile(attention(more, outputs=("y", "z")), threads=2)
    x = feeds(3, 5)
    got = program.run(x)
    np.testing.assert_allclose(got["y"], expected(x), rtol=1e-4, atol=1e-5)
    assert got["z"] == got["y"].max() and "nest y" not in program.launches


def test_two_outputs_of_the_same_elements_are_two_arrays() -> None:
    program = polydyn.compile(attention(outputs=("y", "o_t")), threads=1)
    got = program.run(feeds(3, 5))
    assert (got["y"].reshape(3, 5, 2, 8) == got["o_t"]).all() and not np.shares_memory(got["y"], got["o_t"])
