"""Expected results of the sm_90a primitives: TMA boxes, mbarrier hand-over, wgmma in every shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from polydyn.runtime.cuda.tensormap import TF32, PixelBox, TensorMap
from polydyn.testing.device.cases import RNG, Array, Case, Mapped, from_bf16, mma_case, to_bf16, to_tf32, to_tf32_even

SOURCE = "primitives_hopper.cu"


def _map(a: Array, box: tuple[int, ...], swizzle: int, dtype: str | None = None) -> Mapped:
    """Return a map over all of ``a``; a last axis longer than its dim shows as the pitch of axis -2."""
    return Mapped(TensorMap(dtype or str(a.dtype), a.shape[::-1], a.strides[-2::-1], box, swizzle), a)


def _swizzle(rows: Array) -> Array:
    """Return shared memory of 128-byte rows under the 128-byte swizzle: 16-byte chunk c of row r is at c ^ (r % 8)."""
    chunks = rows.view(np.uint8).reshape(-1, 8, 16)
    r = np.arange(len(chunks))[:, None]
    swizzled: Array = chunks[r, np.arange(8)[None] ^ (r % 8)].reshape(-1)
    return swizzled


def _box(a: Array, at: tuple[int, ...], box: tuple[int, ...]) -> Array:
    """Return the box of ``a`` at coordinates (innermost first), zeros outside."""
    out = np.zeros(box[::-1], a.dtype)
    for index in np.ndindex(*out.shape):
        where = tuple(i + at[len(at) - 1 - d] for d, i in enumerate(index))
        if all(0 <= w < n for w, n in zip(where, a.shape, strict=True)):
            out[index] = a[where]
    return out


def _load_case(
    name: str, kernel: str, mapped: Mapped, raw: Array, at: tuple[int, ...], tap: tuple[int, ...] = ()
) -> Case:
    """Return a copy to shared memory from coordinates (innermost first) on; ``raw``: its bytes there."""
    numbers = [np.int32(n) for n in (raw.nbytes, *(*at, 0, 0, 0)[:5], *(*tap, 0, 0, 0)[:3])]
    out, want = np.zeros(raw.nbytes // 4, np.uint32), raw.reshape(-1).view(np.uint32)
    arguments = (mapped, *numbers, out)
    return Case(f"{kernel}_{name}", SOURCE, kernel, 128, arguments, {10: want}, raw.nbytes + 1024, arch=90)


def tma_cases() -> list[Case]:
    """Return loads inside, across every border and fully outside; stores clipped; ranks 2 to 4; with and without
    swizzle.
    """
    r, cases = RNG(8), []
    flat = r.integers(1, 60000, (37, 104)).astype(np.uint16)
    a2 = flat[:, :99]  # 99 columns, pitch 208 bytes
    a3 = r.integers(1, 60000, (5, 9, 24)).astype(np.uint16)
    a4 = r.integers(1, 60000, (3, 4, 6, 16)).astype(np.uint16)
    heads = r.integers(1, 60000, (13, 8, 104)).astype(np.uint16).transpose(1, 0, 2)  # a pitch beyond the outer stride
    loads: list[tuple[str, Array, tuple[int, ...], tuple[int, ...], int]] = [
        ("inside", a2, (8, 3), (64, 16), 128), ("right", a2, (64, 30), (64, 16), 128),
        ("left", a2, (-9, -2), (64, 16), 128), ("outside", a2, (200, 100), (64, 8), 128),
        ("plain", a2, (40, 5), (24, 7), 0), ("3d", a3, (-3, 4, 2), (16, 8, 4), 0),
        ("4d", a4, (2, -1, 1, 1), (16, 4, 2, 3), 0), ("3d_swizzled", a3, (0, 2, 1), (64, 8, 2), 128),
        ("permuted", heads, (16, 3, 5), (64, 8, 2), 128),
    ]  # fmt: skip
    for name, a, at, box, swizzle in loads:
        want = _box(a, at, box)
        raw = _swizzle(want.reshape(-1, 64)) if swizzle else want.view(np.uint8).reshape(-1)
        cases.append(_load_case(name, f"tma_load_{len(box)}d", _map(a, box, swizzle), raw, at))
    for name, at, box in (
        ("2d", (88, 30), (16, 12)),
        ("2d_swizzled", (64, 30), (64, 16)),
        ("3d", (16, -2, 3), (16, 6, 4)),
    ):
        rank, swizzle = len(box), 128 * name.endswith("swizzled")
        shape = (37, 104) if rank == 2 else (5, 9, 24)
        target, block = np.zeros(shape, np.uint16), r.integers(1, 60000, box[::-1]).astype(np.uint16)
        want = target.copy()
        for index in np.ndindex(*block.shape):
            where = tuple(i + at[rank - 1 - d] for d, i in enumerate(index))
            if all(0 <= w < n for w, n in zip(where, shape, strict=True)):
                want[where] = block[index]
        coords = [np.int32(c) for c in (*at, 0)[:3]]
        given = _swizzle(block.reshape(-1, 64)).view(np.uint16) if swizzle else block
        args = (_map(target, box, swizzle), given, np.int32(block.nbytes), *coords)
        cases.append(
            Case(f"tma_store_{name}", SOURCE, f"tma_store_{rank}d", 128, args, {0: want}, block.nbytes, arch=90)
        )
    return cases


@dataclass(frozen=True)
class Window:
    """How a convolution walks through an image, along w, h and d: ``before``, ``after``: its paddings."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    kernel: tuple[int, ...]
    steps: tuple[int, ...]
    dilations: tuple[int, ...]

    def results(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the pixels of the result along each dim."""
        sides = zip(sizes, self.before, self.after, self.kernel, self.steps, self.dilations, strict=True)
        return tuple((n + p + q - d * (k - 1) - 1) // s + 1 for n, p, q, k, s, d in sides)

    def box(self, sizes: tuple[int, ...]) -> PixelBox:
        """Return the box from the first pixel that the first tap reads to the last one that is really read."""
        low = tuple(-p for p in self.before)
        last = zip(sizes, low, self.results(sizes), self.steps, strict=True)
        return PixelBox(low, tuple(p + (m - 1) * s - (n - 1) for n, p, m, s in last), self.steps)


def _column(a: Array, w: Window, first: int, pixels: int, tap: tuple[int, ...], channels: slice) -> Array:
    """Return the elements that ``pixels`` results from number ``first`` on read at a tap, by definition of a
    convolution.
    """
    results = w.results(a.shape[-2:0:-1])
    out = np.zeros((pixels, channels.stop - channels.start), a.dtype)
    for p in range(pixels):
        rest, place = first + p, []
        for m, s, before, k, d in zip(results, w.steps, w.before, tap, w.dilations, strict=True):
            place.append(rest % m * s - before + k * d)
            rest //= m
        inside = rest < a.shape[0] and all(0 <= x < n for x, n in zip(place, a.shape[-2:0:-1], strict=True))
        if inside:
            where = (rest, *place[::-1])
            found = a[where][channels]
            out[p, : len(found)] = found
    return out


WINDOWS = {
    "same": Window((1, 1), (1, 1), (3, 3), (1, 1), (1, 1)),
    "strided": Window((1, 0), (1, 1), (3, 3), (2, 2), (1, 1)),
    "uneven": Window((2, 0), (0, 3), (5, 2), (3, 1), (1, 2)),
    "dilated": Window((4, 3), (4, 3), (3, 3), (1, 2), (4, 3)),
}


def pixel_cases() -> list[Case]:
    """Return columns of pixels for every kind of window, at a middle tap: across rows, images and past the last pixel.
    """
    r, cases = RNG(13), []
    for name, w in WINDOWS.items():
        a = r.integers(1, 60000, (3, 7, 9, 72)).astype(np.uint16)
        last, tap = 3 * int(np.prod(w.results((9, 7)))) - 5, (1, w.kernel[1] - 1)
        for at, first in (("first", 0), ("inside", 11), ("last", last)):
            cases.append(_pixel_case(f"{name}_{at}", a, w, first, 24, tap, 64 * (at == "inside"), 64))
    line = r.integers(1, 60000, (3, 11, 40)).astype(np.uint16)
    cases.append(_pixel_case("line", line, Window((2,), (2,), (3,), (2,), (2,)), 3, 13, (2,), 8, 16))
    cube = r.integers(1, 60000, (2, 4, 5, 6, 16)).astype(np.uint16)
    solid = Window((1, 0, 1), (1, 1, 0), (3, 2, 2), (1, 2, 1), (1, 1, 2))
    cases.append(_pixel_case("cube", cube, solid, 7, 40, (2, 1, 1), 0, 16))
    return cases


def _pixel_case(
    name: str, a: Array, w: Window, first: int, pixels: int, tap: tuple[int, ...], channel: int, channels: int
) -> Case:
    sizes = a.shape[-2:0:-1]
    rest, at = first, []
    for m, s, before in zip(w.results(sizes), w.steps, w.before, strict=True):
        at.append(rest % m * s - before)
        rest //= m
    want = _column(a, w, first, pixels, tap, slice(channel, channel + channels))
    swizzle = 128 * (channels == 64)
    of = TensorMap("uint16", a.shape[::-1], a.strides[-2::-1], (channels, pixels), swizzle, w.box(sizes))
    raw = _swizzle(want) if swizzle else want
    offsets = tuple(k * d for k, d in zip(tap, w.dilations, strict=True))
    return _load_case(name, f"tma_pixels_{a.ndim}d", Mapped(of, a), raw, (channel, *at, rest), offsets)


def cluster_cases() -> list[Case]:
    """Return two clusters of two blocks; each block reads both halves, twice."""
    r, cases = RNG(12), []
    for box in ((64, 8), (64, 8, 2), (16, 4, 2, 3)):
        rank, swizzle = len(box), 128 * (box[0] == 64)
        a = r.integers(1, 60000, (6, 7, 40, 72)[4 - rank :]).astype(np.uint16)
        boxes = [_box(a, (8, 3 + n * box[1], 1, 2)[:rank], box) for n in range(4)]
        raw = np.stack([_swizzle(x.reshape(-1, 64)) if swizzle else x.view(np.uint8).reshape(-1) for x in boxes])
        want = np.broadcast_to(raw.reshape(-1), (4, raw.size)).copy().view(np.uint32)
        numbers = [np.int32(n) for n in (raw[0].size, box[1], 8, 3, 1, 2)]
        args = (_map(a, box, swizzle), *numbers, np.zeros_like(want))
        kernel, smem = f"cluster_load_{rank}d", 2 * raw[0].size + 16
        cases.append(Case(kernel, SOURCE, kernel, 64, args, {7: want}, smem, (4, 1, 1), arch=90))
    return cases


def cluster_sums_case() -> Case:
    """Return two clusters of four blocks: each block has the sums of its whole cluster."""
    x = RNG(13).standard_normal((2, 4, 128)).astype(np.float32)
    total = np.zeros((2, 1, 128), np.float32)
    for block in range(4):
        total += x[:, block : block + 1]
    want = np.broadcast_to(total, x.shape).copy()
    return Case(
        "cluster_sums", SOURCE, "cluster_sums", 64, (x, np.zeros_like(want)), {1: want}, 256, (8, 1, 1), arch=90
    )


def mbarrier_case() -> Case:
    """Return values doubled by one warp, plus three by the other, nine times."""
    v = 1
    for _ in range(9):
        v = v * 2 + 3
    return Case("mbarrier_phases", SOURCE, "mbarrier_phases", 64, (np.int32(9), np.zeros(64, np.int32)),
                {1: np.full(64, v, np.int32)}, 64, arch=90)  # fmt: skip


def places_case() -> Case:
    """Dynamic shared memory begins at a swizzle boundary; descriptors have the fields of PTX's table."""
    t = np.arange(32, dtype=np.uint64)  # bits 0 to 13: address; 16: leading, 32: stride offset (all / 16); 62: swizzle
    leading = np.where(t % 2, 8192 // 16, 1).astype(np.uint64)
    fields = t * 2 | leading << np.uint64(16) | np.uint64(1024 // 16 << 32 | 1 << 62)
    args = (np.ones(32, np.uint32), np.zeros(32, np.uint64))
    want = {0: np.zeros(32, np.uint32), 1: fields}
    return Case("shared_places", SOURCE, "shared_places", 32, args, want, 1024, arch=90)


WGMMA = """
    f16_n32 f16_n64 f16_n96 f16_n128 f16_n192 f16_n256 bf16_n32 bf16_n64 bf16_n128 bf16_n256
    f16_n64_mn f16_n128_mn f16_n256_mn bf16_n128_mn tf32_n32 tf32_n96 tf32_n128 tf32_n256 s8_n64
    e4m3_n128 e5m2_n256 e4m3e5m2_n128 e5m2e4m3_n64
    s8_n128 s8_n192 s8_n256 u8s8_n128 u8s8_n256 s8u8_n128 s8u8_n256 u8_n128 u8_n256
"""
BYTES = {"s8": ("int8", "int8"), "u8": ("uint8", "uint8"), "u8s8": ("uint8", "int8"), "s8u8": ("int8", "uint8")}

FLOAT8 = {"e4m3": (4, 4), "e5m2": (5, 5), "e4m3e5m2": (4, 5), "e5m2e4m3": (5, 4)}
"""Bits of the operands' exponents."""


def to_float8(x: Array, exponent: int) -> Array:
    """Convert integers of at most 8, in float16, to 8-bit floats."""
    bits = x.view(np.uint16).astype(np.int32)
    sign, size = bits >> 15 << 7, bits & 0x7FFF
    code = size >> 8 if exponent == 5 else np.where(size > 0, (size - (8 << 10)) >> 7, 0)
    return (sign | code).astype(np.uint8)


def _float8(kind: str, m: int, n: int, k: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return A (m x k), B (k x n), their values and sums, all so small that sums are exact."""
    r = RNG(11)
    a, b = (r.integers(-7, 8, size).astype(np.float16) for size in ((m, k), (k, n)))
    c = r.integers(-100, 100, (m, n)).astype(np.float32)
    x, y = (to_float8(v, e) for v, e in zip((a, b), FLOAT8[kind], strict=True))
    return x, y, a.astype(np.float64), b.astype(np.float64), c


def float8_cases() -> list[Case]:
    """Return products of a warp."""
    cases = []
    for kind in FLOAT8:
        x, y, a, b, c = _float8(kind, 16, 8, 32)
        made = mma_case(f"mma_{kind}", 32, x, y, c, a, b, 1e-7)
        cases.append(replace(made, source=SOURCE, arch=90))
    return cases


def _operands(kind: str, n: int) -> tuple[Array, Array, Array, Array, Array]:
    """Return random A (64 x k) and B (k x n) of 128 bytes of k: storage, values, and an accumulator."""
    r = RNG(9)
    if kind in FLOAT8:
        return _float8(kind, 64, n, 128)
    if kind in BYTES:
        raw = r.integers(0, 256, (64, 128), np.uint8), r.integers(0, 256, (128, n), np.uint8)
        a, b = (x.view(t) for x, t in zip(raw, BYTES[kind], strict=True))
        return a, b, a.astype(np.int64), b.astype(np.int64), r.integers(-(2**31), 2**31, (64, n), np.int32)  # sums wrap
    k = 32 if kind == "tf32" else 64
    a, b = r.standard_normal((64, k)).astype(np.float32), r.standard_normal((k, n)).astype(np.float32)
    c = r.standard_normal((64, n)).astype(np.float32)
    if kind == "bf16":
        a, b = to_bf16(a), to_bf16(b)
        return a, b, from_bf16(a).astype(np.float64), from_bf16(b).astype(np.float64), c
    a, b = (
        (to_tf32(a).view(np.float32), to_tf32(b).view(np.float32))
        if k == 32
        else (a.astype(np.float16), b.astype(np.float16))
    )
    return a, b, a.astype(np.float64), b.astype(np.float64), c


def wgmma_cases() -> list[Case]:
    """Return 64 x N products over 128 bytes of k, B K-major and MN-major."""
    cases = []
    for name in WGMMA.split():
        kind, n, mn = name.split("_")[0], int(name.split("_")[1][1:]), name.endswith("mn")
        a, b, va, vb, c = _operands(kind, n)
        b = b if mn else np.ascontiguousarray(b.T)
        want = (va @ vb + c).astype(c.dtype)
        dtype = "bfloat16" if kind == "bf16" else None
        inner = 128 // a.itemsize
        maps = (_map(a, (inner, 64), 128, dtype), _map(b, (inner, 64 if mn else n), 128, dtype))
        cases.append(Case(f"wgmma_{name}", SOURCE, f"wgmma_{name}", 128, (*maps, c, np.zeros_like(c)), {3: want},
                          8192 + n * 128 + 8, tolerance=0 if want.dtype.kind == "i" else 1e-6, arch=90))  # fmt: skip
    return cases


def register_cases() -> list[Case]:
    """Return such products with A in registers."""
    cases = []
    for name in ("f16_n64", "f16_n128_mn", "f16_n256_mn", "bf16_n32", "bf16_n192_mn"):
        kind, n, mn = name.split("_")[0], int(name.split("_")[1][1:]), name.endswith("mn")
        a, b, va, vb, c = _operands(kind, n)
        want = (va @ vb + c).astype(c.dtype)
        b, dtype = b if mn else np.ascontiguousarray(b.T), "bfloat16" if kind == "bf16" else None
        args = (_map(b, (64, 64 if mn else n), 128, dtype), a.view(np.uint32), c, np.zeros_like(c))
        cases.append(Case(f"wgmma_rs_{name}", SOURCE, f"wgmma_rs_{name}", 128, args, {3: want}, n * 128 + 8,
                          tolerance=1e-6, arch=90))  # fmt: skip
    return cases


def rounding_cases() -> list[Case]:
    """Return float32 through maps that round to tf32: stored in shared memory, and as operands of wgmma.

    Ties are separate from other floats: that they go to the even neighbour is known of newer devices, everything else
    here does not depend on it.
    """
    r, cases = RNG(10), []
    bits = r.integers(0, 2**32, (24, 40), np.uint32)
    bits = np.where((bits & 0x1FFF) == 0x1000, bits + 1, bits).astype(np.uint32)
    plain = np.where(np.isfinite(bits.view(np.float32)), bits, np.uint32(0xFF800000)).astype(np.uint32)
    ties = (bits & np.uint32(0xBFFFE000)) | np.uint32(0x1000)  # no NaN: the exponent's highest bit is 0
    for name, a in (("tf32", plain.view(np.float32)), ("tf32_ties", ties.view(np.float32))):
        want = to_tf32_even(_box(a, (13, 12), (32, 16)))
        raw = _swizzle(want.reshape(-1, 32))
        cases.append(_load_case(name, "tma_load_2d", _map(a, (32, 16), 128, TF32), raw, (13, 12)))
    a, b, c = (r.standard_normal(s).astype(np.float32) for s in ((64, 32), (128, 32), (64, 128)))
    va, vb = (to_tf32_even(x).view(np.float32).astype(np.float64) for x in (a, b))
    product = (va @ vb.T + c).astype(np.float32)
    maps = (_map(a, (32, 64), 128, TF32), _map(b, (32, 128), 128, TF32))
    cases.append(Case("wgmma_tf32_n128_rounded", SOURCE, "wgmma_tf32_n128", 128, (*maps, c, np.zeros_like(c)),
                      {3: product}, 8192 + 128 * 128 + 8, tolerance=1e-6, arch=90))  # fmt: skip
    return cases


def all_hopper_cases() -> list[Case]:
    """Return every case that needs sm_90a."""
    return [
        *tma_cases(),
        *pixel_cases(),
        *cluster_cases(),
        cluster_sums_case(),
        mbarrier_case(),
        places_case(),
        *wgmma_cases(),
        *register_cases(),
        *rounding_cases(),
        *float8_cases(),
    ]
