"""Times windows beside ONNX Runtime: depthwise convolutions and poolings, alone and between 1x1 convolutions.

usage: python -m benchmarks.windows [--threads 1 2] [--rounds N] [--seconds S] [--only FAMILY ...]
                                  [--also openvino] [--quick]

Families: ``depthwise`` and ``pool`` have planes of pixels on both sides, as a model's edges have; ``block`` is
MobileNet's inverted residual (1x1, depthwise, 1x1), in which polydyn keeps channels last. N, H and W are symbolic; each
model is compiled once for all its shapes. Cases are those of mobilenet, efficientnet, convnext, poolformer and resnet,
with odd sizes beside theirs. Protocol: benchmarks/protocol.py. The limit is operations at the FMA peak or bytes at the
bandwidth of where they fit, whichever is longer. ``--quick``: three rounds, the first shape of every model. After every
model benchmarks/results/windows.json is written, of quick runs benchmarks/out/results/windows.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from benchmarks import arguments, record, report
from benchmarks.limits import Limits, measure
from benchmarks.rows import Effort, Field, Row, Shape, progress
from polydyn.testing import models

Sizes = tuple[tuple[int, int, int], ...]
"""N, H, W."""


@dataclass(frozen=True)
class Case:
    """A window over ``channels`` at several shapes. ``operator``: ``Conv``, a pooling, or ``Block`` of ``narrow``
    channels outside.
    """

    operator: str
    channels: int
    kernel: int
    stride: int
    shapes: Sizes
    dilation: int = 1
    narrow: int = 0

    @property
    def family(self) -> str:
        """``depthwise``, ``pool`` or ``block``."""
        return {"Conv": "depthwise", "Block": "block"}.get(self.operator, "pool")

    def model(self) -> onnx.ModelProto:
        """The model."""
        if self.operator == "Block":
            return models.inverted_residual(self.narrow, self.channels, self.kernel, self.stride)
        return models.window(self.operator, self.channels, self.kernel, self.stride, self.dilation)

    def cost(self, shape: Shape) -> tuple[float, float]:
        """Operations, and bytes with each tensor moved once."""
        n, h, w, s = shape["N"], shape["H"], shape["W"], self.stride
        pixels, outputs = n * h * w, n * -(-h // s) * -(-w // s)
        taps = 2.0 * outputs * self.channels * self.kernel**2
        if self.operator == "Block":
            ends = 2.0 * self.channels * self.narrow
            return taps + ends * (pixels + outputs), 4.0 * self.narrow * (pixels + outputs + 2 * self.channels)
        return taps * (1 if self.operator == "Conv" else 0.5), 4.0 * self.channels * (pixels + outputs)


CASES = (
    Case("Conv", 96, 3, 1, ((1, 56, 57), (2, 112, 112))),
    Case("Conv", 32, 3, 1, ((1, 112, 113), (4, 57, 61))),
    Case("Conv", 384, 3, 1, ((1, 14, 15), (4, 14, 14))),
    Case("Conv", 960, 3, 1, ((2, 7, 7), (1, 9, 13))),
    Case("Conv", 96, 3, 2, ((1, 113, 115), (2, 56, 56))),
    Case("Conv", 144, 3, 2, ((1, 57, 59), (4, 28, 31))),
    Case("Conv", 512, 3, 2, ((4, 14, 16), (1, 28, 28))),
    Case("Conv", 128, 5, 1, ((1, 28, 31), (2, 56, 56))),
    Case("Conv", 672, 5, 1, ((1, 14, 14), (2, 7, 9))),
    Case("Conv", 240, 5, 2, ((1, 28, 29), (2, 56, 57))),
    Case("Conv", 96, 7, 1, ((1, 56, 57), (2, 28, 30))),
    Case("Conv", 384, 7, 1, ((1, 14, 15), (2, 14, 14))),
    Case("Conv", 256, 3, 1, ((1, 33, 35), (2, 28, 30)), dilation=2),
    Case("MaxPool", 64, 3, 1, ((1, 56, 57), (2, 28, 28))),
    Case("MaxPool", 512, 3, 1, ((1, 14, 15), (2, 14, 14))),
    Case("MaxPool", 64, 3, 2, ((1, 112, 113), (4, 56, 56))),
    Case("MaxPool", 128, 3, 2, ((2, 28, 29), (1, 55, 55))),
    Case("MaxPool", 64, 2, 2, ((1, 112, 112), (2, 57, 61))),
    Case("AveragePool", 64, 3, 1, ((1, 56, 57), (2, 56, 56))),
    Case("AveragePool", 384, 3, 1, ((1, 56, 59), (2, 14, 14))),
    Case("AveragePool", 512, 3, 1, ((1, 7, 7), (2, 14, 15))),
    Case("AveragePool", 64, 3, 2, ((1, 113, 115), (4, 56, 56))),
    Case("Block", 96, 3, 2, ((1, 112, 113), (2, 96, 80)), narrow=16),
    Case("Block", 192, 3, 1, ((1, 28, 29), (2, 28, 28)), narrow=32),
    Case("Block", 576, 3, 1, ((1, 14, 15), (2, 12, 10)), narrow=96),
    Case("Block", 240, 5, 2, ((1, 28, 29), (2, 24, 20)), narrow=40),
    Case("Block", 960, 5, 1, ((1, 7, 7), (2, 7, 9)), narrow=160),
)


def rows_of(field: Field, case: Case, shapes: Sizes, effort: Effort, limits: Limits) -> Iterator[Row]:
    """One model, loaded once, at the shapes."""
    made = case.model()
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(made, Path(folder)))
    for n, h, w in shapes:
        shape = {"N": n, "H": h, "W": w}
        flops, size = case.cost(shape)
        row = field.measure(shape, effort, limits.seconds_again(flops, size), flops)
        row |= {"case": made.graph.name, "family": case.family, "bytes": size}
        progress(row)
        yield row


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=1)
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    args = parser.parse_args()
    arguments.finish([path for threads in args.threads for path in run(threads, args)])


def run(threads: int, args: argparse.Namespace) -> list[Path]:
    """Every model on one number of threads, written one after the other; then the table."""
    effort, limits = arguments.effort(args), measure(threads, caches=True)
    results = record.Results("windows", arguments.folder(args))
    rows: list[Row] = []
    with Field(arguments.rivals(threads, args.also), threads) as field:
        for case in CASES:
            if args.only and case.family not in args.only:
                continue
            of_model = list(rows_of(field, case, case.shapes[: 1 if args.quick else None], effort, limits))
            results.add(of_model[0]["case"], threads, of_model, limits=vars(limits), **field.about())
            rows += of_model
    report.show_all(rows, "windows", limits)
    return [results.path]


if __name__ == "__main__":
    main()
