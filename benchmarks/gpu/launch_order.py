"""Do launches wait for what they must? The programs of ``launch_programs``, run in every way that there is.

Standard library and numpy only, where a pack has the programs.
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
ADDED = {
    "chains": {"o": 1.0 * DEPTH, "p": 2.0 * DEPTH},
    "branches": {"o": 1.0 * DEPTH, "p": 2.0 * DEPTH},
    "joins": {"o": 1.5 * (DEPTH - 1) + 1, "p": 1.5 * (DEPTH - 1) + 2},
    "clusters": {"o": 1.0 * DEPTH, "p": 2.0 * DEPTH},
}
"""Program -> what each output is more than the input."""
ON_HOPPER = ("clusters",)
"""Those that run on sm_90a alone."""
OLDEST = 90
"""The compute capability of the first devices with clusters, whose launches may begin before the last has ended."""
MANY, FEW = 1 << 20, 1000
"""Elements of an array: more blocks than a device holds; emulated."""
EMULATION = f"cuda:{EMULATED}"


def file_name(program: str, target: str) -> str:
    """Of a program in a pack."""
    return f"{program}.{target.removeprefix('cuda:')}.polydyn"


@dataclass(frozen=True)
class Place:
    """A device; where programs lie that were made for it, if they do; else the target that they are made for here."""

    session: Session
    pack: Path | None
    target: str

    def program(self, name: str) -> CudaProgram:
        """One of ``launch_programs.programs``."""
        return CudaProgram(self._artifact(name), session=self.session)

    def _artifact(self, name: str) -> Artifact:
        ready = self.pack / "conformance" / file_name(name, self.target) if self.pack else None
        if ready and ready.exists():
            return read_artifact(ready)
        from benchmarks.gpu.launch_programs import programs

        return dict(programs(self.target))[name]

    def wrong(self, name: str, bound: bool) -> int:
        """How many elements of ``ROUNDS`` calls on the same arrays are wrong; each call has other numbers."""
        program, elements = self.program(name), FEW if self.target == EMULATION else MANY
        program.graphs = 0
        x = DeviceArray(self.session, (elements,), "float32", 4)
        out = {n: DeviceArray(self.session, (elements,), "float32", 4) for n in "op"}
        call: Callable[[], Any] = program.bind({"x": x}, out) if bound else lambda: program.run({"x": x}, out)
        wrong, first = 0, np.arange(elements, dtype=np.float32) % 1000
        for k in range(ROUNDS):
            x.copy_from(first + np.float32(100 * k))
            call()
            for n, by in ADDED[name].items():
                wrong += int((out[n].numpy() != first + np.float32(100 * k + by)).sum())
        return wrong


@contextmanager
def allowing(early: bool) -> Iterator[None]:
    """Programs that are opened meanwhile have launches that begin early, or not."""
    before = os.environ.pop(LACKING, None)
    os.environ[LACKING] = "" if early else EARLY
    try:
        yield
    finally:
        del os.environ[LACKING]
        os.environ.update({} if before is None else {LACKING: before})


def jobs(arch: int) -> Iterator[tuple[str, Callable[[Place], dict[str, Any]]]]:
    """(name, what says how many elements are wrong) for all plans that it can run, on streams and as graphs, apart and,
    where a device can, early.
    """
    names = [n for n in ADDED if n not in ON_HOPPER or arch == OLDEST]
    for name, early, bound in product(names, (False, True)[: 1 + (arch >= OLDEST)], (False, True)):

        def job(place: Place, name: str = name, early: bool = early, bound: bool = bound) -> dict[str, Any]:
            with allowing(early):
                wrong = place.wrong(name, bound)
            return {"error": float(wrong), "allowed": 0.0, "ok": not wrong}

        yield f"launches_{'early' if early else 'apart'} {'graph' if bound else 'stream'} {name}", job
