"""The function that a measuring worker runs: one kernel of a built library on its own data, timed in C.

The data are standard normal and stay in place between tasks, so the times assume warm caches. A run is repeated for
``TARGET_SECONDS``, at least once. The minimum counts, because other load on the machine can only add time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

TIMER = "polydyn.measure.cpu_timing:time_kernel"
"""The function that ``measure.Workers`` run."""
TARGET_SECONDS = 4e-3
"""Seconds for which a kernel is repeated."""
MIN_RUNS, MAX_RUNS = 2, 200
"""Minimum and maximum number of repetitions. A kernel that takes longer than ``TARGET_SECONDS`` is repeated once."""
ALIGNMENT = 64

_data: dict[int, npt.NDArray[np.float32]] = {}


@lru_cache(maxsize=64)
def _open(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(library)


def _buffer(place: int, size: int) -> int:
    """Return the address of at least ``size`` bytes for buffer ``place`` of a kernel."""
    if place not in _data or _data[place].nbytes < size + ALIGNMENT:
        count = size // 4 + ALIGNMENT
        _data[place] = np.random.default_rng(place).standard_normal(count, np.float32)
    return -(-_data[place].ctypes.data // ALIGNMENT) * ALIGNMENT


def time_kernel(
    library: str, which: int, buffers: Sequence[int], symbols: Sequence[int], tasks: int, threads: int, scratch: int
) -> float:
    """Return the minimum seconds of a run of tasks [0, tasks). ``buffers``: bytes of each. Raises MemoryError if the
    scratch does not fit."""
    call = _open(library).pdt_time
    pointers = (ctypes.c_void_p * len(buffers))(*(_buffer(i, b) for i, b in enumerate(buffers)))
    integers = (ctypes.c_int64 * max(1, len(symbols)))(*symbols)

    def run(count: int) -> float:
        spent = (ctypes.c_int64 * count)()
        numbers = (ctypes.c_int64(tasks), ctypes.c_int64(threads), ctypes.c_int64(scratch))
        if call(which, pointers, integers, *numbers, count, spent):
            raise MemoryError("no memory for a kernel's scratch")
        return float(min(spent)) / 1e9

    first = max(run(1), 1e-9)
    return min(first, run(1 if first > TARGET_SECONDS else max(MIN_RUNS, min(MAX_RUNS, round(TARGET_SECONDS / first)))))
