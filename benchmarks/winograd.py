"""3x3 convolutions as products of tiles of 2x2 and of 4x4 pixels: errors and times compared with the direct sum.

usage: python -m benchmarks.winograd [--threads 1 2] [--rounds N] [--seconds S] [--also openvino] [--quick]
                                    [--layers 64-64@56 ...]

A layer is channels-outputs@side, with padding, between planes, N and both sides symbolic. An error is the largest
absolute difference from sums in float64, over the largest absolute value, for normal random numbers on 14x14 pixels; it
does not depend on the machine's load. Times follow benchmarks/protocol.py, one image of side x side. ``F(2,3)`` is the
default and ``F(4,3)`` is ``Options(winograd=4)``. Both are also used for layers that polydyn/fusion/winograd.py:pays
would reject, so that the table shows what its constants should be. Results go to benchmarks/results/winograd.json, or
benchmarks/out/results/winograd.json for quick runs (three rounds, two layers).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import arguments, record
from benchmarks.ops.convolutions import Case
from benchmarks.rivals import compiled
from benchmarks.rows import Effort, Field, Row
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.testing import models
from polydyn.testing.accuracy import error

LAYERS = ("48-48@56", "64-64@56", "64-64@112", "64-64@224", "96-96@57", "128-128@28", "256-256@14", "512-512@7")
WAYS = {"direct": "polydyn-direct", "F(2,3)": "polydyn-tiles2", "F(4,3)": "polydyn-tiles4"}
"""Maps a column to a contestant of ``benchmarks.rivals``."""
ERRORS_AT = 14


def layer(text: str) -> tuple[Case, int]:
    """Parse ``channels-outputs@side`` into the case and the side."""
    match = re.fullmatch(r"(\d+)-(\d+)@(\d+)", text)
    if not match:
        raise SystemExit(f"{text!r} is no layer; one is 64-64@56")
    channels, outputs, side = map(int, match.groups())
    return Case("3x3", "Conv", channels, outputs, (3, 3), ((1, side, side),)), side


def errors(case: Case) -> dict[str, float]:
    """Map each way of computing to its error."""
    model, shape = case.model(), (1, case.channels, ERRORS_AT, ERRORS_AT)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    exact = reference.evaluate(import_model(model), {"x": x})
    with tempfile.TemporaryDirectory() as folder:
        path = str(models.save(model, Path(folder)))
        return {way: error(compiled(path, 1, kind).run({"x": x}), exact) for way, kind in WAYS.items()}


def times(field: Field, case: Case, effort: Effort) -> Row:
    """Return the seconds of every contestant, and the contestants whose outputs differ."""
    with tempfile.TemporaryDirectory() as folder:
        field.load(models.save(case.model(), Path(folder)))
    flops, _ = case.cost(case.shapes[0])
    return field.measure(case.feed(case.shapes[0]), effort, 0.0, flops)


def main() -> None:
    """See the module's docstring."""
    parser = arguments.parser(__doc__, seconds=3)
    parser.add_argument("--layers", nargs="+", default=LAYERS, metavar="C-O@SIDE")
    args = parser.parse_args()
    results = record.Results("winograd", arguments.folder(args))
    layers = args.layers[:2] if args.quick else args.layers
    wrong = {text: errors(layer(text)[0]) for text in layers}
    for threads in args.threads:
        rivals = {n: n for n in arguments.rivals(threads, args.also) if n != "polydyn"}
        with Field(rivals | WAYS, threads) as field:
            for text in layers:
                row = times(field, layer(text)[0], arguments.effort(args)) | {"errors": wrong[text]}
                results.add(text, threads, [row], **field.about())
                said = (f"{n} {s * 1e6:.0f} us" + _format_error(wrong[text].get(n)) for n, s in row["seconds"].items())
                print(f"{text:12} {threads} threads  " + "  ".join(said), f"spread {row['spread']:.0%}", flush=True)
    print(f"written: {results.path.name}")


def _format_error(error: float | None) -> str:
    return "" if error is None else f" ({error:.1e})"


if __name__ == "__main__":
    main()
