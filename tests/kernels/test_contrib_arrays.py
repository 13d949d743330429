"""Experts, inverses, gathered blocks and samples of com.microsoft, compared with ONNX Runtime, which defines them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import polydyn
from polydyn.errors import UnsupportedError
from polydyn.graph.expand import import_model
from tests.support.contrib import RNG, Array, agrees, floats, model_of
from tests.support.marks import slow

F = "float32"


# -- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_skipped_layer_norms_with_their_statistics(bias: bool) -> None:
    given: dict[str, Any] = {"x": (F, ("B", "L", 8)), "s": (F, ("B", "L", 8)), "g": floats(8)}
    more = {"b": floats(8)} if bias else {}
    feeds = [{"x": floats(b, n, 8), "s": floats(b, n, 8)} for b, n in ((1, 1), (2, 7), (3, 33))]
    agrees(model_of("SkipLayerNormalization", {**given, "beta": floats(8), **more}, ("y", "mean", "inv", "t")), *feeds)
    agrees(model_of("SkipSimplifiedLayerNormalization", {**given, **more}, ("y", "", "inv", "t")), *feeds)
    with pytest.raises(UnsupportedError, match="mean"):
        import_model(model_of("SkipSimplifiedLayerNormalization", given, ("y", "mean")))


# -- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "k", "normalized", "bias"), [
    ("relu", 1, 0, True), slow("relu", 2, 1, False), slow("gelu", 2, 1, True), slow("silu", 3, 0, True),
    slow("identity", 4, 1, False), ("swiglu", 2, 1, True), slow("swiglu", 1, 0, False),
])  # fmt: skip
def test_experts(kind: str, k: int, normalized: int, bias: bool) -> None:
    fused = 1 + (kind == "swiglu")
    given: dict[str, Any] = {
        "x": (F, ("T", 8)), "r": (F, ("T", 4)), "w1": floats(4, fused * 6, 8),
        "b1": floats(4, fused * 6) if bias else None, "w2": floats(4, 8, 6), "b2": floats(4, 8) if bias else None,
    }  # fmt: skip
    more: dict[str, Any] = {}
    if kind == "swiglu":
        more = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 1.5}
    model = model_of("MoE", given, k=k, activation_type=kind, normalize_routing_weights=normalized, **more)
    agrees(model, *({"x": floats(t, 8), "r": floats(t, 4)} for t in (1, 5, 33)), tolerance=1e-4)
    ties = np.array([[1, 1, 1, 1], [0, 2, 2, 1], [3, 0, 0, 3]], F)
    agrees(model, {"x": floats(3, 8), "r": ties}, tolerance=1e-4)


def test_experts_of_sequences_and_what_is_refused() -> None:
    given: dict[str, Any] = {
        "x": (F, ("B", "L", 8)), "r": (F, ("T", 4)), "w1": floats(4, 6, 8), "b1": None, "w2": floats(4, 8, 6),
    }  # fmt: skip
    agrees(model_of("MoE", given, k=2), *({"x": floats(b, n, 8), "r": floats(b * n, 4)} for b, n in ((1, 1), (3, 5))))
    for subject, more in (("sparse", {"use_sparse_mixer": 1}), ("swiglu_fusion", {"activation_type": "swiglu"})):
        with pytest.raises(UnsupportedError, match=subject):
            import_model(model_of("MoE", given, **more))
    with pytest.raises(UnsupportedError, match="fc3"):
        import_model(model_of("MoE", {**given, "b2": None, "w3": floats(4, 6, 8)}))


# -- matrices --------------------------------------------------------------------------------------------------------


def well_conditioned(*shape: int) -> Array:
    """Build matrices with a largest element per column that moves from row to row, so that pivots are exchanged."""
    x = RNG.standard_normal(shape).astype(F)
    return x + 2 * shape[-1] * np.roll(np.eye(shape[-1], dtype=F), 1, axis=0)


def inverts(model: onnx.ModelProto, *calls: dict[str, Array]) -> None:
    """Check a compiled model against ONNX Runtime. Its elimination is a loop of the host, so it has several parts."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    program = polydyn.compile(model, threads=1)
    for feeds in calls:
        got, (want,) = program.run(feeds)["y"], session.run(None, feeds)
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, 1e-4, 1e-4)


