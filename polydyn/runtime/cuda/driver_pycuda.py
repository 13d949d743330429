"""The driver interface over pycuda (``pip install polydyn[gpu]``); pycuda is imported when a driver is opened.

Modules, launches and streams go through pycuda. Memory, events, tensor maps and recovery are inherited from the ctypes
driver, on the same primary context: pycuda's memory objects free themselves, and abort the process when they do so
after a kernel broke the context or in a thread that pycuda does not know. ``_Hold`` keeps the other objects from that.
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

LINKED = "libcuda.so.1"
"""The name under which pycuda loads the driver."""

_more, _less = ctypes.pythonapi.Py_IncRef, ctypes.pythonapi.Py_DecRef
for _count in (_more, _less):
    _count.argtypes, _count.restype = [ctypes.py_object], None


def pycuda_installed() -> bool:
    """Whether pycuda can be found (it is not imported: that would need a driver)."""
    return importlib.util.find_spec("pycuda") is not None


class _Hold:
    """pycuda's hold on the primary context, and the objects that were made through it.

    Their destructors abort the process when the context cannot be had, so each object has one reference too many,
    which only ``let_go`` takes back: nothing is destroyed at the interpreter's end, or after the context is lost.
    pycuda keeps a stack of contexts for each thread, and aborts when a thread ends with one on it: ours is there only
    while a call of pycuda runs.
    """

    def __init__(self, pycuda: Any, device: int, cuda: ctypes.CDLL, resets: Callable[[], int]) -> None:
        self._pycuda, self._device, self._cuda, self._resets = pycuda, device, cuda, resets
        self._context: Any = None
        self._adopting = threading.Lock()
        self._objects: dict[int, Any] = {}
        self._seen = resets()

    def keep(self, key: int, thing: Any) -> int:
        """Notes an object under its handle."""
        _more(thing)
        self._objects[key] = thing
        return key

    def get(self, handle: int) -> Any:
        """The object of a handle."""
        if handle not in self._objects:
            raise DeviceError(
                f"{handle:#x} is not a handle of this context",
                remedy="was it lost with a failed kernel? Streams must be of this driver; that over ctypes takes any",
            )
        return self._objects[handle]

    def let_go(self, handle: int) -> None:
        """Destroys the object of a handle, unless the context cannot be had."""
        with self.current() as there:
            thing = self.get(handle)
            if there:
                _less(thing)
            del self._objects[handle], thing

    def lose(self) -> None:
        """The context is gone with all its objects; later objects belong to the next one.

        The driver is told that pycuda needs the old one no more: pycuda itself would leave it current when told to
        detach, and tell nobody in a thread that did not make it.
        """
        self._objects.clear()
        self._seen = self._resets()
        if self._context is not None:
            self._context = None
            self._cuda.cuDevicePrimaryCtxRelease_v2(self._device)

    def release(self) -> None:
        """Destroys all objects and gives the context back; loses them where it is broken, or gone already."""
        if self._seen == self._resets():
            with contextlib.suppress(self._pycuda.Error), self.current():
                self._pycuda.Context.synchronize()  # raises when it is broken
                for handle in list(self._objects):
                    self.let_go(handle)
        self.lose()

    @contextlib.contextmanager
    def current(self) -> Iterator[bool]:
        """The primary context is pycuda's current one in this thread; gives False where a broken one refuses."""
        before, context = self._at_top(), None
        try:
            context = self._adopted()
            context.push()
        except self._pycuda.Error:
            context = None
            if before and self._at_top() != before:  # pycuda took down what was there
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
        """The primary context as an object of pycuda."""
        with self._adopting:
            if self._context is None:
                self._context = self._pycuda.Device(self._device).retain_primary_context()
                _more(self._context)
            return self._context

    def _pop(self, context: Any) -> None:
        try:
            context.pop()
        except self._pycuda.Error:  # the driver refused, so it is on pycuda's stack still; one that is invalid is not
            if self._context is context:
                self._context = None
            with contextlib.suppress(self._pycuda.Error):
                context.detach()


