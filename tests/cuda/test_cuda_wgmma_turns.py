"""Products of a persistent grid with ping-pong consumers, on the strict emulation against numpy."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from polydyn.codegen.cuda.wgmma import BLOCKS
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.index import Index
from tests.cuda.test_cuda_wgmma import case, hopper, node, product, right, wgmma_only
from tests.support.cuda_groups import MULTIPROCESSORS, SHARED_BYTES, params_of, plan_of, with_bugs

VERSION = "wgmma_128x128x64_5_turns_boxes"
TILES = (300, 200)
"""Rows and columns of six tiles with tails."""


def of_blocks(k: Kernel, blocks: int) -> Kernel:
    """Return the kernel as a device with ``blocks`` SMs launches it."""
    return replace(k, launch={BLOCKS: Index.of(blocks)})


@pytest.fixture(scope="module")
def built() -> tuple[FusionPlan, PlacedGroup]:
    plan = product("float16", False)
    k = hopper(wgmma_only(plan), VERSION)
    return plan, replace(wgmma_only(plan), kernels=(k, *with_bugs(k, BUGS)))


@pytest.mark.parametrize(("blocks", "k"), [(1, 72), (2, 456), (4, 8), (5, 712)])
def test_blocks_go_from_tile_to_tile(blocks: int, k: int, built: tuple[FusionPlan, PlacedGroup]) -> None:
    """Even and odd numbers of tiles for a block; fewer steps than the ring has slots, and more."""
    plan, p = built
    feeds, want = case("float16", False, *TILES, k)
    assert right(plan, of_blocks(p.kernels[0], blocks), p, feeds, want)


@pytest.mark.parametrize(("steps", "turns"), [(128, False), (136, True)])
def test_few_steps_have_no_tiles_in_turns(steps: int, turns: bool) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    plan = plan_of(nodes, {"x": ("M", steps), "w": (steps, "N")}, ["y"], dtype="float16")
    assert any("_turns" in k.version for k in wgmma_only(plan).kernels) == turns


def test_columns_that_192_divide() -> None:
    """Columns that are contiguous along the reduction; batches are tiles too."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 192, 136)).astype(np.float16)
    nodes = [node("Transpose", ["w"], ["t"], perm=[0, 2, 1]), node("MatMul", ["x", "t"], ["y"])]
    plan = plan_of(nodes, {"x": (2, "M", 136), "w": (2, 192, 136)}, ["y"], dtype="float16")
    x = rng.standard_normal((2, 131, 136)).astype(np.float16)
    want = x.astype(np.float64) @ w.astype(np.float64).swapaxes(1, 2)
    p = wgmma_only(plan)
    k = hopper(p, "wgmma_128x192x64_3_turns_boxes")
    assert [len(m.dims) for m in k.device.maps] == [3, 3, 3]
    assert right(plan, of_blocks(k, 3), replace(p, kernels=(k,)), {"x": x, "w": w}, want)


def test_results_of_four_bytes() -> None:
    """A box is a slab of the sums, and takes its whole buffer."""
    plan = product("float32", True)
    p = wgmma_only(plan)
    k = hopper(p, "wgmma_tf32_128x128x32_5_turns_boxes")
    feeds, want = case("float32", True, *TILES, 36)
    assert k.device.maps[2].box == (32, 16) and k.device.maps[2].dtype == "float32"
    assert right(plan, of_blocks(k, 2), replace(p, kernels=(k,)), feeds, want)


def test_what_lanes_store() -> None:
    """Results next to other epilogues' sums, and results that no tensor map reaches."""
    two = plan_of([node("MatMul", ["x", "w"], ["p"]), node("Relu", ["p"], ["y"]), node("Neg", ["p"], ["z"])],
                  {"x": ("M", "K"), "w": ("K", "N")}, ["y", "z"], dtype="float16")  # fmt: skip
    odd = plan_of([node("Transpose", ["w"], ["t"]), node("MatMul", ["x", "t"], ["y"])],
                  {"x": ("M", 192), "w": (77, 192)}, ["y"], dtype="float16")  # fmt: skip
    for plan, version in ((two, "wgmma_128x128x64_5_turns_wide"), (odd, "wgmma_128x128x64_5_turns")):
        assert version in [k.version for k in wgmma_only(plan).kernels]