@pytest.mark.parametrize("dims", [("N", "N"), slow(("B", "C", "N", "N"))])
def test_inverses(dims: tuple[str, ...]) -> None:
    sizes = [{"B": b, "C": c, "N": n} for b, c, n in ((1, 1, 1), (2, 3, 2), (3, 1, 7), (2, 1, 33))]
    calls = [{"x": well_conditioned(*(s[d] for d in dims))} for s in sizes]
    inverts(model_of("Inverse", {"x": (F, dims)}), *calls)


def test_an_inverse_exchanges_rows_where_a_pivot_is_0_and_takes_no_other_shape() -> None:
    model = model_of("Inverse", {"x": ("float64", ("B", 3, 3))})
    turned = np.array([[[0, 0, 2], [0, -4, 0], [1, 0, 0]], [[0, 1, 0], [0, 0, 1], [1, 0, 0]]], np.float64)
    inverts(model, {"x": turned}, {"x": np.zeros((0, 3, 3))})
    with pytest.raises(polydyn.PolydynError, match="Inverse"):
        import_model(model_of("Inverse", {"x": (F, (2, 3))}))


@pytest.mark.parametrize("mode", ["bilinear", slow("nearest"), slow("bicubic")])
def test_samples(mode: str) -> None:
    given = {"x": (F, ("N", 2, "H", "W")), "g": (F, ("N", "P", "Q", 2))}
    for padding in ("zeros", "border", "reflection"):
        model = model_of("GridSample", given, mode=mode, padding_mode=padding, align_corners=1)
        agrees(model, {"x": floats(2, 2, 5, 7), "g": floats(2, 3, 4, 2)}, kernels=padding == "zeros", tolerance=1e-4)


# -- quantized -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("bits", [4, slow(8), slow(2)])
def test_gathered_rows_of_packed_blocks(bits: int, zeros: bool) -> None:
    data = RNG.integers(0, 256, (10, 48 * bits // 8), dtype=np.uint8)
    zero = RNG.integers(0, 256, (10, -(-3 * bits // 8)), dtype=np.uint8)
    given: dict[str, Any] = {"d": data, "i": ("int64", ("A", "B")), "s": floats(10, 3), "z": zero if zeros else None}
    model = model_of("GatherBlockQuantized", given, bits=bits, block_size=16, quantize_axis=1, gather_axis=0)
    agrees(model, {"i": np.array([[0, 3, 9], [-1, -10, 4]])}, {"i": np.array([[10, -11], [1, 5000]])})


@pytest.mark.parametrize(("dtype", "axes"), [("int4", (0, 1)), slow("uint4", (1, 0)), slow("int4", (1, 2))])
def test_gathered_rows_of_blocks_of_4_bits(dtype: str, axes: tuple[int, int]) -> None:
    gathered, blocks = axes
    shape = [5, 6, 3]
    shape[blocks] = 32
    data = RNG.integers(-8 if dtype == "int4" else 0, 8, shape).astype(getattr(ml_dtypes, dtype))
    zero = RNG.integers(0, 4, [2 if k == blocks else n for k, n in enumerate(shape)]).astype(data.dtype)
    for z in (zero, None):
        given: dict[str, Any] = {"d": data, "i": ("int32", ("A",)), "s": floats(*zero.shape), "z": z}
        model = model_of("GatherBlockQuantized", given, block_size=16, quantize_axis=blocks, gather_axis=gathered)
        agrees(model, {"i": np.array([0, 2, -1, 4], np.int32)})


def test_means_of_integers() -> None:
    """ONNX Runtime has no kernel for the CPU, so the definition is the reference."""
    given = {
        "x": ("uint8", ("A", 4, "C")), "s": np.array(0.1, F), "z": np.array(3, np.uint8), "s2": np.array(0.05, F),
        "z2": np.array(100, np.uint8),
    }  # fmt: skip
    for axes, keepdims in (([1], 1), ([0, 2], 0), (None, 1)):
        more = {"axes": axes} if axes else {}
        program = polydyn.compile(model_of("QLinearReduceMean", given, keepdims=keepdims, **more), threads=1)
        x = RNG.integers(0, 256, (3, 4, 5), dtype=np.uint8)
        mean = (x.astype(F) - 3).mean(tuple(axes) if axes else None, keepdims=bool(keepdims)) * np.float32(0.1)
        want = np.clip(np.rint(mean / np.float32(0.05)) + 100, 0, 255)
        got = program.run({"x": x})["y"]
        assert got.dtype == np.uint8 and got.shape == want.shape and np.abs(got - want).max() <= 1
