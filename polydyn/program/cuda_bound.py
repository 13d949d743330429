"""A call on fixed arrays of a device, replayed as CUDA graphs. Standard library and numpy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polydyn.gpu.errors import DeviceLostError
from polydyn.gpu.session import Session
from polydyn.program.bound import BoundCall


class CudaBoundCall(BoundCall):
    """``CudaProgram.run`` on the arrays given to ``CudaProgram.bind``: checked, chosen and captured once.

    Calling it reads the inputs as they are then, overwrites ``outputs`` (name -> array) and returns them. Arrays in
    device memory are used where they are; numpy arrays are copied in and out by every call. One call runs at a time.
    """

    __slots__ = ("_follow", "_generation", "_results", "_session")

    def __init__(self, session: Session, run: Callable[[], int], check: Callable[[int], None], call: Any) -> None:
        """``run``: replays what was recorded of ``call``, a ``cuda_program.Call``. Within ``session.use``."""
        super().__init__(run, check, call, call.named)
        self._session, self._generation, self._results = session, session.generation, call.results
        self._follow: Callable[[], None] = call.follow

    def __call__(self) -> dict[str, Any]:
        """Computes once more; on a stream of the caller's it is only put there, unless an output is on the host.

        InputError: an index tensor now holds an index outside its axis. DeviceLostError: a kernel broke the device's
        context, now or since it was bound; bind it again. DeviceError: what else the driver says.
        """
        with self._session.use(), self._lock:
            if self._generation != self._session.generation:
                raise DeviceLostError("the bound call was lost with a failed kernel", remedy="bind it again")
            self._follow()
            code = self._run()
            if code:
                self._check(code)
            outputs: dict[str, Any] = self._results()
            return outputs
