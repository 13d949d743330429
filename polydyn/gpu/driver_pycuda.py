"""The driver interface over pycuda (``pip install polydyn[gpu]``); pycuda is imported when a driver is opened.

Modules, launches and streams go through pycuda. Memory, events, tensor maps and recovery are inherited from the ctypes
driver, on the same primary context: pycuda's memory objects free themselves, and abort the process when they do so
after a kernel broke the context or in a thread that pycuda does not know. pycuda keeps a stack of contexts for each
thread, and aborts when a thread ends with one on it: ours is there only while a call of pycuda runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from polydyn.gpu.driver import Argument
from polydyn.gpu.driver_ctypes import CtypesDriver
from polydyn.gpu.errors import DeviceError, DriverMissingError, WrongArchitectureError

__all__ = ["PycudaDriver", "pycuda_installed"]


def pycuda_installed() -> bool:
    """Whether pycuda can be found (it is not imported: that would need a driver)."""
    return importlib.util.find_spec("pycuda") is not None


class PycudaDriver(CtypesDriver):
    """See Driver. Handles are those of pycuda's objects, which this object keeps alive."""

    name = "pycuda"

    _pycuda: Any = None

    def __init__(self, device: int = 0, library: str = "libcuda.so.1") -> None:
        super().__init__(device, library)
        if not pycuda_installed():
            raise DriverMissingError("pycuda is not installed", remedy="pip install polydyn[gpu], or the ctypes driver")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._pycuda = importlib.import_module("pycuda.driver")
        except ImportError as e:
            raise DriverMissingError(f"pycuda does not load: {e}", remedy="use the ctypes driver") from None
        self._pycuda.init()
        self._ordinal = device
        self._objects: dict[int, Any] = {}
        self._adopt()

    def _adopt(self) -> None:
        """Makes the primary context known to pycuda."""
        self._primary = self._pycuda.Device(self._ordinal).retain_primary_context()

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The primary context is pycuda's current one in this thread; a broken one may refuse, which is no matter."""
        pushed = False
        with contextlib.suppress(self._pycuda.Error):
            self._primary.push()
            pushed = True
        try:
            yield
        finally:
            if pushed:
                with contextlib.suppress(self._pycuda.Error):
                    self._primary.pop()

    def _retain(self) -> int:
        context = super()._retain()
        if self._pycuda is not None:
            self._adopt()
        return context

    def close(self) -> None:
        """Releases pycuda's hold on the context, then the context."""
        self._forget()
        super().close()

    def _forget(self) -> None:
        """Lets go of pycuda's objects while their context still exists, or their destructors abort."""
        with self._current():
            self._objects = {}

    def _guard(self, call: str, action: Callable[[], Any]) -> Any:
        """Runs a pycuda call; its exceptions become ours, by the state the context is in afterwards."""
        self._enter()
        try:
            with self._current():
                return action()
        except self._pycuda.Error as e:
            self._call("cuCtxSynchronize")  # raises DeviceLostError when the context broke
            text = f"{call} failed: {e}"
            if "kernel image" in str(e) or "PTX" in str(e):
                raise WrongArchitectureError(text, code=209, remedy=f"compile for sm_{self.arch}") from None
            raise DeviceError(text) from None

    def _keep(self, key: int, thing: Any) -> int:
        self._objects[key] = thing
        return key

    def _get(self, handle: int) -> Any:
        if handle not in self._objects:
            raise DeviceError(
                f"{handle:#x} is not a handle of this context", remedy="was it lost with a failed kernel?"
            )
        return self._objects[handle]

    def renew(self) -> None:
        """Resets the primary context, and takes it up in pycuda again."""
        self._forget()
        super().renew()

    def load_module(self, image: bytes) -> int:
        """A cubin or PTX."""
        module = self._guard("module_from_buffer", lambda: self._pycuda.module_from_buffer(image))
        return self._keep(id(module), module)

    def get_function(self, module: int, name: str) -> int:
        """A kernel."""
        owner = self._get(module)
        function = self._guard(f"get_function({name})", lambda: owner.get_function(name))
        return self._keep(id(function), function)

    def set_smem(self, function: int, nbytes: int) -> None:
        """Dynamic shared memory above 48 KB."""
        kernel = self._get(function)
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
        """Starts a kernel."""
        kernel = self._get(function)
        queue = self._get(stream) if stream else None
        packed = [_packed(a) for a in args]
        call = f"launch of grid {grid}, {threads} threads, {smem} bytes of shared memory"
        self._guard(call, lambda: kernel(*packed, grid=grid, block=(threads, 1, 1), shared=smem, stream=queue))

    def stream(self) -> int:
        """A stream; pycuda makes it blocking or not by flags, here non-blocking."""
        stream = self._guard("Stream", lambda: self._pycuda.Stream(1))
        return self._keep(int(stream.handle), stream)

    def free_stream(self, stream: int) -> None:
        """Destroys a stream."""
        self._get(stream)
        with self._current():
            del self._objects[stream]


def _packed(argument: Argument) -> Any:
    """What pycuda packs as we mean it: scalars by value, raw bytes as an array of bytes."""
    if isinstance(argument, int):
        return np.uint64(argument)
    return np.frombuffer(argument, np.uint8) if isinstance(argument, bytes) else argument
