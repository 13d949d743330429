"""A program of several parts on a CUDA device: parts and bodies run there, steps on the host (docs/adr/0027-parts.md).

Standard library and numpy only.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from polydyn.errors import PolydynError, UnsupportedError
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.cuda.dlpack import CPU, CUDA_HOST, device_of
from polydyn.runtime.cuda.native import DEVICE
from polydyn.runtime.cuda.program import MULTIPROCESSORS, CudaProgram
from polydyn.runtime.cuda.session import Session
from polydyn.runtime.frames import Frame
from polydyn.runtime.launch_times import LaunchTime
from polydyn.runtime.parts_program import PartsProgram, leaves
from polydyn.runtime.program import Array, Program


class CudaPartsProgram(PartsProgram):
    """A compiled model with data-dependent sizes, on a device. It is used like a ``CudaProgram``, with numpy arrays.

    A call waits for a part if a step reads its outputs, and at the end; the manifest's notes name these places.
    """

    def __init__(self, artifact: Artifact, parts: Sequence[Program], *, compilations: int = 0) -> None:
        super().__init__(artifact, parts, threads=1, compilations=compilations)
        self._programs = [p for p in leaves(self._parts) if isinstance(p, CudaProgram)]
        self._loading = threading.Lock()
        self._generation = -1

    @property
    def session(self) -> Session:
        """The device's session, opened on first use. DriverMissingError: there is no driver."""
        return self._programs[0].session

    def _run(self, feeds: Mapping[str, Any], rows: list[LaunchTime] | None) -> dict[str, Array]:
        for name, a in feeds.items():
            if hasattr(a, "__dlpack_device__") and device_of(a) not in (CPU, CUDA_HOST):
                raise UnsupportedError(
                    f"input '{name}' is in device memory", tensor=name, remedy="copy it to the host",
                    rule="a program of several parts takes numpy arrays",
                )  # fmt: skip
        if not self._programs:
            return super()._run(feeds, rows)
        with self.session.use():
            return super()._run(feeds, rows)

    @property
    def counters(self) -> dict[str, int]:
        """Implement ``PartsProgram.counters``; ``waits``: the number of times that calls have waited for the device,
        not counting bodies of several parts.
        """
        return super().counters | {"waits": sum(f.waits for f in list(self._frames))}

    def _take_frame(self) -> Frame:
        if self._programs:
            with self._loading:
                if self._generation != self.session.generation:
                    self._load(self.session)
        return super()._take_frame()

    def _load(self, session: Session) -> None:
        """Open the parts for the device's context, and free frames of a lost one. No thread is in a call."""
        for p in self._programs:
            if p._cuda.generation not in (-1, session.generation):
                p._cuda.forget_context()
        gone, self._free_frames = list(self._frames), []
        self._frames.clear()
        for frame in gone:
            frame.free()
        for p in self._programs:
            with p._loading:
                if p._cuda.generation != session.generation:
                    p._load(session)
        self._generation = session.generation
        self.threads = session.driver.attribute(MULTIPROCESSORS)

    def _failure(self, frame: Frame, code: int) -> PolydynError:
        if code != DEVICE:
            return super()._failure(frame, code)
        for p in self._programs:
            message = (p._native.library.pd_error() or b"").decode(errors="replace")
            if message and frame.message.startswith(message):
                try:
                    p._native.check(DEVICE)
                except PolydynError as e:
                    return e
        return PolydynError(frame.message)
