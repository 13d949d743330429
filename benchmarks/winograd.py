"""The error of 3x3 convolutions as products of tiles, beside the direct sum's.

usage: python -m benchmarks.winograd [--channels C ...] [--side PIXELS]

Each is a convolution of C to C channels with padding, of normal random numbers; the reference sums in float64. An error
is the largest absolute difference over the largest absolute value of the reference. Needs no quiet machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import polydyn
from benchmarks.ops.convolutions import Case
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.testing import models
from polydyn.testing.accuracy import error


def errors(channels: int, side: int) -> dict[str, float]:
    """Way of computing -> its error."""
    case = Case("3x3", "Conv", channels, channels, (3, 3), ((1, side, side),))
    model = case.model()
    x = np.random.default_rng(1).standard_normal((1, channels, side, side)).astype(np.float32)
    exact = reference.evaluate(import_model(model), {"x": x})
    with tempfile.TemporaryDirectory() as folder:
        path = models.save(model, Path(folder))
        ways = {"tiles": (), "direct": ("winograd",)}
        made = {n: polydyn.compile(path, threads=1, options=polydyn.Options(without=w)) for n, w in ways.items()}
        return {n: error(p.run({"x": x}), exact) for n, p in made.items()}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", nargs="+", type=int, default=[96, 128, 256, 512])
    parser.add_argument("--side", type=int, default=14)
    args = parser.parse_args()
    for channels in args.channels:
        row = errors(channels, args.side)
        print(f"{channels:5} channels  " + "  ".join(f"{way} {e:.1e}" for way, e in row.items()), flush=True)


if __name__ == "__main__":
    main()
