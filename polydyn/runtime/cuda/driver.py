"""The driver interface: all access to the CUDA driver, through ``libcuda.so.1`` and ctypes.

It needs no package. ``driver_pycuda`` implements it with pycuda where possible, and ``drivers.open_driver`` chooses.
Both use the device's primary context, so torch and cupy tensors can be used with them. Handles are integers. Sizes are
bytes, times milliseconds.

If a kernel breaks its context (an illegal address, for example), all pointers, modules, functions, streams and events
are lost. The driver then creates a new context (``renew``), increments ``generation`` and raises DeviceLostError; the
next call works. With ``deferred`` it only raises: ``session``, which shares the driver between threads, renews the
context when all threads have left.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from polydyn.gpu.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    DriverMissingError,
    WrongArchitectureError,
)
from polydyn.runtime.cuda.tensormap import TensorMap

__all__ = ["LEGACY", "Argument", "Driver", "resets"]

Argument: TypeAlias = "int | np.generic | bytes"
"""A kernel argument: an int is a device pointer (8 bytes), a numpy scalar its own bytes, bytes are passed unchanged."""

LEGACY = 1
"""The CUstream of CUDA's default stream, which other interfaces call 0."""

FATAL_RESULTS = frozenset({214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720})
"""CUresult values after which the context is unusable (ECC, illegal address, timeout, assert, ... launch failed)."""

_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: compute capability
_SMEM = 8  # CUfunction_attribute: dynamic shared memory
_NON_BLOCKING = 1
_CONTEXT = 1  # CUpointer_attribute
_THREAD_LOCAL = 1  # CUstreamCaptureMode
_resets: dict[tuple[str, int], int] = {}


def resets(key: tuple[str, int]) -> int:
    """Return how many times drivers of this process have reset the primary context of a (library, device)."""
    return _resets.get(key, 0)


