"""Two hand-written GEMMs under emulation: right at ugly shapes, free of bank conflicts, and all planted bugs are
caught.
"""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.gpu.emulator import Counters, EmulatedModule, compile_emulated
from polydyn.gpu.errors import DeviceError
from polydyn.testing.device.cases import Mapped
from polydyn.testing.device.gemms import MMA_SOURCE, SHAPES, WGMMA_SOURCE, Problem

SMALL_TILE = {"BM": 64, "BN": 64, "WM": 32, "WN": 32}


def run_mma(
    module: EmulatedModule,
    problem: Problem,
    reverse: bool = False,
    stages: int = 4,
    tile: int = 128,
    name: str = "gemm_mma",
) -> Counters:
    blocks, smem, args = problem.mma(tile, tile, stages)
    threads = 256 if tile == 128 else 128
    return module.launch(name, blocks, threads, args, smem=smem, reverse=reverse)


def run_wgmma(
    module: EmulatedModule,
    problem: Problem,
    reverse: bool = False,
    bn: int = 128,
    stages: int = 4,
    name: str = "gemm_wgmma",
) -> Counters:
    blocks, smem, args = problem.wgmma(bn, stages)
    raw = [a.map.emulated(a.array.ctypes.data) if isinstance(a, Mapped) else a for a in args]
    return module.launch(name, blocks, 384, raw, smem=smem, reverse=reverse, extra=[problem.a.base, problem.b.base])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_mma_gemm(shape: tuple[int, int, int], reverse: bool) -> None:
    problem = Problem(*shape)
    counters = run_mma(EmulatedModule(compile_emulated(MMA_SOURCE)), problem, reverse)
    assert problem.error() < 1e-3
    assert counters.ldmatrix_conflicts == counters.shared_conflicts == 0
    assert counters.mma == 4 * 4 * 2 * 8 * -(-shape[2] // 32) * -(-shape[0] // 128) * -(-shape[1] // 128)


@pytest.mark.parametrize(("vector", "stages"), [(8, 3), (4, 4), (2, 2)])
def test_mma_gemm_with_narrow_copies(vector: int, stages: int) -> None:
    """Pitches of 8, 4 and 2 elements take 16-, 8- and 4-byte copies of the same kernel."""
    problem = Problem(65, 63, 70, vector)
    module = EmulatedModule(compile_emulated(MMA_SOURCE, {**SMALL_TILE, "STAGES": stages, "VECTOR": vector * 2}))
    run_mma(module, problem, stages=stages, tile=64)
    assert problem.error() < 1e-3


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[2]])
def test_wgmma_gemm(shape: tuple[int, int, int], reverse: bool) -> None:
    problem = Problem(*shape)
    counters = run_wgmma(EmulatedModule(compile_emulated(WGMMA_SOURCE, arch=90)), problem, reverse)
    assert problem.error() < 1e-3
    assert counters.wgmma > 0 and counters.tma > 0 and counters.shared_conflicts == 0


def test_two_runs_and_both_orders_give_the_same_bits() -> None:
    module = EmulatedModule(compile_emulated(MMA_SOURCE))
    results = []
    for reverse in (False, False, True):
        problem = Problem(70, 90, 130)
        run_mma(module, problem, reverse)
        results.append(problem.c.tobytes())
    assert len(set(results)) == 1


