"""Times the kernels around products: rows, attention, copies, and weights that stream from memory.

usage: python -m benchmarks.stitch [--threads 1 2] [--rounds N] [--seconds S] [--only FAMILY ...]
                                 [--also openvino] [--quick]

Families: ``layer_norm`` and ``softmax`` (in the caches, from memory, ragged rows), ``attention`` (12 heads of 64, a
mask with zeros; ONNX Runtime runs the same nodes and, as another contestant, its MultiHeadAttention; PyTorch runs its
scaled_dot_product_attention), ``elementwise``, ``copies``, and ``linears``: 24 products whose weights, 226 MB together,
exceed every cache. Every size named in a shape is symbolic; each model is compiled once for all its shapes. Protocol:
benchmarks/protocol.py. The limit is operations at the FMA peak or bytes at the bandwidth of the level where they fit,
counted once each and as reads (exp and similar functions are assumed free), whichever is longer. ``--quick``: three
rounds, every second shape. After every model benchmarks/results/stitch.json is written, or
benchmarks/out/results/stitch.json for quick runs; a new measurement of a model on a number of threads replaces the
earlier one. A plot is written next to the file at the end.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from benchmarks import arguments, record, report
from benchmarks.limits import Limits, measure
from benchmarks.rivals import NUMPY
from benchmarks.rows import Effort, Field, Row, Shape, progress
from polydyn.testing import models

FUSED_ATTENTION_KIND = "onnxruntime-mha"
"""ONNX Runtime with its own fused attention operator."""


@dataclass(frozen=True)
class Work:
    """One model at several shapes. ``cost`` maps a shape to (operations, bytes)."""

    family: str
    model: onnx.ModelProto
    shapes: Sequence[Shape]
    cost: Callable[[Shape], tuple[float, float]]


def _rows(*sizes: int) -> list[Shape]:
    return [{"R": r} for r in sizes]


def _matrix(*sizes: tuple[int, int]) -> list[Shape]:
    return [{"R": r, "L": length} for r, length in sizes]


def _moved(*tensors: Sequence[str | int]) -> Callable[[Shape], tuple[float, float]]:
    """Return the cost of a copy: no operations; float32 tensors of these dims, each moved once."""

    def size(shape: Shape, dims: Sequence[str | int]) -> float:
        elements = 4.0
        for d in dims:
            elements *= shape[d] if isinstance(d, str) else d
        return elements

    return lambda shape: (0.0, sum(size(shape, t) for t in tensors))


def _attention_cost(shape: Shape) -> tuple[float, float]:
    b, length = shape["B"], shape["L"]
    return 4.0 * b * length * length * 768, 4.0 * 4 * b * length * 768


def _linears_cost(shape: Shape) -> tuple[float, float]:
    weights, m = 24.0 * 768 * 3072, shape["M"]
    return 2 * m * weights, 4 * (weights + m * (768 + 768))


def works() -> list[Work]:
    """Return all timed models, family by family."""
    text = [{"B": b, "L": n} for b, n in ((1, 8), (1, 61), (1, 128), (8, 128), (1, 512))]
    heads = [{"B": b, "L": n} for b, n in ((1, 61), (8, 128), (16, 512))]
    flat = [{"R": 1, "L": 61}, {"R": 128, "L": 768}, {"R": 1008, "L": 3072}, {"R": 20_000, "L": 768}]
    plane, four = ["R", "L"], ["B", "L", 12, 64]
    two, three = _moved(plane, plane), _moved(plane, plane, plane)
    images = [{"N": n, "H": h, "W": w} for n, h, w in ((1, 28, 28), (4, 57, 61), (2, 224, 224))]
    both = _moved(["N", 64, "H", "W"], ["N", 64, "H", "W"])
    square = [{"R": r, "L": n} for r, n in ((61, 61), (768, 128), (1000, 3001), (4096, 4096))]
    rows = [*((12, 8), (1536, 128), (3996, 333), (732, 61), (1008, 768), (20_000, 768))]
    return [
        Work("layer_norm", models.layer_norm(768), _rows(1, 8, 128, 1008, 20_000), _moved(["R", 768], ["R", 768])),
        Work("layer_norm", models.layer_norm(61), _rows(61, 732), _moved(["R", 61], ["R", 61])),
        Work("softmax", models.unary("Softmax", plane, axis=-1), _matrix(*rows), two),
        Work("attention", models.attention(), text, _attention_cost),
        Work("elementwise", models.binary("Add", plane, plane, "add"), flat, three),
        Work("elementwise", models.binary("Add", plane, ["L"], "add_row"), flat, _moved(plane, ["L"], plane)),
        Work("elementwise", models.binary("Add", plane, ["R", 1], "add_column"), flat, _moved(plane, ["R"], plane)),
        Work("elementwise", models.unary("Relu", plane), flat, two),
        Work("elementwise", models.unary("Gelu", plane), flat, two),
        Work("elementwise", models.unary("Exp", plane), flat, two),
        Work("elementwise", models.unary("Tanh", plane), flat, two),
        Work("copies", models.transpose(plane, (1, 0), "transpose"), square, two),
        Work("copies", models.transpose(four, (0, 2, 1, 3), "split_heads"), heads, _moved(four, four)),
        Work("copies", models.transpose(four, (0, 2, 3, 1), "split_heads_turned"), heads, _moved(four, four)),
        Work("copies", models.transpose(["N", 64, "H", "W"], (0, 2, 3, 1), "channels_last"), images, both),
        Work("linears", models.linears(), [{"M": m} for m in (1, 2, 3, 4, 8, 16, 32, 64)], _linears_cost),
    ]


def rows_of(field: Field, work: Work, shapes: Sequence[Shape], effort: Effort, limits: Limits) -> Iterator[Row]:
    """Yield the rows of one model, loaded once, at the shapes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fused = models.save(models.fused_attention(), folder) if work.family == "attention" else None
        others: dict[str, Path | None] = {n: fused for n in field.all if n.startswith(FUSED_ATTENTION_KIND)}
        if [n.op_type for n in work.model.graph.node if n.op_type not in NUMPY] or work.family == "linears":
            others["numpy"] = None
        field.load(models.save(work.model, folder), others)
    for shape in shapes:
        flops, size = work.cost(shape)
        row = field.measure(shape, effort, limits.seconds_again(flops, size), flops)
        row |= {"case": work.model.graph.name, "family": work.family, "bytes": size}
        progress(row)
        yield row


def kinds(threads: int, also: Sequence[str]) -> dict[str, str]:
    """Map names in the table to contestants."""
    fused = {k.replace("onnxruntime", FUSED_ATTENTION_KIND, 1): k for k in arguments.onnxruntimes(threads)}
    first, *others = arguments.rivals(threads, also, "torch", "numpy")
    return {first: first, **fused, **{k: k for k in others}}


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=2)
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    args = parser.parse_args()
    arguments.finish([path for threads in args.threads for path in run(threads, args)])


def run(threads: int, args: argparse.Namespace) -> list[Path]:
    """Measure every model on one number of threads and write each one; then print the table."""
    effort, limits = arguments.effort(args), measure(threads, caches=True)
    results = record.Results("stitch", arguments.folder(args))
    rows: list[Row] = []
    with Field(kinds(threads, args.also), threads) as field:
        for work in works():
            if args.only and work.family not in args.only:
                continue
            of_model = list(rows_of(field, work, work.shapes[:: 2 if args.quick else 1], effort, limits))
            results.add(work.model.graph.name, threads, of_model, limits=vars(limits), **field.about())
            rows += of_model
    report.show_all(rows, "kernels around products", limits)
    return [results.path]


if __name__ == "__main__":
    main()
