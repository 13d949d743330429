"""The memory of one call of a program with parts: a C context, and the tensors stored in numpy arrays.

Tensors that parts, or steps in C, write for later stages are stored in rooms of the context, which are reused by later
calls. Standard library and numpy only.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.errors import PolydynError
from polydyn.runtime.native import DTYPE_CODES, Native, address_of, new_output
from polydyn.runtime.program import numpy_dtype
from polydyn.runtime.sequence import STOP_MEMORY, STOP_SIGNALS, Chain, Held

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layout:
    """The properties that all frames of a program share.

    ``numbers``: the tensors' numbers by name; ``dtypes``: those known before a call. ``gone``: after each stage, the
    tensors that are not read any more. ``results``: tensors that are outputs; ``given``: those that C writes to the
    caller's memory. ``rooms``: those that C writes to rooms.
    """

    numbers: Mapping[str, int]
    dtypes: Mapping[str, str]
    gone: tuple[tuple[str, ...], ...]
    results: tuple[str, ...]
    given: frozenset[str]
    rooms: frozenset[str]
    symbols: Mapping[str, int]

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> Layout:
        """Return the layout of a program."""
        tensors = manifest["tensors"]
        return Layout(
            {t["name"]: k for k, t in enumerate(tensors)},
            {t["name"]: t["dtype"] for t in tensors if t["dtype"]},
            tuple(tuple(s["gone"]) for s in manifest["order"]),
            tuple(dict.fromkeys(o["of"] for o in manifest["outputs"])),
            frozenset(t["name"] for t in tensors if t["result"]),
            frozenset(t["name"] for t in tensors if t["room"] >= 0 and not t["result"]),
            {s["symbol"]: k for k, s in enumerate(manifest["symbols"])},
        )


class Frame:
    """The memory of one call, which is reused by later calls.

    ``handle``: the ``pd_context``. ``arrays``: during a call, the tensors stored in numpy arrays.
    """

    def __init__(self, layout: Layout, native: Native, threads: int) -> None:
        self.layout, self._native, self._library = layout, native, native.library
        self.handle = ctypes.c_void_p()
        native.check(native.library.pd_context_new(native.program, threads, ctypes.byref(self.handle)))
        native.library.pd_sequence_of.restype = ctypes.POINTER(Chain)
        self._pointer = native.library.pd_sequence_of(self.handle)
        self._chain = self._pointer.contents
        self._chain.asks = 1
        self._tensors = (Held * len(layout.numbers)).from_address(self._chain.tensors)
        self.values = self._chain.values
        self._names = list(layout.numbers)
        self._shapes: list[tuple[int, ...]] = []
        self._last: dict[str, tuple[int, ...]] = {}
        self.arrays: dict[str, Array] = {}

    def free(self) -> None:
        """Free the context; the frame must not be used any more."""
        self._native.library.pd_context_free(self.handle)

    # -- a call ------------------------------------------------------------------------------------------------------

    def begin(self, arrays: Mapping[str, Array], times: int | None) -> None:
        """Set the inputs. If they have the shapes of the previous call, allocate results of its shapes now.

        ``times``: the address for the times of launches and steps, or None.
        """
        for name, array in arrays.items():
            self._take(name, array)
        shapes = [a.shape for a in arrays.values()]
        if shapes != self._shapes:
            self._shapes = shapes
            self._last.clear()
        for name in self.layout.given:
            if name in self._last:
                self._give(name, self._last[name])
            else:
                self._tensors[self.layout.numbers[name]].given = -1
        chain = self._chain
        chain.at, chain.begun, chain.times = 0, -1, times

    def run(self) -> int:
        """Run until all stages are done, one fails, or one needs Python (``stage``); return the code."""
        while True:
            code: int = self._library.pd_sequence_run(self._pointer)
            if code == STOP_MEMORY:
                t = self._tensors[self._chain.lacks]
                self._give(self._names[self._chain.lacks], tuple(t.shape[: t.rank]))
            elif code != STOP_SIGNALS:
                return code

    @property
    def stage(self) -> int:
        """The number of the next stage, or of the one that failed; after the last stage, a late guard failed."""
        return int(self._chain.at)

    @property
    def waits(self) -> int:
        """The number of times that calls have waited for a device."""
        return int(self._chain.waits)

    @property
    def entered(self) -> bool:
        """Whether a stage has begun, so that the inputs are accepted."""
        return int(self._chain.begun) >= 0

    @property
    def message(self) -> str:
        """The error message of a failed stage."""
        return bytes(self._chain.text).decode(errors="replace")

    def array(self, name: str) -> Array:
        """Return a tensor as an array that shares its memory."""
        if name in self.arrays:
            return self.arrays[name]
        t = self._tensors[self.layout.numbers[name]]
        shape, dtype = tuple(t.shape[: t.rank]), numpy_dtype(self.layout.dtypes[name])
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory: Any = (ctypes.c_char * size).from_address(t.data) if size else None
        array: Array = np.ndarray(shape, dtype, memory)
        return array

    def go_on(self, arrays: Mapping[str, Array]) -> None:
        """Continue after a step in Python with its results."""
        for name, array in arrays.items():
            self._take(name, array)
        self._chain.at += 1
        for over in self.layout.gone[: self._chain.at]:
            for name in over:
                self.arrays.pop(name, None)

    def results(self) -> dict[str, Array]:
        """Return the tensors of the outputs."""
        results = {}
        for name in self.layout.results:
            array = self.array(name)
            if name in self.layout.rooms:
                array = array.copy()
            elif name in self.layout.given:
                t = self._tensors[self.layout.numbers[name]]
                shape = self._last[name] = tuple(t.shape[: t.rank])
                array = array if array.shape == shape else array.reshape(shape)
            results[name] = array
        return results

    def _take(self, name: str, array: Array) -> None:
        """Store an array as a tensor."""
        self.arrays[name] = array
        offset, rank = self.layout.numbers[name] * SIZE, array.ndim
        struct.pack_into(f"P{rank}q", self._tensors, offset, address_of(array), *array.shape)
        struct.pack_into(f"{rank}q", self._tensors, offset + STRIDES, *array.strides)
        struct.pack_into("i", self._tensors, offset + RANK, rank)
        if name not in self.layout.dtypes:
            self._tensors[self.layout.numbers[name]].dtype = DTYPE_CODES.index(array.dtype.name)

    def _give(self, name: str, shape: tuple[int, ...]) -> None:
        """Allocate memory for a result."""
        try:
            array = self.arrays[name] = new_output(shape, numpy_dtype(self.layout.dtypes[name]))
        except (MemoryError, ValueError) as e:  # ValueError: numpy cannot create an array of this shape
            raise PolydynError(f"no memory for a tensor with a data-dependent size: {e}") from e
        offset = self.layout.numbers[name] * SIZE
        struct.pack_into("P", self._tensors, offset, address_of(array))
        struct.pack_into("q", self._tensors, offset + GIVEN, array.nbytes)


SIZE, STRIDES, GIVEN, RANK = ctypes.sizeof(Held), Held.strides.offset, Held.given.offset, Held.rank.offset
