"""Products of bytes by wgmma, which equal numpy bit by bit, and constants that are turned for warpgroups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_bytes import ROLES, Types, product, run
from cuda_groups import ARCH, MULTIPROCESSORS, SHARED, placed, plan_of, with_bugs
from cuda_groups import run as run_plan
from onnx import helper
from quantized import quantized_model

import polydyn
from benchmarks.gpu.cases import to_tf32_even
from polydyn.codegen.cuda_contract import CudaContractKernel
from polydyn.codegen.cuda_emit import LONG
from polydyn.codegen.cuda_kernel import CudaKernel
from polydyn.codegen.cuda_product import ProductGroup
from polydyn.codegen.cuda_wgmma import wgmma_versions, without_wgmma
from polydyn.compiler import Options, plan_program
from polydyn.gpu import hardware
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.emulator import Counters
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.cuda import CudaBuilder
from polydyn.program.cuda_cost import choose, estimated

TRANS = (False, True)
MAIN: Types = ("uint8", "int8")
SIGNS: tuple[Types, ...] = (MAIN, ("int8", "int8"), ("int8", "uint8"), ("uint8", "uint8"))
SHAPES = [(1, 1, 16), (7, 31, 48), (127, 129, 112), (128, 128, 128), (129, 127, 144), (131, 144, 656)]
"""(M, N, K): 1, primes, around the tile, more steps than the ring holds. TMA wants rows of multiples of 16 bytes."""
node = helper.make_node


@functools.cache
def built(types: Types) -> tuple[CudaKernel, ...]:
    """All tiles of the main pair, the smallest for the others."""
    of = ProductGroup("_".join(types), product(types, TRANS, outputs="PQ"), ROLES)
    made = [k for k in wgmma_versions(of) if not k.version.endswith(LONG)]
    return tuple(made if types == MAIN else made[-1:])


def launch(
    k: CudaKernel, versions: Sequence[CudaKernel], types: Types, shape: tuple[int, int, int], reverse: bool
) -> Counters:
    """One of the versions, which are compiled together."""
    return run(versions, types, TRANS, shape, lambda fits: k, reverse, arch=ARCH, limit=SHARED)[1]


@pytest.mark.parametrize("types", SIGNS)
def test_every_pair_of_signs_and_tail(types: Types) -> None:
    every = [k for t in SIGNS for k in built(t)]
    names = ["wgmma_128x256x128_4_wide", "wgmma_128x256x128_4", "wgmma_128x128x128_4_wide", "wgmma_128x128x128_4"]
    assert [k.version for k in built(MAIN)] == names
    used = set()
    for shape in SHAPES:
        env = dict(zip("MNK", shape, strict=True))
        for k in (k for k in built(types) if k.fits(env, SHARED, MULTIPROCESSORS, ARCH)):
            used.add(k.version)
            for reverse in (False, True):
                count = launch(k, every, types, shape, reverse)
                assert count.shared_conflicts == count.mma == 0 and count.wgmma > 0, (k.version, shape)
    assert used == {k.version for k in built(types)}


def test_only_where_the_instruction_and_its_copies_allow_it() -> None:
    k, env = built(MAIN)[-1], {"M": 64, "N": 64, "K": 64}
    assert k.fits(env, SHARED, MULTIPROCESSORS, ARCH) and not k.fits(env, SHARED, MULTIPROCESSORS)
    for other in ({"K": 72}, {"K": 0}):
        assert not k.fits({**env, **other}, SHARED, MULTIPROCESSORS, ARCH)
    assert [m.dtype for m in k.maps] == list(MAIN)
    for trans, side in (((False, False), "column"), ((True, True), "row")):
        of = ProductGroup("bytes", product(MAIN, trans), ROLES)
        assert wgmma_versions(of) == []
        assert without_wgmma(of) == f"its {side} operand is not contiguous along the reduction"
    zero = ProductGroup("bytes", product(MAIN, TRANS, zero=True), ROLES)
    assert wgmma_versions(zero) == [] and without_wgmma(zero) is None, "int32 is not what tensor cores multiply"


WGMMA = "pd_wgmma_m64n128k32_u8s8("
BUGS = {
    "signs swapped": (WGMMA, "pd_wgmma_m64n128k32_s8u8("),
    "rows signed": (WGMMA, "pd_wgmma_m64n128k32_s8("),
    "columns unsigned": (WGMMA, "pd_wgmma_m64n128k32_u8("),
    "stride of the descriptors": ("pd_desc_k(", "(uint64_t)96 << 32 ^ pd_desc_k("),
    "wait too weak": ("pd_wgmma_wait<1>();", "pd_wgmma_wait<2>();"),
    "no final wait": ("      pd_wgmma_wait<0>();\n", ""),
    "no fence before the group": ("pd_wgmma_fence();", ""),
    "a step of 16 bits": ("32*f_k", "16*f_k"),
}


@pytest.fixture(scope="module")
def broken() -> tuple[CudaKernel, ...]:
    return with_bugs(built(MAIN)[-1], BUGS)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, broken: tuple[CudaKernel, ...]) -> None:
    caught = 0
    for reverse in (False, True):
        try:
            launch(broken[list(BUGS).index(bug)], broken, MAIN, (131, 80, 656), reverse)
        except (AssertionError, DeviceError):
            caught += 1
    assert caught


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compiles_without_spills_and_stays_asynchronous() -> None:
    for k in built(MAIN)[::2]:
        made = compile_cuda(k.text, ARCH)
        use = made.kernels[k.name]
        assert use.spill_stores == use.spill_loads == use.stack == 0 and "C75" not in made.log, "serialized wgmma"


# -- constants -------------------------------------------------------------------------------------------------------


def weights(dtype: str, k: int, n: int) -> np.ndarray[Any, Any]:
    r = np.random.default_rng(k + n)
    if dtype == "float32":
        return r.standard_normal((k, n)).astype(np.float32)
    return r.integers(-128, 128, (k, n), np.int8)


def test_constant_bytes_are_turned() -> None:
    """Rows of [N, K] for wgmma, ldmatrix and dp4a; only where that allows copies of 16 bytes."""
    w = weights("int8", 272, 144)
    plan = plan_of([node("MatMulInteger", ["x", "w"], ["y"])], {"x": ("M", 272)}, ["y"], {"w": w}, "uint8")
    (p,) = placed(plan, ARCH)
    ((name, pack),) = p.lowered.packs.items()
    assert pack.shape == (144, 272, 1) and name in p.lowered.buffers.values()
    r = np.random.default_rng(0)
    words = {"gemv_2_k16": 1, "imma_64": 70, "wgmma_128x128": 70}
    some = replace(p, versions=tuple(next(k for k in p.versions if k.version.startswith(w)) for w in words))
    for (word, m), k in zip(words.items(), some.versions, strict=True):
        x = r.integers(0, 256, (m, 272), np.uint8)

        got, (count,) = run_plan(plan, {"x": x}, lambda p, env, k=k: k, (some,))  # type: ignore[misc]
        assert (got["y"] == x.astype(np.int32) @ w.astype(np.int32)).all(), word
        assert count.shared_conflicts == count.ldmatrix_conflicts == 0
    for k in (20, 264):
        uneven = plan_of([node("MatMulInteger", ["x", "w"], ["y"])], {"x": ("M", k)}, ["y"],
                         {"w": weights("int8", k, 144)}, "uint8")  # fmt: skip
        assert not placed(uneven, ARCH)[0].lowered.packs


def test_products_that_stay_with_warps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaContractKernel, "versions", lambda self: ())  # what is said does not need them
    plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", "K"), "w": ("K", "N")}, ["y"])
    said = ["y: no wgmma: its column operand is not contiguous along the reduction"]
    for arch, tf32, notes in ((ARCH, True, said), (ARCH, False, []), ("sm_80", True, [])):
        builder = CudaBuilder(plan, arch, tf32)
        builder.place(plan.groups[0])
        assert builder.notes == notes


H200 = hardware.load("h200")


def test_estimates_choose_among_them() -> None:
    """Many rows take warpgroups, few rows their own versions."""
    w = weights("int8", 512, 512)
    m = quantized_model([node("MatMulInteger", ["x", "w"], ["y"])], {"x": ("int8", ["M", 512])}, ["y"], w=w)
    (one,) = estimated(plan_program(m, target="cuda:sm_90a"), H200).launches

    def name(rows: int) -> str:
        return choose(one.versions, {"nth": H200.multiprocessors, "M": rows}, H200)[0].name

    assert name(1).startswith("gemv_2_k") and name(132 * 128).startswith("wgmma_128x256x128")


def test_the_host_program_makes_maps_that_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights are turned, operands rounded to the nearest tf32 and not truncated."""
    monkeypatch.setenv("POLYDYN_LIBCUDA", "emulated")
    w = weights("float32", 512, 256)
    m = quantized_model([node("MatMul", ["x", "w"], ["y"])], {"x": ("float32", ["M", 512])}, ["y"], w=w)
    program: Any = polydyn.compile(m, target="cuda:emulated", options=Options(tf32=True))
    x = np.random.default_rng(0).standard_normal((509, 512)).astype(np.float32)
    (launched,) = program.explain(M=509).launches
    assert "wgmma_tf32" in launched.kernel
    vx, vw = (to_tf32_even(a).view(np.float32).astype(np.float64) for a in (x, w))
    want = vx @ vw
    got = program.run({"x": x})["y"]
    assert np.abs(got - want).max() < 3e-6 * np.abs(want).max()
    cut = [(a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64) for a in (x, w)]
    assert np.abs(cut[0] @ cut[1] - want).max() > 1e-4 * np.abs(want).max(), "the test would see it"
