"""Find the buffers that launches read and write, in the texts of their kernels. Verifiers use it, not the planner.

A kernel takes each buffer as a pointer. The C compiler rejects a store through a pointer to constant elements, so
such a buffer is only read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polydyn.codegen.kernel import Kernel
from polydyn.program.plan import COUNTERS, WORKSPACE, HostPlan, Launch

_NUMBER = re.compile(r"\bbuf\[(\d+)\]")


@dataclass(frozen=True)
class Accesses:
    """The buffers of a launch. ``read``: it takes them as pointers to constant elements. ``written``: it may store to
    them.
    """

    read: frozenset[str]
    written: frozenset[str]


def launch_accesses(plan: HostPlan) -> list[Accesses]:
    """Return the accesses of every launch.

    CPU accesses are found in the texts of the kernels. Device kernels also access memory through tensor maps, so their
    accesses are taken from ``Launch.writes``.
    """
    kernels = {k.name: k for k in plan.kernels}
    positions: dict[str, tuple[set[int], set[int]]] = {}

    def accesses(launch: Launch) -> Accesses:
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

    return [accesses(x) for x in plan.launches]


def pointers(kernel: Kernel) -> tuple[set[int], set[int]]:
    """Return two sets of positions in ``kernel.buffers``, for a kernel of a CPU.

    The first set holds the buffers that its text takes as pointers to constant elements, the second set the others. A
    buffer that the text does not take is in neither set.
    """
    found: tuple[set[int], set[int]] | None = kernel.__dict__.get("_pointers")  # several verifiers ask for them
    if found is None:
        found = kernel.__dict__["_pointers"] = _pointers(kernel.text)
    return found


def _pointers(text: str) -> tuple[set[int], set[int]]:
    constant: set[int] = set()
    other: set[int] = set()
    for match in _NUMBER.finditer(text):
        begin = 1 + max(text.rfind(c, 0, match.start()) for c in ";{}")
        declared = text[begin : match.start()].split(None, 1)[0]
        (constant if declared == "const" else other).add(int(match[1]))
    return constant, other
