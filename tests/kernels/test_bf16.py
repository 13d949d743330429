"""Products that round their operands to bfloat16, with ``Options(precision="bf16")`` (docs/adr/0023-types.md)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

import polydyn
from polydyn import Options
from polydyn.checked import CheckedProgram
from polydyn.cli.machine import CompileSettings
from polydyn.compiler import plan_program
from polydyn.errors import InputError, UnsupportedError
from polydyn.schedules.expr import OPS
from polydyn.session import SessionOptions
from polydyn.testing.halves import in_type, rounded, widened
from polydyn.testing.inputs import feeds, shapes
from tests.support.marks import slow
from tests.support.stored import compiled, load
from tests.support.tiny import model, node

BF16 = Options(precision="bf16")


def nearest(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def linear(k: int, n: int) -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    r = np.random.default_rng(k * n)
    w, b = (r.standard_normal(s, np.float32) for s in ((k, n), (n,)))
    nodes = [node("MatMul", "x w", "y"), node("Add", "y b", "z"), node("Relu", "z", "o")]
    return model(nodes, {"x": ("float32", ["B", "M", k])}, ["o"], {"w": w, "b": b}), w, b


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
def test_operands_are_rounded_and_sums_are_float32(target: str) -> None:
    for k, n in ((64, 50), (768, 31)):
        made, w, b = linear(k, n)
        program = polydyn.compile(made, target=target, threads=2, options=BF16)
        assert any("pair_bf16" in t for t in program.sources.values())
        for rows in ((1, 0), (1, 1), (3, 7), (2, 33)):
            x = np.random.default_rng(rows).standard_normal((*rows, k)).astype(np.float32)
            expected = np.maximum(nearest(x) @ nearest(w) + b, 0)
            np.testing.assert_allclose(program.run({"x": x})["o"], expected, 1e-5, 1e-4)


def test_weights_take_half_the_bytes_and_notes_name_every_product() -> None:
    r = np.random.default_rng(3)
    w, odd = (r.standard_normal(s).astype(np.float32) for s in ((64, 48), (33, 48)))
    nodes = [node("MatMul", "x w", "y"), node("MatMul", "z odd", "o"), node("MatMul", "y t", "p")]
    inputs: Any = {"x": ("float32", ["M", 64]), "z": ("float32", ["M", 33]), "t": ("float32", [48, "N"])}
    made = model(nodes, inputs, ["o", "p"], {"w": w, "odd": odd})
    program, plain = polydyn.compile(made, options=BF16), polydyn.compile(made)
    assert plain.weight_bytes - program.weight_bytes == (64 * 2 + 33 * 4 - 34 * 2) * 48
    notes = [n for n in program.manifest["notes"] if "bfloat16" in n or "stay" in n]
    assert notes[0] == "precision bf16: 2 of 3 products round their operands to bfloat16"
    assert notes[1] == "in float32 stay (no constant operand, or few columns or steps) p"
    assert not any("bfloat16" in n for n in plain.manifest["notes"])


def test_a_model_stored_in_bfloat16_is_rounded_no_further() -> None:
    made, *_ = linear(64, 48)
    stored = in_type(made, "bfloat16")
    x = rounded(np.random.default_rng(0).standard_normal((2, 9, 64), np.float32), "bfloat16")
    same, words = (widened(polydyn.compile(stored, options=o).run({"x": x})["o"], "bfloat16") for o in (None, BF16))
    np.testing.assert_allclose(words, same, 2.0**-7, 1e-6)  # float32 sums in another order, rounded once
    assert np.mean(words == same) > 0.95


def test_convolutions_that_read_channels_last() -> None:
    r = np.random.default_rng(1)
    w, v = (r.standard_normal((24, c, 3, 3)).astype(np.float32) / 10 for c in (16, 24))
    nodes = [
        node("Conv", "x w", "t", pads=[1, 1, 1, 1]), node("Relu", "t", "u"), node("Conv", "u v", "y", pads=[1, 1, 1, 1])
    ]  # fmt: skip
    made = model(nodes, {"x": ("float32", [1, 16, "H", "W"])}, ["y"], {"w": w, "v": v})
    program, x = polydyn.compile(made, options=BF16), r.standard_normal((1, 16, 7, 5)).astype(np.float32)
    assert "precision bf16: 1 of 2 products round their operands to bfloat16" in program.manifest["notes"]
    exact = polydyn.compile(made).run({"x": x})["y"]
    assert 1e-5 < np.abs(program.run({"x": x})["y"] - exact).max() / np.abs(exact).max() < 2.0**-7


def test_every_access_to_memory_is_in_bounds() -> None:
    made, w, b = linear(32, 20)
    x = np.random.default_rng(2).standard_normal((1, 3, 32)).astype(np.float32)
    got = CheckedProgram(plan_program(made, options=BF16)).run({"x": x})["o"]
    np.testing.assert_allclose(got, np.maximum(nearest(x) @ nearest(w) + b, 0), 1e-5, 1e-5)


def test_words_mean_what_the_processor_computes() -> None:
    values = np.array([1, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, -0.0, np.inf, -np.inf, 3.4e38], np.float32)
    words = OPS["pair_bf16"].numpy(values, values[::-1])
    halves = words.view(np.uint32)
    assert np.array_equal(halves & 0xFFFF, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(halves >> 16, values[::-1].astype(ml_dtypes.bfloat16).view(np.uint16))
    a, b = np.random.default_rng(0).standard_normal((2, 2, 50)).astype(np.float32)
    got = OPS["dot2_bf16"].numpy(OPS["pair_bf16"].numpy(*a), OPS["pair_bf16"].numpy(*b))
    np.testing.assert_allclose(got, (nearest(a) * nearest(b)).sum(0), 1e-6)


def test_other_precisions_and_devices_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="unknown precision 'fp8'"):
        Options(precision="fp8")
    with pytest.raises(UnsupportedError, match="precision bf16 on cuda"):
        polydyn.compile(linear(4, 4)[0], target="cuda:emulated", options=BF16)


@pytest.mark.parametrize("name", [slow("bert_tiny"), slow("resnet_tiny")])
def test_models_are_right_within_the_rounding_of_products(name: str) -> None:
    program, plain, proto = polydyn.compile(load(name), threads=1, options=BF16), compiled(name, 1), load(name)
    for shape in shapes(name)[:2]:
        given = feeds(proto, shape)
        for output, exact in plain.run(given).items():
            assert np.abs(program.run(given)[output] - exact).max() <= 2.0**-5 * np.abs(exact).max()


def test_everywhere_that_takes_options() -> None:
    said = SessionOptions()
    said.add_session_config_entry("polydyn.precision", "bf16")
    assert said.arguments("cpu", {}).options == BF16 == CompileSettings(precision="bf16").options
