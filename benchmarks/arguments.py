"""Command-line options that all benchmarks with baselines share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plot, record
from benchmarks.rows import Effort, Shape

ALSO = ("torch-inductor", "openvino")
"""Baselines that run only on request: the first compiles for a long time, the second is not among the extras."""


def parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with ``--threads --rounds --seconds --also --quick``.

    ``seconds`` is the default time budget for all measurements of a case.
    """
    args = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args.add_argument("--rounds", type=int, default=9, help="maximum number of rounds (9)")
    args.add_argument("--seconds", type=float, default=seconds, help="time budget per case; three rounds always run")
    args.add_argument("--also", nargs="+", default=[], choices=ALSO)
    args.add_argument("--quick", action="store_true", help="three rounds over a few cases, results in benchmarks/out")
    return args


def effort(args: argparse.Namespace) -> Effort:
    """Return how long each case is measured."""
    return Effort(3 if args.quick else args.rounds, args.seconds)


def folder(args: argparse.Namespace) -> Path:
    """Return the folder for results; results of a quick run are not kept."""
    return record.SCRATCH if args.quick else record.RESULTS


def finish(paths: Sequence[Path]) -> None:
    """Print where the results are, and plot them."""
    for path in dict.fromkeys(paths):
        print(f"written: {path.relative_to(record.RESULTS.parent.parent)}")
        plot.draw(path)


def onnxruntimes(threads: int) -> list[str]:
    """Return ONNX Runtime with its spinning pool and, if there is a pool, without; the faster one counts."""
    return ["onnxruntime", *(["onnxruntime-nospin"] if threads > 1 else [])]


def rivals(threads: int, also: Sequence[str], *others: str) -> list[str]:
    """Return all contestants, ONNX Runtime first and polydyn last."""
    return [*onnxruntimes(threads), *others, *also, "polydyn"]


def parse_shape(text: str) -> Shape:
    """Parse ``B=1,L=8`` into a mapping."""
    pairs = (item.partition("=") for item in text.split(","))
    return {symbol.strip(): int(size) for symbol, _, size in pairs}
