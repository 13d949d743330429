"""A device that programs share: one driver per process, and recovery after a kernel breaks its context.

A broken context cannot be used. Calls of other threads soon fail too, because the driver returns the same error; the
last thread to leave creates a new context, and new calls wait for it. Programs see ``generation`` change and load their
kernels and weights again.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from polydyn.gpu.errors import DeviceLostError, DriverMissingError
from polydyn.gpu.targets import EMULATED
from polydyn.runtime.cuda.driver import Driver
from polydyn.runtime.cuda.drivers import open_driver, preferred

__all__ = ["Session", "open_session"]

LIBRARY = "POLYDYN_LIBCUDA"
"""The environment variable with the driver library: a path, or ``emulated`` for the CPU libcuda."""


class Session:
    """A driver, and the calls that use it."""

    def __init__(self, driver: Driver, library: str) -> None:
        """``library``: the file that the driver opened."""
        self.driver, self.library = driver, library
        driver.deferred = True
        self._free = threading.Condition()
        self._inside = threading.local()
        self._active = 0
        self._broken = False
        self._dead: str = ""

    @property
    def generation(self) -> int:
        """The number of lost contexts."""
        return self.driver.generation

    @contextmanager
    def use(self) -> Iterator[Driver]:
        """Enclose all use of the context; may be nested. DeviceLostError: see the module."""
        if getattr(self._inside, "depth", 0):
            yield self.driver
            return
        with self._free:
            self._free.wait_for(lambda: not self._broken or bool(self._dead))
            if self._dead:
                raise DeviceLostError(self._dead, remedy="restart the process")
            self._active += 1
        broken = False
        try:  # directly after the count, so that an interrupt cannot skip _leave
            self._inside.depth = 1
            yield self.driver
        except DeviceLostError as e:
            broken = e.code != 0  # 0: no driver call failed, but an object of an earlier context was used
            raise
        finally:
            self._inside.depth = 0
            self._leave(broken)

    def _leave(self, broken: bool) -> None:
        with self._free:
            self._active -= 1
            self._broken = self._broken or broken
            if not (self._broken and not self._active):
                return
            try:
                self.driver.renew()
            except DriverMissingError as e:
                self._dead = f"a kernel broke the context, and a new one failed: {e}"
            self._broken = False
            self._free.notify_all()


def open_session(device: int = 0, library: str | None = None, prefer: str | None = None) -> Session:
    """Return the session of a device; there is one per process (and per driver, if both are used).

    ``library``: the driver library, by default ``$POLYDYN_LIBCUDA``, else ``libcuda.so.1``; "emulated" is the CPU
    libcuda. ``prefer``: "pycuda" or "ctypes", by default pycuda if it is installed. Raises DriverMissingError.
    """
    name = library or os.environ.get(LIBRARY) or "libcuda.so.1"
    return _open(device, name, prefer or preferred())


@functools.lru_cache(maxsize=16)
def _open(device: int, name: str, prefer: str) -> Session:
    path = name
    if name == EMULATED:
        from polydyn.gpu import cpu_libcuda

        path = str(cpu_libcuda.build())
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)  # so that pycuda finds it by name
    return Session(open_driver(prefer, device, path), path)
