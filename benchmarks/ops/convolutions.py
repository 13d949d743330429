"""Writes the list of convolutions and poolings that benchmarks/convolutions.py times, conv_list.json.

usage: python -m benchmarks.ops.convolutions

Two halves: layers of vision, audio and volume models, at their sizes and at odd ones; and draws from the ranges of
Vortex (Table 4), uniform in their logarithm, with a fixed seed. A case above MAX_FLOPS, or with a tensor above
MAX_ELEMENTS, is drawn again. Every case is one model, N and all pixels symbolic, compiled once for all its shapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import onnx

from polydyn.testing import models

LIST = Path(__file__).parent / "conv_list.json"
SEED = 2025
MAX_FLOPS = 4e9
MAX_ELEMENTS = 12_000_000

Ints = tuple[int, ...]
Range = tuple[int, int]
TABLE4: dict[str, tuple[Range, Range, Range, Range, Range]] = {
    "deepbench": ((1, 16), (7, 700), (1, 20), (1, 2048), (16, 2048)),
    "cnn": ((1, 64), (4, 768), (1, 11), (3, 832), (16, 512)),
}
"""Maps a name to inclusive ranges of N, pixels of a side, kernel, input and output channels."""
CASES_PER_RANGE = 30
"""Cases per range."""


@dataclass(frozen=True)
class Case:
    """``operator``: Conv, ConvTranspose, MaxPool, AveragePool, or Block, MobileNet's inverted residual of ``channels``
    outside and ``outputs`` inside. ``kernel``, ``stride``, ``dilation``: for each axis of pixels; paddings are even.
    ``shapes``: (N, pixels..).
    """

    family: str
    operator: str
    channels: int
    outputs: int
    kernel: Ints
    shapes: tuple[Ints, ...]
    stride: Ints = ()
    dilation: Ints = ()
    group: int = 1

    def steps(self) -> Ints:
        """Strides, 1 by default."""
        return self.stride or (1,) * len(self.kernel)

    def pads(self) -> Ints:
        """Padding on both sides of each axis."""
        apart = self.dilation or (1,) * len(self.kernel)
        return tuple(d * (k - 1) // 2 for k, d in zip(self.kernel, apart, strict=True))

    def result(self, shape: Ints) -> Ints:
        """Return the pixels of the result for the pixels of the input."""
        apart, steps = self.dilation or (1,) * len(self.kernel), self.steps()
        out = []
        for e, k, s, d, p in zip(shape, self.kernel, steps, apart, self.pads(), strict=True):
            transposed = self.operator == "ConvTranspose"
            out.append((e - 1) * s + k - 2 * p if transposed else (e + 2 * p - d * (k - 1) - 1) // s + 1)
        return tuple(out)

    def cost(self, shape: Ints) -> tuple[float, float]:
        """Return operations, and bytes with each tensor moved once; ``shape``: (N, pixels..)."""
        n, *pixels = shape
        before, after, taps = n * prod(pixels), n * prod(self.result(tuple(pixels))), prod(self.kernel)
        if self.operator == "Block":
            ends = 2.0 * self.channels * self.outputs
            flops = 2.0 * after * self.outputs * taps + ends * (before + after)
            return flops, 4.0 * self.channels * (before + after + 2 * self.outputs)
        size = 4.0 * (self.channels * before + self.outputs * after)
        if self.operator.endswith("Pool"):
            return 1.0 * after * self.channels * taps, size
        weights = self.channels * self.outputs // self.group * taps
        return 2.0 * weights * (before if self.operator == "ConvTranspose" else after), size + 4.0 * weights

    def model(self) -> onnx.ModelProto:
        """Build the case as an ONNX model."""
        ends, windows = (self.channels, self.outputs), (self.kernel, self.steps(), self.dilation, self.pads())
        return models.convolution(self.operator, *ends, *windows, self.group)

    def feed(self, shape: Ints) -> dict[str, int]:
        """Map the model's names to (N, pixels..)."""
        return dict(zip(models.image_dims(len(self.kernel)), shape, strict=True))

    def fits(self) -> bool:
        """Return whether every shape has a result and is within the limits."""
        for n, *pixels in self.shapes:
            after = self.result(tuple(pixels))
            sizes = (n * self.channels * prod(pixels), n * self.outputs * prod(after))
            if min(after) < 1 or max(sizes) > MAX_ELEMENTS or self.cost((n, *pixels))[0] > MAX_FLOPS:
                return False
        return True


