"""The host program's choice among a device's candidates, in Python."""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.errors import InputError
from polydyn.gpu.hardware import Hardware
from polydyn.gpu.targets import special_arch
from polydyn.program.launch_tables import limits
from polydyn.program.plan import Candidate, Launch
from polydyn.runtime.symbols import ARCH, LACKING, SHARED, holds
from polydyn.schedules.decision import ArgMin, walk
from polydyn.schedules.decision import choose as decide
from polydyn.schedules.index import Index


def choose(launch: Launch, env: Mapping[str, int], hardware: Hardware) -> Candidate:
    """Return the candidate that the host program selects on a device.

    ``env``: the model's symbols and ``nth``. InputError: none may be launched.
    """
    barred = {k for k, c in enumerate(launch.candidates) if not may_run(c, env, hardware)}
    if len(barred) == len(launch.candidates):
        raise InputError("no kernel runs at this size", rule=f"{hardware.smem_per_block} bytes of shared memory")
    return launch.candidates[decide(launch.decision, env, barred)]


def estimates(launch: Launch) -> dict[str, Index]:
    """Return the time of every candidate that a launch compares, by its name, in nanoseconds."""
    entries = [e for n in walk(launch.decision) if isinstance(n, ArgMin) for e in n.entries]
    return {launch.candidates[e.kernel].name: e.cost for e in entries}


def may_run(c: Candidate, env: Mapping[str, int], hardware: Hardware) -> bool:
    """Return whether a candidate may be launched at these sizes."""
    allowed = {**env, SHARED: hardware.smem_per_block, ARCH: special_arch(hardware.arch), LACKING: 0}
    return all(holds(a.evaluate(allowed), relation, b.evaluate(allowed)) for a, relation, b in limits(c))
