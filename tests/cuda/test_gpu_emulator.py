"""Rejections and counters of the emulation, by one small kernel each."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polydyn.errors import BuildError
from polydyn.gpu import emulator
from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.gpu.errors import DeviceError
from polydyn.testing.device.gemms import MMA_SOURCE, Problem

KERNEL = """#include "pd_hopper.cuh"
PD_KERNEL({name}, 64, 1)(float *g, int at) {{
  PD_DYN_SMEM(s);
  int t = pd_tid();
  uint32_t r[4] = {{0, 0, 0, 0}};
  float d[64] = {{0}};
  (void)s, (void)g, (void)t, (void)at, (void)r, (void)d;
  {body}
}}
PD_EXPORT({name}, 64);
"""
FAULTS = {
    "global_bounds": ("pd_stg(g + 1000 + at, 1.f);", "out-of-bounds global"),
    "global_alignment": ("pd_stg((pd_b128 *)(g + 1), pd_b128{{0, 0, 0, 0}});", "misaligned global access of 16"),
    "global_before": ("pd_ldg(g - 1);", "out-of-bounds global"),
    "shared_bounds": ("pd_sts<float>(s + 1024, 1.f);", "out-of-bounds shared access of 4 bytes at offset 1024"),
    "shared_alignment": ("pd_lds<pd_b64>(s + 4);", "misaligned shared"),
    "copy_bounds": ("pd_cp_async<16>(s + t * 16, g + 1000, 16);", "out-of-bounds global"),
    "copy_size": ("pd_cp_async<8>(s + t * 8, g, 9);", "source size 9 of 8"),
    "copy_unwaited": ("pd_cp_async<4>(s + t * 4, g, 4); pd_cp_async_commit();", "never waited for"),
    "ldmatrix_alignment": ("pd_ldmatrix_x1(r, s + t * 8);", "misaligned shared"),
    "barrier_in_branch": ("if (t < 32) pd_syncthreads();", "divergent barrier|deadlock"),
    "barriers_differ": ("if (t < 32) pd_syncthreads();\n else pd_syncthreads();", "divergent collective"),
    "shuffle_in_branch": ("if (t % 2) d[0] = pd_shfl_xor(d[1], 1);", "deadlock: 32 threads wait.*shfl.xor"),
    "collectives_differ": ("if (t % 2) pd_syncwarp();\n else pd_ballot(true);", "divergent collective"),
    "named_barrier": ("pd_bar_sync(0, 64);", "barrier 1..15"),
    "mbarrier_uninitialised": ("pd_mbar_arrive((uint64_t *)s);", "before pd_mbar_init"),
    "mbarrier_never": (
        "if (t == 0) pd_mbar_init((uint64_t *)s, 2);\n pd_syncthreads(); if (t == 0) pd_mbar_arrive((uint64_t *)s);"
        " pd_mbar_wait((uint64_t *)s, 0);", "deadlock: 64 threads wait.*mbarrier wait at line 9"),
    "no_tensor_map": ("pd_tmap m = {{{{0}}}}; pd_tma_load_2d(s, &m, 0, 0, (uint64_t *)s);", "not a tensor map"),
    "half_warpgroup": ("pd_wgmma_wait<0>();", "outside a whole warpgroup"),
}  # fmt: skip
COUNTS = {
    "conflict_free": ("pd_sts<float>(s + t * 4, 1.f);", {"shared": 2, "shared_conflicts": 0}),
    "two_way": ("pd_sts<float>(s + t % 32 * 8, 1.f);", {"shared": 2, "shared_conflicts": 2}),
    "all_in_one_bank": ("pd_sts<float>(s + t % 8 * 128, 1.f);", {"shared": 2, "shared_conflicts": 14}),
    "broadcast": ("pd_lds<float>(s);", {"shared": 2, "shared_conflicts": 0}),
    "wide_rows": ("pd_sts(s + t * 16, pd_b128{{0, 0, 0, 0}});", {"shared": 2, "shared_conflicts": 0}),
    "wide_columns": ("pd_lds<pd_b64>(s + t % 8 * 128);", {"shared": 2, "shared_conflicts": 2 * 2 * 7}),
    "divergent_lanes": ("if (t % 2) pd_sts<float>(s + t * 4, 1.f);", {"shared": 2, "shared_conflicts": 0}),
    "loop": ("for (int i = 0; i < 4; i++) pd_sts<float>(s + ((i * 4 + t) % 64) * 4, 1.f);", {"shared": 8}),
    "ldmatrix_rows": ("pd_ldmatrix_x4(r, s + t % 32 * 16);", {"ldmatrix": 2, "ldmatrix_conflicts": 0}),
    "ldmatrix_column": ("pd_ldmatrix_x4(r, s + t % 8 * 128);", {"ldmatrix": 2, "ldmatrix_conflicts": 2 * 4 * 7}),
    "coalesced": ("pd_stg(g + t, 1.f);", {"global_": 2, "global_sectors": 8, "global_sectors_min": 8}),
    "strided": ("pd_stg(g + t * 8, 1.f);", {"global_": 2, "global_sectors": 64, "global_sectors_min": 8}),
    "barriers": ("pd_syncthreads();\n pd_syncthreads();", {"barriers": 2}),
}


@pytest.fixture(scope="module")
def module() -> EmulatedModule:
    # Source lines differ only inside a kernel, so that tests may name them.
    parts = [f'#line 1 "{k}"\n{KERNEL.format(name=k, body=v[0].format())}' for k, v in {**FAULTS, **COUNTS}.items()]
    return EmulatedModule(compile_emulated("\n".join(parts), arch=90))


def buffer() -> np.ndarray:
    """Return 1000 zeros that begin at a sector, as in device memory."""
    whole = np.zeros(1064, np.float32)
    skip = -whole.ctypes.data % 256 // 4
    return whole[skip : skip + 1000]


def run(module: EmulatedModule, name: str, reverse: bool = False) -> Counters:
    return module.launch(name, 1, 64, [buffer(), np.int32(0)], smem=1024, reverse=reverse)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_broken_rule_is_named(name: str, reverse: bool, module: EmulatedModule) -> None:
    with pytest.raises(DeviceError, match=FAULTS[name][1]):
        run(module, name, reverse)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str, module: EmulatedModule) -> None:
    counters = run(module, name)
    assert {k: getattr(counters, k) for k in COUNTS[name][1]} == COUNTS[name][1]


def test_calls_that_do_not_fit_the_kernel(module: EmulatedModule) -> None:
    g = np.zeros(1000, np.float32)
    for name, args, threads, message in (
        ("nothing", [g, np.int32(0)], 64, "no kernel nothing"),
        ("barriers", [g], 64, "takes 2 arguments, not 1"),
        ("barriers", [g, np.int64(0)], 64, "argument 1 of barriers has 8 bytes"),
        ("barriers", [g, np.int32(0)], 96, "bound to 64"),
    ):
        with pytest.raises(DeviceError, match=message):
            module.launch(name, 1, threads, args, smem=1024)


def test_the_headers_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first kernel precompiles the header, and g++ takes that file (``-H`` marks it with ``!``)."""
    if "clang" in emulator.emulator_compiler()[1]:
        pytest.skip("only g++ takes a precompiled header in place of an included one")
    monkeypatch.setenv("POLYDYN_CACHE", str(tmp_path))
    emulator._precompiled.cache_clear()
    seen = []

    def compile_seen(command: Sequence[str]) -> None:
        done = subprocess.run([*command, "-H"], capture_output=True, text=True, check=True)
        seen.append((command[-1].rpartition("/")[2], [x for x in done.stderr.splitlines() if x.startswith("!")]))

    monkeypatch.setattr(emulator, "_compile", compile_seen)
    for value in (1.0, 2.0):
        text = KERNEL.replace("hopper", "device").format(name="k", body=f"pd_stg(g + t, {value}f);")
        g = np.zeros(64, np.float32)
        EmulatedModule(compile_emulated(text)).launch("k", 1, 64, [g, np.int32(0)])
        assert (g == value).all()
    assert [name for name, _ in seen] == ["pd_device.cuh.gch", "kernel.so", "kernel.so"]
    assert [len(used) for _, used in seen] == [0, 1, 1] and "pd_device.cuh.gch" in seen[1][1][0]
    emulator._precompiled.cache_clear()


def test_a_kernel_that_does_not_compile() -> None:
    with pytest.raises(BuildError, match="undeclared_thing"):
        compile_emulated('#include "pd_device.cuh"\nPD_KERNEL(k, 32, 1)(int *a) { pd_stg(a, undeclared_thing); }')


def test_portable_context_switch() -> None:
    """The ucontext fallback, for processors without an assembler switch."""
    problem = Problem(70, 65, 100)
    small = {"BM": 64, "BN": 64, "WM": 32, "WN": 32, "PD_EMU_UCONTEXT": 1}
    blocks, smem, args = problem.mma(64, 64)
    EmulatedModule(compile_emulated(MMA_SOURCE, small)).launch("gemm_mma", blocks, 128, args, smem=smem)
    assert problem.error() < 1e-3
