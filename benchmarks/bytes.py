"""Times products of 8 and 4 bits, and quantized models, beside ONNX Runtime's.

usage: python -m benchmarks.bytes [MODEL.onnx ...] [--threads 1 2] [--rounds N] [--seconds S] [--only FAMILY ...]
                                 [--quick]

Families: ``linear8`` are layers of BERT-base quantized dynamically (extremes, quantization, product, scale, bias), one
of them with weights of uint8 too;
``linear4`` are products with weights of 4 bits in blocks of 32 (MatMulNBits), at ONNX Runtime's default accuracy
(float32) and at its level 4 (rows rounded to bytes); ``decoder4`` is a decoder of such products with the layers of one
of 0.5 billion parameters, 8 of its 24, random weights, with B sequences, L new tokens and P before them; GB/s count its
weights. M, B, L and P are symbolic. Models are given as
float32 files of the zoo (``make models``): bert_base is quantized dynamically and in the QDQ form, others in the QDQ
form only, by ONNX Runtime's tools, into benchmarks/out/models. Protocol: benchmarks/protocol.py. Outputs of models
differ by steps of quantization; what is further apart than TOLERANCE is told. After every model
benchmarks/results/bytes.json is written, of quick runs (three rounds, every third shape)
benchmarks/out/results/bytes.json.
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
"""N and K of BERT-base."""
ASYMMETRIC = 113
"""A zero point of weights of uint8, which are no bytes with a sign less it."""
NIBBLES = ((4864, 896), (896, 4864), (4096, 4096))
ROWS = (1, 2, 4, 8, 32, 128, 244, 1024)
FEW = (1, 4, 16, 64)
DECODED = tuple({"B": b, "L": n, "P": p} for b, n, p in ((1, 1, 64), (1, 1, 512), (4, 1, 64), (1, 16, 0), (1, 128, 0)))
LAYERS_OF_DECODER = 8
SCALED = 0.5 + 4 / 32
"""Bytes of a weight of 4 bits with its part of the scale of 32."""
TEXT = tuple({"B": b, "L": n} for b, n in ((1, 8), (1, 32), (1, 128), (4, 61), (8, 128)))
TOLERANCE = 0.1
"""Allowed difference between outputs, relative to their scale; a model's is some hundredths."""
WAYS = {"bert_base": ("dynamic", "QDQ")}
FOLDER = record.SCRATCH.parent / "models"


def quantized(path: Path, how: str) -> Path:
    """The quantized form of a model of the zoo, made once."""
    to = FOLDER / f"{path.stem}_{how.lower()}.onnx"
    if not to.exists():
        to.parent.mkdir(parents=True, exist_ok=True)
        more = {"weight_type": "QInt8"}
        if how != "dynamic":
            more |= {"activation_type": "QUInt8", "per_channel": True}  # type: ignore[dict-item]
        made = onnx.load(str(path))
        quantize(str(path), to, how, [feeds(made, s, seed=3) for s in shapes_of(path.stem, None)[:2]], **more)
    return to


def rows_of(field: Field, case: str, family: str, shapes: Sequence[Shape], cost: tuple[int, float], effort: Effort,
            limits: Limits) -> Iterator[Row]:  # fmt: skip
    """One model, which is loaded, at the shapes. ``cost``: multiply-adds and bytes; the first for each row of M."""
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
    """Every case on one number of threads, written one after the other; then the table."""
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
    """(model, family, shapes, multiply-adds for a row and bytes of weights)."""
    layers = [
        (models.dynamic_linear(n, k, zero), "linear8", ROWS, (n * k, float(n * k)))
        for (n, k), zero in (*((x, 0) for x in LAYERS), (LAYERS[0], ASYMMETRIC))
    ]
    layers += [
        (models.linear_of_nibbles(n, k, accuracy=a), "linear4", FEW, (n * k, n * k * SCALED))
        for n, k in NIBBLES for a in (0, 4)
    ]  # fmt: skip
    for made, family, at, cost in layers:
        if not args.only or family in args.only:
            yield models.save(made, folder), family, [{"M": m} for m in at], cost
    sizes = decoders.Sizes(LAYERS_OF_DECODER)
    for accuracy in (0, 4) if not args.only or "decoder4" in args.only else ():
        made = decoders.decoder_of_nibbles(f"decoder4_level{accuracy}", sizes, accuracy)
        yield models.save(made, folder), "decoder4", DECODED, (0, sizes.layers * sizes.weights * SCALED)
    for path in args.models:
        for how in WAYS.get(path.stem, ("QDQ",)):
            if not args.only or "models" in args.only:
                shapes = TEXT if path.stem == "bert_base" else shapes_of(path.stem, None)
                yield quantized(path, how), "models", shapes, (0, 0.0)


if __name__ == "__main__":
    main()
