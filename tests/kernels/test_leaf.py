"""The leaves of generated kernels at every vector width: special values, horizontal trees, masked lanes."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from polydyn.build.compiler import build_library, compile_flags, find_compiler
from polydyn.build.features import machine_features
from polydyn.codegen.cpu.target import leaf_headers

WIDTHS = (4, 8, 16)
F = np.float32
SPECIAL = np.array([0, -0.0, 1, -1, 88.7, 89, 200, np.inf, -87, -90, -103.9, -104.5, -200, -np.inf, np.nan, 3], F)

TEXT = """#include <stdint.h>
#include "pd_cpu.h"
#define OPEN __attribute__((visibility("default")))
#define PAIR(NAME) OPEN void t_##NAME(const f32 *a, const f32 *b, f32 *c) { \
  for (i64 i = 0; i < 16; i += PD_W) vstore_f32(c, i, pd_##NAME##_vf32(vload_f32(a, i), vload_f32(b, i))); }
#define ONE(NAME) OPEN void t_##NAME(const f32 *a, f32 *c) { c[0] = pd_##NAME##_vf32(vload_f32(a, 0)); }
#define ONE64(NAME) OPEN void t64_##NAME(const i64 *a, i64 *c) { c[0] = pd_##NAME##_vi64(vload_i64(a, 0)); }
PAIR(max) PAIR(min)
ONE(hsum) ONE(hmax) ONE(hmin) ONE(hprod) ONE64(hsum) ONE64(hmax)
OPEN void t_exp(const f32 *a, f32 *c) {
  for (i64 i = 0; i < 16; i += PD_W) vstore_f32(c, i, pd_exp_vf32(vload_f32(a, i))); }
OPEN void t_bf16(const f32 *a, u16 *c, int64_t n) {
  for (i64 i = 0; i < n; i += PD_W) vstore_u16(c, i, vnarrow_bf16(vload_f32(a, i))); }
OPEN void t_wide(const u16 *a, f32 *c, int64_t n) {
  for (i64 i = 0; i < n; i += PD_W) vstore_f32(c, i, vload_bf16(a, i)); }
#define CASE(s) case s: vstore_f32(c, 0, vloadgs_f32(a, 0, s, m)); vstore_u16(d, 0, vloadgs_u16(h, 0, s, m)); \
  if (!low) vstore_u16(e, 0, vloads_u16(h, 0, s, n)); break;
OPEN void t_apart(const f32 *a, const u16 *h, f32 *c, u16 *d, u16 *e, int64_t s, int64_t low, int64_t n) {
  vb m = vbetween(low, n);
  switch (s) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) } }
