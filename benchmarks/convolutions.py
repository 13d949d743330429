"""Times the listed convolutions and poolings (benchmarks/ops/conv_list.json), compared with ONNX Runtime.

usage: python -m benchmarks.convolutions [--threads 1 2] [--rounds N] [--seconds S] [--only FAMILY ...]
                                       [--also openvino] [--quick]

Inputs and outputs are planes of pixels, as at a model's edges; ``block`` is MobileNet's inverted residual (1x1,
depthwise, 1x1), in which polydyn keeps channels last. N and all pixels are symbolic; each case is compiled once for all
its shapes. Protocol: benchmarks/protocol.py. The limit is operations at the FMA peak or bytes at the bandwidth of the
level where they fit, whichever is longer; summaries give its share and the geometric means of every family.
``--quick``: three rounds, the first shape of every case. After every case benchmarks/results/convolutions.json is
written, or benchmarks/out/results/convolutions.json for quick runs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import arguments, record, report
from benchmarks.limits import Limits, measure
from benchmarks.ops.convolutions import Case, read
from benchmarks.rows import Effort, Field, Row, progress
from polydyn.testing import models


def rows_of(field: Field, case: Case, effort: Effort, limits: Limits) -> Iterator[Row]:
    """Yield the rows of one model, loaded once, at its shapes."""
    model = case.model()
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(model, Path(folder)))
    for sizes in case.shapes:
        shape = case.feed(sizes)
        flops, size = case.cost(sizes)
        row = field.measure(shape, effort, limits.seconds_again(flops, size), flops)
        row |= {"case": model.graph.name, "family": case.family, "bytes": size}
        progress(row)
        yield row


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=1)
    parser.add_argument("--only", nargs="+", metavar="FAMILY")
    args = parser.parse_args()
    arguments.finish([path for threads in args.threads for path in run(threads, args)])


def run(threads: int, args: argparse.Namespace) -> list[Path]:
    """Measure every model on one number of threads and write each one; then print the table."""
    effort, limits = arguments.effort(args), measure(threads, caches=True)
    results = record.Results("convolutions", arguments.folder(args))
    rows: list[Row] = []
    with Field(arguments.rivals(threads, args.also), threads) as field:
        for case in read():
            if args.only and case.family not in args.only:
                continue
            short = replace(case, shapes=case.shapes[: 1 if args.quick else None])
            of_model = list(rows_of(field, short, effort, limits))
            results.add(of_model[0]["case"], threads, of_model, limits=vars(limits), **field.about())
            rows += of_model
    report.show_all(rows, "convolutions", limits)
    return [results.path]


if __name__ == "__main__":
    main()
