"""Frozen parameters: constants of a program. Every call checks that torch still holds the same numbers."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from polydyn.errors import InputError
from polydyn.torch_backend.tensors import array_of

SAMPLES = 16
"""Elements of each parameter that every call compares."""
BLOCK_BYTES = 1 << 16
"""Bytes per checksum."""
BYTES_PER_CALL = 1 << 18
"""Bytes whose checksums each call compares."""
MIN_BLOCK_COST = 1 << 12
"""Minimum bytes that a block counts as, because every block takes time."""


class Frozen:
    """The parameters that a program holds as constants.

    torch counts writes, but not those through ``.data`` or a numpy view. So each call compares the address, the count,
    ``SAMPLES`` elements of every parameter, and checksums of alternating blocks, ``BYTES_PER_CALL`` bytes per call.
    Parameters of up to 256 KiB are compared completely on every call, larger ones within several calls.
    """

    def __init__(self, parameters: dict[int, torch.Tensor]) -> None:
        self._seen = [(k, p.data_ptr(), p._version, _sample(p)) for k, p in parameters.items()]
        self._blocks: list[tuple[int, int, int]] = []
        for k, p in parameters.items():
            data = _bytes(p)
            offsets = range(0, data.size, BLOCK_BYTES)
            self._blocks += [(k, at, zlib.crc32(data[at : at + BLOCK_BYTES])) for at in offsets]
        self._next = 0

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise InputError if a parameter has changed."""
        for k, pointer, version, sample in self._seen:
            p = arguments[k]
            if p.data_ptr() != pointer or p._version != version or _sample(p) != sample:
                raise _changed()
        left = BYTES_PER_CALL
        for _ in self._blocks:
            k, at, checksum = self._blocks[self._next % len(self._blocks)]
            block = _bytes(arguments[k])[at : at + BLOCK_BYTES]
            left -= max(block.size, MIN_BLOCK_COST)
            if left < 0:
                break
            self._next += 1
            if zlib.crc32(block) != checksum:
                raise _changed()


def _changed() -> InputError:
    return InputError("a frozen parameter was changed", rule="freeze", remedy="compile the model again")


def _bytes(p: torch.Tensor) -> Any:
    """Return the bytes of a parameter, without a copy unless its memory has gaps."""
    return np.ascontiguousarray(array_of(p.permute(_by_stride(p)))).reshape(-1).view(np.uint8)


def _by_stride(p: torch.Tensor) -> list[int]:
    return sorted(range(p.dim()), key=lambda k: -p.stride(k))


def _sample(p: torch.Tensor) -> bytes:
    """Return a few evenly spread elements."""
    flat = array_of(p.permute(_by_stride(p))).reshape(-1)
    return bytes(flat[:: max(1, flat.size // SAMPLES)].tobytes())