class PycudaDriver(Driver):
    """See Driver. Handles are those of pycuda's objects, which this object keeps alive."""

    name = "pycuda"

    _hold: _Hold | None = None

    def __init__(self, device: int = 0, library: str = LINKED) -> None:
        super().__init__(device, library)
        self._pycuda = _import(self._cuda, library)
        self._pycuda.init()
        self._hold = _Hold(self._pycuda, device, self._cuda, functools.partial(resets, self._key))
        self._release = weakref.finalize(self, self._hold.release)
        self._release.atexit = False  # threads may still be calling then; the process takes everything with it

    @property
    def _live_hold(self) -> _Hold:
        """The hold on the current context."""
        _ = self.context  # notices a new one
        assert self._hold is not None
        return self._hold

    def _retain(self) -> int:
        context = super()._retain()
        if self._hold is not None:
            self._hold.lose()
        return context

    def close(self) -> None:
        """Releases pycuda's hold on the context, then the context."""
        _ = self._live_hold
        self._release()
        super().close()

    def _guard(self, call: str, action: Callable[[], Any]) -> Any:
        """Runs a pycuda call; its exceptions become ours, by the state the context is in afterwards."""
        try:
            with self._live_hold.current():
                return action()
        except self._pycuda.Error as e:
            self._call("cuCtxSynchronize")  # raises DeviceLostError when the context broke
            text = f"{call} failed: {e}"
            if "kernel image" in str(e) or "PTX" in str(e):
                raise WrongArchitectureError(text, code=209, remedy=f"compile for sm_{self.arch}") from None
            if isinstance(e, self._pycuda.MemoryError):
                raise DeviceMemoryError(text, code=2, remedy="free something, or use smaller dims") from None
            raise DeviceError(text) from None

    def load_module(self, image: bytes) -> int:
        """A cubin or PTX."""
        module = self._guard("module_from_buffer", lambda: self._pycuda.module_from_buffer(image))
        return self._live_hold.keep(id(module), module)

    def get_function(self, module: int, name: str) -> int:
        """A kernel."""
        owner = self._live_hold.get(module)
        function = self._guard(f"get_function({name})", lambda: owner.get_function(name))
        return self._live_hold.keep(id(function), function)

    def set_smem(self, function: int, nbytes: int) -> None:
        """Dynamic shared memory above 48 KB."""
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
        """Starts a kernel, on the default stream or one that this driver made."""
        kernel = self._live_hold.get(function)
        queue = self._live_hold.get(stream) if stream else None
        packed = [_packed(a) for a in args]
        call = f"launch of grid {grid}, {threads} threads, {smem} bytes of shared memory"
        self._guard(call, lambda: kernel(*packed, grid=grid, block=(threads, 1, 1), shared=smem, stream=queue))

    def occupancy(self, function: int, threads: int, smem: int) -> int:
        """Raises DeviceError: pycuda has no handle of a function to ask with."""
        raise DeviceError("pycuda does not say how many blocks fit", remedy="ask the ctypes driver")

    def stream(self) -> int:
        """A stream; pycuda makes it blocking or not by flags, here non-blocking."""
        stream = self._guard("Stream", lambda: self._pycuda.Stream(1))
        return self._live_hold.keep(int(stream.handle), stream)

    def free_stream(self, stream: int) -> None:
        """Destroys a stream."""
        self._live_hold.let_go(stream)


def _import(cuda: ctypes.CDLL, library: str) -> Any:
    """pycuda's driver module, on the same driver library as ours."""
    if not pycuda_installed():
        raise DriverMissingError("pycuda is not installed", remedy="pip install polydyn[gpu], or the ctypes driver")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module("pycuda.driver")
        linked = ctypes.CDLL(LINKED)
    except (ImportError, OSError) as e:
        raise DriverMissingError(f"pycuda does not load: {e}", remedy="use the ctypes driver") from None
    ours, its = (ctypes.cast(c.cuLaunchKernel, ctypes.c_void_p).value for c in (cuda, linked))
    if ours != its:  # objects of one would be handed to the other
        raise DriverMissingError(
            f"pycuda uses another {LINKED} than {library}",
            remedy="load that one first (LD_LIBRARY_PATH, or ctypes.RTLD_GLOBAL), or use the ctypes driver",
        )
    return module


def _packed(argument: Argument) -> Any:
    """An argument in a form that pycuda packs rightly: scalars as integers of their size, raw bytes as an array."""
    if isinstance(argument, int):
        return np.uint64(argument)
    if isinstance(argument, bytes):
        return np.frombuffer(argument, np.uint8)
    return argument.view(f"u{argument.dtype.itemsize}")
