"""The function that a GPU measuring worker runs: one kernel of an image on its own data, timed by graphs of launches.

The driver is the one of ``open_session`` (``$POLYDYN_LIBCUDA``). Float buffers contain normal numbers, so that the
power draw is realistic. Data stay in place between tasks. Launches alternate between sets of data that exceed L2
(``runtime.cuda.timing``): in a model, the weights of a layer were last used a whole model ago. If a kernel is bound by
arithmetic, this makes no difference. The minimum of the rounds counts. If a kernel breaks its context, only this
measurement fails: modules and data are created again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.runtime.cuda.driver import Argument, Driver
from polydyn.runtime.cuda.images import is_emulated
from polydyn.runtime.cuda.session import Session, open_session
from polydyn.runtime.cuda.tensormap import tensor_map
from polydyn.runtime.cuda.timing import LAUNCHES, ROUNDS, Work, replayed, sets_beyond

CUDA_TIMER = "polydyn.measure.cuda_timing:time_kernel"
"""The function that ``measure.Workers`` run."""
WARMUP_SECONDS = 2e-3
"""Warm-up seconds before each measurement. Measurements follow one another, so the clocks are already raised."""
L2_BYTES = 38
"""The CUdevice_attribute of the L2 size."""
DEFAULT_SMEM_BYTES = 48 << 10
"""Dynamic shared memory in bytes that a kernel may use without an attribute."""
PATTERN = 1 << 16
"""Number of distinct elements of a buffer; they repeat."""


class _Device:
    """The modules and data of one generation of the device's context."""

    def __init__(self, session: Session) -> None:
        self.driver: Driver = session.driver
        self.generation = session.generation
        self._functions: dict[tuple[str, str], int] = {}
        self._data: dict[tuple[int, int, str], tuple[int, int]] = {}

    def function(self, image: str, name: str, smem: int) -> int:
        """Return a kernel of an image that may use ``smem`` bytes of shared memory."""
        key = image, name
        if key not in self._functions:
            self._functions[key] = self.driver.get_function(self.driver.load_module(Path(image).read_bytes()), name)
        if smem > DEFAULT_SMEM_BYTES:
            self.driver.set_smem(self._functions[key], smem)
        return self._functions[key]

    def buffer(self, turn: int, place: int, dtype: str, size: int) -> int:
        """Return the address of at least ``size`` bytes for buffer ``place`` of a kernel in set ``turn``."""
        pointer, capacity = self._data.get((turn, place, dtype), (0, -1))
        if capacity < size:
            if pointer:
                self.driver.free(pointer)
            pointer = self.driver.alloc(size)
            self._data[turn, place, dtype] = pointer, size
            self.driver.h2d(pointer, np.resize(_pattern(place, dtype), size))
        return pointer


_device: _Device | None = None


def _pattern(place: int, dtype: str) -> np.ndarray[Any, Any]:
    """Return the bytes of random elements."""
    r = np.random.default_rng(place)
    if dtype in ("float32", "float16"):
        return r.standard_normal(PATTERN).astype(dtype).view(np.uint8)
    if dtype == "bfloat16":
        return np.ascontiguousarray(r.standard_normal(PATTERN).astype(np.float32).view(np.uint16)[1::2]).view(np.uint8)
    return r.integers(0, 2, PATTERN, np.uint8)


def time_kernel(
    image: str,
    name: str,
    buffers: Sequence[tuple[str, int]],
    symbols: Sequence[int],
    grid: int,
    threads: int,
    smem: int,
    maps: Sequence[tuple[int, int, Mapping[str, Any]]] = (),
) -> float:
    """Return the minimum seconds of a launch. ``image``: a file; ``buffers``: dtype and bytes of each; ``maps``: tensor
    maps, each as buffer index, offset in bytes, and fields. DeviceError: the launch fails.
    """
    global _device
    session = open_session()
    with session.use():
        if _device is None or _device.generation != session.generation:
            _device = _Device(session)
        device = _device
        function = device.function(image, name, smem)
        emulated = is_emulated(session.driver)
        turns = 1 if emulated else sets_beyond(sum(b for _, b in buffers), session.driver.attribute(L2_BYTES))

        def launch(turn: int) -> Work:
            pointers = [device.buffer(turn, i, d, b) for i, (d, b) in enumerate(buffers)]
            encoded = [device.driver.encode_tensor_map(tensor_map(m), pointers[i] + offset) for i, offset, m in maps]
            args: list[Argument] = [*encoded, *pointers, *map(np.int64, symbols)]
            return lambda stream: device.driver.launch(function, (grid, 1, 1), threads, smem, args, stream)

        works = [launch(turn) for turn in range(turns)]
        works[0](0)
        device.driver.synchronize()
        return replayed(
            device.driver, works, 1 if emulated else LAUNCHES, 1 if emulated else ROUNDS, WARMUP_SECONDS
        ).least
