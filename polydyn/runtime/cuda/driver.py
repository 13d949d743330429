"""The small driver interface that everything above the CUDA driver uses, and the choice of an implementation.

``open_driver`` gives pycuda when it is importable (the extra ``polydyn[gpu]``) and plain ctypes on ``libcuda.so.1``
otherwise; both share the device's primary context, so torch and cupy tensors are usable next to them. Handles are
integers. Sizes are bytes, times milliseconds.

When a kernel breaks its context (illegal address and the like), every pointer, module, function, stream and event is
gone. The driver then makes a new context (``renew``), counts ``generation`` up and raises DeviceLostError; the next
call works. With ``deferred`` it only raises: ``session``, which shares it between threads, renews when all have left.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from polydyn.gpu.errors import DeviceError, DeviceMemoryError, WrongArchitectureError
from polydyn.runtime.cuda.tensormap import TensorMap

__all__ = ["LEGACY", "Argument", "Driver"]

Argument: TypeAlias = "int | np.generic | bytes"
"""A kernel argument: an int is a device pointer (8 bytes), a numpy scalar its own bytes, bytes go in as they are."""

LEGACY = 1
"""The CUstream of CUDA's default stream, which is 0 elsewhere."""

LOST = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720})
"""CUresult values after which the context is unusable (ECC, illegal address, timeout, assert, ... launch failed)."""


class Driver(abc.ABC):
    """One device and its primary context."""

    name: str
    device_name: str
    """As the driver calls it; ``hardware.match`` finds its description."""
    device: int
    """Its number among those of the process, as DLPack tells it."""
    arch: int
    """Compute capability as a number: 80, 86, 89, 90, 100."""
    deferred: bool = False
    """Whether a broken context is left to somebody else to renew."""

    @property
    @abc.abstractmethod
    def generation(self) -> int:
        """Counts the contexts that were lost; all drivers of a device in a process share its primary context."""

    @property
    @abc.abstractmethod
    def context(self) -> int:
        """The CUcontext."""

    @abc.abstractmethod
    def renew(self) -> None:
        """A new context in place of a broken one. Raises DriverMissingError when none can be made."""

    @abc.abstractmethod
    def fail(self, code: int, call: str, detail: str = "") -> NoReturn:
        """Raises what a CUresult other than 0 means; a broken context is renewed before."""

    @abc.abstractmethod
    def attribute(self, code: int) -> int:
        """A CUdevice_attribute."""

    @abc.abstractmethod
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory."""

    @abc.abstractmethod
    def alloc(self, nbytes: int) -> int:
        """A device pointer to at least ``nbytes`` (256-byte aligned; 0 bytes are allowed). Raises DeviceMemoryError."""

    @abc.abstractmethod
    def free(self, pointer: int) -> None:
        """Gives an allocation back. Raises DeviceError when it is not one of this context's."""

    @abc.abstractmethod
    def owner(self, pointer: int) -> int:
        """The CUcontext that device memory belongs to; 0 where the driver does not say."""

    @abc.abstractmethod
    def h2d(self, pointer: int, array: np.ndarray[Any, Any], stream: int = 0) -> None:
        """Copies a C-contiguous array to the device; done when it returns unless ``stream`` is given."""

    @abc.abstractmethod
    def d2h(self, array: np.ndarray[Any, Any], pointer: int, stream: int = 0) -> None:
        """Copies device memory into a C-contiguous array; done when it returns unless ``stream`` is given."""

    @abc.abstractmethod
    def load_module(self, image: bytes) -> int:
        """Loads a cubin (or PTX, zero-terminated). Raises WrongArchitectureError."""

    @abc.abstractmethod
    def get_function(self, module: int, name: str) -> int:
        """A kernel of a module. Raises DeviceError when there is none of that name."""

    @abc.abstractmethod
    def set_smem(self, function: int, nbytes: int) -> None:
        """Allows a kernel ``nbytes`` of dynamic shared memory; needed above 48 KB. Raises DeviceError."""

    @abc.abstractmethod
    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        smem: int,
        args: Sequence[Argument],
        stream: int = 0,
    ) -> None:
        """Starts a kernel; errors of the kernel itself appear at a later call (``synchronize``)."""

    @abc.abstractmethod
    def stream(self) -> int:
        """A new stream that does not wait for the default one."""

    @abc.abstractmethod
    def free_stream(self, stream: int) -> None:
        """Destroys a stream."""

    @abc.abstractmethod
    def synchronize(self, stream: int | None = None) -> None:
        """Waits for a stream, or for everything. Raises what the kernels did wrong."""

    @abc.abstractmethod
    def event(self) -> int:
        """A new event."""

    @abc.abstractmethod
    def free_event(self, event: int) -> None:
        """Destroys an event."""

    @abc.abstractmethod
    def record(self, event: int, stream: int = 0) -> None:
        """Marks the end of a stream's work so far."""

    @abc.abstractmethod
    def elapsed(self, start: int, end: int) -> float:
        """Milliseconds between two recorded events; waits for the second."""

    @abc.abstractmethod
    def wait_event(self, stream: int, event: int) -> None:
        """Later work of ``stream`` waits for ``event``."""

    @abc.abstractmethod
    def begin_capture(self, stream: int) -> None:
        """What this thread puts on ``stream`` from here on is kept for a graph instead of done."""

    @abc.abstractmethod
    def end_capture(self, stream: int) -> int:
        """What was kept, as a graph that can be launched. Raises DeviceError: something was not to be captured."""

    @abc.abstractmethod
    def launch_graph(self, graph: int, stream: int) -> None:
        """Starts all that a graph holds, in order."""

    @abc.abstractmethod
    def free_graph(self, graph: int) -> None:
        """Destroys a graph."""

    @abc.abstractmethod
    def occupancy(self, function: int, threads: int, smem: int) -> int:
        """Blocks of a kernel that a multiprocessor holds at a time, as the driver says."""

    def order(self, stream: int, after: int) -> None:
        """Later work of ``stream`` waits for all that is on the stream ``after`` by now."""
        event = self.event()
        try:
            self.record(event, after)
            self.wait_event(stream, event)
        finally:
            self.free_event(event)

    @abc.abstractmethod
    def encode_tensor_map(self, tensor_map: TensorMap, pointer: int) -> bytes:
        """The 128 bytes of a CUtensorMap over device memory; pass them as a kernel argument. Needs sm_90."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the context."""


def driver_error(code: int, name: str, text: str, call: str, detail: str = "") -> DeviceError:
    """The exception for a failed call whose context is still sound."""
    message = f"{call} failed: {text} ({name}, {code})" + (f"; {detail}" if detail else "")
    if code == 2:
        return DeviceMemoryError(
            message, code=code, remedy="smaller dims, or Options(max_memory) to refuse such shapes early"
        )
    if code in (200, 209, 218, 222):
        remedy = "compile for this device's architecture, or keep PTX in the artifact"
        return WrongArchitectureError(message, code=code, remedy=remedy)
    if code == 400:
        remedy = "streams and memory must be of the device's primary context (with pycuda: pycuda.autoprimaryctx)"
        return DeviceError(message, code=code, remedy=remedy)
    if 900 <= code <= 908:
        remedy = "try again: no other thread may wait for the whole device while work is captured"
        return DeviceError(message, code=code, remedy=remedy)
    return DeviceError(message, code=code)
