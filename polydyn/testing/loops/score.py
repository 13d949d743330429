"""Count the mutants of kernels that the interpreter of the loop IR tells from the original."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from polydyn.codegen.ir import Body, walk
from polydyn.testing.loops.check import Case
from polydyn.testing.loops.mutants import mutants
from polydyn.testing.loops.rooms import Unbound


def planted(
    cases: Sequence[Case], loops: Mapping[str, Body], each: int, seed: int, counts: Counter[str]
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield ``each`` mutants of a kernel, and of the kernels after it: (description, whether some case differs).

    ``counts`` receives the number of nodes, and of the ones that some case executes.
    """
    executed = set[Hashable]()
    for case in cases:
        case.run(loops, executed)
    for kernel in (cases[0].kernel, *cases[0].kernel.after):
        body = loops[kernel.name]
        nodes = list(walk(body))
        counts["nodes"] += len(nodes)
        counts["nodes executed"] += sum(id(n) in executed for n in nodes)
        for mutant in mutants(body, each, seed, executed):
            changed = {**loops, kernel.name: mutant.body}
            text = f"{kernel.name} {kernel.version}".strip()
            yield f"{text}: {mutant.text}", lambda c=changed: any(_differs(case, c) for case in cases)  # type: ignore[misc]


def _differs(case: Case, loops: Mapping[str, Body]) -> bool:
    try:
        return bool(case.run(loops))
    except Unbound:
        return True


class Score:
    """Counts the mutants of kernels that are seen.

    ``survivors``: descriptions of the others. ``skipped``: cases that are not executed, by reason.
    """

    def __init__(self) -> None:
        self.counts, self.survivors, self.skipped = Counter[str](), list[str](), Counter[str]()

    def add(self, cases: Sequence[Case], loops: Mapping[str, Body], each: int, seed: int) -> None:
        """Try ``each`` mutants of a kernel, and of the kernels after it."""
        for text, kills in planted(cases, loops, each, seed, self.counts):
            seen = kills()
            self.counts["seen" if seen else "not seen"] += 1
            if not seen:
                self.survivors.append(text)

    def text(self) -> str:
        """Return the score in one line."""
        seen, every = self.counts["seen"], self.counts["seen"] + self.counts["not seen"]
        executed, nodes = self.counts["nodes executed"], self.counts["nodes"]
        share = 100 * seen / max(1, every)
        return f"{seen} of {every} mutants seen ({share:.1f} %), {executed} of {nodes} nodes executed"
