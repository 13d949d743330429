"""Convolutions that are rewritten for the matrix unit: images of few channels (stems), and narrow groups of channels.

The numbers are integers that bfloat16 has, so results are equal to ONNX Runtime's. The emulation of the unit is strict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from polydyn import Options
from polydyn.build.features import machine_features
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from tests.support.quantized import quantized_model
from tests.support.tiny import node

pytestmark = pytest.mark.skipif("avx512bw" not in machine_features(), reason="the emulation is for AVX-512")
TARGET = "cpu:amx-emulated"
RNG = np.random.default_rng(11)


@dataclass(frozen=True)
class Window:
    """A convolution of x[N, channels, pixels..], between products if it has groups."""

    channels: int
    results: int
    taps: tuple[int, ...]
    stride: int = 1
    pads: tuple[int, ...] = (0, 0, 0, 0)
    group: int = 1
    dilation: int = 1
    names: tuple[str, ...] = ("H", "W")

    def model(self) -> onnx.ModelProto:
        """Build the model: sums of few products, so that bfloat16 has all numbers."""
        rng, rank = np.random.default_rng(5), len(self.taps)
        shape, ones = (self.results, self.channels // self.group, *self.taps), (1,) * rank
        few = 12 / (shape[1] * np.prod(self.taps))
        w = rng.integers(-1, 2, shape) * (rng.random(shape) < few)
        last = rng.integers(-1, 2, (32, self.results, *ones)) * (rng.random((32, self.results, *ones)) < 0.2)
        first = np.eye(self.channels)[rng.permutation(self.channels)].reshape(self.channels, -1, *ones)
        attributes: dict[str, Any] = {
            "strides": [self.stride] * rank, "pads": list(self.pads), "group": self.group,
            "dilations": [self.dilation] * rank,
        }  # fmt: skip
        nodes = [node("Conv", "x a", "t")] if self.group > 1 else []
        nodes += [node("Conv", f"{'t' if nodes else 'x'} w", "u", **attributes), node("Relu", "u", "v"),
                  node("Conv", "v c", "y")]  # fmt: skip
        ws = {"w": w, "c": last} | ({"a": first} if self.group > 1 else {})
        inputs: Any = {"x": ("float32", ["N", self.channels, *self.names])}
        return quantized_model(nodes, inputs, ["y"], **{k: v.astype(np.float32) for k, v in ws.items()})

    def check(self, run: Any, *images: tuple[int, ...]) -> None:
        """Compare a program with ONNX Runtime at images (N, pixels..)."""
        exact = onnxruntime.InferenceSession(self.model().SerializeToString())
        for n, *pixels in images:
            x = RNG.integers(-3, 4, (n, self.channels, *pixels)).astype(np.float32)
            got = run({"x": x})["y"]
            if n:
                np.testing.assert_array_equal(got, exact.run(None, {"x": x})[0], f"{self} at {n, pixels}")


STEMS = {
    "7x7, 3 channels": Window(3, 64, (7, 7), 2, (3, 3, 3, 3)),
    "3x3, 3 channels, names of iterators": Window(3, 32, (3, 3), 2, (1, 1, 1, 1), names=("d3", "r0")),
    "5x5, one channel, uneven pads": Window(1, 32, (5, 5), 1, (2, 0, 1, 4)),
    "patches of 4 channels": Window(4, 32, (4, 4), 4),
    "5 channels without padding": Window(5, 32, (3, 3)),
    "a line of 2 channels": Window(2, 48, (3,), 1, (1, 1), names=("L",)),
    "a volume": Window(3, 32, (3, 3, 3), 1, (1,) * 6, names=("D", "H", "W")),
}
GROUPS = {
    "of 2": Window(32, 32, (3, 3), 1, (1, 1, 1, 1), group=16),
    "of 8": Window(64, 64, (3, 3), 2, (1, 1, 1, 1), group=8),
    "of 16, 1x1": Window(64, 64, (1, 1), group=4),
    "of 4, a volume": Window(64, 64, (1, 3, 3), 1, (0, 1, 1, 0, 1, 1), group=16, names=("D", "H", "W")),
}
IMAGES = {1: ((1, 7), (2, 33), (1, 3), (0, 9)), 2: ((1, 9, 7), (2, 14, 17), (1, 5, 40), (3, 5, 5), (0, 8, 8)),
          3: ((1, 3, 4, 5), (2, 4, 3, 18))}  # fmt: skip


def planned(w: Window, off: tuple[str, ...] = ()) -> HostPlan:
    return plan_program(w.model(), target=TARGET, options=Options(precision="bf16", without=off))


@pytest.mark.parametrize("w", [*STEMS.values(), *GROUPS.values()], ids=[*STEMS, *GROUPS])
def test_every_image_is_equal_to_the_reference(w: Window) -> None:
    plan = planned(w)
    names = [k.name for k in plan.kernels if not k.amx]
    assert not any("contract" in n or "matrix" in n for n in names), names
    assert any(k.amx for k in plan.kernels)
    w.check(build_program(plan, target=TARGET, threads=2).run, *IMAGES[len(w.taps)])


@pytest.mark.parametrize("w", [STEMS["7x7, 3 channels"], STEMS["5 channels without padding"], GROUPS["of 8"]])
def test_every_access_is_in_bounds_and_reads_what_was_written(w: Window) -> None:
    w.check(CheckedProgram(planned(w)).run, *IMAGES[2][:2])


@pytest.mark.parametrize(("w", "off"), [(STEMS["7x7, 3 channels"], "stems"), (GROUPS["of 8"], "groups")])
def test_without_the_pass_other_kernels_compute_it(w: Window, off: str) -> None:
    plan, plain = planned(w), planned(w, (off,))
    assert {k.name for k in plan.kernels} != {k.name for k in plain.kernels}
    w.check(build_program(plain, target=TARGET, threads=1).run, IMAGES[2][0])


@pytest.mark.parametrize(
    ("w", "off"),
    [
        (Window(3, 32, (3, 3), 1, (2, 2, 2, 2), dilation=2), "stems"),  # taps are not adjacent
        (Window(16, 32, (3, 3), 1, (1, 1, 1, 1)), "stems"),  # a pixel fills an instruction
        (Window(48, 48, (3, 3), 1, (1, 1, 1, 1), group=6), "groups"),  # 32 do not divide the channels
        (Window(64, 64, (3,), 1, (1, 1), group=16, names=("L",)), "groups"),  # its lines are stored as planes
        (Window(64, 128, (3, 3), 1, (1, 1, 1, 1), group=8), "groups"),  # groups have more results than channels
    ],
)
def test_what_the_passes_leave_alone(w: Window, off: str) -> None:
    plan = planned(w)
    assert {k.name for k in plan.kernels} == {k.name for k in planned(w, (off,)).kernels}
    w.check(build_program(plan, target=TARGET, threads=1).run, IMAGES[len(w.taps)][0])
