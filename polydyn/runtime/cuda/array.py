"""DeviceArray: an output of a program that stays in device memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from polydyn.gpu.errors import DeviceError, DeviceLostError
from polydyn.runtime.cuda.dlpack import CUDA, View, capsule, dense_strides
from polydyn.runtime.cuda.driver import LEGACY
from polydyn.runtime.cuda.session import Session

__all__ = ["DeviceArray"]


class DeviceArray:
    """Dense device memory with a shape and a dtype (a name: "float32", "bfloat16" ...), freed with the object.

    ``torch.from_dlpack(a)`` and ``cupy.from_dlpack(a)`` use it without a copy; ``a.numpy()`` copies it to the host.
    ``status`` is called when its contents are complete; it raises the error of the call that wrote them.
    """

    def __init__(self, session: Session, shape: tuple[int, ...], dtype: str, itemsize: int, stream: int = 0) -> None:
        """Allocate without initialisation. ``stream``: the stream that writes the contents, or 0 if they are complete.
        Raises DeviceMemoryError."""
        self._session, self.shape, self.dtype, self.stream = session, tuple(shape), dtype, stream
        self.status: Callable[[], None] | None = None
        self.nbytes = itemsize
        for n in shape:
            self.nbytes *= n
        with session.use() as driver:
            self.pointer = driver.alloc(self.nbytes)
            self._generation = session.generation
        weakref.finalize(self, _release, session, self.pointer, self._generation).atexit = False

    @classmethod
    def of(cls, session: Session, array: np.ndarray[Any, Any], dtype: str | None = None) -> DeviceArray:
        """Copy a host array to device memory; ``dtype``: its dtype name, if numpy's differs (bfloat16)."""
        device = cls(session, array.shape, dtype or str(array.dtype), array.itemsize)
        device.copy_from(array)
        return device

    def copy_from(self, array: np.ndarray[Any, Any]) -> None:
        """Overwrite the memory with a host array of the same size in bytes."""
        with self._session.use() as driver:
            self._alive()
            driver.h2d(self.pointer, np.ascontiguousarray(array))

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy on the host; bfloat16 as uint16 bits.

        DeviceLostError: the memory is lost. InputError: the call that wrote it, on a caller's stream, read an index
        outside its axis.
        """
        out = np.empty(self.shape, "uint16" if self.dtype == "bfloat16" else self.dtype)
        with self._session.use() as driver:
            self._alive()
            if self.stream:
                driver.synchronize(self.stream)
            if self.status is not None:
                self.status()
            driver.d2h(out, self.pointer)
        return out

    def view_on(self, stream: int) -> View:
        """Return the memory for work on ``stream``, which waits until the contents are complete."""
        self._alive()
        if self.stream and stream != self.stream:
            with self._session.use() as driver:
                driver.order(stream, self.stream)
        item = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).itemsize
        return View(self.pointer, self.shape, dense_strides(self.shape, item), self.dtype, self)

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> object:
        """Return a capsule for ``stream`` (None: the legacy default stream; -1: the consumer synchronises itself)."""
        self._alive()
        if stream != -1:
            self.view_on(LEGACY if stream is None else stream)
        return capsule(self.pointer, self.shape, self.dtype, self, self.__dlpack_device__())

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._session.driver.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory for libraries without DLPack; bfloat16 as uint16 bits."""
        self._alive()
        typestr = np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).str
        data = (self.pointer, False)
        return {"shape": self.shape, "typestr": typestr, "data": data, "version": 3, "stream": self.stream or None}

    def _alive(self) -> None:
        if self._generation != self._session.generation:
            raise DeviceLostError("the memory was lost with a failed kernel", remedy="compute it again")

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype}{list(self.shape)} at {self.pointer:#x})"


def _release(session: Session, pointer: int, generation: int) -> None:
    """Free memory, unless it was lost with its context; a context that breaks meanwhile has nothing to free."""
    if session.generation != generation:
        return
    try:
        session.driver.free(pointer)
    except DeviceError:
        return
