"""Split-K over the blocks of a cluster, whose sums are added in one launch, on the strict emulation."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from polydyn.codegen.kernel import Kernel
from polydyn.fusion.plan import FusionPlan
from polydyn.gpu.compiler import compile_cuda, find_nvcc
from polydyn.gpu.errors import DeviceError
from polydyn.lowering.place import PlacedGroup
from tests.cuda import test_cuda_wgmma as wgmma
from tests.cuda.test_cuda_codegen import close, gemm, gemm_case, node, params
from tests.support.cuda_groups import SHARED_BYTES, placed, plan_of, run, with_bugs
from tests.support.marks import slow

Made = tuple[FusionPlan, PlacedGroup, dict[str, Kernel]]
CLUSTER_BARRIER = "pd_cluster_arrive();\n  pd_cluster_wait();\n"


def right(case: Made, name: str, shape: tuple[int, int, int]) -> bool:
    """Return whether a kernel is right, in both orders of warps with equal bits, and without bank conflicts."""
    plan, p, kernels = case
    k = kernels[name]
    feeds, want = gemm_case(*shape, np.float16)
    assert k.fits(params(p, shape), SHARED_BYTES, 132, "sm_90a") and not k.after
    results = [run(plan, feeds, lambda *_: k, (p,), reverse) for reverse in (False, True)]
    got = [x["y"] for x, _ in results]
    return close(got[0], want, 4e-3) and bool((got[0] == got[1]).all()) and results[0][1][0].shared_conflicts == 0


FEW_BUGS = {
    "no barrier behind the sums": (f"{CLUSTER_BARRIER}  if (tid < 8)", "pd_syncthreads();\n  if (tid < 8)"),
    "a block leaves early": (f"  {CLUSTER_BARRIER}  }}\n  }}\n}}\nPD_EXPORT", "  }\n  }\n}\nPD_EXPORT"),
    "another block's sums": ("((int32_t)3LL))", "((int32_t)2LL))"),
    "another block's results": ("8*rank + tid", "8*(rank / 2) + tid"),
    "another block's steps": ("64*rank", "64*(rank / 2)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def few() -> Made:
    """Build GEMV kernels of clusters by version, and with planted bugs; all in one module."""
    plan = gemm("float16")
    (p,) = placed(plan, "sm_90a")
    found = {k.version: k for k in p.kernels if k.version.startswith("gemv") and k.device.cluster > 1}
    found |= dict(zip(FEW_BUGS, with_bugs(found["gemv_2_n8_cluster_8"], FEW_BUGS), strict=True))
    return plan, replace(p, kernels=tuple(found.values())), found


@pytest.mark.parametrize("shape", [(1, 32, 40), (2, 72, 1100), (7, 8, 0), (8, 40, 131)], ids=str)
def test_few_rows(shape: tuple[int, int, int], few: Made) -> None:
    """Blocks without steps, with some, with several rounds."""
    assert right(few, f"gemv_{2 if shape[0] <= 2 else 8}_n8_cluster_8", shape)


@pytest.mark.parametrize("bug", FEW_BUGS)
def test_planted_bugs_of_few_rows_are_caught(bug: str, few: Made) -> None:
    with contextlib.suppress(DeviceError):
        assert not right(few, bug, (2, 32, 1100))


PARTS = "wgmma_128x128x64_4_parts_4_wide"
PART_BUGS = {
    "no barrier behind the sums": ("      pd_cluster_arrive();\n      pd_cluster_wait();\n", ""),
    "the producer does not meet": ("    pd_cluster_arrive();\n    pd_cluster_wait();\n  } else", "  } else"),
    "a block leaves early": (f"  {CLUSTER_BARRIER}  }}\n  }}\n}}\nPD_EXPORT", "  }\n  }\n}\nPD_EXPORT"),
    "another block's sums": (", ((int32_t)3));", ", ((int32_t)2));"),
    "all blocks have the same steps": ("256*b_k + 64*rank", "256*b_k"),
    "another block's slab": ("2048*rank + ", "2048*(rank / 2) + "),
    "staged over what is multiplied": ("pd_bar_sync(((int32_t)1), ((int32_t)256));", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def products() -> Made:
    """Build split-K products of warpgroups by version, and with planted bugs; in one module."""
    plan = wgmma.product("float16", False)
    (p,) = placed(plan, "sm_90a")
    found = {k.version: k for k in p.kernels if "_parts_" in k.version}
    found |= dict(zip(PART_BUGS, with_bugs(found[PARTS], PART_BUGS), strict=True))
    return plan, replace(p, kernels=tuple(found.values())), found


def right_product(case: Made, name: str, shape: tuple[int, int, int], trans_b: bool = False) -> bool:
    plan, p, kernels = case
    return wgmma.right(plan, kernels[name], p, *wgmma.case("float16", trans_b, *shape))


@pytest.mark.parametrize("version", [slow(PARTS), "wgmma_64x128x64_4_parts_4_wide", "wgmma_64x64x64_4_parts_8_wide"])
def test_products(version: str, products: Made) -> None:
    """Whole slabs and rows of them; blocks without a step, with some; more steps than the ring has slots."""
    for shape in ((131, 136, 2056), (1, 8, 8)):
        assert right_product(products, version, shape)


@pytest.mark.parametrize("bug", PART_BUGS)
def test_planted_bugs_of_products_are_caught(bug: str, products: Made) -> None:
    with contextlib.suppress(DeviceError):
        assert not right_product(products, bug, (70, 136, 712))


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_compiles_without_spills_and_stays_asynchronous(products: Made) -> None:
    k = products[2][PARTS]
    use = compile_cuda(k.text, "sm_90a")
    assert use.kernels[k.name].spill_stores == use.kernels[k.name].spill_loads == 0 and "C75" not in use.log


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_copies_of_a_known_number_of_steps_spill_nothing() -> None:
    """The producer has 24 registers: ptxas would unroll its twelve steps and keep some of their addresses in memory."""
    nodes = [node("MatMul", ["x", "w"], ["p"]), node("Add", ["p", "b"], ["q"]), node("Add", ["q", "r"], ["y"])]
    shapes = {"x": ("M", 3072), "w": (3072, 768), "b": (768,), "r": ("M", 768)}
    (p,) = placed(plan_of(nodes, shapes, ["y"], dtype="float16"), "sm_90a")
    k = next(k for k in p.kernels if k.version == "wgmma_64x128x64_4_parts_4_wide")
    use = compile_cuda(k.text, "sm_90a").kernels[k.name]
    assert use.spill_stores == use.spill_loads == use.stack == 0
    assert "#pragma unroll 1\n      for (int b_k = 0; b_k < 12" in k.text


@pytest.mark.parametrize(("n", "blocks"), [(768, 8), slow(3072, 0)])
def test_clusters_where_columns_make_few_blocks(n: int, blocks: int) -> None:
    (p,) = placed(
        plan_of([node("MatMul", ["x", "w"], ["y"])], {"x": ("M", "K"), "w": ("K", n)}, ["y"], dtype="float16"), "sm_90a"
    )
    found = {k.device.cluster for k in p.kernels if k.version.startswith("gemv")}
    assert found == ({1, blocks} if blocks else {1})
