"""What a measuring worker runs: one kernel of a built library on data of its own, timed in C.

Data are standard normal and stay in place from one task to the next, so that times are those of warm caches. A run is
repeated until ``MEASURED`` seconds have passed, at least once; the least time counts, as everything else on the machine
can only add to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

TIMER = "polydyn.measure.cpu_timing:time_kernel"
"""What ``measure.Workers`` are to run."""
MEASURED = 4e-3
LEAST, MOST = 2, 200
"""Repetitions; a run that takes longer than all that time is repeated once."""
ALIGNMENT = 64

_data: dict[int, npt.NDArray[np.float32]] = {}


@lru_cache(maxsize=64)
def _open(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(library)


def _buffer(place: int, size: int) -> int:
    """The address of at least ``size`` bytes for a kernel's buffer number ``place``."""
    if place not in _data or _data[place].nbytes < size + ALIGNMENT:
        count = size // 4 + ALIGNMENT
        _data[place] = np.random.default_rng(place).standard_normal(count, np.float32)
    return -(-_data[place].ctypes.data // ALIGNMENT) * ALIGNMENT


def time_kernel(
    library: str, which: int, buffers: Sequence[int], symbols: Sequence[int], tasks: int, threads: int, scratch: int
) -> float:
    """Least seconds of a run of tasks [0, tasks). ``buffers``: bytes of each. MemoryError: they do not fit."""
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
    return min(first, run(1 if first > MEASURED else max(LEAST, min(MOST, round(MEASURED / first)))))
