"""What the benchmarks with rivals are told on the command line, the same words for all."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plot, record
from benchmarks.rows import Effort, Shape

ALSO = ("torch-inductor", "openvino")
"""Rivals that are asked for by name: one takes long to compile, the other is not among the extras."""


def parser(doc: str | None, seconds: float) -> argparse.ArgumentParser:
    """``--threads --rounds --seconds --also --quick``; ``seconds``: what all turns of a case may take by default."""
    args = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    args.add_argument("--rounds", type=int, default=9, help="of turns, at most (9)")
    args.add_argument("--seconds", type=float, default=seconds, help="of a case's turns; three rounds are always made")
    args.add_argument("--also", nargs="+", default=[], choices=ALSO)
    args.add_argument("--quick", action="store_true", help="three rounds over a few cases, results in benchmarks/out")
    return args


def effort(args: argparse.Namespace) -> Effort:
    """How long each case is measured."""
    return Effort(3 if args.quick else args.rounds, args.seconds)


def folder(args: argparse.Namespace) -> Path:
    """Where results go: those of a quick run are not worth keeping."""
    return record.SCRATCH if args.quick else record.RESULTS


def finish(paths: Sequence[Path]) -> None:
    """Says where results are, and draws them."""
    for path in dict.fromkeys(paths):
        print(f"written: {path.relative_to(record.RESULTS.parent.parent)}")
        plot.draw(path)


def onnxruntimes(threads: int) -> list[str]:
    """ONNX Runtime with its spinning pool, and without where there is a pool; the faster counts."""
    return ["onnxruntime", *(["onnxruntime-nospin"] if threads > 1 else [])]


def rivals(threads: int, also: Sequence[str], *others: str) -> list[str]:
    """Everybody who plays, ONNX Runtime first and polydyn last."""
    return [*onnxruntimes(threads), *others, *also, "polydyn"]


def parse_shape(text: str) -> Shape:
    """``B=1,L=8`` as a mapping."""
    pairs = (item.partition("=") for item in text.split(","))
    return {symbol.strip(): int(size) for symbol, _, size in pairs}