class Driver:
    """One device and its primary context. Calls may come from any thread; a launch is one foreign call."""

    name = "ctypes"
    device_name: str
    """The driver's name of the device; ``hardware.match`` finds its description."""
    device: int
    """The device number within the process, as in DLPack."""
    arch: int
    """Compute capability as a number: 80, 86, 89, 90, 100."""
    deferred = False
    """Whether another object renews a broken context."""

    def __init__(self, device: int = 0, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as e:
            raise DriverMissingError(
                f"no CUDA driver: {e}", remedy="install the NVIDIA driver, or compile for target='cpu'"
            ) from None
        code = self._cuda.cuInit(0)
        if code:
            raise DriverMissingError(f"the CUDA driver does not start: {self._describe(code)}", code=code)
        count = ctypes.c_int()
        self._cuda.cuDeviceGetCount(ctypes.byref(count))
        if not 0 <= device < count.value:
            raise DriverMissingError(f"no CUDA device {device}: the driver sees {count.value}", code=101)
        self.device, number = device, ctypes.c_int()
        self._cuda.cuDeviceGet(ctypes.byref(number), device)
        self._device = number.value
        room = ctypes.create_string_buffer(256)
        self._cuda.cuDeviceGetName(room, 256, self._device)
        self.device_name = room.value.decode()
        self._allocated: dict[int, int] = {}
        self._key = (library, device)
        self._renewing = threading.RLock()  # an array that is freed while it is held acquires it again
        self._seen = self.generation
        self._launch = self._cuda.cuLaunchKernel
        self._launch.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
        self._context = self._retain()
        self.arch = self.attribute(_MAJOR) * 10 + self.attribute(_MINOR)

    # ---- context and errors

    def _retain(self) -> int:
        context = ctypes.c_void_p()
        code = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device)
        if code:
            raise DriverMissingError(f"no context on the device: {self._describe(code)}", code=code)
        return int(context.value or 0)

    @property
    def generation(self) -> int:
        """The number of lost contexts, detected by any driver of this process."""
        return resets(self._key)

    @property
    def context(self) -> int:
        """The CUcontext; a new one if another driver has renewed it."""
        if self._seen != self.generation:
            with self._renewing:  # a second thread must not clear allocations made meanwhile
                now = self.generation
                if self._seen != now:
                    self._context = self._retain()
                    self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)  # the lost context was not released
                    self._allocated.clear()
                    self._seen = now
        return self._context

    def _describe(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return f"{(text.value or b'unknown error').decode()} ({(name.value or b'unknown').decode()}, {code})"

    def _enter(self) -> int:
        """Make the context current. This is always needed: other libraries (torch, pycuda) change the current context.

        Return the context of another library to restore afterwards, or 0.
        """
        mine, before = self.context, ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(before))
        self._cuda.cuCtxSetCurrent(ctypes.c_void_p(mine))
        return 0 if before.value in (None, mine) else int(before.value)

    def _leave(self, before: int) -> None:
        if before:
            self._cuda.cuCtxSetCurrent(ctypes.c_void_p(before))

    def _call(self, function: str, *args: Any, detail: str = "") -> None:
        before = self._enter()
        code = getattr(self._cuda, function)(*args)
        self._leave(before)
        if code:
            self.fail(code, function, detail)

    def fail(self, code: int, call: str, detail: str = "") -> NoReturn:
        """Raise the exception of a CUresult other than 0; a broken context is renewed before."""
        more = f"; {detail}" if detail else ""
        if code not in FATAL_RESULTS:
            raise driver_error(code, f"{call} failed: {self._describe(code)}{more}")
        message = f"a kernel broke the context: {self._describe(code)}, seen at {call}{more}"
        remedy = "load modules and buffers again; run under compute-sanitizer"
        if not self.deferred:
            try:
                self.renew()
            except DriverMissingError as e:
                message, remedy = f"{message}; a new context failed: {e}", "restart the process"
        raise DeviceLostError(message, code=code, remedy=remedy)

    def renew(self) -> None:
        """Reset the primary context, which replaces a broken one. DriverMissingError: no new context."""
        self._cuda.cuDevicePrimaryCtxReset_v2(self._device)
        _resets[self._key] = self.generation + 1
        self._leave(self._enter())

    def close(self) -> None:
        """Release the primary context; the object cannot be used afterwards."""
        self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    # ---- device

    def attribute(self, code: int) -> int:
        """Return a CUdevice_attribute."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), code, self._device)
        return value.value

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of device memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    # ---- memory

    def alloc(self, nbytes: int) -> int:
        """Return a device pointer to at least ``nbytes`` (256-byte aligned; for 0 bytes one byte is allocated, so that
        pointers are distinct). DeviceMemoryError.
        """
        pointer = ctypes.c_uint64()
        self._call(
            "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)), detail=f"{nbytes} bytes requested"
        )
        self._allocated[pointer.value] = nbytes
        return pointer.value

    def free(self, pointer: int) -> None:
        """Free an allocation. Raises DeviceError if it does not belong to this context."""
        _ = self.context  # detects a new context and clears the allocations of the old one
        if self._allocated.pop(pointer, None) is None:
            raise DeviceError(
                f"{pointer:#x} is not an allocation of this context", remedy="was it lost with a failed kernel?"
            )
        self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def h2d(self, pointer: int, array: np.ndarray[Any, Any], stream: int = 0) -> None:
        """Copy a C-contiguous array to the device; without ``stream`` the copy is complete on return."""
        self._copy("cuMemcpyHtoD", ctypes.c_uint64(pointer), ctypes.c_void_p(_contiguous(array)), array.nbytes, stream)

    def d2h(self, array: np.ndarray[Any, Any], pointer: int, stream: int = 0) -> None:
        """Copy device memory into a C-contiguous array; without ``stream`` the copy is complete on return."""
        self._copy("cuMemcpyDtoH", ctypes.c_void_p(_contiguous(array)), ctypes.c_uint64(pointer), array.nbytes, stream)

    def _copy(self, call: str, to: Any, source: Any, nbytes: int, stream: int) -> None:
        if not nbytes:
            return
        if stream:
            self._call(call + "Async_v2", to, source, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))
        else:
            self._call(call + "_v2", to, source, ctypes.c_size_t(nbytes))
            if call == "cuMemcpyHtoD":  # a copy from pageable memory may return before it is complete
                self._call("cuStreamSynchronize", None)

    def owner(self, pointer: int) -> int:
        """Return the CUcontext that owns device memory; 0 if the driver does not report it."""
        context, before = ctypes.c_void_p(), self._enter()
        code = self._cuda.cuPointerGetAttribute(ctypes.byref(context), _CONTEXT, ctypes.c_uint64(pointer))
        self._leave(before)
        return 0 if code else int(context.value or 0)

    # ---- modules

    def load_module(self, image: bytes) -> int:
        """Load a cubin (or PTX, zero-terminated). Raises WrongArchitectureError."""
        module = ctypes.c_void_p()
        self._call(
            "cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image), detail=f"the device is sm_{self.arch}"
        )
        return int(module.value or 0)

    def get_function(self, module: int, name: str) -> int:
        """Return a kernel of a module. Raises DeviceError if no kernel has this name."""
        function = ctypes.c_void_p()
        call = "cuModuleGetFunction"
        self._call(call, ctypes.byref(function), ctypes.c_void_p(module), name.encode(), detail=f"kernel {name}")
        return int(function.value or 0)

    def set_smem(self, function: int, nbytes: int) -> None:
        """Allow a kernel ``nbytes`` of dynamic shared memory; needed above 48 KB. Raises DeviceError."""
        detail = f"{nbytes} bytes of shared memory per block"
        self._call("cuFuncSetAttribute", ctypes.c_void_p(function), _SMEM, ctypes.c_int(nbytes), detail=detail)

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        smem: int,
        args: Sequence[Argument],
        stream: int = 0,
    ) -> None:
        """Launch a kernel; errors of the kernel itself appear at a later call (``synchronize``)."""
        before = self._enter()
        values = [_value(a) for a in args]
        params = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(v) for v in values])
        code = self._launch(function, *grid, threads, 1, 1, smem, stream or None, ctypes.addressof(params), None)
        self._leave(before)
        if code:
            self.fail(code, "cuLaunchKernel", f"grid {grid}, {threads} threads, {smem} bytes of shared memory")

    # ---- streams and events

    def stream(self) -> int:
        """Create a stream that does not wait for the default stream."""
        return self._create("cuStreamCreate", _NON_BLOCKING)

    def free_stream(self, stream: int) -> None:
        """Destroy a stream."""
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all work. Raises errors of kernels."""
        if stream is None:
            self._call("cuCtxSynchronize")
        else:
            self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def event(self) -> int:
        """Create an event with timing."""
        return self._create("cuEventCreate", 0)

    def free_event(self, event: int) -> None:
        """Destroy an event."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def record(self, event: int, stream: int = 0) -> None:
        """Record an event after the current work of a stream."""
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def elapsed(self, start: int, end: int) -> float:
        """Return the milliseconds between two recorded events; wait for the second."""
        self._call("cuEventSynchronize", ctypes.c_void_p(end))
        time = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(time), ctypes.c_void_p(start), ctypes.c_void_p(end))
        return time.value

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work of ``stream`` wait for ``event``."""
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def order(self, stream: int, after: int) -> None:
        """Make later work of ``stream`` wait for all current work on the stream ``after``."""
        event = self.event()
        try:
            self.record(event, after)
            self.wait_event(stream, event)
        finally:
            self.free_event(event)

    def _create(self, call: str, flags: int) -> int:
        handle = ctypes.c_void_p()
        self._call(call, ctypes.byref(handle), flags)
        return int(handle.value or 0)

    # ---- graphs

    def captures(self, stream: int) -> bool:
        """Return whether a stream is capturing a graph, even if the capture is already invalid."""
        status = ctypes.c_int()
        self._call("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
        return status.value != 0

    def begin_capture(self, stream: int) -> None:
        """Start capturing: work that this thread enqueues on ``stream`` goes to a graph instead of being executed.
        Other threads are not affected.
        """
        self._call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), _THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End capturing. Return an executable graph. Raises DeviceError if some work cannot be captured."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        try:
            self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        finally:
            self._call("cuGraphDestroy", graph)
        return int(executable.value or 0)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch all work of a graph, in order."""
        self._call("cuGraphLaunch", ctypes.c_void_p(graph), ctypes.c_void_p(stream))

    def free_graph(self, graph: int) -> None:
        """Destroy a graph."""
        self._call("cuGraphExecDestroy", ctypes.c_void_p(graph))

    # ---- kernels

    def occupancy(self, function: int, threads: int, smem: int) -> int:
        """Return the resident blocks per SM of a kernel, as reported by the driver."""
        blocks, handle = ctypes.c_int(), ctypes.c_void_p(function)
        call = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        self._call(call, ctypes.byref(blocks), handle, ctypes.c_int(threads), ctypes.c_size_t(smem))
        return blocks.value

    # ---- tensor maps

    def encode_tensor_map(self, tensor_map: TensorMap, pointer: int) -> bytes:
        """Return the 128 bytes of a CUtensorMap over device memory, to pass as a kernel argument. Needs sm_90.
        Zero fill, no interleave, 256-byte L2 promotion.
        """
        tensor_map.check_address(pointer)
        if self.arch < 90:
            raise DeviceError(f"tensor maps need sm_90, the device is sm_{self.arch}")
        rank = len(tensor_map.dims)
        room = (ctypes.c_char * 192)()
        aligned = (ctypes.addressof(room) + 63) & ~63
        swizzle, pixels = 3 if tensor_map.swizzle else 0, tensor_map.pixels
        steps = (1, *pixels.steps, 1) if pixels else [1] * rank
        shape: tuple[Any, ...] = ((ctypes.c_uint32 * rank)(*tensor_map.box),)
        if pixels:
            corners = ((ctypes.c_int * 3)(*x) for x in (pixels.lower, pixels.upper))
            shape = (*corners, *map(ctypes.c_uint32, tensor_map.box))
        self._call(
            "cuTensorMapEncodeIm2col" if pixels else "cuTensorMapEncodeTiled", ctypes.c_void_p(aligned),
            tensor_map.type_code, rank, ctypes.c_void_p(pointer), (ctypes.c_uint64 * rank)(*tensor_map.dims),
            (ctypes.c_uint64 * rank)(*tensor_map.strides), *shape, (ctypes.c_uint32 * rank)(*steps), 0, swizzle, 3, 0,
            detail=str(tensor_map),
        )  # fmt: skip
        return ctypes.string_at(aligned, 128)


def _contiguous(array: np.ndarray[Any, Any]) -> int:
    if not array.flags.c_contiguous:
        raise DeviceError("only C-contiguous arrays can be copied", remedy="numpy.ascontiguousarray")
    return array.ctypes.data


def _value(argument: Argument) -> Any:
    """Return a ctypes object with the argument's bytes."""
    if isinstance(argument, int):
        return ctypes.c_uint64(argument)
    raw = argument if isinstance(argument, bytes) else argument.tobytes()
    return ctypes.create_string_buffer(raw, len(raw))


def driver_error(code: int, message: str) -> DeviceError:
    """Return the exception for a failed call whose context is still valid."""
    if code == 2:
        return DeviceMemoryError(message, code=code, remedy="take smaller dims")
    if code in (200, 209, 218, 222):
        remedy = "compile for this device's architecture, or keep PTX in the artifact"
        return WrongArchitectureError(message, code=code, remedy=remedy)
    if code == 400:
        remedy = "streams and memory must be of the device's primary context (with pycuda: pycuda.autoprimaryctx)"
    else:
        captured = "try again: no other thread may wait for the whole device while work is captured"
        remedy = captured if 900 <= code <= 908 else ""
    return DeviceError(message, code=code, remedy=remedy or None)
