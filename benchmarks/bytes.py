"""Times 8-bit and 4-bit products and quantized models, compared with ONNX Runtime.

usage: python -m benchmarks.bytes [MODEL.onnx ...] [--threads 1 2] [--rounds N] [--seconds S] [--only FAMILY ...]
                                 [--quick]

``linear8``: layers of BERT-base quantized dynamically (extremes, quantization, product, scale, bias), one of them with
uint8 weights too. ``linear4``: products with 4-bit weights in blocks of 32 (MatMulNBits), at ONNX Runtime's default
accuracy (float32) and at its level 4 (rows rounded to bytes). ``decoder4``: a decoder of such products with random
weights and the layer sizes of a model of 0.5 billion parameters (8 of its 24 layers), for B sequences, L new tokens and
P earlier ones; GB/s count its weights. M, B, L and P are symbolic.

Models are float32 files of the zoo (``make models``). ONNX Runtime's tools quantize bert_base dynamically and in the
QDQ form, other models in the QDQ form only, into benchmarks/out/models. Protocol: benchmarks/protocol.py. Outputs of
models differ by quantization steps; differences above TOLERANCE are reported. After every model
benchmarks/results/bytes.json is written, or benchmarks/out/results/bytes.json for quick runs (three rounds, every third
shape).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx

from benchmarks import arguments, record, report
from benchmarks.cpu_all import shapes_of
from benchmarks.limits import Limits, measure
from benchmarks.rows import Effort, Field, Row, Shape, progress
from polydyn.testing import decoders, models
from polydyn.testing.inputs import feeds
from polydyn.testing.quantizer import quantize

LAYERS = ((768, 768), (2304, 768), (3072, 768), (768, 3072))
"""N and K of BERT-base's layers."""
ASYMMETRIC = 113
"""A zero point for which uint8 weights are not int8 weights plus 128."""
NIBBLES = ((4864, 896), (896, 4864), (4096, 4096))
ROWS = (1, 2, 4, 8, 32, 128, 244, 1024)
LINEAR4_ROWS = (1, 4, 16, 64)
DECODER_DIMS = tuple(
    {"B": b, "L": n, "P": p} for b, n, p in ((1, 1, 64), (1, 1, 512), (4, 1, 64), (1, 16, 0), (1, 128, 0))
)
LAYERS_OF_DECODER = 8
NIBBLE_BYTES = 0.5 + 4 / 32
"""Bytes of a 4-bit weight, including its part of the scale that 32 weights share."""
TEXT = tuple({"B": b, "L": n} for b, n in ((1, 8), (1, 32), (1, 128), (4, 61), (8, 128)))
TOLERANCE = 0.1
"""Allowed difference between outputs, relative to their scale; a model's is a few hundredths."""
WAYS = {"bert_base": ("dynamic", "QDQ")}
FOLDER = record.SCRATCH.parent / "models"


def quantized(path: Path, scheme: str) -> Path:
    """Quantize a model of the zoo, once, and return its path."""
    to = FOLDER / f"{path.stem}_{scheme.lower()}.onnx"
    if not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        more = {"weight_type": "QInt8"}
        if scheme != "dynamic":
            more |= {"activation_type": "QUInt8", "per_channel": True}  # type: ignore[dict-item]
        model = onnx.load(str(path))
        quantize(str(path), to, scheme, [feeds(model, s, seed=3) for s in shapes_of(path.stem, None)[:2]], **more)
    return to


def rows_of(field: Field, case: str, family: str, shapes: Sequence[Shape], cost: tuple[int, float], effort: Effort,
            limits: Limits) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of one loaded model at the shapes. ``cost``: multiply-adds per row of M, and bytes."""
    for shape in shapes:
        flops = 2.0 * cost[0] * shape.get("M", 0)
        row = field.measure(shape, effort, limits.seconds_again(0, cost[1]), flops)
        row |= {"case": case, "family": family}
        progress(row)
        yield row


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=2)
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL.onnx")
    parser.add_argument("--only", nargs="+", choices=("linear8", "linear4", "decoder4", "models"), metavar="FAMILY")
    args = parser.parse_args()
    arguments.finish([path for threads in args.threads for path in run(threads, args)])


def run(threads: int, args: argparse.Namespace) -> list[Path]:
    """Measure every case on one number of threads and write each one; then print the table."""
    effort, limits, step = arguments.effort(args), measure(threads, caches=True), 3 if args.quick else 1
    results = record.Results("bytes", arguments.folder(args))
    rows: list[Row] = []
    with (
        Field(arguments.rivals(threads, args.also), threads, TOLERANCE) as field,
        tempfile.TemporaryDirectory() as folder,
    ):
        for path, family, shapes, cost in _cases(args, Path(folder)):
            field.load(path)
            of_model = list(rows_of(field, path.stem, family, shapes[::step], cost, effort, limits))
            results.add(path.stem, threads, of_model, limits=vars(limits), **field.about())
            rows += of_model
    report.show_all(rows, "8 and 4 bits", limits)
    return [results.path]


def _cases(args: argparse.Namespace, folder: Path) -> Iterator[tuple[Path, str, Sequence[Shape], tuple[int, float]]]:
    """Yield (path, family, shapes, (multiply-adds per row, bytes of weights))."""
    layers = [
        (models.dynamic_linear(n, k, zero), "linear8", ROWS, (n * k, float(n * k)))
        for (n, k), zero in (*((x, 0) for x in LAYERS), (LAYERS[0], ASYMMETRIC))
    ]
    layers += [
        (models.linear_of_nibbles(n, k, accuracy=a), "linear4", LINEAR4_ROWS, (n * k, n * k * NIBBLE_BYTES))
        for n, k in NIBBLES for a in (0, 4)
    ]  # fmt: skip
    for model, family, at, cost in layers:
        if not args.only or family in args.only:
            yield models.save(model, folder), family, [{"M": m} for m in at], cost
    sizes = decoders.Sizes(LAYERS_OF_DECODER)
    for accuracy in (0, 4) if not args.only or "decoder4" in args.only else ():
        model = decoders.decoder_of_nibbles(f"decoder4_level{accuracy}", sizes, accuracy)
        yield models.save(model, folder), "decoder4", DECODER_DIMS, (0, sizes.layers * sizes.weights * NIBBLE_BYTES)
    for path in args.models:
        for scheme in WAYS.get(path.stem, ("QDQ",)):
            if not args.only or "models" in args.only:
                shapes = TEXT if path.stem == "bert_base" else shapes_of(path.stem, None)
                yield quantized(path, scheme), "models", shapes, (0, 0.0)


if __name__ == "__main__":
    main()
