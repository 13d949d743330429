"""Large windows on CUDA, channels-last, in tiles of pixels; on the strict emulation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.window_tiles import tile_axes
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.errors import DeviceError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.errors import Declined
from tests.support.cuda_groups import placed, plan_of, run, version, with_bugs
from tests.support.polyhedral_groups import depthwise

node = helper.make_node
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)
TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]


class Layer:
    """A depthwise convolution inside a network, followed by relu and a sum with another tensor."""

    def __init__(
        self, kernel: tuple[int, int], channels: int, pads: Sequence[int] = (0,) * 4, strides: Sequence[int] = (1, 1),
        dilations: Sequence[int] = (1, 1), dtype: str = "float16", side: Sequence[int | str] = ("H", "W"),
        constant: bool = True,
    ) -> None:  # fmt: skip
        self.pads, self.strides, self.dilations, self.dtype = pads, strides, dilations, dtype
        self.type = numpy_dtype(dtype)
        self.w = RNG.standard_normal((channels, 1, *kernel)).astype(self.type)
        self.constants = {"w": self.w} if constant else {}
        conv = node("Conv", ["t", "w"], ["u"], group=channels, pads=list(pads), strides=list(strides),
                    dilations=list(dilations))  # fmt: skip
        nodes = [node("Transpose", ["x"], ["t"], perm=TO_NCHW), conv, node("Relu", ["u"], ["r"]),
                 node("Transpose", ["r"], ["v"], perm=TO_NHWC), node("Add", ["v", "z"], ["y"])]  # fmt: skip
        inputs: dict[str, tuple[Any, ...]] = {"x": ("B", *side, channels), "z": (channels,)}
        if not constant:
            inputs["w"] = self.w.shape
        self.plan: FusionPlan = plan_of(nodes, inputs, ["y"], self.constants, dtype)
        self.placed: tuple[PlacedGroup, ...] = placed(self.plan)

    def check(self, images: int, height: int, width: int, kernels: tuple[PlacedGroup, ...] | None = None) -> bool:
        """Return whether tiles compute it at a size."""
        channels = self.w.shape[0]
        x = RNG.standard_normal((images, height, width, channels)).astype(self.type)
        z = RNG.standard_normal(channels).astype(self.type)
        feeds = {"x": x, "z": z} | ({} if self.constants else {"w": self.w})

        got, _ = run(self.plan, feeds, tile, kernels or self.placed)
        want = self.by_hand(x.astype(np.float64), z.astype(np.float64))
        close = np.abs(got["y"].astype(np.float64) - want) <= self.tolerance * np.maximum(1.0, np.abs(want))
        return got["y"].shape == want.shape and bool(close.all())

    @property
    def tolerance(self) -> float:
        return {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5}[self.dtype]

    def by_hand(self, x: Array, z: Array) -> Array:
        """Compute in float64."""
        top, left, bottom, right = self.pads
        padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
        kernel = self.w.shape[2:]
        span = [d * (k - 1) + 1 for k, d in zip(kernel, self.dilations, strict=True)]
        views = np.lib.stride_tricks.sliding_window_view(padded, span, (1, 2))
        views = views[:, :: self.strides[0], :: self.strides[1], :, :: self.dilations[0], :: self.dilations[1]]
        sums = np.einsum("bhwcij,cij->bhwc", views, self.w[:, 0].astype(np.float64))
        return np.maximum(sums.astype(self.type).astype(np.float64), 0) + z


def tile(p: PlacedGroup, env: dict[str, int]) -> Kernel:
    """Return the tile version if a group has it, else the first that fits."""
    return next((k for k in p.kernels if k.version == "tile"), p.kernels[0])


def tiles(layer: Layer) -> list[Kernel]:
    return [k for p in layer.placed for k in p.kernels if k.version == "tile"]


SIZES = ((1, 1, 1), (2, 5, 9), (1, 13, 17), (0, 5, 5), (3, 2, 31))


@pytest.mark.parametrize("kernel", [(5, 5), (7, 7)])
def test_tiles_at_sizes_that_are_symbols(kernel: tuple[int, int]) -> None:
    """At sizes around a tile's, of none, one and many pixels; weights are read in float32."""
    half = kernel[0] // 2
    layer = Layer(kernel, 10, [half] * 4)
    (found,) = tiles(layer)
    assert found.text.count("const float *") == 1 and "pd_ldg_wide<2>(in0 + 0, a" in found.text
    for size in SIZES:
        assert layer.check(*size)