def test_only_for_more_tiles_than_multiprocessors(built: tuple[FusionPlan, PlacedGroup]) -> None:
    _, p = built
    k = p.kernels[0]
    for rows, wanted in ((128 * 66, False), (128 * 66 + 1, True)):
        dims = params_of(p, {"M": rows, "N": 256, "K": 64})
        assert k.fits(dims, SHARED_BYTES, MULTIPROCESSORS, "sm_90a") == wanted
        assert k.tasks.evaluate(k.values(dims, MULTIPROCESSORS)) == MULTIPROCESSORS
    large = params_of(p, dict.fromkeys("MNK", 16384))
    assert k.fits(large, SHARED_BYTES, MULTIPROCESSORS, "sm_90a"), "steps of all tiles are more than 32 bits count"


RELEASE = "            pd_mbar_arrive((uint64_t *)(smem + 229424"
TURN = "pd_mbar_{}((uint64_t *)(smem + 229472"
FENCE = "pd_fence_proxy_async();\n"
STORE_WAIT = "pd_tma_store_wait_read<0>();\n"
SWIZZLE, LANE_ROW = "pd_swizzled<64, 8, 8, 2>((int)(", "(-3)*(lane/16) + 6*(lane/32) + 4*(lane/4) + (-6)*(lane/8)"
BUGS = {
    "begins before the other has issued all": (TURN.format("wait"), "(void)((uint64_t *)(smem + 229472"),
    "the other may never begin": (TURN.format("arrive"), "(void)((uint64_t *)(smem + 229472"),
    "slots begin again with each tile": ("const int32_t before = (round", "const int32_t before = 0*(round"),
    "last slot not released": (f"if ((tid + (-128)*(tid/128)) == 0) {{\n{RELEASE}", f"if (0) {{\n{RELEASE}"),
    "last slot released while it is read": ("          pd_wgmma_wait<0>();\n", ""),
    "a tile left out": ("block = (blocks*round + worker)", "block = (blocks*round + worker/2)"),
    "both have all tiles": ("== ((tid/128) + (-1))", ">= 0"),
    "rows of the other instruction": ("(8192*f_i + 32*f_k)", "(8192*(1 - f_i) + 32*f_k)"),
    "sums of the other instruction": ("acc + (64*f_i)", "acc + (64*(1 - f_i))"),
    "staged in the other's place": ("2048*e_g + 8192*warp", "2048*e_g + 8192*(warp^4)"),
    "results not fenced": (FENCE, ""),
    "sent before other lanes are done": (f"{FENCE}{' ' * 14}pd_syncwarp();", FENCE),
    "staged where boxes are not read yet": (f"{' ' * 14}{STORE_WAIT}", ""),
    "memory left before boxes are read": (f"\n{' ' * 6}{STORE_WAIT}", "\n"),
    "results where others still read sums": (f"}}\n{' ' * 16}pd_syncwarp();\n", "}\n"),
    "rows of a box as they were staged": (f"{SWIZZLE}{LANE_ROW}", f"{SWIZZLE}(lane/4)"),
    "the first box twice": ("(1024*e_p + 2048*warp", "(2048*warp"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, built: tuple[FusionPlan, PlacedGroup]) -> None:
    plan, p = built
    feeds, want = case("float16", False, *TILES, 456)
    k = p.kernels[1 + list(BUGS).index(bug)]
    with contextlib.suppress(DeviceError):
        assert not right(plan, of_blocks(k, 2), p, feeds, want)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compiles_without_spills_and_stays_asynchronous(built: tuple[FusionPlan, PlacedGroup]) -> None:
    k = built[1].kernels[0]
    use = compile_cuda(k.text, "sm_90a")
    assert use.kernels[k.name].spill_stores == use.kernels[k.name].spill_loads == 0 and "C75" not in use.log
