"""Products of two-block clusters, in which each block loads half of an operand for both, on the strict emulation."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from polydyn.codegen.cuda import wgmma
from polydyn.codegen.cuda.wgmma import BLOCKS, WgmmaTile
from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.index import Index
from tests.cuda.test_cuda_wgmma import case, hopper, product, right, wgmma_only
from tests.support.cuda_groups import SHARED_BYTES, params_of, with_bugs

PLAIN, PINGPONG = "wgmma_128x256x64_4_cluster_i_wide", "wgmma_128x128x64_5_turns_cluster_i_boxes"
THREE = (300, 200)
"""Rows and columns: three tiles of rows, so one block of a cluster has none."""


def of_blocks(k: Kernel, blocks: int) -> Kernel:
    """Return the kernel as a device with ``blocks`` SMs launches it."""
    return replace(k, launch={BLOCKS: Index.of(blocks)}) if k.launch else k


@pytest.fixture(scope="module")
def built() -> tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]:
    """Return the kernels by version, and kernels with planted bugs by bug; all in one module."""
    plan = product("float16", False)
    p = wgmma_only(plan)
    alone, turns = hopper(p, PLAIN), hopper(p, PINGPONG)
    kernels = (alone, turns, *with_bugs(turns, BUGS))
    return plan, replace(p, kernels=kernels), dict(zip((PLAIN, PINGPONG, *BUGS), kernels, strict=True))


@pytest.mark.parametrize(
    ("version", "blocks", "shape"),
    [(PLAIN, 0, (129, 264, 456)), (PLAIN, 0, (1, 8, 8)), (PINGPONG, 2, (*THREE, 456)), (PINGPONG, 4, (*THREE, 72))],
)
def test_both_have_what_each_brings_half_of(
    version: str, blocks: int, shape: tuple[int, int, int], built: tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]
) -> None:
    """Whole and surplus tiles; fewer steps than the ring has slots, and more.

    Columns are contiguous along themselves.
    """
    plan, p, kernels = built
    feeds, want = case("float16", False, *shape)
    assert right(plan, of_blocks(kernels[version], blocks), p, feeds, want)


def test_neighbours_along_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns along the reduction: half of an operand's rows, or of its columns, is half of the lines of a box."""
    monkeypatch.setattr(wgmma, "TILES", tuple(WgmmaTile(128, 4, cluster=axis) for axis in "ij"))
    plan = product("float16", True, True)
    p = wgmma_only(plan)
    assert [[m.box[1] for m in k.device.maps] for k in p.kernels] == [[128, 64], [64, 128]]
    feeds, want = case("float16", True, 131, 136, 328, 2)
    for k in p.kernels:
        assert k.device.cluster == 2 and right(plan, k, p, feeds, want)


def test_where_clusters_are_offered(built: tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]) -> None:
    """Blocks are whole clusters, on devices that hold one; tiles are counted including surplus tiles of a pair."""
    _, p, kernels = built
    k = kernels[PINGPONG]
    assert k.device.features == ("warpgroups", "tma_stores", "clusters")
    cases = ((132, 128 * 65, 0), (132, 128 * 66 + 1, 132), (131, 128 * 66, 130), (1, 999, 0))
    for multiprocessors, rows, blocks in cases:
        dims = params_of(p, {"M": rows, "N": 256, "K": 64})
        assert k.fits(dims, SHARED_BYTES, multiprocessors, "sm_90a") == (blocks > 0)
        assert not blocks or k.tasks.evaluate(k.values(dims, multiprocessors)) == blocks
    dims = params_of(p, {"M": 257, "N": 257, "K": 64})
    assert kernels[PLAIN].tasks.evaluate(kernels[PLAIN].values(dims, 1)) == 2 * 2 * 2


def test_different_boxes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a cluster along rows are not shared."""
    monkeypatch.setattr(wgmma._Version, "_sharers", lambda v, which: 2 if v.size.cluster and which == 0 else 1)
    with pytest.raises(CodegenError, match="blocks of a cluster copy different boxes of"):
        wgmma_only(product("float16", False))


RELEASE, TOLD = "pd_mbar_arrive_at((uint64_t *)(smem + 229424", "(tid + (-128)*(tid/128)) < 2"
DONE = "pd_cluster_arrive();\n"
BUGS = {
    "the other block is not told": (TOLD, "(tid + (-128)*(tid/128)) < 1"),
    "told twice": (f"{TOLD}) {{\n", f"{TOLD}) {{\n{RELEASE} + (before % 5) * 8), tid % 128);\n"),
    "a slot is free when one block has read it": ("((int32_t)2));", "((int32_t)1));"),
    "the other's half is not waited for": ("((int32_t)32768)", "((int32_t)24576)"),
    "a half for this block only": ("((int32_t)3));", "((int32_t)(1 << c_i)));"),
    "halves in each other's place": ("2048*c_i", "2048*(1 - c_i)"),
    "the same half twice": ("(64*b_k + 32*c_i)", "(64*b_k)"),
    "no barrier at the start": ("pd_cluster_start()", "pd_syncthreads()"),
    "nobody waits at the end": ("pd_cluster_wait();", ""),
    "a consumer does not say that it is done": (f"    {DONE}    if (lane", "    if (lane", ),
    "a surplus block leaves": ("for (int32_t b_k = 0;", "if (256*b_i + 128*c_i < n0) for (int32_t b_k = 0;"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, built: tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]) -> None:
    plan, p, kernels = built
    feeds, want = case("float16", False, *THREE, 456)
    with contextlib.suppress(DeviceError):
        assert not right(plan, of_blocks(kernels[bug], 2), p, feeds, want)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compiles_without_spills_and_stays_asynchronous(
    built: tuple[FusionPlan, PlacedGroup, dict[str, Kernel]],
) -> None:
    k = built[2][PINGPONG]
    use = compile_cuda(k.text, "sm_90a")
    assert use.kernels[k.name].spill_stores == use.kernels[k.name].spill_loads == 0 and "C75" not in use.log
