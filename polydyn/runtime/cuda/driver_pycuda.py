"""The driver interface over pycuda (``pip install polydyn[gpu]``); pycuda is imported when a driver is opened.

Modules, launches and streams use pycuda. Memory, events, tensor maps and recovery are inherited from the ctypes driver,
on the same primary context. The reason is that pycuda's memory objects free themselves, and abort the process if they
do so after a kernel broke the context, or in a thread unknown to pycuda. ``_Hold`` protects the other objects from
this.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polydyn.gpu.errors import DeviceError, DeviceMemoryError, DriverMissingError, WrongArchitectureError
from polydyn.runtime.cuda.driver import Argument, Driver, resets

__all__ = ["PycudaDriver", "pycuda_installed"]

LIBCUDA = "libcuda.so.1"
"""The name under which pycuda loads the driver."""

_more, _less = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef
for _count in (_more, _less):
    _count.argtypes, _count.restype = [ctypes.py_object], None


def pycuda_installed() -> bool:
    """Return whether pycuda can be found (it is not imported, because that needs a driver)."""
    return importlib.util.find_spec("pycuda") is not None


class _Hold:
    """pycuda's reference to the primary context, and the objects created through it.

    The destructors of these objects abort the process if the context cannot be used. So each object has an extra
    reference, which only ``let_go`` removes: nothing is destroyed at the interpreter's end, or after the context is
    lost. pycuda has a stack of contexts per thread, and aborts if a thread ends with a context on it. Our context is on
    the stack only during a call of pycuda.
    """

    def __init__(self, pycuda: Any, device: int, cuda: ctypes.CDLL, resets: Callable[[], int]) -> None:
        self._pycuda, self._device, self._cuda, self._resets = pycuda, device, cuda, resets
        self._context: Any = None
        self._adopting = threading.Lock()
        self._objects: dict[int, Any] = {}
        self._seen = resets()

    def keep(self, key: int, thing: Any) -> int:
        """Store an object under its handle."""
        _more(thing)
        self._objects[key] = thing
        return key

    def get(self, handle: int) -> Any:
        """Return the object of a handle."""
        if handle not in self._objects:
            raise DeviceError(
                f"{handle:#x} is not a handle of this context",
                remedy="was it lost with a failed kernel? Streams must be of this driver; that over ctypes takes any",
            )
        return self._objects[handle]

    def let_go(self, handle: int) -> None:
        """Destroy the object of a handle, unless the context cannot be used."""
        with self.current() as usable:
            thing = self.get(handle)
            if usable:
                _less(thing)
            del self._objects[handle], thing

    def lose(self) -> None:
        """Drop the lost context and all its objects; later objects belong to the next context.

        The driver must be told that pycuda has released the old context. pycuda itself would leave it current when it
        detaches, and would not tell the driver in a thread that did not create it.
        """
        self._objects.clear()
        self._seen = self._resets()
        if self._context is not None:
            self._context = None
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    def release(self) -> None:
        """Destroy all objects and release the context; only drop them if the context is broken or already lost."""
        if self._seen == self._resets():
            with contextlib.suppress(self._pycuda.Error), self.current():
                self._pycuda.Context.synchronize()  # raises if it is broken
                for handle in list(self._objects):
                    self.let_go(handle)
        self.lose()

    @contextlib.contextmanager
    def current(self) -> Iterator[bool]:
        """Make the primary context pycuda's current one in this thread. Yield False if a broken context rejects it."""
        before, context = self._at_top(), None
        try:
            context = self._adopted()
            context.push()
        except self._pycuda.Error:
            context = None
            if before and self._at_top() != before:  # pycuda removed the previous context
                self._cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(before))
        try:
            yield context is not None
        finally:
            if context is not None:
                self._pop(context)

    def _at_top(self) -> int:
        top = ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(top))
        return top.value or 0

    def _adopted(self) -> Any:
        """Return the primary context as an object of pycuda."""
        with self._adopting:
            if self._context is None:
                self._context = self._pycuda.Device(self._device).retain_primary_context()
                _more(self._context)
            return self._context

    def _pop(self, context: Any) -> None:
        try:
            context.pop()
        except self._pycuda.Error:  # the driver rejected it, so pycuda still has it on its stack, unless it is invalid
            if self._context is context:
                self._context = None
            with contextlib.suppress(self._pycuda.Error):
                context.detach()


