"""Repeated calls on fixed device arrays, replayed as a CUDA graph. Standard library and numpy only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from polydyn.errors import InputError
from polydyn.gpu.errors import DeviceLostError
from polydyn.runtime.bound import BoundCall
from polydyn.runtime.cuda.session import Session


class CallStatus:
    """The result of a call that was not waited for. It raises an InputError again on every request."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._error: InputError | None = None

    def __call__(self) -> None:
        """Request the result, unless it is known, and raise its error."""
        if self._error is None:
            try:
                self._ask()
            except InputError as e:
                self._error = e
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """Reset the status, because the call is made again."""
        self._error = None


class CudaBoundCall(BoundCall):
    """``CudaProgram.run`` on the arrays given to ``CudaProgram.bind``: checked, chosen and recorded once.

    A call reads the current inputs, overwrites ``outputs`` (name -> array) and returns them. Arrays in device memory
    are used in place; numpy arrays are copied in and out by every call. Calls run one at a time.
    """

    __slots__ = ("_follow", "_generation", "_results", "_session", "_status")

    def __init__(self, session: Session, run: Callable[[], int], check: Callable[[int], None], call: Any) -> None:
        """``run``: replays the recording of ``call``, a ``Call`` of the program. Use it within ``session.use``."""
        super().__init__(run, check, call, call.named)
        self._session, self._generation, self._results = session, session.generation, call.results
        self._follow: Callable[[], None] = call.follow
        self._status: CallStatus | None = None

    def status(self, wait: Callable[[], None]) -> Callable[[], None]:
        """Return a function with which outputs get the status of the last call. ``wait`` waits for the context."""
        status = self._status = CallStatus(wait)
        this = weakref.ref(self)

        def ask() -> None:
            bound = this()
            if bound is not None:
                with bound._lock:
                    status()

        return ask

    def __call__(self) -> dict[str, Any]:
        """Compute once more. On a caller's stream the work is only enqueued, unless an output is on the host.

        InputError: an index tensor now has an index outside its axis. If a call is not waited for, the next call or
        ``numpy()`` of an output raises it. DeviceLostError: a kernel broke the device's context, now or since the call
        was bound; bind it again. DeviceError: any other error of the driver.
        """
        with self._session.use(), self._lock:
            if self._generation != self._session.generation:
                raise DeviceLostError("the bound call was lost with a failed kernel", remedy="bind it again")
            if self._status is not None:
                self._status.forget()
            self._follow()
            code = self._run()
            if code:
                self._check(code)
            outputs: dict[str, Any] = self._results()
            return outputs
