"""ctypes bindings of a program's library (``runtime/c/polydyn.h``). Standard library and numpy only."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.build.cache import open_library
from polydyn.errors import ArtifactError, InputError, PolydynError
from polydyn.runtime.artifact import ABI, Artifact

DTYPE_CODES = (
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
    "int4", "uint4", "int2", "uint2",
)  # fmt: skip
"""The ``PD_<dtype>`` enumeration in order."""
BITS = DTYPE_CODES[13:]
"""The dtypes of at most 8 bits that numpy lacks; each element takes one byte."""

OK, INPUT, OVERFLOW, MEMORY = 0, 1, 2, 3

PAGE = 4096
OUTPUT_BYTES = 1 << 14
"""Minimum size of outputs that are aligned to a page; numpy aligns only to 16 bytes."""


class Tensor(ctypes.Structure):
    """``pd_tensor``."""

    _fields_ = (
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
    )


class LaunchInfo(ctypes.Structure):
    """``pd_launch_info``."""

    _fields_ = (
        ("label", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
        ("tasks", ctypes.c_int64),
        ("work", ctypes.c_int64),
        ("flops", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


SPAN = np.dtype([
    ("launch", "i4"), ("thread", "i4"), ("first", "i8"), ("count", "i8"), ("begin", "i8"), ("end", "i8"),
])  # fmt: skip
"""``pd_span``."""


def address_of(array: npt.NDArray[Any]) -> int:
    """Return the address of an array's first element."""
    try:  # a quarter of the time of the line below, but it fails for read-only, strided or empty arrays
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]  # the stub wants 3.12's Buffer
    except (TypeError, ValueError):
        return int(array.__array_interface__["data"][0])


def new_output(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a new array; a large one is aligned to a page, so that no vector crosses a cache line.

    It is aligned to a page rather than a line for a reason: a load waits for a pending store whose address has the same
    last 12 bits. A kernel that reads an array from its beginning reads ahead of its stores, unless the output has a
    lower offset in its page.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < OUTPUT_BYTES:
        return np.empty(shape, dtype)
    memory = np.empty(size + PAGE, np.uint8)
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, memory, -address_of(memory) % PAGE)
    return array


class Native:
    """An opened program: the library and its ``pd_program``."""

    def __init__(self, artifact: Artifact) -> None:
        try:
            self.library = open_library(artifact.library)
        except OSError as e:
            raise ArtifactError(
                f"the system cannot load the program's library: {e}",
                remedy="if the system forbids libraries from memory, set POLYDYN_CACHE to a writable folder",
            ) from e
        lib = self.library
        lib.pd_error.restype = ctypes.c_char_p
        for f in (lib.pd_arena_bytes, lib.pd_evaluations, lib.pd_copied_bytes, lib.pd_shapes_seen):
            f.restype = ctypes.c_int64
        if lib.pd_abi_version() != ABI:
            raise ArtifactError(
                f"the library has ABI {lib.pd_abi_version()}, this polydyn ABI {ABI}", remedy="compile the model again"
            )
        self.weights = artifact.weights  # must outlive the program
        self.program = ctypes.c_void_p()
        memory = ctypes.c_void_p(self.weights.ctypes.data if self.weights.size else None)
        self.check(self._open(memory, ctypes.c_int64(self.weights.size)))

    def _open(self, memory: ctypes.c_void_p, size: ctypes.c_int64) -> int:
        code: int = self.library.pd_open(None, memory, ctypes.c_int64(0), size, ctypes.byref(self.program))
        return code

    def shapes_seen(self, symbols: int) -> tuple[list[list[int]], int]:
        """Call ``pd_shapes_seen``. Return rows of symbol sizes and a count, and the number of runs that were not
        logged."""
        others, room, count = ctypes.c_int64(), 0, 0
        memory = (ctypes.c_int64 * 0)()
        while not room or count > room:  # other threads may add rows meanwhile
            room = count + 64
            memory = (ctypes.c_int64 * (room * (symbols + 1)))()
            count = self.library.pd_shapes_seen(self.program, memory, ctypes.c_int64(room), ctypes.byref(others))
        numbers, width = list(memory), symbols + 1
        return [numbers[k * width : (k + 1) * width] for k in range(count)], others.value

    def launch(self, context: ctypes.c_void_p, index: int) -> LaunchInfo:
        """Call ``pd_launch``."""
        info = LaunchInfo()
        self.check(self.library.pd_launch(context, index, ctypes.byref(info)))
        return info

    def statistics(self, context: ctypes.c_void_p) -> dict[str, int]:
        """Return a context's arena size in bytes, its number of shape evaluations, and the bytes it only copied."""
        lib: Any = self.library
        return {
            "arena_bytes": lib.pd_arena_bytes(context),
            "evaluations": lib.pd_evaluations(context),
            "bytes_copied": lib.pd_copied_bytes(context),
        }

    def before_close(self) -> None:
        """Prepare for closing; called before contexts and the program are freed."""

    def check(self, code: int) -> None:
        """Raise the exception of the library's error code, if any."""
        if code == OK:
            return
        raise failure(code, (self.library.pd_error() or b"").decode(errors="replace"))


