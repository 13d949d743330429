"""What a measuring worker runs on a GPU: one kernel of an image on data of its own, timed by graphs of launches.

The driver is that of ``open_session`` (``$POLYDYN_LIBCUDA``). Data are normal numbers where a buffer has floats, so
that the device draws the power that it does at work, and stay in place from one task to the next. Launches take turns
with sets of data beyond L2 (``gpu.timing``): in a model the weights of a layer were last used a whole model ago, and
where they are few bytes beside the arithmetic it makes no difference. The least of the rounds counts. A kernel that
breaks its context fails alone: modules and data are made again.
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
"""What ``measure.Workers`` are to run."""
WARM = 2e-3
"""Seconds before each measurement: they follow one another, so the device's clocks are up."""
L2_BYTES = 38
"""CUdevice_attribute."""
SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel may have without asking."""
PATTERN = 1 << 16
"""Different elements of a buffer; they repeat."""


class _Device:
    """The modules and data of one generation of the device's context."""

    def __init__(self, session: Session) -> None:
        self.driver: Driver = session.driver
        self.generation = session.generation
        self._functions: dict[tuple[str, str], int] = {}
        self._data: dict[tuple[int, int, str], tuple[int, int]] = {}

    def function(self, image: str, name: str, smem: int) -> int:
        """A kernel of an image, allowed ``smem`` bytes of shared memory."""
        key = image, name
        if key not in self._functions:
            self._functions[key] = self.driver.get_function(self.driver.load_module(Path(image).read_bytes()), name)
        if smem > SHARED:
            self.driver.set_smem(self._functions[key], smem)
        return self._functions[key]

    def buffer(self, turn: int, place: int, dtype: str, size: int) -> int:
        """The address of at least ``size`` bytes for a kernel's buffer number ``place`` in set ``turn``."""
        pointer, held = self._data.get((turn, place, dtype), (0, -1))
        if held < size:
            if pointer:
                self.driver.free(pointer)
            pointer = self.driver.alloc(size)
            self._data[turn, place, dtype] = pointer, size
            self.driver.h2d(pointer, np.resize(_pattern(place, dtype), size))
        return pointer


_device: _Device | None = None


def _pattern(place: int, dtype: str) -> np.ndarray[Any, Any]:
    """Bytes of random elements."""
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
    """Least seconds of a launch. ``image``: a file; ``buffers``: dtype and bytes of each; ``maps``: tensor maps, each
    as the number of its buffer, where it begins there, in bytes, and its fields. DeviceError: it fails.
    """
    global _device
    session = open_session()
    with session.use():
        if _device is None or _device.generation != session.generation:
            _device = _Device(session)
        own = _device
        function = own.function(image, name, smem)
        emulated = is_emulated(session.driver)
        turns = 1 if emulated else sets_beyond(sum(b for _, b in buffers), session.driver.attribute(L2_BYTES))

        def launch(turn: int) -> Work:
            pointers = [own.buffer(turn, i, d, b) for i, (d, b) in enumerate(buffers)]
            encoded = [own.driver.encode_tensor_map(tensor_map(m), pointers[at] + first) for at, first, m in maps]
            args: list[Argument] = [*encoded, *pointers, *map(np.int64, symbols)]
            return lambda stream: own.driver.launch(function, (grid, 1, 1), threads, smem, args, stream)

        works = [launch(turn) for turn in range(turns)]
        works[0](0)
        own.driver.synchronize()
        return replayed(own.driver, works, 1 if emulated else LAUNCHES, 1 if emulated else ROUNDS, WARM).least