class PycudaDriver(Driver):
    """See Driver. Handles are those of pycuda's objects, which this object keeps alive."""

    name = "pycuda"

    _hold: _Hold | None = None

    def __init__(self, device: int = 0, library: str = LIBCUDA) -> None:
        super().__init__(device, library)
        self._pycuda = _import(self._cuda, library)
        self._pycuda.init()
        self._hold = _Hold(self._pycuda, device, self._cuda, functools.partial(resets, self._key))
        self._release = weakref.finalize(self, self._hold.release)
        self._release.atexit = False  # threads may still be in calls at exit; the process frees everything

    @property
    def _live_hold(self) -> _Hold:
        """The hold on the current context."""
        _ = self.context  # detects a new context
        assert self._hold is not None
        return self._hold

    def _retain(self) -> int:
        context = super()._retain()
        if self._hold is not None:
            self._hold.lose()
        return context

    def close(self) -> None:
        """Release pycuda's hold on the context, then the context."""
        _ = self._live_hold
        self._release()
        super().close()

    def _guard(self, call: str, action: Callable[[], Any]) -> Any:
        """Run a pycuda call. Its exceptions become ours, according to the state of the context afterwards."""
        try:
            with self._live_hold.current():
                return action()
        except self._pycuda.Error as e:
            self._call("cuCtxSynchronize")  # raises DeviceLostError if the context broke
            text = f"{call} failed: {e}"
            if "kernel image" in str(e) or "PTX" in str(e):
                raise WrongArchitectureError(text, code=209, remedy=f"compile for sm_{self.arch}") from None
            if isinstance(e, self._pycuda.MemoryError):
                raise DeviceMemoryError(text, code=2, remedy="free something, or use smaller dims") from None
            raise DeviceError(text) from None

    def load_module(self, image: bytes) -> int:
        """Load a cubin or PTX."""
        module = self._guard("module_from_buffer", lambda: self._pycuda.module_from_buffer(image))
        return self._live_hold.keep(id(module), module)

    def get_function(self, module: int, name: str) -> int:
        """Return a kernel of a module."""
        owner = self._live_hold.get(module)
        function = self._guard(f"get_function({name})", lambda: owner.get_function(name))
        return self._live_hold.keep(id(function), function)

    def set_smem(self, function: int, nbytes: int) -> None:
        """Allow dynamic shared memory above 48 KB."""
        kernel = self._live_hold.get(function)
        attribute = self._pycuda.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._guard(f"set_attribute({nbytes} bytes of shared memory)", lambda: kernel.set_attribute(attribute, nbytes))

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        smem: int,
        args: Sequence[Argument],
        stream: int = 0,
    ) -> None:
        """Launch a kernel, on the default stream or on one that this driver created."""
        kernel = self._live_hold.get(function)
        queue = self._live_hold.get(stream) if stream else None
        packed = [_packed(a) for a in args]
        call = f"launch of grid {grid}, {threads} threads, {smem} bytes of shared memory"
        self._guard(call, lambda: kernel(*packed, grid=grid, block=(threads, 1, 1), shared=smem, stream=queue))

    def occupancy(self, function: int, threads: int, smem: int) -> int:
        """Raise DeviceError, because pycuda has no function handle for this query."""
        raise DeviceError("pycuda does not report occupancy", remedy="use the ctypes driver")

    def stream(self) -> int:
        """Create a non-blocking stream (pycuda selects this by a flag)."""
        stream = self._guard("Stream", lambda: self._pycuda.Stream(1))
        return self._live_hold.keep(int(stream.handle), stream)

    def free_stream(self, stream: int) -> None:
        """Destroy a stream."""
        self._live_hold.let_go(stream)


def _import(cuda: ctypes.CDLL, library: str) -> Any:
    """Import pycuda's driver module, which must use the same driver library."""
    if not pycuda_installed():
        raise DriverMissingError("pycuda is not installed", remedy="pip install polydyn[gpu], or the ctypes driver")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module("pycuda.driver")
        linked = ctypes.CDLL(LIBCUDA)
    except (ImportError, OSError) as e:
        raise DriverMissingError(f"pycuda cannot be loaded: {e}", remedy="use the ctypes driver") from None
    ours, its = (ctypes.cast(c.cuLaunchKernel, ctypes.c_void_p).value for c in (cuda, linked))
    if ours != its:  # objects of one library would be passed to the other
        raise DriverMissingError(
            f"pycuda uses another {LIBCUDA} than {library}",
            remedy="load that one first (LD_LIBRARY_PATH, or ctypes.RTLD_GLOBAL), or use the ctypes driver",
        )
    return module


def _packed(argument: Argument) -> Any:
    """Convert an argument to a form that pycuda packs correctly: scalars as integers of their size, raw bytes as an
    array."""
    if isinstance(argument, int):
        return np.uint64(argument)
    if isinstance(argument, bytes):
        return np.frombuffer(argument, np.uint8)
    return argument.view(f"u{argument.dtype.itemsize}")