class NativeOfParts(Native):
    """A program of several parts that uses already open programs."""

    def __init__(self, artifact: Artifact, models: Sequence[Native]) -> None:
        self._models = models
        super().__init__(artifact)

    def _open(self, memory: ctypes.c_void_p, size: ctypes.c_int64) -> int:
        handles = ctypes.c_void_p * (len(self._models) + 1)
        libraries = handles(*(m.library._handle for m in self._models))
        programs = handles(*(m.program.value for m in self._models))
        code: int = self.library.pd_open_around(memory, size, libraries, programs, ctypes.byref(self.program))
        return code


def failure(code: int, message: str) -> PolydynError:
    """Return the exception of an error code."""
    if code == INPUT:
        return InputError(message)
    if code == OVERFLOW:
        return InputError(message, remedy="pass smaller shapes")
    return PolydynError(message, remedy="pass smaller shapes, or free memory" if code == MEMORY else None)


class Context:
    """A ``pd_context`` with the memory for the arguments of calls, allocated once.

    ``key``: the shapes and strides for which the context is prepared, or None: those of the inputs, then the strides of
    the outputs in ``strided`` (() for dense). ``output_shapes`` belong to that key.
    """

    __slots__ = (
        "_dims", "_dims_pack", "_input_pack", "_native", "_output_dims", "_output_pack", "_output_ranks",
        "_output_strides", "_shapes_call", "_strided", "_tensors", "handle", "input_pointers", "key", "output_pointers",
        "output_shapes", "run_call",
    )  # fmt: skip

    def __init__(
        self,
        native: Native,
        threads: int,
        inputs: list[tuple[int, int]],
        output_ranks: list[int],
        strided: list[int],
    ) -> None:
        """``inputs``: dtype code and rank of each input. ``strided``: positions of outputs with chosen strides."""
        self.handle = ctypes.c_void_p()
        native.check(native.library.pd_context_new(native.program, threads, ctypes.byref(self.handle)))
        self._native = native
        count = 2 * sum(rank for _, rank in inputs)
        self._dims = (ctypes.c_int64 * (count + 1))()
        self._dims_pack = struct.Struct(f"{count}q").pack_into
        self._tensors = (Tensor * (len(inputs) + 1))()
        address = ctypes.addressof(self._dims)
        for t, (dtype, rank) in zip(self._tensors, inputs, strict=False):
            t.shape, t.strides, t.dtype, t.rank = address, address + 8 * rank, dtype, rank
            address += 16 * rank
        self._output_ranks = output_ranks
        self._output_strides = (ctypes.c_void_p * (len(output_ranks) + 1))()
        self._strided = [(k, (ctypes.c_int64 * output_ranks[k])()) for k in strided]
        self._output_dims = (ctypes.c_int64 * (sum(output_ranks) + 1))()
        self.input_pointers = (ctypes.c_void_p * (len(inputs) + 1))()
        self.output_pointers = (ctypes.c_void_p * (len(output_ranks) + 1))()
        self._input_pack = struct.Struct(f"{len(inputs)}P").pack_into
        self._output_pack = struct.Struct(f"{len(output_ranks)}P").pack_into
        self._shapes_call = native.library.pd_shapes
        self.run_call = native.library.pd_run
        self.key: list[tuple[int, ...]] | None = None
        self.output_shapes: list[tuple[int, ...]] = []

    def prepare(self, key: list[tuple[int, ...]]) -> None:
        """Call ``pd_shapes`` for arrays of these shapes and strides (see ``key``). InputError: a check failed."""
        self.key = None
        inputs = len(key) - len(self._strided)
        self._dims_pack(self._dims, 0, *[n for part in key[:inputs] for n in part])
        for (k, memory), strides in zip(self._strided, key[inputs:], strict=True):
            if strides:
                memory[:] = list(strides)
            self._output_strides[k] = ctypes.addressof(memory) if strides else None
        code = self._shapes_call(self.handle, self._tensors, self._output_strides, self._output_dims)
        if code:
            self._native.check(code)
        dims = iter(self._output_dims)
        self.output_shapes = [tuple([next(dims) for _ in range(rank)]) for rank in self._output_ranks]
        self.key = key

    def point(self, inputs: list[int], outputs: list[int]) -> None:
        """Store addresses in ``input_pointers`` and ``output_pointers``, the arguments of ``run_call``."""
        self._input_pack(self.input_pointers, 0, *inputs)
        self._output_pack(self.output_pointers, 0, *outputs)

    def call(self, inputs: list[int], outputs: list[int]) -> Callable[[], int]:
        """Return ``pd_run`` on these addresses as a function for repeated calls; it returns the error code."""
        self.point(inputs, outputs)
        return partial(self.run_call, self.handle, self.input_pointers, self.output_pointers)

    def run(self, inputs: list[int], outputs: list[int]) -> None:
        """Call ``pd_run`` on these addresses."""
        self.point(inputs, outputs)
        code = self.run_call(self.handle, self.input_pointers, self.output_pointers)
        if code:
            self._native.check(code)

    def profile(self, inputs: list[int], outputs: list[int], launches: int) -> list[int]:
        """Call ``pd_profile``. Return the nanoseconds of every launch."""
        self.point(inputs, outputs)
        table = (ctypes.c_int64 * (launches + 1))()
        code = self._native.library.pd_profile(self.handle, self.input_pointers, self.output_pointers, table)
        self._native.check(code)
        return list(table)[:launches]

    def trace(self, inputs: list[int], outputs: list[int], room: int) -> npt.NDArray[Any]:
        """Call ``pd_trace``. Return the work of each thread as ``SPAN``, ordered by begin.

        ``room``: a guess of the number of spans.
        """
        self.point(inputs, outputs)
        count = ctypes.c_int64(room)
        spans = np.empty(0, SPAN)
        while count.value > spans.size:  # a call with more threads than the previous one has more spans
            spans = np.zeros(count.value, SPAN)
            code = self._native.library.pd_trace(
                self.handle, self.input_pointers, self.output_pointers, ctypes.c_void_p(address_of(spans)),
                ctypes.c_int64(spans.size), ctypes.byref(count),
            )  # fmt: skip
            self._native.check(code)
        return np.sort(spans[: count.value], order="begin")

    def launch(self, index: int) -> LaunchInfo:
        """Call ``pd_launch``."""
        return self._native.launch(self.handle, index)

    def statistics(self) -> dict[str, int]:
        """Return ``Native.statistics`` of this context."""
        return self._native.statistics(self.handle)


def close_program(native: Native, contexts: list[Context]) -> None:
    """Close a program and free its contexts."""
    native.before_close()
    for context in contexts:
        native.library.pd_context_free(context.handle)
    native.library.pd_close(native.program)
