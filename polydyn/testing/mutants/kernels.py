"""Mutants of the loop IR of kernels, which its interpreter kills (``testing/loops``)."""

from __future__ import annotations

from collections.abc import Iterable

from polydyn.testing.kernel_graphs import GRAPHS, graph
from polydyn.testing.loops.score import planted
from polydyn.testing.loops.sizes import cases_by_kernel
from polydyn.testing.mutants.score import Score
from polydyn.testing.plan.planned import plans_of

TARGET = "cpu:avx2"
SECONDS = 10.0
"""Maximum time of a case, which the kernel itself takes."""


def score(each: int, seed: int, graphs: Iterable[str] = tuple(GRAPHS), seconds: float = SECONDS) -> Score:
    """Return the score of ``each`` mutants of every kernel."""
    total = Score("loop IR")
    for name in graphs:
        plans = plans_of(graph(name), target=TARGET)
        loops = {n: b for p in plans for n, b in p.loops.items()}
        for cases in cases_by_kernel(plans, seconds, total.notes).values():
            for text, kills in planted(cases, loops, each, seed, total.notes):
                total.add(f"{name}: {text}", kills)
    return total
