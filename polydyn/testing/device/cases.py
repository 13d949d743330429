"""Expected results of every device primitive, in numpy: the reference for the emulation's tests and for a real GPU.

A ``Case`` names a kernel of ``primitives.cu`` or ``primitives_hopper.cu``, its inputs and the expected outputs. The
fragment layouts are written here from the PTX manual's formulas, independently of the emulation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polydyn.runtime.cuda.tensormap import TensorMap

HERE = Path(__file__).parent
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng


@dataclass(frozen=True)
class Mapped:
    """A kernel argument that is a tensor map over an array (possibly a view with a pitch)."""

    map: TensorMap
    array: Array


@dataclass(frozen=True)
class Case:
    """One launch: ``args`` in kernel order, and for some argument positions the array expected afterwards.

    ``tolerance`` 0 means equal bits (any NaN equals any NaN); else the relative error of the norm, finite part, with
    infinities and NaN in the same places.
    """

    name: str
    source: str
    kernel: str
    threads: int
    args: tuple[Any, ...]
    expect: dict[int, Array]
    smem: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    tolerance: float = 0.0
    arch: int = 80


def mismatch(case: Case, position: int, got: Array) -> float:
    """Return the error of one output: 0 if equal; relative norm of the difference; inf if NaN or inf disagree."""
    want = case.expect[position]
    if case.tolerance == 0 or want.dtype.kind in "iu":
        same = (got == want) | (np.not_equal(got, got) & np.not_equal(want, want))
        return float(1 - same.mean()) if same.size else 0.0
    if not (np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(np.isinf(got), np.isinf(want))):
        return math.inf
    ok = np.isfinite(want)
    g, w = got[ok].astype(np.float64), want[ok].astype(np.float64)
    return float(np.linalg.norm(g - w) / max(float(np.linalg.norm(w)), 1e-30))


# ---- 16-bit and tf32 formats, from their definitions --------------------------------------------------------------
def to_bf16(x: Array) -> Array:
    """Convert f32 to bf16 bits, nearest even; NaN becomes 0x7fff."""
    u = x.astype(np.float32).view(np.uint32)
    r = ((u.astype(np.uint64) + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), r)


def from_bf16(h: Array) -> Array:
    """Convert bf16 bits to f32."""
    return (h.astype(np.uint32) << 16).view(np.float32)


def to_f16(x: Array) -> Array:
    """Convert f32 to f16 bits, nearest even; NaN becomes 0x7fff."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def to_tf32(x: Array) -> Array:
    """Convert f32 to f32 bits with 10 mantissa bits, nearest, ties away."""
    u = x.astype(np.float32).view(np.uint32)
    return np.where(np.isfinite(x), (u + np.uint32(0x1000)) & np.uint32(0xFFFFE000), u)


def to_tf32_even(x: Array) -> Array:
    """Convert like ``to_tf32`` with ties to even, as TMA rounds."""
    u = x.astype(np.float32).view(np.uint32)
    return np.where(np.isfinite(x), (u + np.uint32(0xFFF) + (u >> 13 & 1)) & np.uint32(0xFFFFE000), u)


