"""Runs one table of a paper, or lists them.

usage: python -m benchmarks.papers list
       python -m benchmarks.papers NAME [--threads 1] [--seed 0] [--trials N] [--points N] [--rounds 3]
                                   [--models FOLDER] [--only PART ...] [--quick] [--record]

Prints a section of Markdown: the numbers of the paper, the measurements here, and which may be compared. ``--record``
also writes the section to docs/paper_tables.md. ``--trials`` and ``--points`` (tiles, sizes) have a default for each
table. ``--quick`` uses tiny inputs and takes seconds; its numbers mean nothing and are not recorded. NAME is a
key of ``TABLES``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.papers import checks, kernels, programs
from benchmarks.papers.report import Result, Settings, save

TABLES: Mapping[str, Callable[[Settings], Result]] = {
    "tscompiler-6": kernels.smoothness,
    "bladedisc-2": programs.stitch,
    "vortex-13": programs.networks,
    "dietcode-10": checks.bounds,
    "dietcode-12": kernels.votes,
    "ftuner-14": kernels.growth,
}
"""Maps the name of a table to its function, whose docstring describes it."""


def listing() -> str:
    """Return one line for each table."""
    return "\n".join(f"{name:14}{(table.__doc__ or '').splitlines()[0]}" for name, table in TABLES.items())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["list", *TABLES])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--points", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Settings.models)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args(arguments)
    if args.quick and args.record:
        parser.error("the numbers of a quick run are not recorded")
    return args


def main(arguments: Sequence[str]) -> None:
    """See the module's docstring."""
    args = parse(arguments)
    if args.name == "list":
        print(listing())
        return
    settings = Settings(
        args.threads, args.seed, args.trials, args.points, args.rounds, args.models, tuple(args.only), args.quick
    )
    result = TABLES[args.name](settings)
    print(result.markdown())
    if args.record:
        save(result)


if __name__ == "__main__":
    main(sys.argv[1:])
