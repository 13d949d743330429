"""Score the interpreter of the loop IR: how many planted mistakes it sees in the kernels of ``kernel_graphs``.

usage: python -m polydyn.testing.loops [--target cpu:avx2] [--each 6] [--seed 0] [--seconds 10] [GRAPH ...]

Every kernel is executed at the sizes of ``check.SIZES``, then ``--each`` mutants of it. A mutant counts as seen if some
case differs from the statements of the group. Code that no case executes is not changed; its share is printed. The
mutants that are not seen are listed. Exit code 1: a kernel is wrong as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Hashable, Sequence

from polydyn.codegen.ir import Body, walk
from polydyn.testing.kernel_graphs import GRAPHS, graph
from polydyn.testing.loops.check import Case
from polydyn.testing.loops.mutants import mutants
from polydyn.testing.loops.rooms import Unbound
from polydyn.testing.loops.sizes import cases_by_kernel
from polydyn.testing.plan.planned import plans_of


class Score:
    """Counts the mutants of kernels that are seen.

    ``survivors``: descriptions of the others. ``skipped``: cases that are not executed, by reason.
    """

    def __init__(self) -> None:
        self.counts, self.survivors, self.skipped = Counter[str](), list[str](), Counter[str]()

    def add(self, cases: Sequence[Case], loops: dict[str, Body], each: int, seed: int) -> None:
        """Try ``each`` mutants of a kernel, and of the kernels after it."""
        executed = set[Hashable]()
        for case in cases:
            case.run(loops, executed)
        for kernel in (cases[0].kernel, *cases[0].kernel.after):
            body = loops[kernel.name]
            nodes = list(walk(body))
            self.counts["nodes"] += len(nodes)
            self.counts["nodes executed"] += sum(id(n) in executed for n in nodes)
            for mutant in mutants(body, each, seed, executed):
                seen = any(_differs(case, {**loops, kernel.name: mutant.body}) for case in cases)
                self.counts["seen" if seen else "not seen"] += 1
                if not seen:
                    self.survivors.append(f"{kernel.name} {kernel.version}: {mutant.text}")

    def text(self) -> str:
        """Return the score in one line."""
        seen, planted = self.counts["seen"], self.counts["seen"] + self.counts["not seen"]
        executed, nodes = self.counts["nodes executed"], self.counts["nodes"]
        share = 100 * seen / max(1, planted)
        return f"{seen} of {planted} mutants seen ({share:.1f} %), {executed} of {nodes} nodes executed"


def _differs(case: Case, loops: dict[str, Body]) -> bool:
    try:
        return bool(case.run(loops))
    except Unbound:
        return True


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