# ---- mma fragments -------------------------------------------------------------------------------------------------
def _fragment_a(k: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (lane, element, row, column) of a 16 x k operand; 4 * (k // 8) / ... elements per lane, PTX's order."""
    per = k // 8  # elements of one 32-bit register
    for lane in range(32):
        for i in range(4 * per):
            register, e = divmod(i, per)
            yield lane, i, lane // 4 + 8 * (register % 2), (lane % 4) * per + e + 4 * per * (register // 2)


def _fragment_b(k: int) -> Iterator[tuple[int, int, int, int]]:
    per = k // 8
    for lane in range(32):
        for i in range(2 * per):
            register, e = divmod(i, per)
            yield lane, i, (lane % 4) * per + e + 4 * per * register, lane // 4


def _fragment_c() -> Iterator[tuple[int, int, int, int]]:
    for lane in range(32):
        for i in range(4):
            yield lane, i, lane // 4 + 8 * (i // 2), (lane % 4) * 2 + i % 2


def _pack(m: Array, layout: Iterator[tuple[int, int, int, int]], per_lane: int) -> Array:
    out = np.zeros((32, per_lane), m.dtype)
    for lane, i, r, c in layout:
        out[lane, i] = m[r, c]
    return out


def mma_case(name: str, k: int, a: Array, b: Array, c: Array, va: Array, vb: Array, tolerance: float) -> Case:
    """Build a case. ``a``, ``b``: storage bits; ``va``, ``vb``: their values."""
    exact = np.float64 if tolerance else np.int64
    d = (va.astype(exact) @ vb.astype(exact) + c).astype(c.dtype)
    args = (_pack(a, _fragment_a(k), k // 2), _pack(b, _fragment_b(k), k // 4), _pack(c, _fragment_c(), 4))
    out = np.zeros((32, 4), c.dtype)
    return Case(name, "primitives.cu", name, 32, (*args, out), {3: _pack(d, _fragment_c(), 4)}, tolerance=tolerance)


def mma_cases() -> list[Case]:
    """Return tensor-core products of random operands."""
    r = RNG(1)
    c = r.standard_normal((16, 8)).astype(np.float32)
    a16, b16 = r.standard_normal((16, 16)).astype(np.float32), r.standard_normal((16, 8)).astype(np.float32)
    h, g, t, u = to_f16(a16), to_f16(b16), to_tf32(a16[:, :8]), to_tf32(b16[:8])
    x, y = to_bf16(a16), to_bf16(b16)
    a8, b8 = r.integers(-128, 128, (16, 32), np.int8), r.integers(-128, 128, (32, 8), np.int8)
    u8, v8, ci = a8.view(np.uint8), b8.view(np.uint8), r.integers(-1000, 1000, (16, 8), np.int32)
    return [
        mma_case("mma_f16", 16, h, g, c, h.view(np.float16), g.view(np.float16), 1e-6),
        mma_case("mma_bf16", 16, x, y, c, from_bf16(x), from_bf16(y), 1e-6),
        mma_case("mma_tf32", 8, t, u, c, t.view(np.float32), u.view(np.float32), 1e-6),
        mma_case("mma_s8", 32, a8, b8, ci, a8, b8, 0),
        mma_case("mma_u8", 32, u8, v8, ci, u8, v8, 0),
        mma_case("mma_s8u8", 32, a8, v8, ci, a8, v8, 0),
        mma_case("mma_u8s8", 32, u8, b8, ci, u8, b8, 0),
    ]


def dp4a_cases() -> list[Case]:
    """Return products of four bytes of either sign times four, into sums that wrap."""
    r = RNG(9)
    c = r.integers(-(1 << 31), 1 << 31, 32, np.int32)
    kinds = {"s8": (np.int8, np.int8), "u8": (np.uint8, np.uint8), "u8s8": (np.uint8, np.int8),
             "s8u8": (np.int8, np.uint8)}  # fmt: skip
    cases = []
    for name, types in kinds.items():
        a, b = (r.integers(0, 256, (32, 4), np.uint8).view(t) for t in types)
        want = (a.astype(np.int32) * b.astype(np.int32)).sum(1, dtype=np.int32) + c
        args = (a, b, c, np.zeros(32, np.int32))
        cases.append(Case(f"dp4a_{name}", "primitives.cu", f"dp4a_{name}", 32, args, {3: want}))
    return cases


def byte_columns_case() -> Case:
    """Return a 32 x 16 tile of bytes: its even columns are one column operand of m16n8k32, its odd ones another."""
    tile = RNG(8).integers(0, 256, (32, 16), np.uint8)
    pair = [_pack(tile[:, f::2], _fragment_b(32), 8).view(np.uint32) for f in range(2)]
    args = (tile, np.zeros((32, 4), np.uint32))
    return Case("byte_columns", "primitives.cu", "byte_columns", 32, args, {1: np.concatenate(pair, 1)}, 512)


# ---- data movement -------------------------------------------------------------------------------------------------
def ldmatrix_cases() -> list[Case]:
    """Return cases in which lane l holds elements (l/4, 2(l%4)) and the next of each matrix, transposed with .trans."""
    cases = []
    for n in (1, 2, 4):
        m = RNG(n).integers(0, 65536, (n, 8, 8)).astype(np.uint16)
        for trans in (False, True):
            rows = (m.transpose(0, 2, 1) if trans else m).reshape(n, 32, 2)
            name = f"ldmatrix_x{n}" + ("_trans" if trans else "")
            want = np.ascontiguousarray(rows.transpose(1, 0, 2)).view(np.uint32).reshape(32, n)
            cases.append(Case(name, "primitives.cu", name, 32, (m, np.zeros((32, n), np.uint32)), {1: want}, 1024))
    return cases


def cp_async_cases() -> list[Case]:
    """Return every source size from 0 to V, with zeros after it, or all or nothing; two groups, both read in reverse.
    """
    cases = []
    for name, v in itertools.product(("cp_async", "cp_async_if"), (16, 8, 4)):
        src = RNG(v).integers(1, 256, (2, 64, v)).astype(np.uint8)
        counts = np.arange(128) % (v + 1)
        sizes = (counts if name == "cp_async" else np.where(counts > 0, v, 0)).astype(np.int32)
        kept = np.where(np.arange(v) < sizes.reshape(2, 64, 1), src, 0).astype(np.uint8)[:, ::-1]
        args = (src, sizes, np.zeros((2, 64, v // 4), np.uint32))
        want = np.ascontiguousarray(kept).view(np.uint32)
        cases.append(Case(f"{name}_{v}", "primitives.cu", f"{name}_{v}", 64, args, {2: want}, 4096))
    return cases


def _shuffles() -> Case:
    v = RNG(2).standard_normal(32).astype(np.float32)
    i = np.arange(32)
    far = i ^ 21  # crosses lane 16, as do the others
    want = np.stack([v[far], np.where(i < 13, v[(i + 19) % 32], v), np.where(i >= 17, v[i - 17], v), v[::-1]])
    ballot = np.full(32, sum(int(v[j] > 0) << j for j in range(32)), np.uint32)
    args = (v, np.zeros((4, 32), np.float32), *(np.zeros(32, t) for t in (np.uint32, np.int64, np.uint8)))
    wide, narrow = (far << 40) - far, (255 - far).astype(np.uint8)
    return Case("shuffles", "primitives.cu", "shuffles", 32, args, {1: want, 2: ballot, 3: wide, 4: narrow})


def _counted_sums() -> Case:
    """Return three tasks of four blocks: the last block of each has the sums of all of them."""
    x = RNG(14).standard_normal((3, 4, 64)).astype(np.float32)
    total = np.zeros((3, 64), np.float32)
    for block in range(4):
        total += x[:, block]
    args = (x, np.zeros_like(total), np.zeros_like(x), np.zeros(3, np.uint32))
    return Case("counted_sums", "primitives.cu", "counted_sums", 32, args, {1: total, 3: args[3]}, grid=(12, 1, 1))


def movement_cases() -> list[Case]:
    """Return cases of plain memory, shuffles, barriers, grid indices, atomics, sums of blocks."""
    r = RNG(3)
    x = r.integers(-100, 100, 128).astype(np.int32)
    barrier = (x.sum() + 127 - np.arange(64)).astype(np.int32)
    warp = x[:32]
    blocks = np.arange(12)[:, None] * 100 + np.arange(32)
    cases = [
        _shuffles(),
        _counted_sums(),
        Case("barriers", "primitives.cu", "barriers", 128, (x, np.zeros(64, np.int32)), {1: barrier}, 2048),
        Case("syncwarp", "primitives.cu", "syncwarp", 32, (warp, np.zeros(32, np.int32)), {1: warp[::-1].copy()}, 128),
        Case("grid", "primitives.cu", "grid", 32, (np.zeros(1, np.uint32), np.zeros((12, 32), np.int32)),
             {0: np.array([12 * 32 * 3], np.uint32), 1: blocks.astype(np.int32)}, grid=(3, 2, 2)),
    ]  # fmt: skip
    for n in (1, 2, 4, 8, 16):
        b = r.integers(0, 256, (64, n)).astype(np.uint8)
        args = (b, np.zeros_like(b))
        cases.append(Case(f"memory_{n}", "primitives.cu", f"memory_{n}", 64, args, {1: b[::-1].copy()}, 64 * n))
    return cases


# ---- scalars -------------------------------------------------------------------------------------------------------
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 126.5, 127.5, 128.0, -128.5, -129.0, 254.5, 255.5, 256.0,
     65504.0, 65519.0, 65520.0, 70000.0, 6e-8, 2.98e-8, 3e-8, 6.1e-5, 1e-40, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan,
     1.0009765625, 1.00048828125, 1.00146484375, 1.00390625, 1.01171875],
    np.float32,
)  # fmt: skip


def conversion_cases() -> list[Case]:
    """Return narrowing of special and random values, widening of every 16-bit pattern."""
    x = np.concatenate(
        [SPECIAL, (RNG(4).standard_normal(400) * 10.0 ** RNG(5).integers(-8, 8, 400)).astype(np.float32)]
    )
    n = len(x)
    f16, bf16 = to_f16(x), to_bf16(x)
    packed = np.stack([f16 | f16[::-1].astype(np.uint32) << 16, bf16 | bf16[::-1].astype(np.uint32) << 16])
    whole = np.nan_to_num(np.rint(x), nan=0.0, posinf=1e9, neginf=-1e9)
    ints = np.stack([np.clip(whole, -128, 127), np.clip(whole, 0, 255)]).astype(np.int32)
    args = (x, np.int32(n), np.zeros(n, np.uint16), np.zeros(n, np.uint16), np.zeros(n, np.uint32),
            np.zeros((2, n), np.uint32), np.zeros((2, n), np.int32))  # fmt: skip
    tf32 = to_tf32(np.nan_to_num(x, nan=np.inf))
    narrow = Case("convert", "primitives.cu", "convert", 64, args, {2: f16, 3: bf16, 5: packed, 6: ints})
    finite = np.isfinite(x)  # NaN and inf have several tf32 forms
    m = int(finite.sum())
    outputs = [np.zeros((*a.shape[:-1], m), a.dtype) for a in args[2:]]
    exact = Case("convert_tf32", "primitives.cu", "convert", 64, (x[finite], np.int32(m), *outputs), {4: tf32[finite]})
    h = np.arange(65536).astype(np.uint16)
    wide = np.stack([h.view(np.float16).astype(np.float32), from_bf16(h)])
    every = np.concatenate([wide, wide[:, ::-1], wide])
    widen = Case(
        "widen", "primitives.cu", "widen", 64, (h, np.int32(65536), np.zeros((6, 65536), np.float32)), {2: every}
    )
    return [narrow, exact, widen]


MATH: tuple[tuple[str, Callable[[Array, Array], Array]], ...] = (
    ("exp", lambda x, y: np.exp(x)), ("log", lambda x, y: np.log(x)), ("sqrt", lambda x, y: np.sqrt(x)),
    ("tanh", lambda x, y: np.tanh(x)), ("erf", lambda x, y: np.vectorize(math.erf)(x)), ("sin", lambda x, y: np.sin(x)),
    ("cos", lambda x, y: np.cos(x)), ("sigmoid", lambda x, y: 1 / (1 + np.exp(-x))),
    ("floor", lambda x, y: np.floor(x)), ("ceil", lambda x, y: np.ceil(x)),
    ("rint", lambda x, y: np.rint(x)), ("abs", lambda x, y: np.abs(x)),
    ("max", np.maximum), ("min", np.minimum), ("pow", np.power), ("fmod", np.fmod), ("fma", lambda x, y: x * y + x),
    ("rsqrt", lambda x, y: 1 / np.sqrt(x)),
)  # fmt: skip
FAST_FUNCTIONS: tuple[Callable[[Array], Array], ...] = (
    np.exp, np.exp2, np.log, np.log2, np.reciprocal, np.tanh, np.vectorize(math.erf),
    lambda x: 1 / (1 + np.exp(-x)), np.sqrt, np.reciprocal,
)  # fmt: skip


def math_cases() -> list[Case]:
    """Return every scalar function at ordinary and special values, against float64; one case, one row per function."""
    x = np.concatenate([RNG(6).standard_normal(200) * 3, [0.0, -1.0, 1.0, np.inf, -np.inf, np.nan, 8.0, 2.5]]).astype(
        np.float32
    )
    y = np.concatenate([RNG(7).standard_normal(200), [2.0, np.nan, 1.0, 1.0, 2.0, 1.0, -2.0, 0.5]]).astype(np.float32)
    with np.errstate(all="ignore"):
        want = np.stack([f(x.astype(np.float64), y.astype(np.float64)) for _, f in MATH]).astype(np.float32)
        fast = np.stack([f(x.astype(np.float64)) for f in FAST_FUNCTIONS]).astype(np.float32)
    args = (x, y, np.int32(len(x)), np.zeros(want.shape, np.float32))
    fast_args = (x, np.int32(len(x)), np.zeros(fast.shape, np.float32))
    a = np.array([7, -7, 7, -7, 0, 1, -1, 6, -6, 2**31 - 1], np.int32)
    b = np.array([2, 2, -2, -2, 5, 3, 3, 3, 3, 2], np.int32)
    whole = np.stack([a // b, a // b, np.minimum(a, b), np.maximum(a, b)])
    return [
        Case("math", "primitives.cu", "math", 64, args, {3: want}, tolerance=1e-5),
        Case("math_fast", "primitives.cu", "math_fast", 64, fast_args, {2: fast}, tolerance=2e-5),
        Case(
            "integers", "primitives.cu", "integers", 64, (a, b, np.int32(10), np.zeros((4, 10), np.int32)), {3: whole}
        ),
    ]


def wide_cases() -> list[Case]:
    """Return vectors of every kind of element: all bits of integers, all finite halves that fit."""
    r, cases = RNG(5), []
    kinds: dict[str, Array] = {
        "f16": r.standard_normal(512).astype(np.float16), "bf16": to_bf16(r.standard_normal(512).astype(np.float32)),
        "f32": r.standard_normal(512).astype(np.float32), "s8": r.integers(-128, 128, 512, np.int8),
        "u8": r.integers(0, 256, 1024, np.uint8), "u16": r.integers(0, 1 << 16, 512, np.uint16),
        "s32": r.integers(-(1 << 31), 1 << 31, 512, np.int32),
        "s64": r.integers(-(1 << 63), (1 << 63) - 1, 512, np.int64),
    }  # fmt: skip
    for kind, n in (("f16", 8), ("f16", 2), ("bf16", 8), ("f32", 4), ("f32", 8), ("s8", 8), ("u8", 16), ("u16", 4),
                    ("s32", 4), ("s64", 2)):  # fmt: skip
        a = kinds[kind][: 64 * n].reshape(64, n)
        name = f"wide_{kind}_{n}"
        cases.append(Case(name, "primitives.cu", name, 64, (a, np.zeros_like(a)), {1: a[:, ::-1].copy()}))
    for kind, n in (("f32", 1), ("f32", 2), ("f32", 4), ("s32", 2), ("s32", 4)):
        a = kinds[kind][: 64 * n].reshape(64, n)
        name = f"wide_shared_{n}" if kind == "f32" else f"wide_shared_{kind}_{n}"
        cases.append(Case(name, "primitives.cu", name, 64, (a, np.zeros_like(a)), {1: a[::-1].copy()}, 64 * n * 4))
    return cases


def all_cases() -> list[Case]:
    """Return every case that runs on sm_80 and newer."""
    return [
        *ldmatrix_cases(), *mma_cases(), *dp4a_cases(), byte_columns_case(), *cp_async_cases(), *movement_cases(),
        *conversion_cases(), *math_cases(), *wide_cases(),
    ]  # fmt: skip
