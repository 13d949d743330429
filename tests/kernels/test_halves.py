"""float16 and bfloat16 on the CPU: right to the type's rounding, stored in 16 bits, float32 arithmetic in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.graph.dtypes import numpy_dtype
from polydyn.testing.halves import HALVES, in_type, rounded, widened
from polydyn.testing.inputs import feeds, shapes
from polydyn.verification import verify_model
from tests.support.marks import slow
from tests.support.stored import compiled, load
from tests.support.tiny import model, node

EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half a unit in the last place of 1."""


def linear(dtype: str, k: int, n: int) -> tuple[object, np.ndarray, np.ndarray]:
    r = np.random.default_rng(k * n)
    w, b = (rounded(r.standard_normal(s, np.float32), dtype) for s in ((k, n), (n,)))
    nodes = [node("MatMul", "x w", "y"), node("Add", "y b", "z"), node("Relu", "z", "o")]
    return model(nodes, {"x": (dtype, ["M", k])}, ["o"], {"w": w, "b": b}), w.astype(np.float32), b.astype(np.float32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("k", "n"), [slow(64, 48), (33, 7), (31, 50), (48, 3), (1, 17)])
def test_a_linear_layer_rounds_once_for_each_tensor(dtype: str, k: int, n: int) -> None:
    made, w, b = linear(dtype, k, n)
    program = polydyn.compile(made, threads=1)
    for rows in (0, 1, 2, 7, 31):
        x = rounded(np.random.default_rng(rows).standard_normal((rows, k), np.float32), dtype)
        product = rounded(x.astype(np.float32) @ w, dtype).astype(np.float32)
        expected = np.maximum(rounded(product + b, dtype).astype(np.float32), 0)
        got = widened(program.run({"x": x})["o"], dtype)
        np.testing.assert_allclose(got, expected, 4 * EPSILON[dtype], 4 * EPSILON[dtype] * np.sqrt(k))


@pytest.mark.parametrize("dtype", [slow("float16"), "bfloat16"])
def test_two_computed_operands(dtype: str) -> None:
    nodes = [node("MatMul", "x y", "p"), node("Softmax", "p", "o", axis=-1)]
    program = polydyn.compile(model(nodes, {"x": (dtype, ["B", "M", "K"]), "y": (dtype, ["B", "K", "N"])}, ["o"]))
    for b, m, k, n in ((1, 1, 1, 1), (2, 7, 33, 31), (3, 2, 0, 5), (1, 9, 17, 2)):
        r = np.random.default_rng(m)
        x, y = (rounded(r.standard_normal(s, np.float32), dtype) for s in ((b, m, k), (b, k, n)))
        p = rounded(x.astype(np.float32) @ y.astype(np.float32), dtype).astype(np.float32)
        e = np.exp(p - p.max(-1, keepdims=True))
        got = widened(program.run({"x": x, "y": y})["o"], dtype)
        np.testing.assert_allclose(got, e / e.sum(-1, keepdims=True), atol=(np.abs(p).max() + 2) * 2 * EPSILON[dtype])


