"""A call on fixed arrays of a device, replayed as a CUDA graph. Standard library and numpy only."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from polydyn.errors import InputError
from polydyn.gpu.errors import DeviceLostError
from polydyn.runtime.bound import BoundCall
from polydyn.runtime.cuda.session import Session


class CallStatus:
    """What is asked how a call ended: it says an InputError again and again."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._error: InputError | None = None

    def __call__(self) -> None:
        """Asks, unless the answer is known."""
        if self._error is None:
            try:
                self._ask()
            except InputError as e:
                self._error = e
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """The call is made again."""
        self._error = None


class CudaBoundCall(BoundCall):
    """``CudaProgram.run`` on the arrays given to ``CudaProgram.bind``: checked, chosen and recorded once.

    Calling it reads the inputs as they are then, overwrites ``outputs`` (name -> array) and returns them. Arrays in
    device memory are used where they are; numpy arrays are copied in and out by every call. One call runs at a time.
    """

    __slots__ = ("_follow", "_generation", "_results", "_session", "_status")

    def __init__(self, session: Session, run: Callable[[], int], check: Callable[[int], None], call: Any) -> None:
        """``run``: replays what was recorded of ``call``, a ``Call`` of the program. Within ``session.use``."""
        super().__init__(run, check, call, call.named)
        self._session, self._generation, self._results = session, session.generation, call.results
        self._follow: Callable[[], None] = call.follow
        self._status: CallStatus | None = None

    def status(self, wait: Callable[[], None]) -> Callable[[], None]:
        """How the last call ended, for its outputs to ask as long as this object is there; ``wait``: in the context."""
        status = self._status = CallStatus(wait)
        this = weakref.ref(self)

        def ask() -> None:
            bound = this()
            if bound is not None:
                with bound._lock:
                    status()

        return ask

    def __call__(self) -> dict[str, Any]:
        """Computes once more; on a stream of the caller's it is only put there, unless an output is on the host.

        InputError: an index tensor now holds an index outside its axis; of a call that is not waited for the next one
        says so, or ``numpy()`` of an output. DeviceLostError: a kernel broke the device's context, now or since it was
        bound; bind it again. DeviceError: what else the driver says.
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