def _image(side: int, n: int = 2) -> tuple[Ints, ...]:
    """Return a model's own size, and an odd one in a batch."""
    return (1, side, side), (n, side - side // 8, side + 1)


def _square(
    family: str, k: int, rows: str, s: int = 1, d: int = 1, group: int = 1, operator: str = "Conv"
) -> list[Case]:
    """Return cases of a square kernel from ``channels-outputs@side`` words; ``group`` 0: depthwise."""
    out = []
    for word in rows.split():
        channels, rest = word.split("-")
        outputs, side = rest.split("@")
        groups = group or int(channels)
        steps, apart = ((s, s) if s > 1 else ()), ((d, d) if d > 1 else ())
        shapes = _image(int(side))
        out.append(Case(family, operator, int(channels), int(outputs), (k, k), shapes, steps, apart, groups))
    return out


def of_models() -> list[Case]:
    """Return layers of models."""
    return [
        *_square("1x1", 1, "64-256@56 256-64@56 512-128@28 1024-256@14 2048-512@7 96-24@56 320-1280@7 256-21@33"),
        *_square("1x1", 1, "256-512@56 512-1024@28", s=2),
        *_square("3x3", 3, "64-64@56 128-128@28 256-256@14 512-512@7 64-64@112 32-64@80 128-32@28 192-208@14 96-96@57"),
        *_square("3x3", 3, "16-16@112 24-48@40 256-256@33 304-256@29 48-20@96"),
        *_square("3x3 strided", 3, "64-128@56 128-256@28 256-512@14 128-128@57 32-64@112 16-24@113", s=2),
        *_square("large", 5, "16-32@28 32-96@28 48-128@14 64-64@56"),
        *_square("large", 7, "96-96@28 64-64@14"),
        *_square("large", 5, "64-192@27", s=2),
        Case("large", "Conv", 128, 192, (1, 7), _image(17)),
        Case("large", "Conv", 192, 192, (7, 1), _image(17)),
        Case("large", "Conv", 64, 64, (1, 3), _image(56)),
        *_square("stem", 3, "3-32@224 3-16@160 3-64@112 3-24@225", s=2),
        *_square("stem", 3, "3-64@112 1-16@96"),
        *_square("stem", 7, "3-64@224 3-64@112 1-64@96", s=2),
        Case("stem", "Conv", 3, 48, (4, 4), _image(112), (4, 4)),
        Case("stem", "Conv", 3, 96, (16, 16), _image(224), (16, 16)),
        Case("stem", "Conv", 3, 32, (7, 7), _image(224), (4, 4)),
        *_square("grouped", 3, "128-128@56 256-256@28 512-512@14 1024-1024@7", group=32),
        *_square("grouped", 3, "256-256@57 512-512@28", s=2, group=32),
        *_square("grouped", 3, "48-48@56 104-104@28", group=2),
        *_square("grouped", 3, "208-208@14", group=26),
        *_square("grouped", 3, "96-96@28", group=3),
        *_square("grouped", 1, "240-240@28", group=3),
        *_square("dilated", 3, "128-128@28 256-256@28 512-512@14", d=2),
        *_square("dilated", 3, "256-256@33", d=6),
        *_square("dilated", 3, "256-64@33", d=12),
        *_square("dilated", 3, "128-128@33", d=4),
        *_square("depthwise", 3, "96-96@56 32-32@112 384-384@14 960-960@7 576-576@14", group=0),
        *_square("depthwise", 3, "96-96@113 144-144@57 512-512@14 64-64@112", s=2, group=0),
        *_square("depthwise", 5, "128-128@28 672-672@14 240-240@14", group=0),
        *_square("depthwise", 5, "240-240@28 96-96@28", s=2, group=0),
        *_square("depthwise", 7, "96-96@56 384-384@14 768-768@7", group=0),
        *_square("depthwise", 3, "256-256@33", d=2, group=0),
        *_square("pool", 3, "64-64@56 512-512@14 192-192@28", operator="MaxPool"),
        *_square("pool", 3, "64-64@112 128-128@28 192-192@56", s=2, operator="MaxPool"),
        *_square("pool", 2, "64-64@112 256-256@28", s=2, operator="MaxPool"),
        *_square("pool", 3, "64-64@56 384-384@56 512-512@7 320-320@14", operator="AveragePool"),
        *_square("pool", 3, "64-64@113", s=2, operator="AveragePool"),
        *_square("pool", 2, "128-128@56", s=2, operator="AveragePool"),
        *_square("block", 3, "16-96@112", s=2, operator="Block"),
        *_square("block", 3, "32-192@28 96-576@14", operator="Block"),
        *_square("block", 5, "40-240@28", s=2, operator="Block"),
        *_square("block", 5, "160-960@7", operator="Block"),
        Case("1-d", "Conv", 80, 256, (3,), ((1, 400), (2, 333))),
        Case("1-d", "Conv", 256, 256, (3,), ((1, 400), (2, 201)), (2,)),
        Case("1-d", "Conv", 64, 64, (9,), ((1, 1600), (2, 555))),
        Case("1-d", "Conv", 128, 128, (3,), ((1, 1000), (2, 301)), (), (8,)),
        Case("1-d", "Conv", 1, 64, (16,), ((1, 8000), (2, 4001)), (8,)),
        Case("1-d", "Conv", 256, 256, (31,), ((1, 400), (2, 201)), (), (), 256),
        Case("3-d", "Conv", 16, 32, (3, 3, 3), ((1, 16, 28, 28), (1, 9, 31, 27))),
        Case("3-d", "Conv", 3, 32, (3, 7, 7), ((1, 8, 56, 57),), (1, 2, 2)),
        Case("3-d", "Conv", 64, 64, (1, 3, 3), ((1, 8, 28, 29),)),
        Case("3-d", "Conv", 64, 64, (3, 1, 1), ((1, 8, 28, 29),)),
        Case("3-d", "MaxPool", 32, 32, (2, 2, 2), ((1, 16, 32, 33),), (2, 2, 2)),
        *_square("transposed", 2, "64-32@28 128-64@28", s=2, operator="ConvTranspose"),
        *_square("transposed", 4, "64-32@28", s=2, operator="ConvTranspose"),
        *_square("transposed", 3, "32-32@28", operator="ConvTranspose"),
        *_square("transposed", 3, "64-32@56", s=2, operator="ConvTranspose"),
    ]


def drawn() -> Iterator[Case]:
    """Yield cases of Vortex's ranges; a kernel is no larger than its image."""
    r = np.random.default_rng(SEED)

    def pick(low_high: Range) -> int:
        low, high = low_high
        return int(np.clip(round(float(np.exp(r.uniform(np.log(low), np.log(high))))), low, high))

    for name, (batch, side, kernel, channels, outputs) in TABLE4.items():
        count = 0
        while count < CASES_PER_RANGE:
            n, h, k, c, o = (pick(x) for x in (batch, side, kernel, channels, outputs))
            w, s = h + int(r.integers(0, 4)), int(r.choice((1, 1, 2)))
            case = Case(name, "Conv", c, o, (k, k), ((n, h, w),), (s, s) if s > 1 else ())
            if k <= h and case.fits() and case.cost((n, h, w))[0] > 1e6:
                yield case
                count += 1


def cases() -> list[Case]:
    """Return the whole list: each model occurs once, with all its shapes."""
    shapes: dict[Case, tuple[Ints, ...]] = {}
    for c in (*of_models(), *drawn()):
        model = replace(c, shapes=())
        shapes[model] = (*shapes.get(model, ()), *c.shapes)
    return [replace(model, shapes=found) for model, found in shapes.items()]


def read() -> list[Case]:
    """Read the committed list."""
    tuples = ("kernel", "stride", "dilation")
    return [
        Case(**{**c, "shapes": tuple(map(tuple, c["shapes"])), **{n: tuple(c[n]) for n in tuples}})
        for c in json.loads(LIST.read_text())["cases"]
    ]


def text() -> str:
    """Return the expected content of conv_list.json, one case a line."""
    lines = ",\n".join(f"  {json.dumps(asdict(c))}" for c in cases())
    return f'{{\n "seed": {SEED},\n "cases": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    LIST.write_text(text())
    print(f"{LIST.name}: {sum(len(c.shapes) for c in cases())} shapes of {len(cases())} convolutions and poolings")