OTHERS = ("albert_tiny", "gpt2_past_tiny", "llama_tiny", "shufflenet_tiny", "squeezenet_tiny", "t5_tiny", "vit_hw_tiny")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bert_tiny", "float16"), slow("resnet_tiny", "bfloat16"), slow("bert_tiny", "bfloat16"),
     slow("resnet_tiny", "float16"), *(slow(n, x) for n in OTHERS for x in HALVES)],
)  # fmt: skip
def test_models_are_right_within_the_rounding_of_their_type(name: str, dtype: str) -> None:
    plain, whole = load(name), compiled(name, 1)
    halves = in_type(plain, dtype)
    program = polydyn.compile(halves, threads=1)
    try:
        other = onnxruntime.InferenceSession(halves.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:  # it has few operators of bfloat16
        assert dtype == "bfloat16"
        other = None
    for shape in shapes(name)[:3]:
        inputs = {n: rounded(x, dtype) for n, x in feeds(plain, shape).items()}
        got = {n: widened(x, dtype) for n, x in program.run(inputs).items()}
        references = [whole.run({n: x.astype(np.float32) if x.dtype == numpy_dtype(dtype) else x
                                 for n, x in inputs.items()})]  # fmt: skip
        if other is not None:
            references.append(dict(zip(got, other.run(None, inputs), strict=True)))
        for n, expected in ((n, x) for r in references for n, x in r.items()):
            scale = np.abs(expected.astype(np.float32)).max()
            assert np.abs(got[n] - expected.astype(np.float32)).max() <= 8 * EPSILON[dtype] * scale


@pytest.mark.parametrize("dtype", HALVES)
def test_every_access_of_a_kernel_of_halves_is_checked(dtype: str) -> None:
    made, *_ = linear(dtype, 33, 29)
    checked, program = CheckedProgram(plan_program(made)), polydyn.compile(made)
    for rows in (1, 9):
        x = {"x": rounded(np.random.default_rng(rows).standard_normal((rows, 33), np.float32), dtype)}
        assert np.array_equal(checked.run(x)["o"], program.run(x)["o"])


@pytest.mark.parametrize("dtype", [slow("float16"), "bfloat16"])
def test_a_convolution_copies_its_footprint_and_rounds_what_it_clips_once(dtype: str) -> None:
    r = np.random.default_rng(4)
    w = rounded(r.standard_normal((48, 16, 3, 3), np.float32), dtype)  # more columns than a window in place of it has
    nodes = [node("Conv", "x w", "t", pads=[1, 1, 1, 1]), node("Relu", "t", "o")]
    made = model(nodes, {"x": (dtype, ["N", 16, "H", "W"])}, ["o"], {"w": w})
    plan = plan_program(made)
    (kernel,) = plan.kernels
    assert any("footprint copied" in note for note in kernel.notes) and "vround" not in kernel.text
    x = rounded(r.standard_normal((1, 16, 7, 5), np.float32), dtype)
    got = widened(CheckedProgram(plan).run({"x": x})["o"], dtype)
    padded = np.pad(x.astype(np.float32), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    exact = np.maximum(np.einsum("nchwij,ocij->nohw", windows, w.astype(np.float32)), 0)
    np.testing.assert_allclose(got, rounded(exact, dtype).astype(np.float32), 2 * EPSILON[dtype], 1e-4)


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_stay_in_16_bits(dtype: str, tmp_path: Path) -> None:
    made, w, _ = linear(dtype, 640, 480)
    polydyn.compile(made).save(tmp_path / "h.polydyn")
    assert sum(x.stat().st_size for x in [tmp_path / "h.polydyn"]) < w.size * 2 + 150_000
    x = {"x": rounded(np.ones((2, 640), np.float32), dtype)}
    assert np.array_equal(polydyn.load(tmp_path / "h.polydyn").run(x)["o"], polydyn.compile(made).run(x)["o"])


@pytest.mark.parametrize("dtype", HALVES)
def test_narrower_processors_round_alike(dtype: str) -> None:
    made, *_ = linear(dtype, 31, 50)
    x = {"x": rounded(np.random.default_rng(0).standard_normal((5, 31), np.float32), dtype)}
    got, wide = (widened(polydyn.compile(made, target=t).run(x)["o"], dtype) for t in ("cpu:avx2", "cpu"))
    np.testing.assert_allclose(got, wide, 4 * EPSILON[dtype], 4 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", ["float16", slow("bfloat16")])
def test_every_group_is_the_reference_s(dtype: str) -> None:
    halves, inputs = in_type(load("bert_tiny"), dtype), feeds(load("bert_tiny"), {"B": 2, "L": 9})
    checks = verify_model(halves, {n: rounded(x, dtype) for n, x in inputs.items()})
    assert len(checks) > 10 and not [c for c in checks if not c.ok]


@pytest.mark.parametrize("dtype", HALVES)
def test_twins_keep_what_masks_mean(dtype: str) -> None:
    """The lowest float32 becomes the type's lowest number, which a whole row may have; -inf stays (its row is NaN)."""
    lowest = np.array([np.finfo(np.float32).min, -np.inf, 0.5], np.float32)
    made = in_type(model([node("Add", "x c", "o")], {"x": ("float32", ["M", 3])}, ["o"], {"c": lowest}), dtype)
    (held,) = (widened(np.frombuffer(t.raw_data, numpy_dtype(dtype)), dtype) for t in made.graph.initializer)
    assert np.isfinite(held[0]) and held[0] < -6e4 and held[1] == -np.inf and held[2] == 0.5
