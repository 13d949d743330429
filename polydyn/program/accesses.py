"""What a launch reads and writes, as the texts of its kernels say: for verifiers, which must not ask the planner.

A kernel takes its buffers as pointers, and a pointer to constant elements is one through which the C compiler lets
nobody write.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polydyn.codegen.kernel import Kernel
from polydyn.program.plan import COUNTERS, WORKSPACE, HostPlan, Launch

_NUMBER = re.compile(r"\bbuf\[(\d+)\]")


@dataclass(frozen=True)
class Accesses:
    """``read``: the buffers whose elements a launch may load and never stores through the same pointer; ``written``:
    those that it may store to.
    """

    read: frozenset[str]
    written: frozenset[str]


def launch_accesses(plan: HostPlan) -> list[Accesses]:
    """The accesses of every launch: on a CPU from the texts of its kernels; on a device, whose kernels reach memory
    through tensor maps too, as the launch says.
    """
    kernels = {k.name: k for k in plan.kernels}
    positions: dict[str, tuple[set[int], set[int]]] = {}

    def of(launch: Launch) -> Accesses:
        if plan.on_device:
            written = set(launch.writes or ())
            return Accesses(frozenset(set(launch.buffers) - written), frozenset(written))
        read: set[str] = set()
        stored: set[str] = set()
        for c in (c for first in launch.candidates for c in first.sequence):
            if c.kernel not in positions:
                positions[c.kernel] = pointers(kernels[c.kernel])
            constant, other = positions[c.kernel]
            read |= {c.buffers[n] for n in constant}
            stored |= {c.buffers[n] for n in other}
        return Accesses(frozenset(read - {WORKSPACE, COUNTERS}), frozenset(stored - {WORKSPACE, COUNTERS}))

    return [of(x) for x in plan.launches]


def pointers(kernel: Kernel) -> tuple[set[int], set[int]]:
    """The positions in ``kernel.buffers``, of a kernel for a CPU, that its text takes as pointers to constant elements,
    and those of others. Buffers that the text does not take are in neither.
    """
    constant: set[int] = set()
    other: set[int] = set()
    text = kernel.text
    for found in _NUMBER.finditer(text):
        begin = 1 + max(text.rfind(c, 0, found.start()) for c in ";{}")
        declared = text[begin : found.start()].split(None, 1)[0]
        (constant if declared == "const" else other).add(int(found[1]))
    return constant, other
