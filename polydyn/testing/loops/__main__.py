"""Score the interpreter of the loop IR: how many planted mistakes it sees in the kernels of ``kernel_graphs``.

usage: python -m polydyn.testing.loops [--target cpu:avx2] [--each 6] [--seed 0] [--seconds 10] [GRAPH ...]

Every kernel is executed at sizes that run most of its code (``sizes.py``), then ``--each`` mutants of it. A mutant
counts as seen if some case differs from the statements of the group. Code that no case executes is not changed; its
share is printed. The mutants that are not seen are listed. Exit code 1: a kernel is wrong as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from polydyn.testing.kernel_graphs import GRAPHS, graph
from polydyn.testing.loops.score import Score
from polydyn.testing.loops.sizes import cases_by_kernel
from polydyn.testing.plan.planned import plans_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", metavar="GRAPH", help=", ".join(GRAPHS))
    parser.add_argument("--target", default="cpu:avx2")
    parser.add_argument("--each", type=int, default=6, help="mutants of a kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0, help="longest case")
    args = parser.parse_args(argv)
    score = Score()
    for name in args.graphs or GRAPHS:
        plans = plans_of(graph(name), target=args.target)
        loops = {n: b for p in plans for n, b in p.loops.items()}
        for cases in cases_by_kernel(plans, args.seconds, score.skipped).values():
            score.add(cases, loops, args.each, args.seed)
        print(f"{name}: {score.text()}", flush=True)
    for reason, count in score.skipped.most_common():
        print(f"not executed: {count} times: {reason}")
    for line in score.survivors:
        print(f"not seen: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