KINDS: dict[str, dict[str, Any]] = {
    "strides, pads of no symmetry": {"kernel": (5, 7), "channels": 6, "pads": (3, 0, 1, 2), "strides": (2, 1)},
    "strides alike, dilated columns": {"kernel": (7, 5), "channels": 4, "pads": (2, 4, 3, 3), "strides": (2, 2),
                                       "dilations": (1, 2)},
    "dilated as far as strides": {"kernel": (5, 5), "channels": 2, "pads": (4, 0, 4, 5), "strides": (2, 1),
                                  "dilations": (2, 1)},
    "no pads": {"kernel": (5, 5), "channels": 4},
    "weights that are no constant": {"kernel": (5, 5), "channels": 8, "pads": (2, 2, 2, 2), "constant": False},
    "bfloat16": {"kernel": (5, 5), "channels": 6, "pads": (2, 2, 2, 2), "dtype": "bfloat16", "constant": False},
    "float32": {"kernel": (5, 5), "channels": 6, "pads": (2, 2, 2, 2), "dtype": "float32"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_every_kind(kind: str) -> None:
    layer = Layer(**KINDS[kind])
    assert tiles(layer)
    for size in ((1, 11, 12), (2, 9, 33), (1, 25, 9)):
        assert layer.check(*size)


@pytest.mark.parametrize("side", [(28, 28), (7, 9), (2, 3)])
def test_tiles_of_sizes_that_are_known(side: tuple[int, int]) -> None:
    """Whole tiles have no bounds checks inside the image; a tile is no larger than the image."""
    layer = Layer((5, 5), 4, [2] * 4, side=side)
    assert tiles(layer)
    assert layer.check(1, *side) and layer.check(2, *side)


def test_a_large_pooling() -> None:
    """A window without weights; pixels outside the image never become the maximum."""
    nodes = [node("Transpose", ["x"], ["t"], perm=TO_NCHW), node("Conv", ["t", "e"], ["u"]),
             node("MaxPool", ["u"], ["m"], kernel_shape=[5, 5], pads=[2, 2, 2, 2]),
             node("Conv", ["m", "e"], ["v"]), node("Transpose", ["v"], ["y"], perm=TO_NHWC)]  # fmt: skip
    same = {"e": np.eye(6, dtype=np.float16).reshape(6, 6, 1, 1)}
    plan = plan_of(nodes, {"x": ("B", "H", "W", 6)}, ["y"], same, "float16")
    kernels = placed(plan)
    assert any(k.version == "tile" for p in kernels for k in p.kernels)
    x = -np.abs(RNG.standard_normal((2, 7, 19, 6))).astype(np.float16)
    padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=-np.inf)
    want = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), (1, 2)).max((4, 5))
    got, _ = run(plan, {"x": x}, tile, kernels)
    assert np.array_equal(got["y"], want)


def test_lines_outside_of_the_image_take_nothing() -> None:
    """Estimates count loaded image rows and rows of taps that use them, by hand: 7 tiles of 4 x 14 pixels."""
    (found,) = tiles(Layer((5, 5), 8, [2] * 4, side=(28, 28)))
    work, lines, taps = found.device.work, 7 * 8 - 4, 28 * 5 - 6
    assert work is not None and work.steps == 8 and found.device.threads == 32
    products = Fraction(2 * 14 * 5 * taps, 7 * 8)
    assert products < work.instructions < Fraction(4, 3) * products
    assert work.shared == 32 * 2 * ceil(Fraction(18 * 2 * lines, 7 * 8) + Fraction(5 * 4 * taps, 7 * 8))


def test_what_has_no_tiles() -> None:
    """Odd channels, rows of taps that no rows of pixels share, small windows."""
    assert not tiles(Layer((5, 5), 7, [2] * 4))
    assert not tiles(Layer((5, 5), 8, [4, 2, 4, 2], dilations=(2, 1)))
    assert not tiles(Layer((3, 3), 8, [1] * 4))
    assert isinstance(tile_axes(depthwise(last=True), ("h", "w", "c")), Declined)


def test_a_line_outside_of_the_image_adds_nothing() -> None:
    """Weights that are infinite or no number have no effect there."""
    layer = Layer((5, 5), 2, [2] * 4, constant=False)
    layer.w[:, :, :2] = np.nan
    x = np.ones((1, 1, 9, 2), np.float16)

    got, _ = run(layer.plan, {"x": x, "z": np.zeros(2, np.float16), "w": layer.w}, tile, layer.placed)
    assert np.isfinite(got["y"]).all()


BUGS = {
    "a line of taps too early": ("row >= 1 && row < 6", "row >= 1 && row < 5"),
    "above the image": ("+ row + (-2)) >= 0", "+ row + (-1)) >= 0"),
    "the next column": ("line[(t + 2)] = in0[t]", "line[(t + 2)] = in0[t ^ 1]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_line_is_seen(bug: str) -> None:
    layer = Layer((5, 5), 10, [2] * 4)
    kernels = [p for p in layer.placed if any(k.version == "tile" for k in p.kernels)]
    (wrong,) = with_bugs(version(kernels[0], "tile"), {bug: BUGS[bug]})
    broken = tuple(
        replace(p, kernels=(replace(wrong, version="tile"),)) if p is kernels[0] else p for p in layer.placed
    )
    with suppress(DeviceError):
        assert not layer.check(1, 13, 17, broken)