MMA_BUGS = {
    "wait one group too weak": ("pd_cp_async_wait<STAGES - 2>();", "pd_cp_async_wait<STAGES - 1>();"),
    "no barrier in the main loop": (
        "pd_cp_async_wait<STAGES - 2>();\n    pd_syncthreads();", "pd_cp_async_wait<STAGES - 2>();"),
    "no barrier before the epilogue": ("pd_cp_async_wait<0>();\n  pd_syncthreads();", "pd_cp_async_wait<0>();"),
    "no barrier inside the epilogue": ("  pd_syncthreads();\n  PD_UNROLL\n  for (int q = 0; q < BM * (BN / 8)",
                                       "  PD_UNROLL\n  for (int q = 0; q < BM * (BN / 8)"),
    "commit only with a copy": ("(step + STAGES - 1) * BK);\n    pd_cp_async_commit();",
                                "(step + STAGES - 1) * BK), pd_cp_async_commit();"),
    "writes the slot being read": ("read = 0, write = STAGES - 1", "read = 0, write = 0"),
    "row predicate dropped": ("bool inside = m0 + r < m;", "bool inside = true;"),
    "K rows not zero-filled": ("bool inside = k0 + r < k;", "bool inside = k0 + r < k + 8;"),
    "column tail not zero-filled": ("pd_imax(pd_imin((cols - c) * 2, VECTOR), 0)", "VECTOR"),
    "B fragments swapped": ("fb[j / 2] + j % 2 * 2", "fb[j / 2] + (1 - j % 2) * 2"),
    "A fragment rows wrong": (
        "wm + i * 16 + lane % 16, kk * 2 + lane / 16", "wm + i * 16 + lane / 2, kk * 2 + lane % 2"),
    "B not transposed": ("pd_ldmatrix_x4_trans(", "pd_ldmatrix_x4("),
    "wrong stage address": ("multiply_stage(acc, smem + read * STAGE", "multiply_stage(acc, smem + read * A_BYTES"),
    "divergent barrier": (
        "pd_cp_async_wait<0>();\n  pd_syncthreads();", "pd_cp_async_wait<0>();\n  if (wm == 0) pd_syncthreads();"),
    "early return before a barrier": (
        "  pd_cp_async_wait<0>();\n", "  pd_cp_async_wait<0>();\n  if (n0 + wn >= n) return;\n"),
    "store predicate dropped": ("if (m0 + r >= m || n0 + col >= n) continue;", "if (n0 + col >= n) continue;"),
    "store past the row end": ("n0 + col + 8 <= n", "n0 + col + 4 <= n"),
    "last k step lost": ("steps = (k + BK - 1) / BK;", "steps = k / BK;"),
    "epilogue reads the wrong row": ("pd_lds<pd_b128>(smem + r * PITCH", "pd_lds<pd_b128>(smem + (r ^ 8) * PITCH"),
    "divergent mma": ("for (int kk = 0; kk < BK / 16; kk++) {", "for (int kk = 0; kk < BK / 16 - (lane == 7); kk++) {"),
    "misaligned copies": ("bytes ? row + c : row", "bytes ? row + c + 1 : row"),
}  # fmt: skip

WGMMA_BUGS = {
    "expects too few bytes": ("pd_mbar_expect_tx(full + slot, STAGE)", "pd_mbar_expect_tx(full + slot, STAGE - PANEL)"),
    "expects too many bytes": ("pd_mbar_expect_tx(full + slot, STAGE)", "pd_mbar_expect_tx(full + slot, STAGE + 16)"),
    "consumer parity wrong": ("pd_mbar_wait(full + slot, parity)", "pd_mbar_wait(full + slot, parity ^ 1)"),
    "producer does not wait": ("    pd_mbar_wait(empty + slot, parity ^ 1);\n", ""),
    "wrong arrival count": ("pd_mbar_init(empty + s, CONSUMERS)", "pd_mbar_init(empty + s, 1)"),
    "slot freed a step early": ("pd_mbar_arrive(empty + previous)", "pd_mbar_arrive(empty + slot)"),
    "wait too weak": ("pd_wgmma_wait<1>();", "pd_wgmma_wait<2>();"),
    "no final wait": ("  pd_wgmma_wait<0>();\n", ""),
    "no commit": ("    pd_wgmma_commit();\n", ""),
    "no wgmma fence": ("    pd_wgmma_fence();\n", ""),
    "no barrier after init": ("  pd_syncthreads();\n  if (pd_tid() < 128) {", "  if (pd_tid() < 128) {"),
    "no fence after init": ("    pd_fence_mbar_init();\n", ""),
    "wrong A descriptor step": ("sa + k * 32", "sa + k * 64"),
    "wrong B descriptor step": ("sb + k * 2048", "sb + k * 1024"),
    "wrong panel stride": ("pd_desc_mn(sb + k * 2048, PANEL)", "pd_desc_mn(sb + k * 2048, PANEL / 2)"),
    "B taken as K-major": ("WGMMA<1>", "WGMMA<0>"),
    "accumulates onto rubbish": ("step + k > 0", "step > 0"),
    "wrong output row": ("t / 32 * 16 + t % 32 / 4", "t / 32 * 16 + t % 32 / 2"),
    "ring parity never flips": (
        "if (++slot == STAGES) slot = 0, parity ^= 1;\n  }\n  pd_wgmma",
        "if (++slot == STAGES) slot = 0;\n  }\n  pd_wgmma"),
    "row predicate dropped": ("if (row + h * 8 >= m) continue;", ""),
    "more registers than are given": ("pd_reg_inc<232>", "pd_reg_inc<240>"),
    "more registers given than there are": ("pd_reg_dec<40>", "pd_reg_dec<176>"),
    "registers given by one warp": ("    pd_reg_dec<40>();\n", "    if (pd_tid() < 32) pd_reg_dec<40>();\n"),
    "plain stores not fenced before TMA writes there": (
        "  pd_syncthreads();\n  if (pd_tid() < 128) {",
        "  pd_sts<float>(smem + pd_tid() * 4, 0.f);\n  pd_syncthreads();\n  if (pd_tid() < 128) {"),
}  # fmt: skip


