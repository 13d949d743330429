"""Descriptions of TMA tensor maps (``CUtensorMap``), checked before the driver sees them.

The driver answers a bad map with one number; here every rule has a name. Encoding for a device is
``Driver.encode_tensor_map``; ``TensorMap.emulated`` makes the 128 bytes that emulated kernels read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from polydyn.gpu.errors import DeviceError

__all__ = ["TF32", "TensorMap", "element_type"]

TF32 = "tfloat32"
"""The type of a map over float32 whose loads round to tf32, to nearest: tensor cores themselves would truncate."""
_TYPES = {  # type -> (CUtensorMapDataType, bytes)
    "uint8": (0, 1), "int8": (0, 1), "bool": (0, 1), "uint16": (1, 2), "int16": (1, 2), "uint32": (2, 4),
    "int32": (3, 4), "uint64": (4, 8), "int64": (5, 8), "float16": (6, 2), "float32": (7, 4), "float64": (8, 8),
    "bfloat16": (9, 2), TF32: (11, 4), "float8_e4m3fn": (0, 1), "float8_e5m2": (0, 1),
}  # fmt: skip


def element_type(dtype: str) -> tuple[int, int]:
    """The CUtensorMapDataType of a dtype or ``TF32``, and bytes per element. DeviceError: there is none."""
    if dtype not in _TYPES:
        raise DeviceError(f"a tensor map cannot hold {dtype}", remedy=f"one of {', '.join(_TYPES)}")
    return _TYPES[dtype]


@dataclass(frozen=True)
class TensorMap:
    """A strided tensor and the box that one copy moves; dims innermost first.

    ``dtype``: of the elements, or ``TF32``. ``strides``: bytes, of dims 1, 2, ... (the innermost is dense). ``box``:
    elements per dim. ``swizzle``: 0 or 128 bytes. DeviceError: a rule of ``cuTensorMapEncodeTiled`` is broken.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128

    def __post_init__(self) -> None:
        inner = self.box[0] * self.element_bytes
        rules = (
            (1 <= len(self.dims) <= 5, "rank 1 to 5"),
            (
                len(self.strides) == len(self.dims) - 1 and len(self.box) == len(self.dims),
                "a stride per outer dim, a box per dim",
            ),
            (all(0 < d <= 1 << 32 for d in self.dims), "dims from 1 to 2^32"),
            (all(s % 16 == 0 and 0 < s < 1 << 40 for s in self.strides), "strides that are multiples of 16 bytes"),
            (all(0 < b <= 256 for b in self.box), "box sizes from 1 to 256"),
            (inner % 16 == 0, "an inner box that is a multiple of 16 bytes"),
            (self.swizzle in (0, 128), "swizzle 0 or 128"),
            (self.swizzle == 0 or inner <= self.swizzle, "an inner box no wider than the swizzle"),
        )
        for holds, rule in rules:
            if not holds:
                raise DeviceError(
                    f"a tensor map needs {rule}: {self}", remedy="use a kernel without TMA for this layout"
                )

    @property
    def element_bytes(self) -> int:
        """Bytes per element."""
        return element_type(self.dtype)[1]

    @property
    def type_code(self) -> int:
        """The CUtensorMapDataType."""
        return element_type(self.dtype)[0]

    def check_address(self, address: int) -> None:
        """Raises DeviceError unless the base address is a multiple of 16."""
        if address % 16:
            raise DeviceError(f"a tensor map needs a 16-byte aligned base, not {address:#x}")

    def emulated(self, address: int) -> bytes:
        """The 128 bytes of a ``pdemu_tensor_map`` (``pd_emu_abi.h``)."""
        self.check_address(address)
        pad = 5 - len(self.dims)
        dims, box = (*self.dims, *[1] * pad), (*self.box, *[1] * pad)
        strides = (*self.strides, *[0] * (4 - len(self.strides)))
        code = 3 if self.swizzle else 0
        packed = struct.pack(
            "<Q4QI5I5HBBBB",
            address,
            *strides,
            0x70616D74,
            *dims,
            *box,
            len(self.dims),
            self.element_bytes,
            code,
            self.dtype == TF32,
        )
        return packed.ljust(128, b"\0")
