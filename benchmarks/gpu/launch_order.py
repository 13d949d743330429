"""Checks that launches wait for their predecessors: runs the programs of ``launch_programs`` in every possible way.

Needs only the standard library and numpy if a pack has the programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.capability import EARLY
from polydyn.gpu.lacking import LACKING
from polydyn.gpu.targets import EMULATED
from polydyn.runtime.artifact import Artifact, read_artifact
from polydyn.runtime.cuda.array import DeviceArray
from polydyn.runtime.cuda.program import CudaProgram
from polydyn.runtime.cuda.session import Session

DEPTH, ROUNDS = 8, 20
"""Launches of a chain, calls."""
ADDENDS = {
    "chains": {"o": 1.0 * DEPTH, "p": 2.0 * DEPTH},
    "branches": {"o": 1.0 * DEPTH, "p": 2.0 * DEPTH},
    "joins": {"o": 1.5 * (DEPTH - 1) + 1, "p": 1.5 * (DEPTH - 1) + 2},
    "clusters": {"o": 1.0 * DEPTH, "p": 2.0 * DEPTH},
}
"""Maps a program to the number that each output adds to the input."""
ON_HOPPER = ("clusters",)
"""Programs that run only on sm_90a."""
MIN_CLUSTER_ARCH = 90
"""The first compute capability with clusters and programmatic dependent launch."""
DEVICE_ELEMENTS, EMULATED_ELEMENTS = 1 << 20, 1000
"""Elements of an array: on a device, more blocks than it holds; emulated."""
EMULATION = f"cuda:{EMULATED}"


def file_name(program: str, target: str) -> str:
    """Return the name of a program's file in a pack."""
    return f"{program}.{target.removeprefix('cuda:')}.polydyn"


@dataclass(frozen=True)
class Place:
    """A device, the folder of its compiled programs if there is one, and the target to compile for otherwise."""

    session: Session
    pack: Path | None
    target: str

    def program(self, name: str) -> CudaProgram:
        """Load one of ``launch_programs.programs``."""
        return CudaProgram(self._artifact(name), session=self.session)

    def _artifact(self, name: str) -> Artifact:
        ready = self.pack / "conformance" / file_name(name, self.target) if self.pack else None
        if ready and ready.exists():
            return read_artifact(ready)
        from benchmarks.gpu.launch_programs import programs

        return dict(programs(self.target))[name]

    def wrong(self, name: str, bound: bool) -> int:
        """Return the number of wrong elements in ``ROUNDS`` calls on the same arrays; each call has other numbers."""
        program, elements = self.program(name), EMULATED_ELEMENTS if self.target == EMULATION else DEVICE_ELEMENTS
        program.graphs = 0
        x = DeviceArray(self.session, (elements,), "float32", 4)
        out = {n: DeviceArray(self.session, (elements,), "float32", 4) for n in "op"}
        call: Callable[[], Any] = program.bind({"x": x}, out) if bound else lambda: program.run({"x": x}, out)
        wrong, first = 0, np.arange(elements, dtype=np.float32) % 1000
        for k in range(ROUNDS):
            x.copy_from(first + np.float32(100 * k))
            call()
            for n, by in ADDENDS[name].items():
                wrong += int((out[n].numpy() != first + np.float32(100 * k + by)).sum())
        return wrong


@contextmanager
def allowing(early: bool) -> Iterator[None]:
    """Open programs inside the block with programmatic dependent launch, or without."""
    before = os.environ.pop(LACKING, None)
    os.environ[LACKING] = "" if early else EARLY
    try:
        yield
    finally:
        del os.environ[LACKING]
        os.environ.update({} if before is None else {LACKING: before})


def jobs(arch: int) -> Iterator[tuple[str, Callable[[Place], dict[str, Any]]]]:
    """Yield (name, function that counts wrong elements) for all plans that the device can run: on streams and as
    graphs, apart and, if the device supports it, with programmatic dependent launch.
    """
    names = [n for n in ADDENDS if n not in ON_HOPPER or arch == MIN_CLUSTER_ARCH]
    for name, early, bound in product(names, (False, True)[: 1 + (arch >= MIN_CLUSTER_ARCH)], (False, True)):

        def job(place: Place, name: str = name, early: bool = early, bound: bool = bound) -> dict[str, Any]:
            with allowing(early):
                wrong = place.wrong(name, bound)
            return {"error": float(wrong), "allowed": 0.0, "ok": not wrong}

        yield f"launches_{'early' if early else 'apart'} {'graph' if bound else 'stream'} {name}", job