def survives(launch, problems: list[Problem]) -> bool:
    """Return whether a kernel gives right results everywhere, in both orders."""
    for problem in problems:
        for reverse in (False, True):
            problem.c.base[...] = np.nan
            try:
                launch(problem, reverse)
            except DeviceError:
                return False
            if not problem.error() < 1e-3:
                return False
    return True


def with_bugs(source: str, kernel: str, bugs: dict[str, tuple[str, str]]) -> str:
    """Return one file with a copy of the kernel per bug (kernel_0, kernel_1, ...): one compilation instead of twenty.
    """
    include = next(line for line in source.splitlines() if line.startswith("#include"))
    parts = [include, f"namespace correct {{\n{source.replace(include, '')}\n}}"]
    for i, (bug, (old, new)) in enumerate(bugs.items()):
        assert source.count(old) == 1, f"the planted bug '{bug}' no longer fits the kernel"
        body = source.replace(include, "").replace(old, new).replace(kernel, f"{kernel}_{i}")
        parts.append(f"namespace bug_{i} {{\n{body}\n}}")
    return "\n".join(parts)


@pytest.fixture(scope="module")
def mma_bugs() -> EmulatedModule:
    return EmulatedModule(compile_emulated(with_bugs(MMA_SOURCE, "gemm_mma", MMA_BUGS), SMALL_TILE))


@pytest.fixture(scope="module")
def wgmma_bugs() -> EmulatedModule:
    return EmulatedModule(compile_emulated(with_bugs(WGMMA_SOURCE, "gemm_wgmma", WGMMA_BUGS), {"STAGES": 3}, arch=90))


@pytest.mark.parametrize("bug", MMA_BUGS)
def test_planted_bug_in_mma_gemm_is_caught(bug: str, mma_bugs: EmulatedModule) -> None:
    problems = [Problem(67, 70, 210), Problem(131, 60, 33)]
    assert survives(lambda p, reverse: run_mma(mma_bugs, p, reverse, tile=64), problems)
    name = f"gemm_mma_{list(MMA_BUGS).index(bug)}"
    assert not survives(lambda p, reverse: run_mma(mma_bugs, p, reverse, tile=64, name=name), problems)


@pytest.mark.parametrize("bug", WGMMA_BUGS)
def test_planted_bug_in_wgmma_gemm_is_caught(bug: str, wgmma_bugs: EmulatedModule) -> None:
    problems = [Problem(131, 77, 450)]
    assert survives(lambda p, reverse: run_wgmma(wgmma_bugs, p, reverse, stages=3), problems)
    name = f"gemm_wgmma_{list(WGMMA_BUGS).index(bug)}"
    assert not survives(lambda p, reverse: run_wgmma(wgmma_bugs, p, reverse, stages=3, name=name), problems)


def test_lost_swizzle_shows_in_the_conflict_count() -> None:
    """The kernel is slow, not wrong: only the counters can tell."""
    source = MMA_SOURCE.replace("((c ^ ((r >> 1) & 3)) << 4)", "(c << 4)")
    problem = Problem(64, 64, 64)
    counters = run_mma(EmulatedModule(compile_emulated(source, SMALL_TILE)), problem, tile=64)
    assert problem.error() < 1e-3 and counters.ldmatrix_conflicts > 0
    source = MMA_SOURCE.replace("((BN + 8) * 2)", "(BN * 2)")
    counters = run_mma(EmulatedModule(compile_emulated(source, SMALL_TILE)), problem, tile=64)
    assert problem.error() < 1e-3 and counters.ldmatrix_conflicts == 0 and counters.shared_conflicts > 0
