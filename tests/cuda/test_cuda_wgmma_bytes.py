"""Products of bytes by wgmma, which equal numpy bit by bit, and constants that are transposed for warpgroups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.cuda.emit import LONG_SUFFIX
from polydyn.codegen.cuda.few_rows import gemv_versions
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.product import TiledProduct
from polydyn.codegen.cuda.versions import IMMA_TILES, CudaContractKernel
from polydyn.codegen.cuda.wgmma import wgmma_versions
from polydyn.codegen.cuda.wgmma_operands import wgmma_refusal
from polydyn.codegen.kernel import Kernel
from polydyn.compiler import plan_program
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu import hardware
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.emulator import Counters
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.place import PlacedGroup
from polydyn.lowering.place_cuda import CudaBuilder
from polydyn.program.estimates import estimated
from polydyn.schedules.errors import Declined
from polydyn.testing.choice import choose
from tests.support.cuda_bytes import ROLES, Types, product, run
from tests.support.cuda_groups import ARCH, MULTIPROCESSORS, SHARED_BYTES, plan_of, with_bugs
from tests.support.cuda_groups import run as run_plan
from tests.support.quantized import quantized_model

TRANS = (False, True)
MAIN: Types = ("uint8", "int8")
SIGNS: tuple[Types, ...] = (MAIN, ("int8", "int8"), ("int8", "uint8"), ("uint8", "uint8"))
SHAPES = [(1, 1, 16), (7, 31, 48), (127, 129, 112), (128, 128, 128), (129, 127, 144), (131, 144, 656)]
"""(M, N, K): 1, primes, around the tile, more steps than the ring holds. TMA requires rows of multiples of 16 bytes."""
node = helper.make_node


@functools.cache
def built(types: Types) -> tuple[Kernel, ...]:
    """Build two tiles of the main pair, one with 16-byte stores; a smaller tile for the others."""
    of = ProductGroup("_".join(types), product(types, TRANS, outputs="P"), ROLES)
    made = [k for k in wgmma_versions(of) if not k.version.endswith(LONG_SUFFIX)]
    names = [f"wgmma_{t}x128_4{wide}" for t in ("128x256", "128x128", "64x128", "64x64") for wide in ("_wide", "")]
    names += ["wgmma_128x128x128_5_turns_boxes", "wgmma_128x256x128_4_cluster_i_wide",
              "wgmma_128x128x128_5_turns_cluster_i_boxes"]  # fmt: skip
    assert [k.version for k in made] == names
    return tuple(made[1:3] if types == MAIN else made[3:4])


def launch(k: Kernel, versions: Sequence[Kernel], types: Types, shape: tuple[int, int, int], reverse: bool) -> Counters:
    """Launch one of the versions, which are compiled together."""
    return run(versions, types, TRANS, shape, lambda fits: k, reverse, arch=ARCH, limit=SHARED_BYTES)[1]


@pytest.mark.parametrize("types", SIGNS)
def test_every_pair_of_signs_and_tail(types: Types) -> None:
    every = [k for t in SIGNS for k in built(t)]
    used = set()
    for shape in SHAPES:
        env = dict(zip("MNK", shape, strict=True))
        for k in (k for k in built(types) if k.fits(env, SHARED_BYTES, MULTIPROCESSORS, ARCH)):
            used.add(k.version)
            for reverse in (False, True):
                count = launch(k, every, types, shape, reverse)
                assert count.shared_conflicts == count.mma == 0 and count.wgmma > 0, (k.version, shape)
    assert used == {k.version for k in built(types)}


def test_only_where_the_instruction_and_its_copies_allow_it() -> None:
    k, env = built(MAIN)[0], {"M": 64, "N": 64, "K": 64}
    assert k.fits(env, SHARED_BYTES, MULTIPROCESSORS, ARCH) and not k.fits(env, SHARED_BYTES, MULTIPROCESSORS)
    for other in ({"K": 72}, {"K": 0}):
        assert not k.fits({**env, **other}, SHARED_BYTES, MULTIPROCESSORS, ARCH)
    assert [m.dtype for m in k.device.maps] == list(MAIN)
    for trans, side in (((False, False), "column"), ((True, True), "row")):
        of = ProductGroup("bytes", product(MAIN, trans), ROLES)
        assert wgmma_versions(of) == []
        assert wgmma_refusal(of) == Declined(f"its {side} operand is not contiguous along the reduction")
    zero = ProductGroup("bytes", product(MAIN, TRANS, zero=True), ROLES)
    assert wgmma_versions(zero) == [] and wgmma_refusal(zero) == Declined("it multiplies int32")


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
def broken() -> tuple[Kernel, ...]:
    return with_bugs(built(MAIN)[-1], BUGS)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, broken: tuple[Kernel, ...]) -> None:
    caught = 0
    for reverse in (False, True):
        try:
            launch(broken[list(BUGS).index(bug)], broken, MAIN, (131, 80, 656), reverse)
        except (AssertionError, DeviceError):
            caught += 1
    assert caught


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compiles_without_spills_and_stays_asynchronous() -> None:
    k = wgmma_versions(ProductGroup("quantized", product(MAIN, TRANS, outputs="Q"), ROLES))[0]
    made = compile_cuda(k.text, ARCH)
    use = made.kernels[k.name]
    assert use.spill_stores == use.spill_loads == use.stack == 0 and "C75" not in made.log, "serialized wgmma"


# -- constants -------------------------------------------------------------------------------------------------------


def weights(k: int, n: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(k + n).integers(-128, 128, (k, n), np.int8)


def lowered(k: int, n: int) -> tuple[FusionPlan, ContractGroup]:
    """Lower bytes times constant bytes."""
    w = {"w": weights(k, n)}
    plan = plan_of([node("MatMulInteger", ["x", "w"], ["y"])], {"x": ("M", k)}, ["y"], w, "uint8")
    form = lower_contract(plan, plan.groups[0], 0)
    assert isinstance(form, ContractGroup)
    return plan, form


def test_constant_floats_are_turned() -> None:
    """They become rows of [N, K] if they may be rounded, and if that allows copies of 16 bytes."""
    for k, tf32, shapes in ((36, True, [(20, 36, 1)]), (36, False, []), (35, True, [])):
        plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", k)}, ["y"], {"w": np.ones((k, 20), np.float32)})
        form = lower_contract(plan, plan.groups[0], 0, along_k=CudaBuilder(plan, ARCH, tf32).along_k)
        assert isinstance(form, ContractGroup)
        assert [x.shape for x in form.lowered.packs.values()] == shapes


def test_constant_bytes_of_models() -> None:
    plan, form = lowered(272, 144)
    of = ProductGroup("turned", form.lowered.group, form.roles)
    assert gemv_versions(of)[0].version.startswith("gemv_2_k16")
    kernels = tuple(k for k in wgmma_versions(of) if "128x128" in k.version)
    p = PlacedGroup(plan.groups[0], form.lowered, "", kernels)
    x = np.random.default_rng(0).integers(0, 256, (70, 272), np.uint8)
    got, _ = run_plan(plan, {"x": x}, lambda p, env: p.kernels[0], (p,), compile_all=False)
    assert (got["y"] == x.astype(np.int32) @ plan.graph.constants["w"].astype(np.int32)).all()


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_steps_that_the_compiler_can_count_do_not_spill() -> None:
    """Unrolled, eight steps of warps' own instructions kept six registers in memory."""
    _, form = lowered(512, 512)
    of = ProductGroup("counted", form.lowered.group, form.roles)
    k = TiledProduct(of, IMMA_TILES[0], 16, True).build()[0]
    use = compile_cuda(k.text, "sm_80").kernels[k.name]
    assert use.spill_stores == use.spill_loads == use.stack == 0


def test_products_that_stay_with_warps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaContractKernel, "versions", lambda self: ())  # the reasons do not depend on them
    plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", "K"), "w": ("K", "N")}, ["y"])
    column = "its column operand is not contiguous along the reduction"
    other = "the target is sm_80, not sm_90a"
    for arch, tf32, why in ((ARCH, True, column), (ARCH, False, "it multiplies float32"), ("sm_80", True, other)):
        (p,) = CudaBuilder(plan, arch, tf32).place(plan.groups[0])
        assert ("warpgroups", why) in p.declined


H200 = hardware.load("h200")


def test_estimates_choose_among_them() -> None:
    """Many rows take warpgroups, small row counts other versions."""
    w = weights(512, 512)
    m = quantized_model([node("MatMulInteger", ["x", "w"], ["y"])], {"x": ("int8", ["M", 512])}, ["y"], w=w)
    (one,) = estimated(plan_program(m, target="cuda:sm_90a"), H200).launches

    def name(rows: int) -> str:
        return choose(one, {"nth": H200.multiprocessors, "M": rows}, H200).name

    assert name(1).startswith("gemv_2_k") and name(132 * 128).startswith("wgmma_128x")
