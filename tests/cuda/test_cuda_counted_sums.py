"""Split-K with an arrival counter: the last block adds all sums; on the strict emulation."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest

from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from tests.cuda.test_cuda_cluster_sums import Made, right
from tests.cuda.test_cuda_codegen import gemm, node
from tests.support.cuda_groups import placed, plan_of, with_bugs

GEMV = "gemv_2_n8_counted_8"
FEW_BUGS = {
    "all blocks finish": ("if (come == 1)", "if (come >= 0)"),
    "one counter for all columns": ("counters + (bid/8)", "counters + (bid/64)"),
    "a block too few": ("(bid/8), ((int32_t)8LL)", "(bid/8), ((int32_t)7LL)"),
    "sums where another block's are": ("workspace + (64*bid + tid)", "workspace + (64*(bid/2) + tid)"),
    "another block's sums": (" + 448)", " + 384)"),
    "another block's steps": ("64*rank", "64*(rank / 2)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def few() -> Made:
    """Build GEMV kernels by version, and with planted bugs; all in one module."""
    plan = gemm("float16")
    (p,) = placed(plan, "sm_80")
    found = {k.version: k for k in p.kernels if "gemv" in k.version and "counted" in k.version}
    found |= dict(zip(FEW_BUGS, with_bugs(found[GEMV], FEW_BUGS), strict=True))
    return plan, replace(p, kernels=tuple(found.values())), found


@pytest.mark.parametrize("shape", [(1, 32, 40), (2, 72, 1100), (7, 8, 0), (8, 40, 131)], ids=str)
def test_few_rows(shape: tuple[int, int, int], few: Made) -> None:
    """Blocks without steps, with some, with several rounds."""
    assert right(few, f"gemv_{2 if shape[0] <= 2 else 8}_n8_counted_8", shape)


@pytest.mark.parametrize("bug", FEW_BUGS)
def test_planted_bugs_of_few_rows_are_caught(bug: str, few: Made) -> None:
    with contextlib.suppress(DeviceError):
        assert not right(few, bug, (2, 72, 1100))


TILES = ("counted_8_mma_16x64x64_4_16_16_wide", "counted_8_mma_64x64x32_4_16_16_wide")
TILE_BUGS = {
    "all blocks finish": ("if (come == 1)", "if (come >= 0)"),
    "one counter for all tiles": ("counters + (bid/8)", "counters + (bid/1024)"),
    "a block too few": ("(bid/8), ((int32_t)8LL)", "(bid/8), ((int32_t)7LL)"),
    "sums where another block's are": ("(16384*bid + ", "(16384*(bid/2) + "),
    "sums where another warp's are": ("+ 4096*warp) + (1024*row_half)", "+ 2048*warp) + (1024*row_half)"),
    "another block's steps": ("32*rank", "32*(rank / 2)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiles() -> Made:
    """Build mma.sync tiles by version, and with planted bugs; in one module."""
    plan = gemm("float16")
    (p,) = placed(plan, "sm_80")
    found = {k.version: k for k in p.kernels if k.version in TILES}
    found |= dict(zip(TILE_BUGS, with_bugs(found[TILES[1]], TILE_BUGS), strict=True))
    return plan, replace(p, kernels=tuple(found.values())), found


@pytest.mark.parametrize("version", TILES)
def test_tiles(version: str, tiles: Made) -> None:
    """Blocks without steps, with some, with more than the ring has slots; several tiles along both sides."""
    for shape in ((70, 136, 1320), (3, 8, 8)):
        assert right(tiles, version, shape)


@pytest.mark.parametrize("bug", TILE_BUGS)
def test_planted_bugs_of_tiles_are_caught(bug: str, tiles: Made) -> None:
    with contextlib.suppress(DeviceError):
        assert not right(tiles, bug, (40, 136, 520))


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compiles_without_spills(few: Made, tiles: Made) -> None:
    for k in (few[2][GEMV], tiles[2][TILES[1]]):
        use = compile_cuda(k.text, "sm_80").kernels[k.name]
        assert use.spill_stores == use.spill_loads == 0


@pytest.mark.parametrize(("n", "blocks"), [(2048, 4), (3072, 0)])
def test_where_columns_make_few_blocks(n: int, blocks: int) -> None:
    plan = plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", "K"), "w": ("K", n)}, ["y"], dtype="float16")
    (p,) = placed(plan, "sm_80")
    found = {k.version for k in p.kernels if k.version.startswith("gemv") and "counted" in k.version}
    assert found == ({f"gemv_{rows}_n8_counted_{blocks}" for rows in (2, 8)} if blocks else set())
