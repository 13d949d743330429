"""Convolutions of 3x3 taps as products of tiles of 2x2 and of 4x4 pixels: errors and times beside the direct sum's.

usage: python -m benchmarks.winograd [--threads 1 2] [--rounds N] [--seconds S] [--also openvino] [--quick]
                                    [--layers 64-64@56 ...]

A layer is channels-outputs@side, with padding, between planes, N and both sides symbolic. An error is the largest
absolute difference from sums in float64, over the largest absolute value, for normal random numbers on 14x14 pixels; it
needs no quiet machine. Times follow benchmarks/protocol.py, one image of side x side. ``F(2,3)`` is the default and
``F(4,3)`` ``Options(winograd=4)``, both also where polydyn/fusion/winograd.py:pays would not take them: so one sees
what its numbers should be. Results go to benchmarks/results/winograd.json, of quick runs (three rounds, two layers) to
benchmarks/out/results/winograd.json.
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
"""Column -> contestant of ``benchmarks.rivals``."""
ERRORS_AT = 14


def layer(text: str) -> tuple[Case, int]:
    """The case and the side of ``channels-outputs@side``."""
    found = re.fullmatch(r"(\d+)-(\d+)@(\d+)", text)
    if not found:
        raise SystemExit(f"{text!r} is no layer; one is 64-64@56")
    channels, outputs, side = map(int, found.groups())
    return Case("3x3", "Conv", channels, outputs, (3, 3), ((1, side, side),)), side


def errors(case: Case) -> dict[str, float]:
    """Way of computing -> its error."""
    model, shape = case.model(), (1, case.channels, ERRORS_AT, ERRORS_AT)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    exact = reference.evaluate(import_model(model), {"x": x})
    with tempfile.TemporaryDirectory() as folder:
        path = str(models.save(model, Path(folder)))
        return {way: error(compiled(path, 1, kind).run({"x": x}), exact) for way, kind in WAYS.items()}


def times(field: Field, case: Case, effort: Effort) -> Row:
    """Seconds of everybody, and whose outputs differ."""
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
                said = (f"{n} {s * 1e6:.0f} us" + _said(wrong[text].get(n)) for n, s in row["seconds"].items())
                print(f"{text:12} {threads} threads  " + "  ".join(said), f"spread {row['spread']:.0%}", flush=True)
    print(f"written: {results.path.name}")


def _said(error: float | None) -> str:
    return "" if error is None else f" ({error:.1e})"


if __name__ == "__main__":
    main()
