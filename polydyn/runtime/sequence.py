"""The ctypes view of a sequence of ``sequence.h``: parts and steps that C runs in order."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_int32, c_int64, c_void_p

STOP_PYTHON, STOP_MEMORY, STOP_SIGNALS = -1, -2, -3
AXES = 16
"""``PD_MAX_RANK``."""


class Held(ctypes.Structure):
    """``pd_held``."""

    _fields_ = (
        ("data", c_void_p), ("shape", c_int64 * AXES), ("strides", c_int64 * AXES), ("given", c_int64),
        *((n, c_int32) for n in ("dtype", "rank", "room", "result", "device")),
    )  # fmt: skip


class Chain(ctypes.Structure):
    """The first members of ``pd_sequence``."""

    _fields_ = (
        ("tensors", c_void_p), ("values", POINTER(c_int64)), ("times", c_void_p), ("waits", c_int64),
        *((n, c_int32) for n in ("asks", "at", "begun", "lacks")), ("text", c_char * 1024),
    )  # fmt: skip
