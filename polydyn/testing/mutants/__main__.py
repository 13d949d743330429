"""Score the checks of tile maps, of the loop IR, of plans and of guards: how many generated mutants each one kills.

usage: python -m polydyn.testing.mutants [--each 12] [--seed 0] [--list] [SUBJECT ...]

A mutant is a tile map, a kernel, a plan or the guards of a model with one change. It is killed if the subject's check
detects it: the proof or the interpreter of schedules, the interpreter of the loop IR, the interpreter of plans, ONNX's
reference evaluator. A check shares no function with the code that it checks. ``--each`` limits the mutants of each
schedule, kernel, model or kind of mistake. ``--list`` prints the survivors. Exit code 1: a score is below 90 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from polydyn.testing.mutants import guards, kernels, plans, schedules
from polydyn.testing.mutants.score import Score, table

SUBJECTS: Mapping[str, Callable[[int, int], Score]] = {
    "tile-map": schedules.score, "loop-ir": kernels.score, "plan": plans.score, "guards": guards.score,
}  # fmt: skip
MIN_PERCENT = 90.0
"""Minimum score of a subject, in percent."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(argv)
    scores = []
    for name in args.subjects or SUBJECTS:
        found = SUBJECTS[name](args.each, args.seed)
        scores.append(found)
        for reason, count in found.notes.most_common():
            print(f"{found.subject}: {count} times: {reason}")
        for line in found.survivors if args.list else ():
            print(f"{found.subject}: not killed: {line}")
        print(found.row(), flush=True)
    print(table(scores))
    return int(any(s.percent < MIN_PERCENT for s in scores))


if __name__ == "__main__":
    sys.exit(main())
