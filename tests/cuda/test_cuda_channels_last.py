"""Channels-last on CUDA: tensors between convolutions, and their copies; on the strict emulation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from tests.support.cuda_groups import Arrays, first_fit, placed, plan_of, run, version, with_bugs

node = helper.make_node
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float16)


def close(got: Array, want: Array) -> bool:
    a = got.astype(np.float64)
    return a.shape == want.shape and bool(
        np.abs(a - want).max(initial=0) <= 2e-3 * max(1.0, np.abs(want).max(initial=0))
    )


WEIGHTS: Arrays = {
    "u": normal(16, 3, 1, 1), "v": normal(24, 3, 1, 1), "s": normal(40, 1, 1), "b": normal(40, 1, 1),
    "z": normal(24, 40, 1, 1), "w": normal(32, 24, 3, 3),
}  # fmt: skip
KERNELS = normal(16, 1, 3, 3)


@pytest.fixture(scope="module")
def layers() -> tuple[FusionPlan, tuple[PlacedGroup, ...]]:
    """Build a norm of a concatenation in the copies of a product, and a convolution with strides and dilations.

    The 24 channels of the convolution are three copies, not a tile of steps.
    """
    nodes = [node("Conv", ["x", "u"], ["c0"]), node("Conv", ["x", "v"], ["c1"]),
             node("Concat", ["c0", "c1"], ["c"], axis=1), node("Mul", ["c", "s"], ["m"]),
             node("Add", ["m", "b"], ["n"]), node("Relu", ["n"], ["r"]), node("Conv", ["r", "z"], ["p"]),
             node("Conv", ["p", "w"], ["d"], pads=[2, 1, 1, 2], strides=[2, 1], dilations=[1, 2]),
             node("GlobalAveragePool", ["d"], ["y"])]  # fmt: skip
    plan = plan_of(nodes, {"x": ("B", 3, "H", "W")}, ["y"], WEIGHTS, "float16")
    return plan, placed(plan)


def by_hand(x: Array) -> Array:
    """Compute the layers in float64."""
    u, v, s, b, z, w = (a.astype(np.float64) for a in WEIGHTS.values())
    c = np.einsum("bchw,oc->bohw", x.astype(np.float64), np.concatenate([u, v])[..., 0, 0])
    p = np.einsum("bchw,oc->bohw", np.maximum(c * s + b, 0), z[..., 0, 0])
    padded = np.pad(p, ((0, 0), (0, 0), (2, 1), (1, 2)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 5), (2, 3))[:, :, ::2, :, :, ::2]
    return np.einsum("bchwij,ocij->bohw", windows, w).mean((2, 3), keepdims=True)


@pytest.mark.slow
def test_pixels_come_by_16_bytes_of_channels(layers: tuple[FusionPlan, tuple[PlacedGroup, ...]]) -> None:
    """A copy of 16 bytes belongs to one tap, inside the image or zeros; nothing is transposed between kernels."""
    plan, kernels = layers
    *_, computed, copied, _ = kernels
    versions = [k for p in (computed, copied) for k in p.kernels if "gemv" not in k.version]
    assert len(kernels) == 5 and all("_16_16" in k.version for k in versions)
    assert "pd_max" in version(computed, "mma").text and "pd_cp_async_if<16>" in version(copied, "mma").text
    for shape in ((2, 3, 5, 9), (1, 3, 1, 3)):
        x = normal(*shape)
        got, counts = run(plan, {"x": x}, kernels=kernels)
        assert close(got["y"], by_hand(x)) and not any(c.ldmatrix_conflicts for c in counts)


BROKEN = {
    "a line above the image": ("(uint32_t)", "(int32_t)"),
    "another row's place": ("((int)(tid/4), (int)(8*tid", "((int)(tid/8), (int)(8*tid"),
}


@pytest.mark.parametrize("bug", BROKEN)
def test_a_wrong_copy_is_seen(bug: str, layers: tuple[FusionPlan, tuple[PlacedGroup, ...]]) -> None:
    plan, kernels = layers
    *before, copied, mean = kernels
    bugs = with_bugs(version(copied, "mma"), BROKEN)
    broken = (*before, replace(copied, kernels=(bugs[list(BROKEN).index(bug)],)), mean)
    x = normal(2, 3, 5, 9)
    try:
        got, _ = run(plan, {"x": x}, kernels=broken)
        assert not close(got["y"], by_hand(x))
    except DeviceError:
        pass


@pytest.fixture(scope="module")
def windows() -> tuple[FusionPlan, tuple[PlacedGroup, ...]]:
    """Build a depthwise convolution, both poolings and a mean, after a convolution."""
    nodes = [node("Conv", ["x", "u"], ["a"]),
             node("Conv", ["a", "k"], ["d"], group=16, pads=[1, 1, 0, 1], strides=[2, 1]),
             node("Relu", ["d"], ["r"]), node("MaxPool", ["r"], ["m"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
             node("AveragePool", ["m"], ["p"], kernel_shape=[2, 2]),
             node("GlobalAveragePool", ["p"], ["y"])]  # fmt: skip
    plan = plan_of(nodes, {"x": ("B", 3, "H", "W")}, ["y"], {"u": WEIGHTS["u"], "k": KERNELS}, "float16")
    return plan, placed(plan)


def windows_by_hand(x: Array) -> Array:
    def view(a: Array, pads: tuple[tuple[int, int], ...], size: int, outside: float) -> Array:
        padded = np.pad(a, ((0, 0), (0, 0), *pads), constant_values=outside)
        return np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3))

    a = np.einsum("bchw,oc->bohw", x.astype(np.float64), WEIGHTS["u"][..., 0, 0].astype(np.float64))
    d = np.einsum("bchwij,cij->bchw", view(a, ((1, 0), (1, 1)), 3, 0)[:, :, ::2], KERNELS[:, 0].astype(np.float64))
    m = view(np.maximum(d, 0), ((1, 1), (1, 1)), 3, -np.inf).max((4, 5))
    p = view(m, ((0, 0), (0, 0)), 2, 0).mean((4, 5))
    return p.mean((2, 3), keepdims=True)


def test_windows_have_vectors_of_channels_and_several_lines(
    windows: tuple[FusionPlan, tuple[PlacedGroup, ...]],
) -> None:
    """A thread has eight channels of four outputs, loads shared pixels once, and checks the bounds once."""
    plan, kernels = windows
    _, *nests = kernels
    assert [p.kernels[0].version for p in nests] == [*["window"] * 3, "split_wide"]
    text = nests[0].kernels[0].text
    assert text.count("pd_ldg_wide<8>(") == 6 + 3 and "pd_ldg(a" not in text
    for shape in ((2, 3, 6, 9), (1, 3, 5, 4)):
        x = normal(*shape)
        for word in ("window", "wide"):
            got, _ = run(plan, {"x": x}, partial(preferred, word=word), kernels)
            assert close(got["y"], windows_by_hand(x))


def preferred(p: PlacedGroup, env: dict[str, int], word: str) -> Kernel:
    """Return the version of a name if a group has it, else the first that fits."""
    return next((k for k in p.kernels if k.version == word), None) or first_fit(p, env)


BLIND = {
    "above the image": (1, "if ((2*i1 + j0 + (-1)) >= 0 && ", "if ("),
    "the line before": (1, "8*b_t + 64*b_u + (-16)*n2 + 16))", "8*b_t + 64*b_u + (-16)*n2))"),
    "stored where no output is": (1, "if ((4*b_u + 3) < n2) {", "if (1) {"),
    "read for no output": (3, "if ((4*b_u + 3) < n1) {\n        pd_ldg", "if (1) {\n        pd_ldg"),
}


@pytest.mark.parametrize("bug", BLIND)
def test_a_window_that_asks_too_little_is_seen(bug: str, windows: tuple[FusionPlan, tuple[PlacedGroup, ...]]) -> None:
    plan, kernels = windows
    number, old, new = BLIND[bug]
    bugs = with_bugs(kernels[number].kernels[0], {bug: (old, new)})
    broken = (*kernels[:number], replace(kernels[number], kernels=bugs), *kernels[number + 1 :])
    x = normal(2, 3, 6, 9)
    try:
        got, _ = run(plan, {"x": x}, kernels=broken)
        assert not close(got["y"], windows_by_hand(x))
    except DeviceError:
        pass


def test_pixels_of_a_mean_are_shared() -> None:
    """Threads share the pixels, also in unequal parts; a wrong first pixel is detected."""
    nodes = [node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]), node("GlobalAveragePool", ["t"], ["y"])]
    plan = plan_of(nodes, {"x": ("B", "H", "W", 24)}, ["y"], dtype="float16")
    (mean,) = placed(plan)
    split = version(mean, "split_wide")
    bugs = with_bugs(split, {"the first pixel again": ("24*j1 + 24*k_lo", "24*j1")})
    together = replace(mean, kernels=(split, *bugs))
    for pixels in ((7, 7), (20, 23)):
        x = normal(2, *pixels, 24)
        for k in together.kernels:
            got, _ = run(plan, {"x": x}, partial(preferred, word=k.version), (together,))
            assert close(got["y"][..., 0, 0], x.astype(np.float64).mean((1, 2))) == (k is split)
