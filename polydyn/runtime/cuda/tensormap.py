"""Descriptions of TMA tensor maps (``CUtensorMap``), checked before they are passed to the driver.

The driver reports any wrong map with a single number; here every rule has a name. ``Driver.encode_tensor_map`` encodes
a map for a device; ``TensorMap.emulated`` returns the 128 bytes that emulated kernels read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polydyn.gpu.errors import DeviceError

__all__ = ["TF32", "PixelBox", "TensorMap", "element_type", "tensor_map"]

TF32 = "tfloat32"
"""The type of a float32 map whose loads round to nearest tf32; tensor cores themselves would truncate."""
_TYPES = {  # type -> (CUtensorMapDataType, bytes)
    "uint8": (0, 1), "int8": (0, 1), "bool": (0, 1), "uint16": (1, 2), "int16": (1, 2), "uint32": (2, 4),
    "int32": (3, 4), "uint64": (4, 8), "int64": (5, 8), "float16": (6, 2), "float32": (7, 4), "float64": (8, 8),
    "bfloat16": (9, 2), TF32: (11, 4), "float8_e4m3fn": (0, 1), "float8_e5m2": (0, 1),
}  # fmt: skip


def element_type(dtype: str) -> tuple[int, int]:
    """Return the CUtensorMapDataType of a dtype or ``TF32``, and bytes per element. DeviceError: it has none."""
    if dtype not in _TYPES:
        raise DeviceError(f"a tensor map does not support {dtype}", remedy=f"use one of {', '.join(_TYPES)}")
    return _TYPES[dtype]


CORNERS = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}
"""Maps the number of image dims to n: corners of the pixel box are in [-n, n)."""


@dataclass(frozen=True)
class PixelBox:
    """The pixels that copies of a tensor map in im2col mode traverse, along w, h and d.

    ``lower``, ``upper``: offsets of its corners from the first and from the last pixel of the image; ``steps``:
    distance between pixels. They apply to dims 1, 2, ...; the last dim counts images.
    """

    lower: tuple[int, ...]
    upper: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """A strided tensor and the box that one copy moves; dims innermost first.

    ``dtype``: of the elements, or ``TF32``. ``strides``: bytes, for dims 1, 2, ... (the innermost is dense). ``box``:
    elements per dim; with ``pixels`` (im2col mode) channels and pixels. ``swizzle``: 0 or 128 bytes. DeviceError: a
    rule of ``cuTensorMapEncodeTiled`` or ``cuTensorMapEncodeIm2col`` is broken.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    pixels: PixelBox | None = None

    def __post_init__(self) -> None:
        inner = self.box[0] * self.element_bytes
        boxes = len(self.box) == (2 if self.pixels else len(self.dims))
        rules = (
            (1 <= len(self.dims) <= 5, "rank 1 to 5"),
            (len(self.strides) == len(self.dims) - 1 and boxes, "a stride per outer dim, a box per dim"),
            (all(0 < d <= 1 << 32 for d in self.dims), "dims from 1 to 2^32"),
            (all(s % 16 == 0 and 0 < s < 1 << 40 for s in self.strides), "strides that are multiples of 16 bytes"),
            (self.pixels or all(0 < b <= 256 for b in self.box), "box sizes from 1 to 256"),
            (inner % 16 == 0, "an inner box that is a multiple of 16 bytes"),
            (self.swizzle in (0, 128), "swizzle 0 or 128"),
            (self.swizzle == 0 or inner <= self.swizzle, "an inner box no wider than the swizzle"),
            *(self._pixel_rules(self.pixels) if self.pixels else ()),
        )
        for holds, rule in rules:
            if not holds:
                raise DeviceError(
                    f"a tensor map needs {rule}: {self}", remedy="use a kernel without TMA for this layout"
                )

    def _pixel_rules(self, box: PixelBox) -> Iterator[tuple[bool, str]]:
        along, (channels, pixels) = len(self.dims) - 2, self.box
        yield 1 <= along <= 3, "rank 3 to 5 in im2col mode"
        yield {len(box.lower), len(box.upper), len(box.steps)} == {along}, "corners and a step for each dim of an image"
        yield 0 < channels <= 256 and 0 < pixels <= 1024, "1 to 256 channels of 1 to 1024 pixels"
        limit = CORNERS[along]
        yield all(-limit <= x < limit for x in (*box.lower, *box.upper)), f"corners from {-limit} to {limit - 1}"
        yield all(1 <= s <= 8 for s in box.steps), "steps from 1 to 8"
        sides = zip(self.dims[1:-1], box.lower, box.upper, strict=False)
        yield all(low < size + high for size, low, high in sides), "a box with a pixel in it"

    @property
    def element_bytes(self) -> int:
        """Bytes per element."""
        return element_type(self.dtype)[1]

    @property
    def type_code(self) -> int:
        """The CUtensorMapDataType."""
        return element_type(self.dtype)[0]

    def check_address(self, address: int) -> None:
        """Raise DeviceError unless the base address is a multiple of 16."""
        if address % 16:
            raise DeviceError(f"a tensor map needs a 16-byte aligned base, not {address:#x}")

    def emulated(self, address: int) -> bytes:
        """Return the 128 bytes of a ``pdemu_tensor_map`` (``pd_emu_abi.h``)."""
        self.check_address(address)
        dims, box = ((*x, *[1] * (5 - len(x))) for x in (self.dims, self.box))
        strides = (*self.strides, *[0] * (4 - len(self.strides)))
        code = 3 if self.swizzle else 0
        pixels = self.pixels or PixelBox((), (), ())
        corners = ((*x, *[0] * (3 - len(x))) for x in (pixels.lower, pixels.upper, pixels.steps))
        packed = struct.pack(
            "<Q4QI5I5HBBBB6h3B",
            address,
            *strides,
            0x70616D74,
            *dims,
            *box,
            len(self.dims),
            self.element_bytes,
            code,
            self.dtype == TF32,
            *(n for x in corners for n in x),
        )
        return packed.ljust(128, b"\0")


def tensor_map(fields: Mapping[str, Any]) -> TensorMap:
    """Return the map with these fields, with lists for tuples: the JSON form of ``dataclasses.asdict``."""

    def plain(data: Mapping[str, Any]) -> dict[str, Any]:
        return {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}

    pixels = fields["pixels"]
    return TensorMap(**plain(fields) | {"pixels": PixelBox(**plain(pixels)) if pixels else None})