OPEN void t_tail(f32 *a, int64_t n) { vstorem_f32(a, 0, vloadm_f32(a, 0, n) + 1.0f, n); }
"""


@lru_cache
def leaf(width: int) -> ctypes.CDLL:
    library = build_library({"leaf.c": TEXT}, leaf_headers(width))
    return ctypes.CDLL(str(library.file()))


def call(width: int, name: str, *arrays: np.ndarray) -> np.ndarray:
    out = np.zeros(16, arrays[0].dtype)
    getattr(leaf(width), name)(*(ctypes.c_void_p(a.ctypes.data) for a in (*arrays, out)))
    return out


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["max", "min"])
def test_max_and_min_hand_nan_on_from_either_side(width: int, name: str) -> None:
    expected = {"max": np.maximum, "min": np.minimum}[name]
    for shift in range(16):
        other = np.roll(SPECIAL, shift)
        np.testing.assert_array_equal(call(width, f"t_{name}", SPECIAL, other), expected(SPECIAL, other))


@pytest.mark.parametrize("width", WIDTHS)
def test_exp_of_special_values(width: int) -> None:
    got = call(width, "t_exp", SPECIAL)
    with np.errstate(over="ignore", under="ignore"):
        expected = np.exp(SPECIAL.astype(np.float64)).astype(F)
    np.testing.assert_allclose(got, expected, rtol=3e-7, atol=2e-45)
    np.testing.assert_array_equal(got, call(4, "t_exp", SPECIAL))


@pytest.mark.parametrize("width", WIDTHS)
def test_horizontal_reductions_see_every_lane(width: int) -> None:
    base = np.random.default_rng(width).standard_normal(16).astype(F)
    for lane in range(width):
        a = base.copy()
        for value in (F(77), F(-77), F(np.nan)):
            a[lane] = value
            live = a[:width]
            for name, expected in (("hmax", live.max()), ("hmin", live.min())):
                np.testing.assert_array_equal(call(width, f"t_{name}", a)[0], expected)
            np.testing.assert_allclose(call(width, "t_hsum", a)[0], live.sum(), rtol=1e-5)
            np.testing.assert_allclose(call(width, "t_hprod", a)[0], live.prod(), rtol=1e-5)
    numbers = np.arange(-3, 13, dtype=np.int64) * 10**12
    assert call(width, "t64_hsum", numbers)[0] == numbers[:width].sum()
    assert call(width, "t64_hmax", numbers)[0] == numbers[:width].max()


@contextmanager
def page() -> Iterator[tuple[mmap.mmap, int]]:
    """Yield memory whose first page is accessible and whose next one is not, and its address."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    behind = ctypes.c_void_p(begin + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)
    assert protect(*behind, 0) == 0
    yield memory, begin
    assert protect(*behind, 3) == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_masked_lanes_touch_nothing_beyond_a_page(width: int) -> None:
    """The live elements end at the end of readable memory; one byte further is a fault."""
    with page() as (memory, begin):
        for n in range(width + 1):
            leaf(width).t_tail(ctypes.c_void_p(begin + mmap.PAGESIZE - 4 * n), ctypes.c_int64(n))
        assert np.frombuffer(memory, F)[mmap.PAGESIZE // 4 - 1] == width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_elements_apart_are_read_in_their_lanes_only(width: int, dtype: type[np.generic]) -> None:
    """The last element that is read ends at the end of readable memory."""
    size = mmap.PAGESIZE // np.dtype(dtype).itemsize
    lanes = np.arange(width)
    with page() as (memory, begin):
        places = np.frombuffer(memory, dtype, size)
        places[:] = np.arange(size)
        for apart, low, n in product(range(1, 6), (0, 1, width // 2), range(1, width + 1)):
            first = size - apart * (n - 1) - 1
            at, other = (ctypes.c_void_p(begin + i * places.itemsize) for i in (first, 0))
            out = [np.zeros(width, x) for x in (np.float32, np.uint16, np.uint16)]
            pointers = (ctypes.c_void_p(x.ctypes.data) for x in out)
            pair = (at, other) if dtype is np.float32 else (other, at)
            leaf(width).t_apart(*pair, *pointers, *map(ctypes.c_int64, (apart, low, n)))
            expected = np.where((lanes >= low) & (lanes < n), places.take(first + apart * lanes, mode="clip"), 0)
            for got in out[:1] if dtype is np.float32 else out[1 : 2 + (low == 0)]:
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_conversions_of_bfloat16_keep_subnormal_numbers_and_nan(width: int) -> None:
    """Every upper half with lower bits below, at and above a tie; vectors of neighbours, and of all kinds of numbers.
    """
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16 | lower[:, None]).reshape(-1)
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    nearest = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    expected = np.where(nan, bits >> 16 | 0x40, nearest).astype(np.uint16)
    for order in (np.arange(bits.size), np.random.default_rng(0).permutation(bits.size)):
        numbers, got = bits[order].view(F), np.zeros(bits.size, np.uint16)
        leaf(width).t_bf16(*(ctypes.c_void_p(a.ctypes.data) for a in (numbers, got)), ctypes.c_int64(bits.size))
        np.testing.assert_array_equal(got, expected[order])
    every, wide = np.arange(1 << 16, dtype=np.uint16), np.zeros(1 << 16, np.uint32)
    leaf(width).t_wide(*(ctypes.c_void_p(a.ctypes.data) for a in (every, wide)), ctypes.c_int64(every.size))
    np.testing.assert_array_equal(wide, every.astype(np.uint32) << 16)


STRAIGHT = """#include <stdint.h>
#include "pd_cpu.h"
#define OPEN __attribute__((visibility("default")))
OPEN void s_live(vb *to, i64 n) { *to = vlive(n); }
OPEN void s_between(vb *to, i64 n, i64 m) { *to = vbetween(n, m); }
OPEN void s_ramp(vi32 *to, i64 a, i64 s) { *to = vramp_i32(a, s); }
OPEN void s_places(vi64 *to, i64 a, i64 s) { *to = vramp_i64(a, s); }
OPEN void s_evens(vf32 *to, const f32 *a) { *to = vevens_f32(vload_f32(a, 0), vload_f32(a, PD_W)); }
OPEN void s_odds(vf32 *to, const f32 *a) { *to = vodds_f32(vload_f32(a, 0), vload_f32(a, PD_W)); }
OPEN void s_tail(f32 *a, i64 n) { vstorem_f32(a, 0, vsel_f32(vlive(n), vloadm_f32(a, 0, n), vload_f32(a, 64)), PD_W); }
OPEN void s_apart(vu16 *to, const u16 *a) { *to = vloads_u16(a, 0, 3, PD_W); }
OPEN void s_most(f32 *a) { a[0] = pd_hmax_vf32(vload_f32(a, 0)); }
OPEN void s_sum(f32 *a) { a[0] = pd_hsum_vf32(vload_f32(a, 0)); }
"""
"""Leaves that kernels use once for each row or vector."""
LOOPS: dict[str, set[str]] = {"cpu:avx512": set(), "cpu:avx2": {"s_tail", "s_apart"}}
"""Those that load or store one element after another."""
FEATURES = {"cpu:avx512": "avx512vl", "cpu:avx2": "avx2"}


@pytest.mark.parametrize("target", FEATURES)
def test_leaves_of_every_row_have_no_loops(target: str, tmp_path: Path) -> None:
    """With flags that do not vectorise, a loop over lanes stays one: a mask took longer than the row it masked."""
    compiler = find_compiler()
    if FEATURES[target] not in machine_features() or "clang" in compiler.version:
        pytest.skip("the instructions of another processor, or the loops of another compiler")
    width = 16 if target == "cpu:avx512" else 8
    for name, text in (leaf_headers(width) | {"straight.c": STRAIGHT}).items():
        (tmp_path / name).write_text(text)
    command = [*compiler.command, *compile_flags(compiler, target), "-S", "-o", "-", "straight.c"]
    listing = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    bodies = re.findall(r"^(s_\w+):\n(.*?)\n\t\.cfi_endproc", listing, re.M | re.S)
    assert len(bodies) == STRAIGHT.count("OPEN void")
    for name, body in bodies:
        labels = {m[1]: m.start() for m in re.finditer(r"^(\.L\w+):", body, re.M)}
        back = [m[0] for m in re.finditer(r"\tj(?!mp)\w+\s+(\.L\w+)", body) if labels.get(m[1], m.end()) < m.start()]
        assert name in LOOPS[target] or not back, f"{name} has a loop: {back}"
